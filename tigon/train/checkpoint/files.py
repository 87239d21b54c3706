"""Names, verifies, keeps and removes the directories of a run's checkpoints.

checkpoints/step-00000100/
  weights-RANK, optimizer-RANK and ema-RANK.safetensors   rows of checkpoint tensors
  config.json, generation_config.json, tokenizer files    as in a Hugging Face checkpoint
  run.json                                                step, settings, digest of the data
  SHA256SUMS                                              of all other files, as sha256sum has it
"""

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tigon.hub import check_folder
from tigon.utils.json import quote, read_bytes, read_json
from tigon.weights import WriterGroup
from tigon.weights.files import remove_directory
from tigon.weights.write import WORKERS

NAME = re.compile(r"step-(\d+)")
RUN, SUMS = "run.json", "SHA256SUMS"
MAX_SUMS_BYTES = 16 << 20


def list_checkpoints(directory: Path, until: int | None) -> dict[int, Path]:
    """Returns the complete checkpoints by step, in order, up to step `until`."""
    names = ((NAME.fullmatch(path.name), path) for path in directory.glob("step-*"))
    steps = {int(name[1]): path for name, path in names if name and path.is_dir()}
    return {step: steps[step] for step in sorted(steps) if until is None or step <= until}


def latest(directory: Path, until: int | None = None) -> Path | None:
    """Returns the complete checkpoint with the highest step, up to step `until`; None without."""
    return next(reversed(list_checkpoints(directory, until).values()), None)


def step_of(checkpoint: Path) -> int:
    """Returns the step in a checkpoint's directory name; FileNotFoundError for any other path."""
    match = NAME.fullmatch(checkpoint.name)
    if match is None or not (checkpoint / RUN).is_file():
        newest = latest(checkpoint / "checkpoints")
        hint = f"; its newest is {newest}" if newest else ""
        raise FileNotFoundError(f"{checkpoint} is not a checkpoint (a directory step-N){hint}")
    return int(match[1])


def read_metadata(checkpoint: Path | None) -> dict[str, Any]:
    """Returns the content of run.json, {} for None; raises ValueError if that is damaged."""
    if checkpoint is None:
        return {}
    path = checkpoint / RUN
    try:
        content = read_json(path, nan=True)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    for name in ("config", "state", "digests"):
        if not isinstance(content.get(name, {}), dict):
            raise ValueError(f"{path} is damaged: its {name} is no JSON object")
    return content


# Checksums


def checksum(path: Path) -> str:
    """Returns a file's SHA-256 as hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sums(directory: Path, known: Mapping[str, str]) -> None:
    """Writes SHA256SUMS. `known`: checksums of files that were hashed as they were written."""
    names = sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file())
    sums = {name: known.get(name) or checksum(directory / name) for name in names}
    (directory / SUMS).write_text("".join(f"{sums[name]}  {name}\n" for name in names))


def verify(checkpoint: Path, *, wanted: Callable[[str], bool] = lambda name: True) -> None:
    """Raises ValueError, naming the file, unless every file is as it was written.

    In a process group every rank calls this: each reads a share of the files, and all raise the
    same error, also if one sees another checkpoint of that name.
    """
    ranks = WriterGroup()
    try:
        faults = _find_faults(checkpoint, wanted, ranks.rank, ranks.size)
        result = faults, "" if faults else checksum(checkpoint / SUMS)
    except (OSError, ValueError) as error:
        result = [str(error)], ""
    results = ranks.gather(result)
    faults = [fault for faults, _ in results for fault in faults]
    differing = [rank for rank, (_, digest) in enumerate(results) if digest != results[0][1]]
    if differing and not faults:
        faults = [
            f"rank {differing[0]} has another {checkpoint} than rank 0: give all hosts the same"
        ]
    if faults:
        raise ValueError("; ".join(dict.fromkeys(faults)))


def newest_complete(
    directory: Path, say: Callable[[str], None] = print, *, until: int | None = None
) -> Path | None:
    """Returns the newest undamaged checkpoint up to step `until`; None if there is no checkpoint.

    Every rank calls this. `say` gets a line for each damaged one. Raises ValueError if all are.
    """
    listed = WriterGroup().gather([*list_checkpoints(directory, until).values()])[0]
    faults = []
    for checkpoint in reversed(listed):  # all ranks verify those that rank 0 sees
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


def _find_faults(
    checkpoint: Path, wanted: Callable[[str], bool], rank: int, size: int
) -> list[str]:
    """Returns what is wrong with this rank's share of the `wanted` files, a text for each fault."""
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

    unlisted = [p for p in checkpoint.glob("*.safetensors") if p.name not in sums and rank == 0]
    if unlisted:  # they would be read too
        return [f"{path} is not in {SUMS}: it is no part of the checkpoint" for path in unlisted]
    with ThreadPoolExecutor(WORKERS) as pool:
        faults = pool.map(fault, sorted(name for name in sums if wanted(name))[rank::size])
        return [text for text in faults if text]


def _read_sums(path: Path) -> dict[str, str]:
    """Returns the checksums in SHA256SUMS by file name; ValueError if it is missing or damaged."""
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    sums = {}
    for line in read_bytes(path, MAX_SUMS_BYTES).decode(errors="replace").splitlines(keepends=True):
        digest, _, name = line.partition("  ")
        outside = Path(name).is_absolute() or ".." in Path(name).parts
        if len(digest) != 64 or not name.endswith("\n") or outside:
            raise ValueError(f"{path} is damaged: it has the line {quote(line)}")
        sums[name.removesuffix("\n")] = digest
    if RUN not in sums:
        raise ValueError(f"{path} is damaged: it does not name {RUN}")
    return sums


# Retention


def is_listed(checkpoint: Path) -> Callable[[str], bool]:
    """Returns a function that says whether the checkpoint wrote a file, by its path inside it, as
    users may add files.

    If SHA256SUMS cannot be read, all count as the checkpoint's.
    """
    try:
        names = {SUMS, *_read_sums(checkpoint / SUMS)}
    except (OSError, ValueError):
        return lambda name: True
    return names.__contains__


SavedStep = tuple[int, float, float | None]  # step, seconds since the epoch, eval loss


@dataclass(frozen=True)
class KeepPolicy:
    """Keeps the `last` newest (0: all), the `best` by eval loss, one every `hours` (0: none)."""

    last: int = 2
    best: int = 0
    hours: float = 0.0

    def choose(self, saved: Sequence[SavedStep]) -> set[int]:
        """Returns the steps that stay; the newest always does."""
        ordered = sorted(saved)
        chosen = {step for step, *_ in ordered[-self.last :]}
        scored = [(x, step) for step, _, x in ordered if x is not None and math.isfinite(x)]
        chosen |= {step for _, step in sorted(scored)[: self.best]}
        if self.hours:
            last = -math.inf
            for step, time, _ in ordered:
                if abs(time - last) >= 3600 * self.hours:  # a clock may have been put back
                    last = time
                    chosen.add(step)
        return chosen


def prune(directory: Path, newest: int, keep: KeepPolicy, losses: dict[int, float]) -> None:
    """Removes the checkpoints up to step `newest`, which is complete, that `keep` does not choose.

    Later ones are of a run that resumed from an earlier step: they may be damaged. One that is
    being read stays until the next time, and one with files of the user's stays for ever.
    """
    checkpoints = list_checkpoints(directory, newest)
    saved = [(step, _time(path), losses.get(step)) for step, path in checkpoints.items()]
    for step in checkpoints.keys() - keep.choose(saved):
        path, listed = checkpoints[step], is_listed(checkpoints[step])
        files = (p.relative_to(path).as_posix() for p in path.rglob("*") if not p.is_dir())
        if all(map(listed, files)):
            remove_directory(path)


def _time(path: Path) -> float:
    """Returns when a checkpoint was saved, by run.json or else its directory, in Unix seconds."""
    try:
        return float(read_metadata(path)["saved_at"])
    except (OSError, ValueError, KeyError):
        return path.stat().st_mtime
