"""What a run remembers besides weights, optimizer states and the step; checkpoints have it."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from tigon.utils.config import build_settings, prefix_errors, read_settings, setting

WINDOW = 128  # steps that a spike is measured against
MAX_STEPS = 2**40  # steps, which no run has


@dataclass
class TrainState:
    """Remembers rollbacks, skipped steps and evaluations; the same on every rank."""

    offset: int = setting(0, ge=0, lt=MAX_STEPS)  # steps' rows that rollbacks have passed over
    rollbacks: int = setting(0, ge=0, lt=MAX_STEPS)
    skips: int = setting(0, ge=0, lt=MAX_STEPS)  # in a row
    skipped: int = setting(0, ge=0, lt=MAX_STEPS)  # steps of the run
    losses: list[float] = field(default_factory=list)  # of the last WINDOW steps
    grad_norms: list[float] = field(default_factory=list)
    evaluated: int = setting(-1, ge=-1, lt=MAX_STEPS)  # step of the last evaluation
    best_step: int | None = setting(None, ge=0, lt=MAX_STEPS)  # of that with the lowest loss
    best_loss: float = setting(math.inf, le=math.inf)
    evaluations_since: int = setting(0, ge=0, lt=MAX_STEPS)  # the best one

    @classmethod
    def of(cls, facts: dict[str, Any]) -> Self:
        """Returns the state in a checkpoint's metadata; the initial one if that has none. Raises
        ValueError for values that no run has."""
        known = dict(facts.get("state", {}))
        if known.get("best_loss") is None:
            known["best_loss"] = math.inf
        with prefix_errors("run.json has a state that no run has"):
            return build_settings(cls, read_settings(cls, known))

    def facts(self) -> dict[str, Any]:
        """Returns {"state": ...} for the metadata of a checkpoint, in values that JSON has."""
        best = self.best_loss if math.isfinite(self.best_loss) else None  # JSON has no infinity
        return {"state": asdict(self) | {"best_loss": best}}

    def note_step(self, loss: float, grad_norm: float) -> None:
        """Remembers a step's loss and norm, if they are finite, for the bounds of spikes."""
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.losses = [*self.losses, loss][-WINDOW:]
            self.grad_norms = [*self.grad_norms, grad_norm][-WINDOW:]

    def note_evaluation(self, step: int, loss: float) -> None:
        """Counts an evaluation and notes the best one; ignores steps up to the last one counted, as
        a run in another directory may repeat an evaluation."""
        if step <= self.evaluated:
            return
        self.evaluated = step
        if loss < self.best_loss:
            self.best_step, self.best_loss, self.evaluations_since = step, loss, 0
        else:
            self.evaluations_since += 1

    def is_out_of_patience(self, patience: int) -> bool:
        """Returns whether `patience` evaluations in a row were no better; 0: never."""
        return 0 < patience <= self.evaluations_since
