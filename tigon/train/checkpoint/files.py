"""Names, verifies, keeps and removes the directories of a run's checkpoints.

checkpoints/step-00000100/
  weights-RANK, optimizer-RANK and ema-RANK.safetensors   rows of checkpoint tensors
  config.json, generation_config.json, tokenizer files    as in a Hugging Face checkpoint
  run.json                                                step, settings, which data
  SHA256SUMS                                              of all other files
"""

import fcntl
import hashlib
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tigon.hub import check_folder
from tigon.utils.json import quote, read_bytes, read_json

NAME = re.compile(r"step-(\d+)")
LEFTOVER = re.compile(r"\.step-\d+\.(partial|removed)")
RUN = "run.json"


def list_checkpoints(directory: Path, until: int | None = None) -> list[Path]:
    """The complete checkpoints, by step; not of steps after `until`."""
    named = ((NAME.fullmatch(path.name), path) for path in directory.glob("step-*"))
    found = [(int(name[1]), path) for name, path in named if name and path.is_dir()]
    return [path for step, path in sorted(found) if until is None or step <= until]


def latest(directory: Path, until: int | None = None) -> Path | None:
    """The complete checkpoint with the highest step, which is not after `until`."""
    found = list_checkpoints(directory, until)
    return found[-1] if found else None


def step_of(checkpoint: Path) -> int:
    match = NAME.fullmatch(checkpoint.name)
    if match is None or not (checkpoint / RUN).is_file():
        newest = latest(checkpoint / "checkpoints")
        hint = f"; its newest is {newest}" if newest else ""
        raise FileNotFoundError(f"{checkpoint} is not a checkpoint (a directory step-N){hint}")
    return int(match[1])


def read_metadata(checkpoint: Path) -> dict[str, Any]:
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
def read_lock(checkpoint: Path) -> Iterator[None]:
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


def first_cause(error: BaseException) -> str:
    """What this rank met, or else the first one that failed, which is then named: who reports the
    error puts the number of this one in front. torch's CheckpointException has all of them, with
    tracebacks."""
    failures = getattr(error, "failures", None)
    if not failures:
        return str(error) or type(error).__name__
    own = dist.get_rank() if dist.is_initialized() else 0
    rank = own if own in failures else min(failures)
    cause = failures[rank][0]
    text = str(cause) if isinstance(cause, OSError) else repr(cause)
    return text if rank == own else f"rank {rank}: {text}"


# SHA256SUMS: the checksum of every file of a checkpoint, as `sha256sum --check` reads it.

SUMS = "SHA256SUMS"
BLOCK = 16 << 20
MAX_SUMS_BYTES = 16 << 20  # bytes of the file


def checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def write_sums(directory: Path, known: Mapping[str, str]) -> None:
    """`known`: by name, those of files that were hashed while they were written."""
    names = sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file())
    sums = {name: known.get(name) or checksum(directory / name) for name in names}
    (directory / SUMS).write_text("".join(f"{sums[name]}  {name}\n" for name in names))


def verify(checkpoint: Path, *, wanted: Callable[[str], bool] = lambda name: True) -> None:
    """Raises ValueError, naming the file, unless every file is as it was written.

    In a process group every rank calls this, of one file system: each reads a share of the files,
    and all raise alike, also if one sees another checkpoint of that name.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    try:
        faults = _faults(checkpoint, wanted, rank, size)
        own = faults, "" if faults else _identity(checkpoint)
    except (OSError, ValueError) as error:
        own = [str(error)], ""
    everywhere = [own]
    if dist.is_initialized():
        everywhere = [own] * size
        dist.all_gather_object(everywhere, own)
    faults = [fault for faults, _ in everywhere for fault in faults]
    first = everywhere[0][1]
    others = [number for number, (_, identity) in enumerate(everywhere) if identity != first]
    if others and not faults:
        faults = [f"rank {others[0]} has another {checkpoint} than rank 0: give all hosts the same"]
    if faults:
        raise ValueError("; ".join(dict.fromkeys(faults)))


def is_listed(checkpoint: Path) -> Callable[[str], bool]:
    """Whether a file is the checkpoint's, by its path inside it. Somebody may have put others
    there; where SHA256SUMS cannot be read, all count as the checkpoint's."""
    try:
        names = {SUMS, *_read_sums(checkpoint / SUMS)}
    except (OSError, ValueError):
        return lambda name: True
    return names.__contains__


def has_other_files(checkpoint: Path) -> bool:
    """Whether somebody has put files into the checkpoint, such as notes."""
    files, listed = (p for p in checkpoint.rglob("*") if not p.is_dir()), is_listed(checkpoint)
    return not all(listed(path.relative_to(checkpoint).as_posix()) for path in files)


def newest_complete(
    directory: Path, say: Callable[[str], None] = print, *, until: int | None = None
) -> Path | None:
    """The newest checkpoint that is not damaged; None if there is none at all.

    Every rank calls this. `say` hears of those that are passed over. With `until`, those of later
    steps are not of the run that asks: it went on from an earlier one.
    """
    listed = [list_checkpoints(directory, until)]
    if dist.is_initialized():  # all look at the same ones
        dist.broadcast_object_list(listed, src=0)
    faults = []
    for checkpoint in reversed(listed[0]):
        try:
            verify(checkpoint)
        except ValueError as error:
            faults.append(str(error))
            say(f"{error}: taking the checkpoint before it")
            continue
        return checkpoint
    if faults:
        raise ValueError(
            f"no checkpoint in {directory} is whole: {faults[0]}; "
            "restore one, or begin again in another run_dir"
        )
    return None


def _identity(checkpoint: Path) -> str:
    """A digest that changes with any of its files."""
    return checksum(checkpoint / SUMS)


def _faults(checkpoint: Path, wanted: Callable[[str], bool], rank: int, size: int) -> list[str]:
    if checkpoint.is_dir():
        check_folder(checkpoint)
    if not (checkpoint / RUN).is_file():
        return [f"{checkpoint / RUN} is missing"]
    sums = _read_sums(checkpoint / SUMS)

    def fault(name: str) -> str | None:
        path = checkpoint / name
        if not path.is_file():
            return f"{path} is missing"
        if checksum(path) != sums[name]:
            return f"{path} is damaged: its SHA-256 is not the one in {SUMS}"
        return None

    mine = sorted(name for name in sums if wanted(name))[rank::size]
    strange = [p for p in checkpoint.glob("*.safetensors") if p.name not in sums and rank == 0]
    if strange:  # it would be read too
        return [f"{path} is not in {SUMS}: it is no part of the checkpoint" for path in strange]
    with ThreadPoolExecutor(4) as pool:
        return [found for found in pool.map(fault, mine) if found]


def _read_sums(path: Path) -> dict[str, str]:
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    sums = {}
    for line in read_bytes(path, MAX_SUMS_BYTES).decode(errors="replace").splitlines(keepends=True):
        digest, _, name = line.partition("  ")
        if len(digest) != 64 or not name.endswith("\n") or _is_outside(name):
            raise ValueError(f"{path} is damaged: it has the line {quote(line)}")
        sums[name.removesuffix("\n")] = digest
    if RUN not in sums:
        raise ValueError(f"{path} is damaged: it does not name {RUN}")
    return sums


def _is_outside(name: str) -> bool:
    return Path(name).is_absolute() or ".." in Path(name).parts


@dataclass(frozen=True)
class SavedStep:
    step: int
    time: float  # seconds since the epoch
    eval_loss: float | None = None


@dataclass(frozen=True)
class KeepPolicy:
    """`last` newest (0: all), `best` by eval loss, and one every `hours` for ever (0: none)."""

    last: int = 2
    best: int = 0
    hours: float = 0.0

    def choose(self, saved: Sequence[SavedStep]) -> set[int]:
        """The steps that stay; the newest always does."""
        ordered = sorted(saved, key=lambda s: s.step)
        kept = {s.step for s in ordered[-self.last :]}
        scored = [s for s in ordered if s.eval_loss is not None and math.isfinite(s.eval_loss)]
        scored.sort(key=lambda s: (s.eval_loss, s.step))
        kept |= {s.step for s in scored[: self.best]}
        if self.hours:
            last = -math.inf
            for s in ordered:
                if abs(s.time - last) >= 3600 * self.hours:  # a clock may have been put back
                    last = s.time
                    kept.add(s.step)
        return kept


def prune(directory: Path, newest: int, keep: KeepPolicy, losses: dict[int, float]) -> None:
    """Remove the checkpoints up to step `newest`, which is whole, that `keep` does not choose.

    Those after it are of a run that went on from an earlier one: they may be damaged, so they do
    not count. One that is being read stays until the next time, and one into which somebody has put
    files stays for ever.
    """
    found = {step: path for path in list_checkpoints(directory) if (step := _step(path)) <= newest}
    saved = [SavedStep(step, _time(path), losses.get(step)) for step, path in found.items()]
    for step in found.keys() - keep.choose(saved):
        if not has_other_files(found[step]):
            remove(found[step])


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _time(path: Path) -> float:
    try:
        return float(read_metadata(path)["saved_at"])
    except (OSError, ValueError, KeyError):  # damaged, or of an earlier version
        return path.stat().st_mtime
