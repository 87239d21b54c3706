"""Reads checkpoints into models and optimizers, on any number of ranks."""

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import Optimizer

from tigon.models import CausalLM
from tigon.train.checkpoint import files, legacy
from tigon.train.checkpoint.errors import first_cause
from tigon.train.checkpoint.tensors import EMA, OPTIMIZER, State, everything
from tigon.train.optim import Ema


def load(
    checkpoint: Path, model: CausalLM, optimizer: Optimizer | None = None, ema: Ema | None = None
) -> None:
    """Fill weights and, if given, optimizer states and average in place; lr, betas and so on stay.
    An average that the checkpoint does not have begins with its weights.

    Each rank reads its own rows only. In a process group every rank calls this. Raises ValueError
    if the checkpoint does not fit the model or cannot be read.
    """
    with files.in_use(checkpoint), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            if legacy.is_legacy(checkpoint):
                _load_legacy(checkpoint, model, optimizer)
                has_average = False
            else:
                has_average = _load(checkpoint, model, optimizer, ema)
        except CheckpointException as error:
            raise ValueError(f"{checkpoint} cannot be read: {first_cause(error)}") from error
    if ema is not None and not has_average:
        ema.begin(model)


def _load(checkpoint: Path, model: CausalLM, optimizer: Optimizer | None, ema: Ema | None) -> bool:
    """Whether it has an average."""
    reader = HuggingFaceStorageReader(str(checkpoint))
    try:
        stored: dict[str, Any] = reader.read_metadata().state_dict_metadata
    except Exception as error:  # whatever torch and safetensors meet in headers that are wrong
        raise ValueError(f"{checkpoint} cannot be read: {error}") from error
    has_average = any(name.startswith(EMA) for name in stored)
    state = everything(model, optimizer, ema if has_average else None)
    if ema is None:
        stored = {name: info for name, info in stored.items() if not name.startswith(EMA)}
    if optimizer is None:
        stored = {name: info for name, info in stored.items() if not name.startswith(OPTIMIZER)}
    _check_optimizer(checkpoint, state, stored)
    _check_names(checkpoint, state, stored)
    dcp.load(dict(state), storage_reader=reader, no_dist=not dist.is_initialized())
    return has_average


def _check_optimizer(checkpoint: Path, state: State, stored: Mapping[str, Any]) -> None:
    """Raises ValueError, naming the states, if another optimizer made the checkpoint's."""

    def kinds(names: Iterable[str]) -> str:
        found = {name.split(".")[1] for name in names if name.startswith(OPTIMIZER)}
        return ", ".join(sorted(found)) or "none"

    if (was := kinds(stored)) != (now := kinds(state)):
        raise ValueError(
            f"{checkpoint} has the states of another optimizer: {was}; this one has {now}. Give "
            "the optimizer and settings that it was made with, or begin another run_dir, with "
            "model= an export of this one"
        )


def _check_names(checkpoint: Path, state: State, stored: Mapping[str, Any]) -> None:
    missing = sorted(state.keys() - stored.keys())
    unexpected = sorted(stored.keys() - state.keys())
    both = state.keys() & stored.keys()
    wrong = sorted(n for n in both if stored[n].size != state[n].size())
    holes = sorted(
        n for n in both if sum(c.sizes.numel() for c in stored[n].chunks) < state[n].numel()
    )
    for fault, names in (
        ("lacks", missing),
        ("also has", unexpected),
        ("resizes", wrong),
        ("lacks rows of", holes),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(
                f"{checkpoint} does not fit the model: it {fault} {', '.join(names[:3])}{more}"
            )


def _load_legacy(checkpoint: Path, model: CausalLM, optimizer: Optimizer | None) -> None:
    state: dict[str, Any] = {"model": {n: p.detach() for n, p in model.named_parameters()}}
    if optimizer is not None:  # the optimizer's own tensors
        state["optimizer"] = dict(get_optimizer_state_dict(model, optimizer))["state"]
    legacy.load(checkpoint, state)
