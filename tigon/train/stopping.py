"""Whether a run that a scheduler is ending still has the time for a checkpoint."""

import torch

from tigon.train.build import Run


class Deadline:
    """`stop_seconds` after SIGTERM, as all ranks see it; other signals have none."""

    def __init__(self, run: Run):
        self.run, self.seconds = run, run.config.stop_seconds
        self._told = False

    def note(self, step_seconds: float) -> None:
        """Say once, and before any signal, that the time for a step and a checkpoint is short."""
        needed = step_seconds + self.run.saver.seconds
        if self._told or not self.run.saver.seconds or not 0 < self.seconds < needed:
            return
        self._told = True
        self.run.world.log_rank0(
            f"note: a step and a checkpoint take {needed:.0f} s, longer than stop_seconds="
            f"{self.seconds:g}: SIGTERM would end the run without a checkpoint. Let the scheduler "
            "grant more, and say so in stop_seconds"
        )

    def allows_save(self, step: int) -> bool:
        """Whether a checkpoint that is begun now would be whole in time; if not, says so."""
        world = self.run.world
        own = [self.run.saver.expected(), -world.signals.left(self.seconds)]
        needed, over = world.all_reduce_max(torch.tensor(own, dtype=torch.double)).tolist()
        if needed + over <= 0:
            return True
        world.log_rank0(
            f"no checkpoint of step {step}: it would take about {needed:.0f} s, and "
            f"{max(0.0, -over):.0f} s are left of stop_seconds={self.seconds:g}"
        )
        return False
