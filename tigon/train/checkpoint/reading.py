"""Reads checkpoints into models and optimizers, on any number of ranks."""

import warnings
from collections.abc import Callable
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
from tigon.train.checkpoint.tensors import OPTIMIZER, State, optimizer_states, weights


def load(checkpoint: Path, model: CausalLM, optimizer: Optimizer | None = None) -> None:
    """Fill weights and, if given, optimizer states in place; lr, betas and so on stay.

    Each rank reads its own rows only. In a process group every rank calls this. Raises ValueError
    if the checkpoint does not fit the model or cannot be read.
    """
    with files.in_use(checkpoint), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            if legacy.is_legacy(checkpoint):
                _load_legacy(checkpoint, model, optimizer)
            else:
                _load(checkpoint, model, optimizer)
        except CheckpointException as error:
            raise ValueError(f"{checkpoint} cannot be read: {first_cause(error)}") from error


def _load(checkpoint: Path, model: CausalLM, optimizer: Optimizer | None) -> None:
    state = weights(model)
    if optimizer is not None:
        state |= optimizer_states(model, optimizer)
    reader = HuggingFaceStorageReader(str(checkpoint))
    _check_names(checkpoint, state, reader, lambda name: name.startswith(OPTIMIZER))
    dcp.load(dict(state), storage_reader=reader, no_dist=not dist.is_initialized())


def _check_names(
    checkpoint: Path,
    state: State,
    reader: HuggingFaceStorageReader,
    optional: Callable[[str], bool],
) -> None:
    try:
        stored: dict[str, Any] = reader.read_metadata().state_dict_metadata
    except Exception as error:  # whatever torch and safetensors meet in headers that are wrong
        raise ValueError(f"{checkpoint} cannot be read: {error}") from error
    missing = sorted(state.keys() - stored.keys())
    unexpected = sorted(stored.keys() - state.keys())
    if not any(optional(name) for name in state):
        unexpected = [name for name in unexpected if not optional(name)]
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
