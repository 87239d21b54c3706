"""Which checkpoints of a run stay."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tigon.train.checkpoint import files
from tigon.train.checkpoint.integrity import has_other_files


@dataclass(frozen=True)
class Saved:
    step: int
    time: float  # seconds since the epoch
    eval_loss: float | None = None


@dataclass(frozen=True)
class Keep:
    """`last` newest (0: all), `best` by eval loss, and one every `hours` for ever (0: none)."""

    last: int = 2
    best: int = 0
    hours: float = 0.0

    def choose(self, saved: Sequence[Saved]) -> set[int]:
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


def prune(directory: Path, newest: int, keep: Keep, losses: dict[int, float]) -> None:
    """Remove the checkpoints up to step `newest`, which is whole, that `keep` does not choose.

    Those after it are of a run that went on from an earlier one: they may be damaged, so they do
    not count. One that is being read stays until the next time, and one into which somebody has put
    files stays for ever.
    """
    found = {step: path for path in files.every(directory) if (step := _step(path)) <= newest}
    saved = [Saved(step, _time(path), losses.get(step)) for step, path in found.items()]
    for step in found.keys() - keep.choose(saved):
        if not has_other_files(found[step]):
            files.remove(found[step])


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _time(path: Path) -> float:
    try:
        return float(files.facts(path)["saved_at"])
    except (OSError, ValueError, KeyError):  # damaged, or of an earlier version
        return path.stat().st_mtime
