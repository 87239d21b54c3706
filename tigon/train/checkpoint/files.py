"""The directories of a run's checkpoints: their names, what they say of themselves, who uses them.

checkpoints/step-00000100/
  weights-RANK, optimizer-RANK and ema-RANK.safetensors   rows of checkpoint tensors
  config.json, generation_config.json, tokenizer files    as in a Hugging Face checkpoint
  run.json                                                step, settings, which data
  SHA256SUMS                                              of all other files
"""

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tigon.utils.json import read_json

NAME = re.compile(r"step-(\d+)")
LEFTOVER = re.compile(r"\.step-\d+\.(partial|removed)")
RUN = "run.json"


def every(directory: Path, until: int | None = None) -> list[Path]:
    """The complete checkpoints, by step; not of steps after `until`."""
    named = ((NAME.fullmatch(path.name), path) for path in directory.glob("step-*"))
    found = [(int(name[1]), path) for name, path in named if name and path.is_dir()]
    return [path for step, path in sorted(found) if until is None or step <= until]


def latest(directory: Path, until: int | None = None) -> Path | None:
    """The complete checkpoint with the highest step, which is not after `until`."""
    found = every(directory, until)
    return found[-1] if found else None


def step_of(checkpoint: Path) -> int:
    match = NAME.fullmatch(checkpoint.name)
    if match is None or not (checkpoint / RUN).is_file():
        newest = latest(checkpoint / "checkpoints")
        hint = f"; its newest is {newest}" if newest else ""
        raise FileNotFoundError(f"{checkpoint} is not a checkpoint (a directory step-N){hint}")
    return int(match[1])


def facts(checkpoint: Path) -> dict[str, Any]:
    """Its run.json."""
    path = checkpoint / RUN
    try:
        content = read_json(path, nan=True)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    for name in ("config", "state"):
        if not isinstance(content.get(name, {}), dict):
            raise ValueError(f"{path} is damaged: its {name} is no JSON object")
    return content


@contextmanager
def in_use(checkpoint: Path) -> Iterator[None]:
    """Nobody removes the checkpoint meanwhile, as far as the file system knows locks."""
    descriptor = os.open(checkpoint, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def remove(checkpoint: Path) -> bool:
    """Remove it, never half there under its name, unless somebody uses it; whether it is gone."""
    try:
        descriptor = os.open(checkpoint, os.O_RDONLY)
    except FileNotFoundError:
        return True
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            pass
        doomed = checkpoint
        if not checkpoint.name.startswith("."):
            doomed = checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}.removed"))
        if doomed.is_symlink():  # to a checkpoint that was moved to another disk, where it stays
            doomed.unlink()
        else:
            shutil.rmtree(doomed)
    finally:
        os.close(descriptor)
    return True


def clean(directory: Path) -> None:
    """Remove what runs that were killed left half written or half removed."""
    for left in directory.glob(".step-*"):
        if LEFTOVER.fullmatch(left.name):
            with suppress(OSError):  # it stays, and so does what else cannot be removed
                remove(left)
