"""The settings of a training run: one flat dataclass, from YAML and the command line."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import yaml

from tigon import strict
from tigon.kernels.attention import Backend

USAGE = """\
python -m tigon.train config.yaml [key=value | --key value ...]
torchrun --nproc-per-node 8 -m tigon.train config.yaml [key=value | --key value ...]

  --help           this text
  --print-config   the settings as they would be used, as YAML
"""


def option(default: Any, help: str, *, least: float | None = None, stream: bool = False) -> Any:
    """A setting. `stream`: it decides which rows a step gets, so a run cannot be resumed with
    another value."""
    return strict.setting(default, help, least=least, stream=stream)


@dataclass(frozen=True)
class Config:
    run_dir: str = option("", "where everything that the run writes goes")
    task: str = option(
        "sft", "the objective; sft: chats, learning what the assistant says; pretrain: text"
    )

    model: str = option("", "checkpoint to start from: a directory or a hub repository")
    revision: str | None = option(None, "commit, branch or tag of a hub repository")
    init: str = option("", "instead of model: a config.json to start from with random weights")
    tokenizer: str = option("", "directory or hub repository; default: that of model")
    chat_template: str = option(
        "", "a Jinja file for chats, in place of the tokenizer's; run_dir/hf gets it"
    )
    router_aux_loss_coef: float | None = option(
        None,
        "weight of the loss that balances experts, 0: none; null: as config.json says",
        least=0,
    )
    attention: Backend = option("auto", "its backend: docs/attention.md")  # noqa: RUF009
    activation_checkpointing: bool = option(False, "recompute blocks in backward to save memory")

    data: tuple[str, ...] = option((), "training files or globs: .jsonl, or .txt to pretrain on")
    eval_data: tuple[str, ...] = option((), "held-out files or globs")
    separator: str = option("", "divides a .txt file into documents; empty: a file is one")
    seq_len: int = option(2048, "tokens in a row", least=2, stream=True)
    packing: bool = option(True, "several sequences to a row; false pads instead", stream=True)
    truncate: bool = option(
        True, "cut chats longer than seq_len; false leaves them out", stream=True
    )

    epochs: float | None = option(None, "passes over the data; 1 unless steps is given", least=0)
    steps: int | None = option(None, "optimizer steps, instead of epochs", least=1)
    batch_size: int = option(8, "rows in a step, over all ranks", least=1, stream=True)
    micro_batch_size: int = option(1, "rows in one forward of one rank", least=1)
    loss_reduction: Literal["token", "sequence"] = option(
        "token", "what weighs the same in a step's loss: every token, or every sequence"
    )
    seed: int = option(0, "of the data order and of random weights", least=0, stream=True)

    lr: float = option(1e-5, "peak learning rate", least=0)
    schedule: Literal["cosine", "linear", "constant", "wsd"] = option(
        "cosine", "of the learning rate after warm-up; wsd: constant, then linear in the last fifth"
    )
    warmup_steps: int = option(0, "steps of linear warm-up", least=0)
    min_lr_ratio: float = option(0.1, "learning rate at the end, as a share of lr", least=0)
    weight_decay: float = option(0.0, "AdamW's, on matrices only", least=0)
    beta1: float = option(0.9, "AdamW's", least=0)
    beta2: float = option(0.95, "AdamW's", least=0)
    eps: float = option(1e-8, "AdamW's", least=0)
    max_grad_norm: float = option(1.0, "clip gradients to this global norm; 0: never", least=0)

    device: Literal["auto", "cuda", "cpu"] = option("auto", "auto: cuda where there is one")
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto", "of the computation; auto: bfloat16 on cuda, param_dtype on cpu"
    )
    param_dtype: Literal["float32", "bfloat16"] = option(
        "float32", "of the weights being trained and of AdamW's state"
    )
    log_every: int = option(10, "steps between log lines", least=1)
    eval_every: int = option(0, "steps between evaluations; 0: only at the end", least=0)
    save_every: int = option(0, "steps between checkpoints; 0: only at the end", least=0)
    keep_last: int = option(2, "checkpoints to keep; 0: all", least=0)
    resume: str | bool = option(
        False, "auto: from the run's latest checkpoint, if any; or a checkpoint's path"
    )
    export: bool = option(True, "write run_dir/hf, in Hugging Face format, at the end")
    export_dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto", "of the weights in run_dir/hf; auto: what the model's config.json says"
    )

    def __post_init__(self) -> None:
        strict.check_bounds(self)
        for name in ("run_dir", "data"):
            if not getattr(self, name):
                raise ValueError(f"{name} is required: {_help(name)}")
        if bool(self.model) == bool(self.init):
            raise ValueError(
                "exactly one of model (to fine-tune) and init (from scratch) is needed"
            )
        if not (self.tokenizer or self.model):
            raise ValueError(f"tokenizer is required with init: {_help('tokenizer')}")
        if self.epochs is not None and self.steps is not None:
            raise ValueError(f"epochs={self.epochs} and steps={self.steps}: give one of them")
        if self.batch_size % self.micro_batch_size:
            raise ValueError(
                f"batch_size={self.batch_size} must be a multiple of "
                f"micro_batch_size={self.micro_batch_size}"
            )
        if self.param_dtype == "bfloat16" and self.dtype == "float32":
            raise ValueError("param_dtype=bfloat16 needs dtype=bfloat16 (or auto), not float32")


def load(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """A Config from a YAML file and `key=value` or `--key value` texts, which win over it."""
    values: dict[str, Any] = {}
    if path is not None:
        if not Path(path).is_file():
            raise FileNotFoundError(f"no config file {path}")
        try:
            read = yaml.safe_load(Path(path).read_text()) or {}
        except yaml.YAMLError as error:
            raise ValueError(f"{path} is not valid YAML: {error}") from None
        if not isinstance(read, dict):
            raise ValueError(f"{path}: needs `key: value` lines, not a {type(read).__name__}")
        try:
            values = strict.read(Config, read, parse=_number)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    values |= strict.read(Config, dict(_pairs(overrides)), parse=_parse)
    return strict.make(Config, values)


def dump(config: Config) -> str:
    """The settings as YAML that `load` reads back."""
    return yaml.safe_dump(asdict(config), sort_keys=False, width=100)


def help_text() -> str:
    lines = [USAGE]
    for f in fields(Config):
        kind = strict.describe(strict.hints(Config)[f.name])
        lines.append(f"  {f.name}: {kind} = {_plain(f.default)}")
        lines.append(f"      {f.metadata['help']}")
    return "\n".join(lines)


def _pairs(arguments: Sequence[str]) -> list[tuple[str, str]]:
    pairs, rest = [], list(arguments)
    while rest:
        argument = rest.pop(0)
        key, equals, value = argument.partition("=")
        if not equals:
            if not argument.startswith("--") or not rest:
                raise ValueError(f"{argument!r}: settings are given as key=value or --key value")
            value = rest.pop(0)
        pairs.append((key.removeprefix("--").replace("-", "_"), value))
    return pairs


def _number(text: str) -> float | str:
    """YAML reads 2e-5 as text."""
    try:
        return float(text)
    except ValueError:
        return text


def _parse(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError from error
    return _number(value) if isinstance(value, str) else value


def _plain(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n").strip()


def _help(name: str) -> str:
    return Config.__dataclass_fields__[name].metadata["help"]
