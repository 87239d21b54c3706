"""Writes a torch.profiler trace of a few steps."""

from pathlib import Path

import torch

from tigon.settings.config import Profile
from tigon.train.distributed import World

TRACE = "trace.json.gz"


class Profiler:
    """Profiles the steps that `profile` names on the first rank, into run_dir/profile."""

    def __init__(self, chosen: Profile | None, run_dir: str, world: World, done: int, steps: int):
        """`done` of the run's `steps` are made already."""
        self.world, self.trace = world, Path(run_dir, "profile", TRACE)
        self.profile: torch.profiler.profile | None = None
        if chosen is None or not world.main:
            return
        first = max(chosen.start, done + 1)
        self.last = min(chosen.start + chosen.steps - 1, steps)
        if first > self.last:
            if not self.trace.exists():
                world.log_rank0(
                    f"note: nothing is profiled: this run makes the steps {done + 1} to {steps}, "
                    f"none of which profile.start={chosen.start} profile.steps={chosen.steps} name"
                )
            return
        before = first - done - 1
        warmup = min(1, before)
        self.profile = torch.profiler.profile(
            schedule=torch.profiler.schedule(
                wait=before - warmup, warmup=warmup, active=self.last - first + 1, repeat=1
            ),
            on_trace_ready=self._write,
        )
        self.profile.start()
        world.closing.callback(self.close)

    def step(self, step: int) -> None:
        """Notes the end of a step, which is counted from 1."""
        if self.profile is not None:
            self.profile.step()
            if step >= self.last:
                self.profile.stop()  # which writes the trace
                self.profile = None

    def close(self) -> None:
        """Drops a profile that the run ends before the last of its steps, and says so."""
        if self.profile is not None:
            self.profile.on_trace_ready = None
            self.profile.stop()
            self.world.log_rank0(f"no profile: the run ended before step {self.last}")

    def _write(self, profile: torch.profiler.profile) -> None:
        """Writes the trace; logs its path, or why there is none."""
        try:
            self.trace.parent.mkdir(parents=True, exist_ok=True)
            self.trace.unlink(missing_ok=True)  # never written through, should it be a link
            profile.export_chrome_trace(str(self.trace))
            self.world.log_rank0(f"profile: {self.trace}")
        except OSError as error:  # no profile is worth a run
            self.world.log_rank0(f"no profile: {error}")
