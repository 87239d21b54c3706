"""The settings of a training run, each with its default, range and help.

Sections are dataclasses, which `Config` joins to one flat one. What settings exclude or need is in
rules.py.
"""

# ruff: noqa: RUF009

from dataclasses import dataclass, fields
from typing import Any, Literal

from tigon.hub import check_repository
from tigon.settings.data import REQUIRED_KEYS, TASK_ROWS, Entry, check_format, check_task
from tigon.settings.lora import LoraConfig, Quantize
from tigon.settings.mesh import MeshSizes
from tigon.settings.rules import MAX_TOKENS, check_settings
from tigon.tokenizer.chat_template import check_variables
from tigon.utils.config import check_ranges, setting
from tigon.utils.paths import check_file_name, expand_user

MAX_ROWS = 2**31 - 1  # products of numbers of rows are to fit 64 bits
MAX_FLOAT = 3.4e38  # of float32, in which losses are computed

# As tigon.kernels has it, which imports torch
Backend = Literal["auto", "fa4", "cudnn", "flash", "triton", "flex", "sdpa", "reference"]
PairLoss = Literal["sigmoid", "hinge", "ipo", "robust", "sigmoid_norm", "apo_zero", "apo_down"]
PolicyLoss = Literal["dapo", "grpo", "dr_grpo", "cispo"]


@dataclass(frozen=True)
class Lora:
    """Settings of a low-rank adapter, which is trained in place of the model."""

    rank: int = setting(16, "columns of its matrices", ge=1)
    alpha: float = setting(32.0, "its output is multiplied by alpha / rank", ge=0)
    targets: tuple[str, ...] = setting(
        ("all-linear",), "projections such as q_proj, or patterns of full names"
    )
    dropout: float = setting(0.0, "share of its inputs that are dropped in training", ge=0)
    rslora: bool = setting(False, "multiplied by alpha / sqrt(rank) instead")
    dora: bool = setting(False, "train the lengths of weights' rows too (DoRA)")
    rank_pattern: dict[str, int] | None = setting(
        None, "ranks of some projections, by name or pattern"
    )
    alpha_pattern: dict[str, float] | None = setting(None, "alphas of some projections")
    modules_to_save: tuple[str, ...] = setting((), "embed_tokens or lm_head: trained whole")
    quantize: Quantize | None = setting(
        None, "nf4: base in 4 bits (QLoRA); keep: as in an fp8 checkpoint"
    )
    merge: bool = setting(False, "write run_dir/hf too at the end, the model with what was added")

    def adapter(self, base: str = "", revision: str = "") -> LoraConfig:
        """Returns the adapter's config; raises ValueError for values that no adapter can have."""
        options = {n: value for n, value in vars(self).items() if n not in ("merge", "quantize")}
        patterns = {name: options[name] or {} for name in ("rank_pattern", "alpha_pattern")}
        return LoraConfig(**options | patterns, base=base, revision=revision)


@dataclass(frozen=True)
class Parallel:
    """Ranks of each dimension; their product, without `expert`, is the number of all ranks."""

    replicate: int = setting(1, "groups of ranks, each with all weights", ge=1)
    fsdp: int | None = setting(None, "ranks that shard weights and states; null: the rest", ge=1)
    context: int = setting(1, "ranks that share the tokens of a row", ge=1)
    tensor: int = setting(1, "ranks that share each matrix, and the tokens between", ge=1)
    expert: int = setting(1, "ranks, of fsdp x context x tensor, that share the experts", ge=1)

    def sizes(self, ranks: int) -> MeshSizes:
        """Returns the mesh of so many ranks; raises ValueError if the dimensions do not fit."""
        others = self.replicate * self.context * self.tensor
        fsdp = max(1, ranks // others) if self.fsdp is None else self.fsdp
        sizes = MeshSizes(self.replicate, fsdp, self.context, self.tensor, self.expert)
        if sizes.ranks != ranks:
            needed = f"a multiple of {others}" if self.fsdp is None else sizes.ranks
            raise ValueError(
                f"parallel: {sizes.description or 'fsdp 1'} is for {sizes.ranks} ranks, and there "
                f"are {ranks}: start {needed} processes (--nproc), or change parallel"
            )
        if sizes.shards * self.tensor % self.expert:
            raise ValueError(
                f"parallel.expert={self.expert} must divide the ranks that share the weights, "
                f"{sizes.shards * self.tensor} (fsdp {fsdp} x context {self.context} x tensor "
                f"{self.tensor}): start more processes (--nproc), or change parallel.expert"
            )
        return sizes


TASKS = "; ".join(
    f"{', '.join(task for task in TASK_ROWS if TASK_ROWS[task] == rows)}: {rows}"
    for rows in dict.fromkeys(TASK_ROWS.values())
)
MESH = ", ".join(f"{f.name}: {f.default or 'null'}" for f in fields(Parallel))


@dataclass(frozen=True)
class ParameterGroup:
    """Settings of the parameters whose names match."""

    match: tuple[str, ...]  # patterns of checkpoint tensor names, as in a shell
    lr: float | None = setting(None, "peak learning rate; null: lr", ge=0, finite=True)
    weight_decay: float | None = setting(None, "null: that of the others", ge=0, finite=True)
    freeze: bool = False  # not trained


@dataclass(frozen=True)
class Profile:
    """Steps to write a torch.profiler trace of."""

    start: int = setting(10, "the first step, as metrics.jsonl counts", ge=1)
    steps: int = setting(3, "how many", ge=1)


@dataclass(frozen=True)
class TaskEvaluation:
    """Tasks of lm-eval, on which each evaluation measures the model."""

    tasks: tuple[str, ...] = setting((), "tasks, groups or tags of lm-eval, or YAML files")
    include_path: str = setting("", "a folder with tasks of your own; code that they name runs")
    num_fewshot: int | None = setting(None, "answered examples; null: as the task says", ge=0)
    limit: float | None = setting(
        None, "documents of each task; below 1: a share; null: all", gt=0, finite=True
    )


@dataclass(frozen=True)
class ModelSettings:
    """The model."""

    model: str = setting("", "checkpoint to start from: a directory or a hub repository")
    revision: str | None = setting(None, "commit, branch or tag of a hub repository")
    init: str = setting("", "instead of model: a config.json to start from with random weights")
    tokenizer: str = setting("", "directory or hub repository; default: that of model")
    chat_template: str = setting("", "a Jinja file, in place of the tokenizer's template")
    new_tokens: tuple[str, ...] = setting(
        (),
        "special tokens to add, whose rows of embedding and head begin as the mean; lora trains "
        "both whole",
        stream=True,
    )
    router_aux_loss_coef: float | None = setting(
        None, "weight of the loss that balances experts; null: as config.json", ge=0
    )
    attention: Backend = setting("auto", "its backend: docs/attention.md")
    activation_checkpointing: bool | int | Literal["auto", "experts"] = setting(
        "auto",
        "recompute in backward: auto: as few blocks as fit, true: each, N: every n-th; experts: "
        "gate_up of a mixture's experts alone",
        ge=0,
    )
    device: Literal["auto", "cuda", "cpu"] = setting("auto", "auto: cuda where there is one")
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", "of the computation; auto: bfloat16 on cuda, param_dtype on cpu"
    )
    param_dtype: Literal["float32", "bfloat16"] = setting("float32", "of the weights being trained")
    fp8: bool = setting(False, "8-bit floats in attention and MLP products: docs/optimizers.md")
    fp8_except: tuple[str, ...] = setting(
        (), "patterns of projections without fp8, such as down_proj"
    )
    lora: Lora | None = setting(None, "{rank: 16, alpha: 32}: train an adapter: docs/adapters.md")
    sharding: Literal["auto", "full", "gradients"] = setting(
        "auto",
        "full: shard weights, gradients and states (FSDP2); gradients: ZeRO-2; auto: gradients, "
        "the faster, where it fits",
    )
    parallel: Parallel | Literal["auto"] | None = setting(
        None, f"{{{MESH}}}; auto: as `tigon plan` says: docs/parallel.md"
    )
    activation_offload: bool = setting(False, "keep activations for backward in host memory")
    cuda_graphs: bool | Literal["auto"] = setting(
        "auto",
        "replay blocks as CUDA graphs; auto: where one GPU waits for launches: docs/memory.md",
    )
    memory_budget: float | None = setting(
        None, "GiB of a GPU for what is chosen by memory; null: the GPU's", gt=0, finite=True
    )


@dataclass(frozen=True)
class DataSettings:
    """The data."""

    data: tuple[str | Entry, ...] = setting(
        (),
        "training files, globs, hf://owner/name, or groups: path, weight, format, columns, "
        "split, skip, take, config, revision",
    )
    eval_data: tuple[str | Entry, ...] = setting(
        (), "held-out data; {NAME: ..., NAME: ...} is also measured apart"
    )
    eval_fraction: float = setting(
        0.0, "fraction of data to hold out, by a digest of each row", ge=0, lt=1, stream=True
    )
    separator: str = setting("", "splits a .txt file into documents; empty: one document")
    seq_len: int = setting(2048, "tokens in a row", ge=2, le=MAX_TOKENS, stream=True)
    packing: bool = setting(True, "several sequences to a row; false pads instead", stream=True)
    truncate: bool = setting(
        True, "cut chats longer than seq_len; false leaves them out", stream=True
    )
    batch_size: int = setting(8, "rows in a step, over all ranks", ge=1, le=MAX_ROWS, stream=True)
    micro_batch_size: int | Literal["auto"] = setting(
        "auto", "rows in one forward of one rank; auto: as many as help and fit", ge=1, le=MAX_ROWS
    )
    seed: int = setting(
        0, "of the data order and of random weights", ge=0, le=2**63 - 1, stream=True
    )
    format: str | None = setting(
        None, f"of the rows: {', '.join(REQUIRED_KEYS)}; null: told from their keys", stream=True
    )
    columns: dict[str, str] | None = setting(
        None, "names of keys, as {messages: dialog}", stream=True
    )
    train_on: Literal["assistant", "all_turns", "last", "all"] = setting(
        "assistant",
        "what is learned of a chat: assistant turns, also turns that the template rewrites "
        "later (all_turns), the last one, or all",
        stream=True,
    )
    chat_template_kwargs: dict[str, Any] | None = setting(
        None, "variables of the chat template; a row's win", stream=True
    )
    train_on_empty_thinking: bool = setting(
        False, "learn the empty reasoning block of a template", stream=True
    )
    bad_rows: Literal["error", "skip"] = setting(
        "error", "skip: leave out and count rows that cannot be read", stream=True
    )
    workers: int | None = setting(
        None, "processes that tokenize; 0: this one; null: one per CPU", ge=0
    )
    streaming: bool = setting(False, "tokenize while training; needs steps", stream=True)
    shuffle_window: int = setting(65536, "examples packed and shuffled at once", ge=1, stream=True)


@dataclass(frozen=True)
class LossSettings:
    """The loss, and what is measured with it."""

    task: str = setting("sft", f"what is learned, and from what: {TASKS}")
    loss_reduction: Literal["token", "sequence"] = setting(
        "token", "the unit that weighs the same in a step's loss"
    )
    eval_every: int = setting(0, "steps between evaluations; 0: only at the end", ge=0)
    metrics: tuple[str, ...] = setting((), "means to log: nll, entropy, max_logit, z")
    return_logits: bool = setting(False, "give callbacks all logits of a pass [B, T, V]")
    logits_to_keep: int = setting(0, "count only the last N positions of a sequence; 0: all", ge=0)
    logits_bytes: int | None = setting(
        None, "memory of logits in the loss; null: at most 1 GiB", ge=1
    )
    label_smoothing: float = setting(0.0, "share of a target spread over all tokens", ge=0, lt=1)
    z_loss: float = setting(
        0.0, "factor of the squared log-normalizer, as in PaLM", ge=0, finite=True
    )
    eval: TaskEvaluation | None = setting(
        None, "{tasks: [arc_easy], limit: 100}: benchmarks at evaluations: docs/evaluation.md"
    )
    eval_metrics: tuple[str, ...] | None = setting(None, "null: as metrics")
    eval_return_logits: bool | None = setting(None, "in evaluation; null: the same")
    eval_logits_to_keep: int | None = setting(None, "in evaluation; null: the same", ge=0)
    eval_logits_bytes: int | None = setting(None, "in evaluation; null: the same", ge=1)
    eval_label_smoothing: float | None = setting(None, "in evaluation; null: the same", ge=0, lt=1)
    eval_z_loss: float | None = setting(None, "in evaluation; null: the same", ge=0, finite=True)
    hooks: tuple[str, ...] = setting(
        (), "callbacks, module:function or file.py:function: docs/loss.md"
    )
    hook_every: int = setting(1, "training steps between calls; 0: evaluations only", ge=0)
    predictions: bool = setting(False, "write run_dir/predictions-step-N.jsonl in evaluations")
    sample_prompts: tuple[str, ...] = setting(
        (), "texts, or .jsonl files, to answer in evaluations"
    )
    sample_tokens: int = setting(64, "the most tokens of an answer", ge=1)


@dataclass(frozen=True)
class OptimizerSettings:
    """The optimizer and its schedule."""

    epochs: float | None = setting(
        None, "passes over the data; 1 unless steps is given", ge=0, finite=True
    )
    steps: int | None = setting(None, "optimizer steps, instead of epochs", ge=1)
    lr: float = setting(1e-5, "peak learning rate", ge=0, finite=True)
    schedule: Literal["cosine", "linear", "constant", "wsd"] = setting(
        "cosine", "after warm-up; wsd: constant, then decay_type"
    )
    warmup_steps: float = setting(0, "linear warm-up; below 1: share of all steps", ge=0)
    min_lr_ratio: float = setting(0.1, "learning rate at the end, as a share of lr", ge=0, le=1)
    weight_decay: float = setting(0.0, "on matrices, not on norms and biases", ge=0, finite=True)
    beta1: float = setting(0.9, "AdamW's", ge=0, lt=1)
    beta2: float = setting(0.95, "AdamW's", ge=0, lt=1)
    eps: float = setting(1e-8, "AdamW's", ge=0, finite=True)
    max_grad_norm: float = setting(1.0, "clip gradients to this norm; 0: never", ge=0, finite=True)
    optimizer: Literal["adamw", "adamw_bf16", "adamw_8bit", "muon", "sgd"] = setting(
        "adamw", "docs/optimizers.md describes each"
    )
    momentum: float | None = setting(None, "of muon (null: 0.95) and sgd (null: 0)", ge=0, lt=1)
    nesterov: bool | None = setting(None, "of muon (null: true) and sgd (null: false)")
    ns_steps: int = setting(5, "Newton-Schulz iterations of muon", ge=1)
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = setting(
        "match_rms_adamw", "scale muon's steps to the size of AdamW's"
    )
    adamw_lr: float | None = setting(
        None, "lr of muon's AdamW parameters; null: lr", ge=0, finite=True
    )
    decay_steps: float = setting(0.2, "last steps of wsd; below 1: share of all steps", ge=0)
    decay_type: Literal["linear", "cosine", "sqrt"] = setting(
        "linear", "curve of lr over decay_steps; sqrt: 1 - sqrt(x)"
    )
    parameter_groups: tuple[ParameterGroup, ...] = setting(
        (), "match, lr, weight_decay, freeze: docs/optimizers.md"
    )
    stochastic_rounding: bool = setting(True, "round bfloat16 weights at random after updates")
    optimizer_offload: bool = setting(False, "keep states and ema in host memory; not with muon")
    optimizer_in_backward: bool = setting(
        False,
        "update each block in backward and free its gradients; needs max_grad_norm=0 and one "
        "micro-batch",
    )
    ema_decay: float = setting(0.0, "of averaged weights in run_dir/hf-ema; 0: none", ge=0, lt=1)
    accumulate_fp32: bool = setting(False, "add up gradients of bfloat16 weights in float32")


@dataclass(frozen=True)
class RunSettings:
    """The run: what it writes, and how it goes on."""

    run_dir: str = setting("", "where everything that the run writes goes")
    resume: str | bool = setting(False, "auto: from the latest checkpoint, if any; or a path")
    log_every: int = setting(10, "steps between log lines", ge=1)
    save_every: int = setting(0, "steps between checkpoints; 0: only at the end", ge=0)
    keep_last: int = setting(2, "checkpoints to keep; 0: all", ge=0)
    export: bool = setting(True, "write run_dir/hf, in Hugging Face format, at the end")
    export_dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", "of run_dir/hf; auto: config.json's"
    )
    push_to_hub: str = setting("", "owner/name to upload run_dir/hf to, with a model card")
    push_private: bool | None = setting(None, "visibility of a new repository; null: the account's")
    nonfinite: Literal["stop", "skip", "rollback"] = setting(
        "stop",
        "on a loss, norm or weight that is not finite; skip: no update; rollback: to the last "
        "checkpoint, with later rows",
    )
    spike: Literal["stop", "skip", "rollback"] = setting("skip", "on a spike, see spike_sigma")
    spike_sigma: float = setting(
        0.0, "standard deviations above the mean of 128 steps; 0: off", ge=0, finite=True
    )
    max_rollbacks: int = setting(3, "rollbacks in a run, before it stops after all", ge=0)
    patience: int = setting(0, "evaluations without improvement before the end; 0: any", ge=0)
    deterministic: bool = setting(False, "the same bits in every run on one machine, or an error")
    keep_best: int = setting(0, "checkpoints of the lowest eval loss to keep too", ge=0)
    keep_hours: float = setting(0.0, "keep a checkpoint every N hours; 0: none", ge=0)
    async_save: bool = setting(True, "write checkpoints and exports while training goes on")
    hf_every: int = setting(0, "steps between exports to run_dir/hf-step-N; 0: none", ge=0)
    hf_best: bool = setting(False, "export the best evaluation's weights to run_dir/hf-best")
    stop_seconds: float = setting(
        30.0, "from SIGTERM to the end; no checkpoint begins that takes longer; 0: any", ge=0
    )
    log_to: tuple[Literal["tensorboard", "wandb"], ...] = setting((), "further logs of each row")
    profile: Profile | None = setting(None, "{start: 10, steps: 3}: trace to run_dir/profile")


@dataclass(frozen=True)
class TaskSettings:
    """Settings of single tasks."""

    loss_type: PairLoss | PolicyLoss | None = setting(
        None,
        "of dpo: sigmoid, hinge, ipo, robust, sigmoid_norm, apo_zero, apo_down; of apo: apo_zero, "
        "apo_down; of cpo: sigmoid, hinge, ipo; of grpo: dapo, grpo, dr_grpo, cispo; null: the "
        "first",
    )
    beta: float | None = setting(
        None,
        "how much a model keeps to its reference, or its log-probabilities count; null: 0.1, 2 of "
        "simpo, 0 of grpo; of distill 0: forward KL, 1: reverse KL, between: Jensen-Shannon; "
        "null: 0",
        ge=0,
        le=MAX_FLOAT,
    )
    max_length: int | None = setting(
        None, "most tokens of a prompt with one answer; null: seq_len", ge=2, stream=True
    )
    reference: str = setting("", "model to keep to; empty: the initial one, or without adapters")
    simpo_gamma: float = setting(0.5, "the reward margin of simpo", ge=0, le=MAX_FLOAT)
    cpo_alpha: float | None = setting(
        None, "weight of cross-entropy; null: 1 in cpo, 0 in simpo", ge=0, le=MAX_FLOAT
    )
    desirable_weight: float = setting(1.0, "of desired answers in kto", ge=0, le=MAX_FLOAT)
    undesirable_weight: float = setting(1.0, "of undesired answers in kto", ge=0, le=MAX_FLOAT)
    center_rewards_coefficient: float = setting(
        0.0, "pulls a pair's rewards to 0", ge=0, le=MAX_FLOAT
    )
    epsilon: float = setting(0.2, "how far grpo's ratio of policies counts, below 1", ge=0)
    epsilon_high: float | None = setting(None, "and above 1; null: the same", ge=0)
    delta: float | None = setting(None, "the most of grpo's unclipped ratio; null: any", ge=0)
    importance_sampling_level: Literal["token", "sequence"] = setting(
        "token", "of grpo's ratio; sequence: GSPO"
    )
    scale_rewards: Literal["group", "none"] = setting(
        "group", "divide advantages by the prompt's deviation", stream=True
    )
    max_completion_length: int | None = setting(None, "what dr_grpo divides by", ge=1)
    teacher: str = setting("", "model or repository for distill; empty: rows have distributions")
    temperature: float = setting(  # its square is a factor of the loss
        1.0, "divides the logits of student and teacher", gt=0, le=MAX_FLOAT**0.5
    )
    cross_entropy_weight: float = setting(
        0.0, "share of cross-entropy in distill, below 1", ge=0, lt=1
    )


SECTIONS = (
    *(ModelSettings, DataSettings, LossSettings),
    *(OptimizerSettings, RunSettings, TaskSettings),
)


@dataclass(frozen=True)
class Config(
    TaskSettings, RunSettings, OptimizerSettings, LossSettings, DataSettings, ModelSettings
):
    """Holds the settings of all sections. A dataclass takes the fields of its last base first."""

    @property
    def labels(self) -> int:
        """Returns how many scores of a sequence the model has; 0: it predicts tokens."""
        return int(self.task == "reward")

    @property
    def held_out(self) -> tuple[str | Entry, ...]:
        """Returns the data to evaluate on; with eval_fraction, a part of the rows of `data`."""
        return self.data if self.eval_fraction else self.eval_data

    @property
    def evaluates(self) -> bool:
        """Returns whether there is anything that an evaluation measures."""
        return bool(self.held_out) or (self.eval is not None and bool(self.eval.tasks))

    def __post_init__(self) -> None:
        """Raises ValueError for settings out of range, at fault or in conflict; replaces a ~ at the
        beginning of paths."""
        check_ranges(self)
        for name in ("run_dir", "model", "init", "tokenizer", "chat_template"):
            check_file_name(getattr(self, name))
        for name in ("run_dir", "init", "resume", "chat_template"):
            if str(value := getattr(self, name)).startswith("~"):
                object.__setattr__(self, name, str(expand_user(value)))
        check_settings(self)
        check_task(self.task)
        check_format(self.format)
        check_variables(self.chat_template_kwargs or {}, "chat_template_kwargs")
        if self.push_to_hub:
            check_repository(self.push_to_hub)
        if self.lora is not None:
            self.lora.adapter()


def parallel_settings(config: Config) -> Parallel:
    """Returns how ranks share the run; raises ValueError if parallel=auto is not resolved."""
    if config.parallel == "auto":
        raise ValueError("parallel=auto: no layout has been chosen yet")
    return config.parallel or Parallel()


def micro_batch_rows(config: Config) -> int:
    """Returns the rows of a micro-batch; ValueError if it is still auto."""
    if config.micro_batch_size == "auto":
        raise ValueError("micro_batch_size=auto: no size has been chosen yet")
    return config.micro_batch_size


def mesh_sizes(config: Config, ranks: int) -> MeshSizes:
    """Returns the size of each dimension of the mesh; raises ValueError if the ranks do not fit."""
    return parallel_settings(config).sizes(ranks)


def check_batch(config: Config, ranks: int) -> None:
    """Raises ValueError if so many ranks with different rows cannot share the rows of a step."""
    rows = 1 if config.micro_batch_size == "auto" else config.micro_batch_size
    if rest := config.batch_size % (rows * ranks):
        below = config.batch_size - rest
        sizes = " or ".join(str(n) for n in (below, below + rows * ranks) if n)
        of_rank = "" if config.micro_batch_size == "auto" else f"micro_batch_size={rows} x "
        raise ValueError(
            f"batch_size={config.batch_size} must be a multiple of {of_rank}{ranks} ranks with "
            f"different rows: give {sizes}"
        )
