"""The settings of a training run, by section; `config.py` makes one flat Config of them."""

from dataclasses import dataclass, fields
from typing import Any, Literal

from tigon import strict
from tigon.data import Entry
from tigon.data.formats import REQUIRED
from tigon.kernels.attention.api import Backend
from tigon.train.lora_settings import Lora
from tigon.train.parallel_settings import Parallel

MOST = 2**31 - 1  # of numbers of rows, whose products are to fit 64 bits
LONGEST = 2**28  # tokens of a row, of which pairs are to fit, too: estimates have masks
MESH = ", ".join(f"{f.name}: {f.default or 'null'}" for f in fields(Parallel))


def option(
    default: Any,
    help: str,
    *,
    least: float | None = None,
    most: float | None = None,
    stream: bool = False,
) -> Any:
    """A setting. `stream`: it decides which rows a step gets, so a run cannot be resumed with
    another value."""
    return strict.setting(default, help, least=least, most=most, stream=stream)


@dataclass(frozen=True)
class ModelSettings:
    """The model."""

    model: str = option("", "checkpoint to start from: a directory or a hub repository")
    revision: str | None = option(None, "commit, branch or tag of a hub repository")
    init: str = option("", "instead of model: a config.json to start from with random weights")
    tokenizer: str = option("", "directory or hub repository; default: that of model")
    chat_template: str = option(
        "", "a Jinja file for chats, in place of the tokenizer's; run_dir/hf gets it"
    )
    new_tokens: tuple[str, ...] = option(
        (),
        "special tokens to add to the tokenizer, and rows for them to embedding and head, which "
        "begin as the mean of the others; lora trains both whole",
        stream=True,
    )
    router_aux_loss_coef: float | None = option(
        None,
        "weight of the loss that balances experts, 0: none; null: as config.json says",
        least=0,
    )
    attention: Backend = option("auto", "its backend: docs/attention.md")  # noqa: RUF009
    activation_checkpointing: bool | int | Literal["auto"] = option(
        False,
        "recompute blocks in backward to save memory: true each, N every n-th, false none, auto as "
        "few as fit memory_budget",
        least=0,
    )
    device: Literal["auto", "cuda", "cpu"] = option("auto", "auto: cuda where there is one")
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto", "of the computation; auto: bfloat16 on cuda, param_dtype on cpu"
    )
    param_dtype: Literal["float32", "bfloat16"] = option("float32", "of the weights being trained")
    fp8: bool = option(
        False,
        "products of attention and MLPs, forward and backward, of 8-bit floats: docs/training.md",
    )
    fp8_except: tuple[str, ...] = option(
        (), "shell patterns of projections that fp8 leaves, such as model.layers.0.* or down_proj"
    )
    lora: Lora | None = option(  # noqa: RUF009
        None, "{rank: 16, alpha: 32}: train a low-rank adapter alone; docs/adapters.md"
    )
    sharding: Literal["full", "gradients"] = option(
        "full",
        "what ranks divide; full: weights, gradients and optimizer states (FSDP2); gradients: all "
        "but the weights (ZeRO-2), which moves fewer bytes where they fit",
    )
    parallel: Parallel | Literal["auto"] | None = option(  # noqa: RUF009
        None,
        f"{{{MESH}}}: how ranks share the run; auto: as `tigon plan` would have it; "
        "docs/parallel.md",
    )
    activation_offload: bool = option(
        False, "keep what backward needs in host memory between forward and backward"
    )
    cuda_graphs: bool = option(
        False,
        "launch the blocks of a pass as one: for short rows and small models, whose steps wait for "
        "Python; one GPU, packed rows: docs/training.md",
    )
    memory_budget: float | None = option(
        None,
        "GiB of tensors that a GPU may hold, for activation_checkpointing=auto; null: what it has, "
        "less a margin",
        least=0,
    )


@dataclass(frozen=True)
class DataSettings:
    """The data."""

    data: tuple[str | Entry, ...] = option(
        (),
        "training files, globs, hub data sets as hf://owner/name, or groups of settings: path, "
        "weight, format, columns, split, skip, take, config, revision",
    )
    eval_data: tuple[str | Entry, ...] = option(
        (), "held-out ones; {NAME: ..., NAME: ...} or entries with name= are also measured apart"
    )
    eval_fraction: float = option(
        0.0,
        "in place of eval_data: this fraction of the rows of data is held out, chosen by a digest "
        "of each row, so the same in every order and on every machine",
        least=0,
        stream=True,
    )
    separator: str = option(
        "", "divides a .txt file into documents, such as '\\n\\n'; empty: a file is one"
    )
    seq_len: int = option(2048, "tokens in a row", least=2, most=LONGEST, stream=True)
    packing: bool = option(True, "several sequences to a row; false pads instead", stream=True)
    truncate: bool = option(
        True, "cut chats longer than seq_len; false leaves them out", stream=True
    )
    batch_size: int = option(8, "rows in a step, over all ranks", least=1, most=MOST, stream=True)
    micro_batch_size: int = option(1, "rows in one forward of one rank", least=1, most=MOST)
    seed: int = option(
        0, "of the data order and of random weights", least=0, most=2**63 - 1, stream=True
    )
    format: str | None = option(
        None, f"of the rows: {', '.join(REQUIRED)}; null: told from their keys", stream=True
    )
    columns: dict[str, str] | None = option(  # noqa: RUF009
        None, "keys of other names, as in {messages: dialog}", stream=True
    )
    train_on: Literal["assistant", "all_turns", "last", "all"] = option(
        "assistant",
        "what is learned of a chat: the assistant's turns, also those that the chat template "
        "rewrites when others follow (all_turns), its last one, or all of it",
        stream=True,
    )
    chat_template_kwargs: dict[str, Any] | None = option(  # noqa: RUF009
        None,
        "variables of the chat template, as in {enable_thinking: false}; those of a row win",
        stream=True,
    )
    train_on_empty_thinking: bool = option(
        False, "learn the empty block of reasoning that a template writes too", stream=True
    )
    bad_rows: Literal["error", "skip"] = option(
        "error",
        "what a row that cannot be read or encoded does; skipped ones are counted",
        stream=True,
    )
    workers: int | None = option(
        None, "processes that tokenise; 0: none but this one; null: as many as CPUs", least=0
    )
    streaming: bool = option(
        False, "tokenise shortly before training instead of first; needs steps", stream=True
    )
    shuffle_window: int = option(
        65536, "examples that are packed and shuffled together", least=1, stream=True
    )


@dataclass(frozen=True)
class LossSettings:
    """The loss, and what is measured with it."""

    task: str = option(
        "sft",
        "the objective, and what it learns from: {tasks}",  # as usage.py knows them
    )
    loss_reduction: Literal["token", "sequence"] = option(
        "token", "what weighs the same in a step's loss: every token, or every sequence"
    )
    eval_every: int = option(0, "steps between evaluations; 0: only at the end", least=0)
    metrics: tuple[str, ...] = option(
        (), "means over the targets to log beside accuracy: nll, entropy, max_logit, z"
    )
    return_logits: bool = option(False, "give hooks all logits of a pass [B, T, V]")
    logits_to_keep: int = option(
        0, "only the last so many positions of each sequence count; 0: all", least=0
    )
    logits_bytes: int | None = option(
        None, "memory for logits that the loss takes at a time; null: at most 1 GiB", least=1
    )
    label_smoothing: float = option(0.0, "share of a target spread over all tokens", least=0)
    z_loss: float = option(0.0, "factor of the squared log-normaliser, as in PaLM", least=0)
    eval_metrics: tuple[str, ...] | None = option(None, "metrics in evaluation; null: the same")
    eval_return_logits: bool | None = option(None, "in evaluation; null: the same")
    eval_logits_to_keep: int | None = option(None, "in evaluation; null: the same", least=0)
    eval_logits_bytes: int | None = option(None, "in evaluation; null: the same", least=1)
    eval_label_smoothing: float | None = option(None, "in evaluation; null: the same", least=0)
    eval_z_loss: float | None = option(None, "in evaluation; null: the same", least=0)
    hooks: tuple[str, ...] = option(
        (), "module:function or file.py:function, which watch passes; docs/training.md"
    )
    hook_every: int = option(
        1, "steps between calls of hooks in training; 0: only in evaluation", least=0
    )
    predictions: bool = option(
        False, "write what each evaluation predicts to run_dir/predictions-step-N.jsonl"
    )
    sample_prompts: tuple[str, ...] = option(
        (), "texts, or .jsonl files of prompts or messages, which each evaluation has answered"
    )
    sample_tokens: int = option(64, "the most tokens of an answer", least=1)


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with settings of their own."""

    match: tuple[str, ...]  # patterns of checkpoint tensor names, as in a shell
    lr: float | None = option(None, "peak learning rate; null: that of the others", least=0)
    weight_decay: float | None = option(None, "null: that of the others", least=0)
    freeze: bool = False  # not trained


@dataclass(frozen=True)
class OptimizerSettings:
    """The optimizer and its schedule."""

    epochs: float | None = option(None, "passes over the data; 1 unless steps is given", least=0)
    steps: int | None = option(None, "optimizer steps, instead of epochs", least=1)
    lr: float = option(1e-5, "peak learning rate", least=0)
    schedule: Literal["cosine", "linear", "constant", "wsd"] = option(
        "cosine", "of the learning rate after warm-up; wsd: constant, then as decay_type says"
    )
    warmup_steps: float = option(
        0, "steps of linear warm-up; below 1: their share of all steps", least=0
    )
    min_lr_ratio: float = option(0.1, "learning rate at the end, as a share of lr", least=0)
    weight_decay: float = option(0.0, "on matrices only, not on norms and biases", least=0)
    beta1: float = option(0.9, "AdamW's", least=0)
    beta2: float = option(0.95, "AdamW's", least=0)
    eps: float = option(1e-8, "AdamW's", least=0)
    max_grad_norm: float = option(1.0, "clip gradients to this global norm; 0: never", least=0)
    optimizer: Literal["adamw", "adamw_bf16", "adamw_8bit", "muon", "sgd"] = option(
        "adamw", "docs/training.md describes each"
    )
    momentum: float | None = option(
        None, "of muon and sgd; null: 0.95 with muon, 0 with sgd", least=0
    )
    nesterov: bool | None = option(
        None, "Nesterov's momentum in muon and sgd; null: true with muon, false with sgd"
    )
    ns_steps: int = option(5, "Newton-Schulz iterations of muon", least=1)
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = option(
        "match_rms_adamw",
        "how muon's learning rate depends on a matrix's shape; match_rms_adamw: its steps are as "
        "large as AdamW's with the same lr",
    )
    adamw_lr: float | None = option(
        None, "with muon, lr of what it leaves to AdamW; null: lr", least=0
    )
    decay_steps: float = option(
        0.2, "last steps of wsd, in which lr falls; below 1: their share of all steps", least=0
    )
    decay_type: Literal["linear", "cosine", "sqrt"] = option(
        "linear", "how lr falls in the last steps of wsd; sqrt: 1 - sqrt(share of them done)"
    )
    parameter_groups: tuple[ParameterGroup, ...] = option(
        (), "settings of some parameters: match, lr, weight_decay, freeze; docs/training.md"
    )
    stochastic_rounding: bool = option(
        True, "of bfloat16 weights (param_dtype=bfloat16) after each update; false: to nearest"
    )
    optimizer_offload: bool = option(
        False, "keep optimizer states, and the average of ema_decay, in host memory; not with muon"
    )
    optimizer_in_backward: bool = option(
        False,
        "update each block's weights in backward and free its gradients at once, which saves their "
        "memory; needs max_grad_norm=0 and one micro-batch a step: docs/training.md",
    )
    ema_decay: float = option(
        0.0, "of an average of the weights, exported to run_dir/hf-ema, such as 0.999; 0: none",
        least=0,
    )  # fmt: skip
    accumulate_fp32: bool = option(
        False,
        "add up the gradients of bfloat16 weights in float32: over micro-batches and, with "
        "sharding=gradients, ranks",
    )


@dataclass(frozen=True)
class Profile:
    """Steps to look into."""

    start: int = option(10, "the first step, as metrics.jsonl counts", least=1)
    steps: int = option(3, "how many", least=1)


@dataclass(frozen=True)
class RunSettings:
    """The run: what it writes, and how it goes on."""

    run_dir: str = option("", "where everything that the run writes goes")
    resume: str | bool = option(
        False, "auto: from the run's latest checkpoint, if any; or a checkpoint's path"
    )
    log_every: int = option(10, "steps between log lines", least=1)
    save_every: int = option(0, "steps between checkpoints; 0: only at the end", least=0)
    keep_last: int = option(2, "checkpoints to keep; 0: all", least=0)
    export: bool = option(True, "write run_dir/hf, in Hugging Face format, at the end")
    export_dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto", "of the weights in run_dir/hf; auto: what the model's config.json says"
    )
    push_to_hub: str = option(
        "", "a hub repository (owner/name) that gets run_dir/hf at the end, with a model card"
    )
    push_private: bool | None = option(
        None, "whether the repository that the push makes is private; null: the account's default"
    )
    nonfinite: Literal["stop", "skip", "rollback"] = option(
        "stop",
        "where the loss, the gradient's norm or a weight is not finite; skip: leave the step's "
        "update out; rollback: go on from the last checkpoint, with the rows after these",
    )
    spike: Literal["stop", "skip", "rollback"] = option(
        "skip", "the same for a loss or a gradient's norm beyond spike_sigma"
    )
    spike_sigma: float = option(
        0.0,
        "what a spike is: this many standard deviations above the mean of the last 128 steps; "
        "0: nothing is",
        least=0,
    )
    max_rollbacks: int = option(3, "rollbacks in a run, before it stops after all", least=0)
    patience: int = option(
        0, "evaluations without a lower loss than the best, before the run ends; 0: any", least=0
    )
    deterministic: bool = option(
        False, "operations that give the same bits in every run on the same machine, or an error"
    )
    keep_best: int = option(
        0, "checkpoints with the lowest eval loss to keep besides keep_last", least=0
    )
    keep_hours: float = option(
        0.0, "keep one checkpoint every so many hours for ever; 0: none", least=0
    )
    async_save: bool = option(
        True,
        "write checkpoints, and the exports of hf_every, while training goes on, from a copy in "
        "host memory",
    )
    hf_every: int = option(
        0, "steps between exports to run_dir/hf-step-N, which all stay; 0: none", least=0
    )
    hf_best: bool = option(
        False, "export to run_dir/hf-best whenever an evaluation is the best so far"
    )
    stop_seconds: float = option(
        30.0,
        "time from SIGTERM to the end that the scheduler grants; a checkpoint that would not be "
        "whole by then is not begun; 0: any time",
        least=0,
    )
    log_to: tuple[str, ...] = option(
        (), "where the rows of metrics.jsonl go besides: tensorboard, wandb"
    )
    profile: Profile | None = option(  # noqa: RUF009
        None, "{start: 10, steps: 3}: write to run_dir/profile where the time of these steps goes"
    )
