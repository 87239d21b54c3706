"""Saves a run as it trains: checkpoints, whether one fits before a signal ends the run, exports."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tigon.settings.config import Config
from tigon.train import resume
from tigon.train.build import TrainingRun
from tigon.train.logging import RunLog
from tigon.train.model import export_dtype


def checkpoint_metadata(run: TrainingRun) -> dict[str, Any]:
    """Returns what every checkpoint of the run says of its settings and data, digests of reference
    and teacher, the base of an adapter, the time that chat templates write, and how prompts are
    packed."""
    metadata = resume.run_metadata(run.config, run.data) | {"digests": run.task.digests}
    metadata |= {"base": run.base} if run.base else {}
    if run.tokenizer.strftime_now is not None:
        metadata |= {"strftime_now": run.tokenizer.strftime_now.isoformat()}
    if run.task.share_prompts:  # on which the rows of a step depend
        metadata |= {"share_prompts": True}
    return metadata


def save(run: TrainingRun, step: int, log: RunLog, metadata: dict[str, Any], *, last: bool) -> None:
    """Saves a checkpoint after `step` steps, in the background with async_save, once exports are on
    the disk, for which a run that has received a signal does not wait. `last`: no step follows,
    which would change the weights, so that they are not copied."""
    if run.in_backward is not None:
        run.in_backward.check()  # weights of a backward that failed must not be saved
    if not run.world.any(run.world.signals.received > 0):  # a signal leaves little time
        run.exporter.wait()  # a run that resumes from here does not look for earlier exports
    log.sync()
    start_time = time.perf_counter()
    progress = {"cursor": run.data.state(step + run.state.offset), **run.state.facts()}
    if run.choice is not None:  # which may have become smaller since the first step
        progress |= {"config": metadata["config"] | {"micro_batch_size": run.choice.rows}}
    values = run.model, run.optimizer, run.tokenizer, metadata | progress, run.ema
    run.saver.save(step, *values, copy=not last)
    log.saved(step, time.perf_counter() - start_time, whole=run.saver.pending is None)


class Deadline:
    """Decides for all ranks whether a checkpoint fits into `stop_seconds` after SIGTERM."""

    def __init__(self, run: TrainingRun):
        self.run, self.seconds = run, run.config.stop_seconds
        self._warned = False

    def warn_once(self, step_seconds: float) -> None:
        """Logs, once, that a step of `step_seconds` and a checkpoint as the last one take longer
        than stop_seconds, if they do; before the first checkpoint does nothing."""
        needed = step_seconds + self.run.saver.seconds
        if self._warned or not self.run.saver.seconds or not 0 < self.seconds < needed:
            return
        self._warned = True
        self.run.world.log_rank0(
            f"note: a step and a checkpoint take {needed:.0f} s, longer than stop_seconds="
            f"{self.seconds:g}: SIGTERM would end the run without a checkpoint"
        )

    def allows_save(self, step: int) -> bool:
        """Returns whether a checkpoint that begins now would be complete in time; logs if not."""
        world = self.run.world
        local = [self.run.saver.expected(), -world.signals.left(self.seconds)]
        seconds = torch.tensor(local, dtype=torch.double, device="cpu")
        needed, over = world.all_reduce_max(seconds).tolist()
        if needed + over <= 0:
            return True
        takes = f"it would take about {needed:.0f} s, and " if needed else ""  # none was saved yet
        world.log_rank0(
            f"no checkpoint of step {step}: {takes}{max(0.0, -over):.0f} s are left of "
            f"stop_seconds={self.seconds:g}"
        )
        return False


def export_name(config: Config) -> str:
    """Returns the name of a run's export directory: hf, or adapter for a run with lora."""
    return "hf" if config.lora is None else "adapter"


def step_export_path(config: Config, step: int) -> Path:
    """Returns the directory of the export after `step`, a multiple of hf_every."""
    return Path(config.run_dir, f"{export_name(config)}-step-{step:08d}")


def export(
    run: TrainingRun,
    target: Path,
    values: Mapping[str, Tensor] | None = None,
    *,
    copy: bool = False,
) -> None:
    """Exports the run's model, or its `values`, to `target`; with `copy` and async_save while
    training goes on. Raises the errors of `Exporter.export`."""
    dtype = export_dtype(run.config, run.model)
    run.exporter.export(run.model, target, run.tokenizer, dtype=dtype, values=values, copy=copy)
