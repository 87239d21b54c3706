"""The settings of a training run: one flat dataclass, checked."""

import math
from dataclasses import dataclass
from operator import attrgetter

from tigon import strict
from tigon.data import Entry
from tigon.hub import check_repository
from tigon.json_file import shown
from tigon.parallel import MeshSizes
from tigon.paths import check_file_name, expanded
from tigon.tokenizer.chat_template import check_variables
from tigon.train.objective_settings import ObjectiveSettings
from tigon.train.parallel_settings import Parallel
from tigon.train.settings import (
    LONGEST,
    DataSettings,
    LossSettings,
    ModelSettings,
    OptimizerSettings,
    RunSettings,
)

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


@dataclass(frozen=True)
class Config(
    ObjectiveSettings, RunSettings, OptimizerSettings, LossSettings, DataSettings, ModelSettings
):
    """The settings of all sections. A dataclass takes the fields of its last base first."""

    @property
    def labels(self) -> int:
        """Scores of a sequence that the model is to give; 0: it predicts tokens."""
        return int(self.task == "reward")

    @property
    def held_out(self) -> tuple[str | Entry, ...]:
        """The data that is evaluated; with eval_fraction some of the rows of `data`."""
        return self.data if self.eval_fraction else self.eval_data

    def __post_init__(self) -> None:
        strict.check_bounds(self)
        for name in ("run_dir", "model", "init", "tokenizer", "chat_template"):
            check_file_name(getattr(self, name))
        if self.eval_fraction:
            check_eval_fraction(self)
        for name in ("run_dir", "init", "resume", "chat_template"):
            if str(value := getattr(self, name)).startswith("~"):
                object.__setattr__(self, name, str(expanded(value)))
        for name in ("run_dir", "data"):
            if not getattr(self, name):
                raise ValueError(f"{name} is required: {_help(name)}")
        if bool(self.model) == bool(self.init):
            both = f"; there are model={self.model} and init={self.init}" if self.model else ""
            raise ValueError(
                f"exactly one of model (to fine-tune) and init (from scratch) is needed{both}"
            )
        if not (self.tokenizer or self.model):
            raise ValueError("tokenizer is required with init: a directory or hub repository")
        if self.init and self.lora is not None and self.lora.quantize == "keep":
            raise ValueError(
                f"lora.quantize=keep keeps a checkpoint's fp8, and the weights of init={self.init} "
                "are drawn: lora.quantize=nf4 makes 4 bits of them"
            )
        check_variables(self.chat_template_kwargs or {}, "chat_template_kwargs")
        for name in ("keep_best", "hf_best"):
            if getattr(self, name) and not self.held_out:
                raise ValueError(
                    f"{name} needs eval_data or eval_fraction: the best has the lowest eval loss"
                )
        if self.sample_prompts and not self.held_out:
            raise ValueError(
                "sample_prompts needs eval_data or eval_fraction: samples are part of an evaluation"
            )
        if self.epochs is not None and self.steps is not None:
            raise ValueError(f"epochs={self.epochs} and steps={self.steps}: give one of them")
        if self.streaming and self.steps is None:
            raise ValueError("streaming=true needs steps: a stream has no known end")
        if (tokens := self.micro_batch_size * self.seq_len) > LONGEST:
            raise ValueError(
                f"micro_batch_size={self.micro_batch_size} rows of seq_len={self.seq_len} are "
                f"{tokens:,} tokens in one forward: {LONGEST:,} at most"
            )
        if self.batch_size % self.micro_batch_size:
            raise ValueError(
                f"batch_size={self.batch_size} must be a multiple of "
                f"micro_batch_size={self.micro_batch_size}"
            )
        for name in (
            *("lr", "weight_decay", "max_grad_norm", "spike_sigma", "eps"),
            *("momentum", "adamw_lr"),
        ):
            value = getattr(self, name) or 0.0
            if isinstance(value, int) and value >= 2**63:
                raise ValueError(f"{name}={shown(value)} must be below 2**63")
            if not math.isfinite(value):
                raise ValueError(f"{name}={value} must be finite")
        if self.patience and not (self.eval_every and self.held_out):
            raise ValueError(
                f"patience={self.patience} needs eval_every, and eval_data or eval_fraction"
            )
        if self.push_to_hub.lower() in ("true", "false"):  # as in TRL; it could be a name
            raise ValueError(
                f"push_to_hub={self.push_to_hub} is no repository: give its name (owner/name), or "
                "leave it out to push nothing"
            )
        if self.push_to_hub:
            check_repository(self.push_to_hub)
            if not self.export:
                raise ValueError(f"push_to_hub={self.push_to_hub} needs export=true")
        check_parallel(self)
        check_optimizer(self)
        check_precision(self)
        check_budget(self)
        check_graphs(self)
        check_in_backward(self)
        check_lora(self)
        if self.param_dtype == "bfloat16" and self.dtype == "float32":
            raise ValueError("param_dtype=bfloat16 needs dtype=bfloat16 (or auto), not float32")


def check_eval_fraction(config: Config) -> None:
    """Raises ValueError for a fraction that is none, or of data that is not read whole."""
    fraction = config.eval_fraction
    if not fraction < 1:
        raise ValueError(f"eval_fraction={fraction} must be below 1: it is a fraction of the rows")
    if config.eval_data:
        raise ValueError(f"eval_fraction={fraction} and eval_data: give one of them")


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


def check_in_backward(config: Config) -> None:
    """Raises ValueError for what needs all gradients at a time, or those of several backwards."""
    if not config.optimizer_in_backward:
        return
    why = {
        "max_grad_norm": (
            config.max_grad_norm > 0,
            "clipping needs the norm of all gradients before the first update: give "
            "max_grad_norm=0",
        ),
        "optimizer": (
            config.optimizer == "muon",
            "its matrices are dealt to the ranks all together: give adamw, adamw_bf16, adamw_8bit "
            "or sgd",
        ),
        "sharding": (
            config.sharding == "gradients",
            "its gradients are a rank's only when backward is over: give sharding=full",
        ),
        "cuda_graphs": (
            config.cuda_graphs,
            "graphs write gradients to memory that stays, so none would be saved: leave one out",
        ),
        "spike": (
            config.spike_sigma > 0 and config.spike == "skip",
            "a spike of the gradient's norm is known after the update, which cannot be skipped: "
            "give spike=rollback or stop, or spike_sigma=0",
        ),
    }
    for name, (wrong, hint) in why.items():
        if wrong:
            value = getattr(config, name)
            shown = str(value).lower() if isinstance(value, bool) else value
            raise ValueError(f"optimizer_in_backward=true with {name}={shown}: {hint}")


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
        raise ValueError(f"{name}={getattr(config, name)} does not work with lora: leave it out")
    if config.push_to_hub and not config.lora.merge:
        raise ValueError(f"push_to_hub={config.push_to_hub} needs lora.merge=true: it pushes hf")
    if config.lora.merge and not config.export:
        raise ValueError("lora.merge=true needs export=true")


def sizes_of(config: Config, ranks: int) -> MeshSizes:
    """What each dimension of the mesh has of so many ranks; ValueError if they do not fit."""
    return parallel_of(config).sizes(ranks)


def parallel_of(config: Config) -> Parallel:
    if config.parallel == "auto":
        raise ValueError("parallel=auto: no layout has been chosen yet")
    return config.parallel or Parallel()


def check_parallel(config: Config) -> None:
    """Raises ValueError for what ranks cannot share as `parallel` says."""
    if config.parallel is None or config.parallel == "auto":
        return
    if config.sharding == "gradients" and config.parallel.replicate > 1:
        raise ValueError(
            f"parallel.replicate={config.parallel.replicate} does not work with "
            "sharding=gradients, which has all weights on each rank: give sharding=full"
        )
    tensor, expert = config.parallel.tensor, config.parallel.expert
    lora = config.lora
    graphs = config.cuda_graphs, "a graph captures no communication with other ranks"
    wrong: dict[str, dict[str, tuple[bool, str]]] = {
        f"parallel.tensor={tensor}": {
            "cuda_graphs": graphs,
            "lora.quantize": (
                lora is not None and lora.quantize is not None,
                "quantised weights are not split over ranks",
            ),
        },
        f"parallel.expert={expert}": {
            "sharding": (
                config.sharding != "full",
                "it shards all weights over the same ranks, and those of experts are fewer",
            ),
            "cuda_graphs": graphs,
        },
    }
    for dimension, found in wrong.items():
        if dimension.endswith("=1"):
            continue
        for name, (there, why) in found.items():
            if there:
                value = attrgetter(name)(config)
                value = [*value] if isinstance(value, tuple) else str(value).lower()
                raise ValueError(
                    f"{name}={value} does not work with {dimension}: {why}; leave one of them out"
                )


def check_precision(config: Config) -> None:
    """Raises ValueError for what does not work with an optimizer or a dtype."""
    if config.fp8 and config.dtype == "float32":
        raise ValueError("fp8=true needs dtype=bfloat16 (or auto), not float32")
    if config.fp8_except and not config.fp8:
        raise ValueError(f"fp8_except={[*config.fp8_except]} needs fp8=true")
    if not config.ema_decay < 1:
        raise ValueError(f"ema_decay={config.ema_decay} must be below 1")
    if config.optimizer != "muon":
        return
    if config.optimizer_offload:
        raise ValueError(
            "optimizer_offload=true does not work with optimizer=muon, whose updates take whole "
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


def _help(name: str) -> str:
    return Config.__dataclass_fields__[name].metadata["help"]
