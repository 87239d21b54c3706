"""The optimizer of a run."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from tigon.models import CausalLM
from tigon.train.config import Config
from tigon.train.optim import low_precision
from tigon.train.optim.groups import freeze, parameter_groups


class Kind(NamedTuple):
    build: Callable[[CausalLM, Config], Optimizer]
    state_bytes: Callable[[Config], float]  # per trained parameter


def build_optimizer(model: CausalLM, config: Config) -> Optimizer:
    """For the parameters that `parameter_groups` leaves to train; the others are frozen here."""
    freeze(model, config)
    return OPTIMIZERS[config.optimizer].build(model, config)


def state_bytes(config: Config) -> float:
    """Bytes of optimizer states per trained parameter, over all ranks."""
    return OPTIMIZERS[config.optimizer].state_bytes(config)


def item_bytes(config: Config) -> int:
    """Of a weight that is trained."""
    return getattr(torch, config.param_dtype).itemsize


def adamw(model: CausalLM, config: Config) -> Optimizer:
    """States are float32 always: torch's has them like the weights."""
    if config.param_dtype != "float32" or config.optimizer_offload:
        return low_precision.build(model, config, "float32")
    groups = parameter_groups(model, config)
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)


# By the name that `optimizer` has in the settings
OPTIMIZERS: dict[str, Kind] = {
    "adamw": Kind(adamw, lambda _: low_precision.state_bytes("float32")),
    "adamw_bf16": Kind(
        lambda model, config: low_precision.build(model, config, "bfloat16"),
        lambda _: low_precision.state_bytes("bfloat16"),
    ),
    "adamw_8bit": Kind(
        lambda model, config: low_precision.build(model, config, "8bit"),
        lambda _: low_precision.state_bytes("8bit"),
    ),
}
