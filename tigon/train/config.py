"""The settings of a training run: one flat dataclass, read from YAML and the command line."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from tigon import strict
from tigon.hub import check_repository
from tigon.train.names import answer
from tigon.train.objective_settings import ObjectiveSettings
from tigon.train.settings import (
    DataSettings,
    LossSettings,
    ModelSettings,
    OptimizerSettings,
    RunSettings,
)
from tigon.train.values import VALUES

USAGE = """\
tigon train config.yaml [key=value | --key value ...]
tigon train config.yaml --nproc 8 [key=value | --key value ...]
torchrun --nproc-per-node 8 -m tigon.train config.yaml [key=value | --key value ...]

  --nproc N        processes on this host, one for each GPU
  --help           this text
  --print-config   the settings as they would be used, as YAML
  --dry-run        check everything, say what the run takes, time a few steps, and stop
"""

# Settings that only some optimizers have
OF_OPTIMIZERS = {
    "momentum": ("muon", "sgd"),
    "nesterov": ("muon", "sgd"),
    "ns_steps": ("muon",),
    "adjust_lr_fn": ("muon",),
    "adamw_lr": ("muon",),
}
SECTIONS = (
    *(ModelSettings, DataSettings, LossSettings),
    *(OptimizerSettings, RunSettings, ObjectiveSettings),
)
DATA = (".jsonl", ".parquet", ".arrow", ".txt", ".gz", ".zst")  # endings of no config


@dataclass(frozen=True)
class Config(
    ObjectiveSettings, RunSettings, OptimizerSettings, LossSettings, DataSettings, ModelSettings
):
    """The settings of all sections. A dataclass takes the fields of its last base first."""

    @property
    def labels(self) -> int:
        """Scores of a sequence that the model is to give; 0: it predicts tokens."""
        return int(self.task == "reward")

    def __post_init__(self) -> None:
        strict.check_bounds(self)
        for name in ("run_dir", "data"):
            if not getattr(self, name):
                raise ValueError(f"{name} is required: {_help(name)}")
        if bool(self.model) == bool(self.init):
            both = f"; there are model={self.model} and init={self.init}" if self.model else ""
            raise ValueError(
                f"exactly one of model (to fine-tune) and init (from scratch) is needed{both}"
            )
        if not (self.tokenizer or self.model):
            raise ValueError(f"tokenizer is required with init: {_help('tokenizer')}")
        for name in ("keep_best", "hf_best"):
            if getattr(self, name) and not self.eval_data:
                raise ValueError(f"{name} needs eval_data: the best has the lowest eval loss")
        if self.sample_prompts and not self.eval_data:
            raise ValueError("sample_prompts needs eval_data: samples are part of an evaluation")
        if self.epochs is not None and self.steps is not None:
            raise ValueError(f"epochs={self.epochs} and steps={self.steps}: give one of them")
        if self.streaming and self.steps is None:
            raise ValueError("streaming=true needs steps: a stream has no known end")
        if self.batch_size % self.micro_batch_size:
            raise ValueError(
                f"batch_size={self.batch_size} must be a multiple of "
                f"micro_batch_size={self.micro_batch_size}"
            )
        for name in (
            *("lr", "weight_decay", "max_grad_norm", "spike_sigma", "eps"),
            *("momentum", "adamw_lr"),
        ):
            if not math.isfinite(value := getattr(self, name) or 0.0):
                raise ValueError(f"{name}={value} must be finite")
        if self.patience and not (self.eval_every and self.eval_data):
            raise ValueError(f"patience={self.patience} needs eval_data and eval_every")
        if self.push_to_hub.lower() in ("true", "false"):  # as in TRL; it could be a name
            raise ValueError(
                f"push_to_hub={self.push_to_hub} is no repository: give its name (owner/name), or "
                "leave it out to push nothing"
            )
        if self.push_to_hub:
            check_repository(self.push_to_hub)
            if not self.export:
                raise ValueError(f"push_to_hub={self.push_to_hub} needs export=true")
        check_optimizer(self)
        check_precision(self)
        check_budget(self)
        check_graphs(self)
        check_lora(self)
        if self.param_dtype == "bfloat16" and self.dtype == "float32":
            raise ValueError("param_dtype=bfloat16 needs dtype=bfloat16 (or auto), not float32")


def check_budget(config: Config) -> None:
    """Raises ValueError for a budget that is none, or of which nothing would come."""
    budget = config.memory_budget
    if budget is None:
        return
    if not 0 < budget < math.inf:
        raise ValueError(f"memory_budget={budget} is no number of GiB above 0")
    if config.activation_checkpointing != "auto":
        raise ValueError(
            f"memory_budget={budget} is for activation_checkpointing=auto, not "
            f"{str(config.activation_checkpointing).lower()}"
        )


def check_graphs(config: Config) -> None:
    """Raises ValueError for what a CUDA graph of a pass cannot have."""
    if not config.cuda_graphs:
        return
    if config.device == "cpu":
        raise ValueError("cuda_graphs=true with device=cpu: only a GPU has them")
    if not config.packing:
        raise ValueError(
            "cuda_graphs=true with packing=false: padded micro-batches have lengths without end, "
            "and a graph has one; give packing=true"
        )
    if config.activation_offload:
        raise ValueError(
            "cuda_graphs=true with activation_offload=true: copies to host memory take longer than "
            "Python does; leave one out"
        )


def check_lora(config: Config) -> None:
    """Raises ValueError for what an adapter cannot be trained with."""
    if config.lora is None:
        return
    config.lora.adapter()
    wrong = {
        "ema_decay": config.ema_decay > 0,
        "optimizer": config.optimizer == "muon",
        "sharding": config.sharding == "gradients",
    }
    for name in filter(wrong.get, wrong):
        raise ValueError(f"{name}={getattr(config, name)} is not there for lora: leave it out")
    if config.push_to_hub and not config.lora.merge:
        raise ValueError(f"push_to_hub={config.push_to_hub} needs lora.merge=true: it pushes hf")
    if config.lora.merge and not config.export:
        raise ValueError("lora.merge=true needs export=true")


def check_precision(config: Config) -> None:
    """Raises ValueError for what is not there for an optimizer or a dtype."""
    if config.fp8 and config.dtype == "float32":
        raise ValueError("fp8=true needs dtype=bfloat16 (or auto), not float32")
    if not config.ema_decay < 1:
        raise ValueError(f"ema_decay={config.ema_decay} must be below 1")
    if config.optimizer != "muon":
        return
    if config.optimizer_offload:
        raise ValueError(
            "optimizer_offload=true is not there for optimizer=muon, whose updates take whole "
            "matrices: the other optimizers have it"
        )
    if config.param_dtype == "bfloat16" and config.stochastic_rounding:
        raise ValueError(
            "optimizer=muon rounds bfloat16 weights to nearest, which loses small updates: give "
            "param_dtype=float32, or stochastic_rounding=false to have it so"
        )


def check_optimizer(config: Config) -> None:
    """Raises ValueError for settings of the optimizer that do not fit together."""
    for name in ("warmup_steps", "decay_steps"):
        if (value := getattr(config, name)) >= 1 and value != int(value):
            raise ValueError(f"{name}={value} is neither a number of steps nor a share below 1")
    for name, optimizers in OF_OPTIMIZERS.items():
        given = getattr(config, name)
        if given != getattr(Config, name) and config.optimizer not in optimizers:
            raise ValueError(
                f"{name}={given} is a setting of {' and '.join(optimizers)}, not of "
                f"optimizer={config.optimizer}"
            )
    if config.schedule != "wsd" and (config.decay_steps, config.decay_type) != (
        Config.decay_steps,
        Config.decay_type,
    ):
        raise ValueError(
            f"decay_steps and decay_type are settings of schedule=wsd, not {config.schedule}"
        )
    if config.decay_steps in (0, 1):
        raise ValueError(
            f"decay_steps={config.decay_steps} leaves schedule=wsd no step to fall in, as the "
            "first of them still has lr: give 2 or more, or schedule=constant"
        )
    if (config.momentum or 0.0) >= 1:
        raise ValueError(f"momentum={config.momentum} must be below 1")
    if config.nesterov and config.optimizer == "sgd" and not config.momentum:
        raise ValueError("nesterov=true needs a momentum, such as momentum=0.9")
    own = [(f"parameter_groups[{i}].lr", g.lr) for i, g in enumerate(config.parameter_groups)]
    for name, lr in (*own, ("adamw_lr", config.adamw_lr)):
        if lr and not config.lr:
            raise ValueError(
                f"lr=0 leaves {name}={lr} without a schedule: freeze the others instead"
            )
    for i, group in enumerate(config.parameter_groups):
        if group.freeze and (group.lr, group.weight_decay) != (None, None):
            raise ValueError(
                f"parameter_groups[{i}]: with freeze, lr and weight_decay mean nothing"
            )
        if not math.isfinite((group.lr or 0.0) + (group.weight_decay or 0.0)):
            raise ValueError(f"parameter_groups[{i}]: lr and weight_decay must be finite")


def load(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """A Config from a YAML file and `key=value` or `--key value` texts, which win over it."""
    values: dict[str, Any] = {}
    if path is not None:
        if not Path(path).is_file():
            raise FileNotFoundError(f"no config file {path}")
        if Path(path).suffix in DATA:
            raise ValueError(f"{path} is no YAML file of settings: give data as data={path}")
        try:
            read = yaml.load(Path(path).read_text(), _Unique) or {}
        except yaml.YAMLError as error:
            raise ValueError(f"{path} is not valid YAML: {error}") from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        if not isinstance(read, dict):
            raise ValueError(f"{path}: needs `key: value` lines, not a {type(read).__name__}")
        try:
            values = _read(read, _number)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    given = _read(dict(_pairs(overrides)), _parse)
    # A group that is null on the command line has no settings of the file either
    values = {name: v for name, v in values.items() if name.partition(".")[0] not in given} | given
    return strict.make(Config, values)


def _read(values: dict[str, Any], parse: strict.Parse) -> dict[str, Any]:
    known, groups = Config.__dataclass_fields__, strict.groups(Config)
    wrong = [
        f"{name!r}; {answer(str(name), known)}"
        for name in values
        if name not in known and str(name).partition(".")[0] not in groups
    ]
    if len(wrong) > 1:
        raise strict.ConfigError("\n  ".join([f"{len(wrong)} unknown settings:", *wrong]))
    if wrong:
        raise strict.ConfigError(f"unknown setting {wrong[0]}")
    for name, others in VALUES.items():
        if isinstance(value := values.get(name), str) and value in others:
            raise strict.ConfigError(
                f"{name}={value!r} is another trainer's; here: {others[value]}"
            )
    return strict.read(Config, values | _named(values, parse), parse=parse)


def _named(values: dict[str, Any], parse: strict.Parse) -> dict[str, Any]:
    """eval_data as {NAME: what, ...}, as a list of entries with a name."""
    given = values.get("eval_data")
    if isinstance(given, str) and given.lstrip().startswith("{"):
        given = parse(given)
    if not isinstance(given, dict) or "path" in given:
        return {}
    entries = [
        {"name": str(name), **(what if isinstance(what, dict) else {"path": what})}
        for name, what in given.items()
    ]
    return {"eval_data": entries}


class _Unique(yaml.SafeLoader):
    """A key that is given twice is an error; YAML would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[Any, int] = {}
        for key, _ in node.value:
            name, line = self.construct_object(key), key.start_mark.line + 1
            if name in lines:
                raise ValueError(f"line {line}: {name} is also set in line {lines[name]}")
            lines[name] = line
        return super().construct_mapping(node, deep=deep)


def dump(config: Config) -> str:
    """The settings as YAML that `load` reads back."""
    return yaml.safe_dump(asdict(config), sort_keys=False, width=100)


def help_text() -> str:
    """All settings with their types and defaults, by section."""
    lines, kinds = [USAGE], strict.hints(Config)
    for section in SECTIONS:
        lines.append(f"{section.__doc__}")
        for f in fields(section):
            lines.append(f"  {f.name}: {strict.describe(kinds[f.name])} = {_plain(f.default)}")
            lines.append(f"      {f.metadata['help']}")
        lines.append("")
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
        if text.startswith(("[", "{")):
            why = getattr(error, "problem", None) or "it cannot be read"
            fix = "quote a text in it that has one of ? : , [ ] { }"
            raise strict.ConfigError(f"{text!r} is not YAML: {why}; {fix}") from error
        raise ValueError from error
    return _number(value) if isinstance(value, str) else value


def _plain(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n").strip()


def _help(name: str) -> str:
    return Config.__dataclass_fields__[name].metadata["help"]
