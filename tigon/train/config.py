"""The settings of a training run: one flat dataclass, from YAML and the command line."""

import difflib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from tigon.kernels.attention import Backend

USAGE = """\
python -m tigon.train config.yaml [key=value | --key value ...]
torchrun --nproc-per-node 8 -m tigon.train config.yaml [key=value | --key value ...]

  --help           this text
  --print-config   the settings as they would be used, as YAML
"""


def option(default: Any, help: str, *, least: float | None = None, stream: bool = False) -> Any:
    """A setting. `least`: the smallest value allowed. `stream`: it decides which rows a step gets,
    so a run cannot be resumed with another value."""
    return field(default=default, metadata={"help": help, "least": least, "stream": stream})


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
        for f in fields(self):
            value, least = getattr(self, f.name), f.metadata["least"]
            if least is not None and value is not None and not value >= least:
                raise ValueError(f"{f.name}={value!r} must be at least {least}")
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
        values = {key: convert(str(key), value, f"{path}: ") for key, value in read.items()}
    for key, text in _pairs(overrides):
        values[key] = convert(key, text, from_text=True)
    return Config(**values)


def convert(key: str, value: Any, where: str = "", *, from_text: bool = False) -> Any:
    """The value for field `key`, checked against its type; `from_text` when it was typed."""
    if key not in HINTS:
        close = difflib.get_close_matches(key, HINTS, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(HINTS)}"
        raise ValueError(f"{where}unknown setting {key!r}; {hint}")
    kind = HINTS[key]
    try:
        return _to(kind, value, from_text)
    except (ValueError, TypeError, yaml.YAMLError):
        raise ValueError(f"{where}{key}={value!r} is not {_describe(kind)}") from None


def dump(config: Config) -> str:
    """The settings as YAML that `load` reads back."""
    return yaml.safe_dump(asdict(config), sort_keys=False, width=100)


def help_text() -> str:
    lines = [USAGE]
    for f in fields(Config):
        lines.append(f"  {f.name}: {_describe(HINTS[f.name])} = {_plain(f.default)}")
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


def _to(kind: Any, value: Any, from_text: bool) -> Any:
    if get_origin(kind) is UnionType:
        for option in sorted(get_args(kind), key=lambda k: k is str):  # text is the last resort
            try:
                return _to(option, value, from_text)
            except (ValueError, TypeError):
                continue
        raise TypeError
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ValueError
        return value
    if kind is str:
        if not isinstance(value, str):
            raise TypeError
        return value
    if from_text:
        value = yaml.safe_load(value)
    if get_origin(kind) is tuple:
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise TypeError
        return tuple(value)
    if kind is float and not isinstance(value, bool):
        return float(value)  # of text too: YAML reads 2e-5 as a string
    if type(value) is not kind:
        raise TypeError
    return value


def _describe(kind: Any) -> str:
    if get_origin(kind) is UnionType:
        return " or ".join(_describe(k) for k in get_args(kind))
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(get_args(kind))
    names = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
    return names.get(kind, "null" if kind is type(None) else "a list of texts")


def _plain(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n").strip()


def _help(name: str) -> str:
    return Config.__dataclass_fields__[name].metadata["help"]


HINTS = get_type_hints(Config)
