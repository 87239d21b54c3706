"""Saves checkpoints, whole or absent, while training goes on."""

import json
import math
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.staging import AsyncStager
from torch.optim import Optimizer

from tigon.models import CausalLM, write_description
from tigon.tokenizer import Tokenizer
from tigon.train.checkpoint.files import (
    RUN,
    KeepPolicy,
    clean,
    first_cause,
    is_listed,
    prune,
    read_lock,
    remove,
    write_sums,
)
from tigon.train.checkpoint.format import Chunk, LocalRows, State, Writer, full_state
from tigon.train.distributed import World, local
from tigon.train.logging import read_metrics
from tigon.train.optim import Ema
from tigon.utils.memory import CGROUP
from tigon.weights.files import carry_over_files, explain_full_disk, fsync
from tigon.weights.write import all_finite


class SaveError(OSError):
    """A checkpoint or an export could not be written; those before it are untouched."""


def has_failed(writing: Future[Any]) -> bool:
    return writing.done() and writing.exception() is not None


class BackgroundWriter(ABC):
    """Leaving its `with` block waits for what is being written, and raises what stopped it."""

    @abstractmethod
    def wait(self) -> None:
        """Until it is on the disk; raises SaveError, on all ranks, if it failed."""

    @property
    @abstractmethod
    def failed(self) -> bool:
        """Whether this rank knows already that what is being written cannot be: `wait` raises it,
        and soon on the other ranks too, which are told what one of them met."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except SaveError as second:
            if error is None:
                raise
            error.add_note(str(second))


def check_finite(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    ema: Ema | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Raises FloatingPointError, naming the first, where a weight, a state or an average is NaN or
    infinite, or would be in `dtype`.

    In a process group every rank calls this and all raise alike; one collective, and one wait for
    the device.
    """
    found = [(name, p.detach()) for name, p in model.named_parameters()]
    if optimizer is not None:
        for name, p in model.named_parameters():
            states = optimizer.state.get(p, {}).items()
            found += [(f"{kind} of {name}", s) for kind, s in states if isinstance(s, Tensor)]
    if ema is not None:
        found += [(f"average of {name}", value) for name, value in ema.values.items()]
    own = [(name, local(t)) for name, t in found]
    floating = [(name, t) for name, t in own if t.is_floating_point() and t.numel()]
    most = math.inf if dtype is None else torch.finfo(dtype).max
    device = next(model.parameters()).device
    good = all_finite([t for _, t in floating], device, most=most).float()
    if dist.is_initialized():
        dist.all_reduce(good, dist.ReduceOp.MIN)
    if good.item():
        return
    bad = [name for name, t in floating if not all_finite([t], t.device, most=most)]
    everywhere: list[list[str] | None] = [bad]
    if dist.is_initialized():
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, bad)
    names = sorted({name for names in everywhere for name in names or ()})
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    where = "" if dtype is None else f" in {dtype}"
    raise FloatingPointError(f"not finite{where}: {', '.join(names[:3])}{more}")


def available_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = CGROUP) -> int:
    """Bytes that this process may still take; where nobody says, more than any machine has."""
    found = [1 << 60]
    if meminfo.is_file():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        if "MemAvailable" in lines:
            found.append(int(lines["MemAvailable"].split()[0]) * 1024)
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit != "max":
            stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
            used = int((cgroup / "memory.current").read_text()) - int(stat["inactive_file"])
            found.append(int(limit) - used)
    except (OSError, ValueError, KeyError):
        pass  # no limit that can be read
    return min(found)


def fits_in_memory(needed: int, world: World) -> bool:
    """Whether the host of every rank has `needed` bytes for each of its ranks, and a tenth more.

    Every rank calls this, each with its own number.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    return not world.all_reduce_max_int(1.1 * needed * local >= available_memory())


KEEP = KeepPolicy()


class _Saving(NamedTuple):
    target: Path
    partial: Path
    done: Future[Any]
    lock: ExitStack


class Saver(BackgroundWriter):
    """The checkpoints of one run. Every rank makes one and calls its methods alike.

    With `background`, `save` returns when weights and states are copied into host memory, and the
    copy is written while training goes on; the next `save`, `wait` and leaving the `with` block
    wait for it and raise what stopped it.
    """

    def __init__(
        self, run_dir: Path, world: World, *, keep: KeepPolicy = KEEP, background: bool = True
    ) -> None:
        self.directory, self.metrics = run_dir / "checkpoints", run_dir / "metrics.jsonl"
        self.world, self.keep, self.background = world, keep, background
        # Its own group: the thread that writes would else mix its messages with the training's
        self._group = dist.new_group(backend="gloo")
        self._stager = _Stager()
        self._saving: _Saving | None = None
        self._began = 0.0
        self.seconds = 0.0  # that the last whole checkpoint took, from `save` to the disk

    def save(
        self,
        step: int,
        model: CausalLM,
        optimizer: Optimizer,
        tokenizer: Tokenizer,
        facts: Mapping[str, Any],
        ema: Ema | None = None,
    ) -> Path:
        """Write checkpoints/step-N, whose run.json has `facts`; then remove what need not stay.

        Raises FloatingPointError if a weight or a state is not finite, and SaveError if this or
        the save before it cannot be written.
        """
        self.wait()
        self._began = time.monotonic()
        target = self.directory / f"step-{step:08d}"
        try:
            check_finite(model, optimizer, ema)
        except FloatingPointError as error:
            raise FloatingPointError(f"{target} was not written: {error}") from None
        state = full_state(model, optimizer, ema)
        needed = sum(rows.numel() * rows.dtype.itemsize for rows in state.values())
        partial = self.directory / f".{target.name}.partial"
        lock = ExitStack()
        if self.world.main:
            clean(self.directory)
            with explain_full_disk(partial, needed):
                partial.mkdir(parents=True)
            lock.enter_context(read_lock(partial))
        self.world.barrier()
        content = {
            "step": step,
            "saved_at": time.time(),
            "ranks": self.world.size,
            "stacked_experts": model.config.source.stacked_experts,
            **facts,
        }

        def commit(sums: Mapping[str, str]) -> None:
            """On rank 0, when every rank has written: nothing has the final name before."""
            with explain_full_disk(partial, needed):
                write_description(partial, model.config, model.generation_config, tokenizer)
                (partial / RUN).write_text(json.dumps(content, indent=2) + "\n")
                write_sums(partial, sums)
                for path in [*partial.rglob("*"), partial]:
                    fsync(path)
            self._publish(partial, target, step)

        writer = Writer(partial, commit)
        if self.background and self._stager.fits(state, self.world):
            done = dcp.async_save(
                dict(state),
                storage_writer=writer,
                process_group=self._group,
                async_stager=self._stager,
            )
            assert isinstance(done, Future)
            done.add_done_callback(self._measure)
            self._saving = _Saving(target, partial, done, lock)
            return target
        done = Future()
        try:
            dcp.save(dict(state), storage_writer=writer, process_group=self._group)
            done.set_result(None)
            self._measure(done)
        except (Exception, CheckpointException) as error:
            done.set_exception(error)
        self._saving = _Saving(target, partial, done, lock)
        self.wait()
        return target

    @property
    def writing(self) -> bool:
        """Whether a checkpoint may not be on the disk yet."""
        return self._saving is not None

    @property
    def failed(self) -> bool:
        return self._saving is not None and has_failed(self._saving.done)

    def expected(self) -> float:
        """Seconds after which a checkpoint begun now would be on the disk, going by the last one;
        0 where none is known."""
        pending = 0.0
        if self._saving is not None and not self._saving.done.done():
            pending = max(0.0, self._began + self.seconds - time.monotonic())
        return pending + self.seconds

    def _measure(self, done: Future[Any]) -> None:
        if done.exception() is None:
            self.seconds = time.monotonic() - self._began

    def _publish(self, partial: Path, target: Path, step: int) -> None:
        """Give a whole checkpoint its name, and remove those that need not stay."""
        # An older one is damaged, or of a run that was resumed from before it
        if target.is_dir() and not target.is_symlink():
            carry_over_files(target, partial, is_listed(target))
        if not remove(target):
            raise OSError("one of that name is being read by another process")
        os.rename(partial, target)
        fsync(self.directory)
        try:
            losses = {
                row["step"]: row["eval_loss"]
                for row in read_metrics(self.metrics)
                if row.get("eval_loss") is not None
            }
            prune(self.directory, step, self.keep, losses)
        except OSError as error:  # the new one is whole
            self.world.log_rank0(f"an older checkpoint could not be removed: {error}")

    def wait(self) -> None:
        if self._saving is None:
            return
        saving, self._saving = self._saving, None
        with saving.lock:
            try:
                saving.done.result()
            except (Exception, CheckpointException) as error:
                if self.world.main:
                    shutil.rmtree(saving.partial, ignore_errors=True)
                raise SaveError(f"{saving.target} was not written: {first_cause(error)}") from error


class _Stager(AsyncStager):
    """Copies into host memory, pinned for a GPU's sake, which is kept for the next time."""

    _synchronize_after_execute = False  # `stage` returns when all is copied

    def __init__(self) -> None:
        self.buffers: dict[str, list[Tensor]] = {}
        self._fits: bool | None = None

    def fits(self, state: State, world: World) -> bool:
        """Whether every rank's host has the memory, with a tenth of it to spare; asked once."""
        if self._fits is None:
            needed = sum(c.rows.nbytes for rows in state.values() for c in rows.chunks)
            self._fits = fits_in_memory(needed, world)
            if not self._fits:
                world.log_rank0(
                    f"async_save: no host memory for a copy of {needed / 2**30:.1f} GiB a rank; "
                    "training waits while checkpoints are written"
                )
        return self._fits

    def synchronize_staging(self) -> None:
        pass

    def close(self) -> None:
        pass

    def stage(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        staged: dict[str, Any] = {}
        on_gpu = False
        for name, rows in state_dict.items():
            if name not in self.buffers:
                self.buffers[name] = [
                    torch.empty(c.rows.shape, dtype=rows.dtype, pin_memory=c.rows.is_cuda)
                    for c in rows.chunks
                ]
            chunks = []
            for chunk, buffer in zip(rows.chunks, self.buffers[name], strict=True):
                buffer.copy_(chunk.rows, non_blocking=chunk.rows.is_cuda)
                on_gpu |= chunk.rows.is_cuda
                chunks.append(Chunk(chunk.offsets, buffer))
            staged[name] = LocalRows(rows.shape, rows.dtype, chunks)
        if on_gpu:
            torch.cuda.synchronize()
        return staged
