"""Builds the optimizer that the settings name."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from tigon.models import CausalLM
from tigon.train.config import Config
from tigon.train.optim import adamw, low_precision
from tigon.train.optim.groups import freeze, hidden_matrices, parameter_groups
from tigon.train.optim.muon import Muon


class OptimizerSpec(NamedTuple):
    """Holds the function that builds an optimizer, and those for the bytes of its states."""

    build: Callable[[CausalLM, Config], Optimizer]
    state_bytes: Callable[[Config], float]  # per trained parameter
    hidden_bytes: Callable[[Config], float] | None = None  # per element of `hidden_matrices`


def build_optimizer(model: CausalLM, config: Config) -> Optimizer:
    """Freezes what the settings do not train, and returns the optimizer of the rest."""
    freeze(model, config)
    return OPTIMIZERS[config.optimizer].build(model, config)


def check_local_model(model: CausalLM, config: Config) -> None:
    """Raises ValueError if optimizer=adamw_8bit cannot keep states of a rank's part of the model,
    which divides a row within a block; others can keep those of any part."""
    if config.optimizer == "adamw_8bit":
        adamw.blocks_of(model)


def state_bytes(config: Config, *, hidden: bool = False) -> float:
    """Returns bytes of states per trained parameter, fewer for Muon's `hidden` ones."""
    spec = OPTIMIZERS[config.optimizer]
    size = spec.hidden_bytes if hidden and spec.hidden_bytes is not None else spec.state_bytes
    return size(config)


def item_bytes(config: Config) -> int:
    """Returns the bytes of one element of a trained weight."""
    return getattr(torch, config.param_dtype).itemsize


def muon(model: CausalLM, config: Config) -> Optimizer:
    """Builds Muon for the blocks' matrices and AdamW for the rest."""
    rows, named = hidden_matrices(model), dict(model.named_parameters())
    return Muon(
        parameter_groups(model, config, rows),
        {named[name]: heights for name, heights in rows.items()},
        lr=config.lr,
        momentum=0.95 if config.momentum is None else config.momentum,
        nesterov=config.nesterov is not False,
        ns_steps=config.ns_steps,
        adjust_lr_fn=config.adjust_lr_fn,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        # CPUs without bf16 units would take longer for less
        dtype=torch.bfloat16 if model.device.type == "cuda" else torch.float32,
        shard_specs={named[name]: spec for name, spec in model.shard_specs.items()},
        tensor=model.tensor_parallel,
        like=next(model.parameters()),
    )


def _adamw(states: str) -> OptimizerSpec:
    """Returns how AdamW is built with these states."""
    size = low_precision.state_bytes(states)
    return OptimizerSpec(partial(adamw.adamw, states=states), lambda _: size)


# By the name that `optimizer` has in the settings
OPTIMIZERS: dict[str, OptimizerSpec] = {
    "adamw": _adamw("float32"),
    "adamw_bf16": _adamw("bfloat16"),
    "adamw_8bit": _adamw("8bit"),
    "muon": OptimizerSpec(muon, lambda config: 2.0 * item_bytes(config), item_bytes),
    "sgd": OptimizerSpec(adamw.sgd, lambda config: 4.0 if config.momentum else 0.0),
}
