"""The settings of `tigon plan`: those of `tigon train` that a plan uses, read without torch."""

from collections.abc import Sequence
from pathlib import Path

from tigon.settings.config import Config, Parallel
from tigon.settings.load import load, parse_arguments

UNMODELED = ("lora", "fp8", "activation_offload", "optimizer_offload", "ema_decay", "teacher")
# Settings that memory, time or the possible layouts depend on; all others are refused
USED = (
    *("revision", "param_dtype", "dtype", "cuda_graphs", "router_aux_loss_coef"),
    *("optimizer", "momentum", "nesterov", "parameter_groups", "stochastic_rounding"),
    *("accumulate_fp32", "optimizer_in_backward", "max_grad_norm"),
    *("loss_reduction", "logits_bytes"),
)
REFUSED = {  # settings that are arguments of the command, or that a plan tries
    **dict.fromkeys(("model", "init"), "give it as the argument MODEL"),
    "seq_len": "give --seq-len T instead",
    "batch_size": "give --batch-tokens N instead, which is batch_size x seq_len",
    "parallel": "a plan tries every layout itself; leave it out",
} | dict.fromkeys(
    ("sharding", "micro_batch_size", "activation_checkpointing"),
    "a plan tries its values itself; leave it out",
)


def read_plan_settings(model: str, settings: Sequence[str]) -> Config:
    """Returns `tigon train`'s settings for a plan of a model, which may be a config.json; raises
    ValueError for settings that a plan would ignore, or whose time is not modeled."""
    check_plan_settings(settings)
    source = f"init={model}" if Path(model).is_file() else f"model={model}"
    fixed = [source, "run_dir=run", "data=data", "task=pretrain", "tokenizer=tokenizer"]
    config = load(None, [*settings, *fixed])
    check_modeled(config)
    return config


def check_plan_settings(settings: Sequence[str]) -> None:
    """Raises ValueError for settings that a plan would ignore."""
    for name, value in parse_arguments(settings):
        first = name.partition(".")[0]
        problem = REFUSED.get(first)
        if first in Parallel.__dataclass_fields__:
            problem = f"{REFUSED['parallel']} (for `tigon train` it is parallel.{name}={value})"
        # `load` reports unknown settings
        elif first in Config.__dataclass_fields__ and first not in (*USED, *UNMODELED, *REFUSED):
            problem = f"a plan does not use it; leave it out. It uses {', '.join(USED)}"
        if problem is not None:
            raise ValueError(f"--settings {name}={value}: {problem}")


def check_modeled(config: Config) -> None:
    """Raises ValueError for settings whose time is not modeled, and for a given `parallel`."""
    if config.parallel not in (None, "auto"):
        raise ValueError("parallel: a plan finds the layout itself; leave it out")
    for name in UNMODELED:
        if getattr(config, name):
            raise ValueError(f"{name}: its time is not modelled; leave it out")
    if config.dtype == "float32":
        raise ValueError("dtype=float32: only GEMMs in bfloat16 are modelled; leave it out")
