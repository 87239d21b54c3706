"""Checkpoints of a run: weights, optimizer state and the step, whole or absent."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from tigon.train.parallel import World

NAME = re.compile(r"step-(\d+)")


def save(
    directory: Path,
    step: int,
    model: nn.Module,
    optimizer: Optimizer,
    world: World,
    facts: dict[str, Any],
    *,
    keep_last: int = 0,
) -> Path:
    """Write directory/step-N on every rank; until it is complete it has another name.

    `facts` go into its run.json. Afterwards only the `keep_last` newest stay; 0 keeps all.
    """
    target = directory / f"step-{step:08d}"
    temporary = directory / f".{target.name}.partial"
    if world.main:
        for left in directory.glob(".step-*"):  # by a run that was killed
            shutil.rmtree(left)
        temporary.mkdir(parents=True)
    world.barrier()
    state = {"model": _weights(model), "optimizer": _optimizer_state(model, optimizer)["state"]}
    dcp.save(state, checkpoint_id=temporary)
    if world.main:
        with open(temporary / "run.json", "w") as file:
            json.dump({"step": step, **facts}, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        _sync(temporary)
        temporary.rename(target)
        _sync(directory)
        _prune(directory, keep_last)
    world.barrier()
    return target


def load(checkpoint: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Fill weights and optimizer state, on any number of ranks; lr, betas and so on stay."""
    state = _optimizer_state(model, optimizer)
    dcp.load({"model": _weights(model), "optimizer": state["state"]}, checkpoint_id=checkpoint)
    set_optimizer_state_dict(model, optimizer, state)


def latest(directory: Path) -> Path | None:
    """The complete checkpoint with the highest step."""
    return max(_all(directory), key=step_of, default=None)


def step_of(checkpoint: Path) -> int:
    match = NAME.fullmatch(checkpoint.name)
    if match is None or not (checkpoint / "run.json").is_file():
        raise FileNotFoundError(f"{checkpoint} is not a checkpoint (a directory step-N)")
    return int(match[1])


def facts(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "run.json").read_text())


def _weights(model: nn.Module) -> dict[str, Any]:
    return {name: p.detach() for name, p in model.named_parameters()}  # a tied one once


def _optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """By parameter name; all zeros before the first step."""
    return dict(get_optimizer_state_dict(model, optimizer))


def _all(directory: Path) -> list[Path]:
    return [path for path in directory.glob("step-*") if NAME.fullmatch(path.name)]


def _prune(directory: Path, keep_last: int) -> None:
    for old in sorted(_all(directory), key=step_of)[:-keep_last] if keep_last else []:
        doomed = old.rename(old.with_name(f".{old.name}.removed"))  # never half there by its name
        shutil.rmtree(doomed)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
