"""The optimizer of a run."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from tigon.models import CausalLM
from tigon.train.config import Config
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
    groups = parameter_groups(model, config)
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)


# By the name that `optimizer` has in the settings
OPTIMIZERS: dict[str, Kind] = {"adamw": Kind(adamw, lambda config: 2.0 * item_bytes(config))}
