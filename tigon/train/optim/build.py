"""Builds the optimizer that the settings name."""

from collections.abc import Callable
from functools import partial

import torch
from torch.optim import Optimizer

from tigon.models import CausalLM
from tigon.settings.config import Config
from tigon.train.optim import adamw
from tigon.train.optim.groups import freeze, hidden_matrices, parameter_groups
from tigon.train.optim.low_precision import BLOCK
from tigon.train.optim.muon import Muon


def build_optimizer(model: CausalLM, config: Config) -> Optimizer:
    """Freezes what the settings do not train, and returns the optimizer of the rest."""
    freeze(model, config)
    return OPTIMIZERS[config.optimizer](model, config)


def check_local_model(model: CausalLM, config: Config) -> None:
    """Raises ValueError if optimizer=adamw_8bit cannot keep states of a rank's part of the model,
    which divides a row within a block; others can keep those of any part."""
    if config.optimizer == "adamw_8bit":
        adamw.blocks_of(model)


def state_bytes(config: Config, *, hidden: bool = False) -> float:
    """Returns bytes of states per trained parameter, fewer for Muon's `hidden` ones."""
    if config.optimizer == "muon":
        return getattr(torch, config.param_dtype).itemsize * (1 if hidden else 2)
    if config.optimizer == "sgd":
        return 4.0 if config.momentum else 0.0
    return {"adamw": 8.0, "adamw_bf16": 4.0, "adamw_8bit": 2 * (1 + 4 / BLOCK)}[config.optimizer]


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


# By the name that `optimizer` has in the settings
OPTIMIZERS: dict[str, Callable[[CausalLM, Config], Optimizer]] = {
    "adamw": partial(adamw.adamw, states="float32"),
    "adamw_bf16": partial(adamw.adamw, states="bfloat16"),
    "adamw_8bit": partial(adamw.adamw, states="8bit"),
    "muon": muon,
    "sgd": adamw.sgd,
}
