"""Writes checkpoints and exports, whole or absent, while training goes on."""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from tigon.models import CausalLM
from tigon.models.adapters.peft_files import prepare_adapter, write_adapter
from tigon.models.pretrained.save import prepare_save, write_description, write_model
from tigon.tokenizer import Tokenizer
from tigon.train.checkpoint.files import RUN, KeepPolicy, is_listed, prune, write_sums
from tigon.train.checkpoint.format import State, StateShard, assign_blocks, full_state, write_blocks
from tigon.train.distributed import World, local
from tigon.train.logging import read_metrics
from tigon.train.optim import Ema
from tigon.utils.json import list_first
from tigon.utils.memory import available_memory
from tigon.weights import WriterGroup
from tigon.weights.entries import RankError
from tigon.weights.files import DiskFullError, explain_full_disk, new_directory, require_space
from tigon.weights.write import all_finite, copy_to_host

KEEP = KeepPolicy()


class SaveError(OSError):
    """Says that a checkpoint or an export could not be written; those before it are untouched."""


class BackgroundWriter:
    """Writes files of a run in a thread. Every rank makes one and calls the same methods.

    With `background`, methods that write return when this rank's rows are copied into host memory,
    and the copy is written while training goes on; the next one, `wait` and leaving the `with`
    block wait for it and raise its errors.
    """

    def __init__(self, world: World, *, background: bool = True) -> None:
        self.world, self.background = world, background
        # A separate group: the writer's messages would mix with those of training
        self._ranks = WriterGroup(dist.new_group(backend="gloo"))
        self._thread = ThreadPoolExecutor(1)
        self.pending: Future[None] | None = None  # what is being written

    def start(self, target: Path, write: Callable[[], None], *, wait: bool) -> None:
        """Calls `write` in the thread; an error of it becomes a SaveError that names `target`."""

        def write_or_explain() -> None:
            try:
                write()
            except Exception as error:
                why = error if isinstance(error, OSError | RankError) else repr(error)
                raise SaveError(f"{target} was not written: {why}") from error

        self.pending = self._thread.submit(write_or_explain)
        if wait:
            self.wait()

    def wait(self) -> None:
        """Waits until it is on the disk; raises SaveError, on all ranks, if it failed."""
        if self.pending is not None:
            pending, self.pending = self.pending, None
            pending.result()

    @property
    def failed(self) -> bool:
        """Returns whether this rank knows already that `wait` will raise."""
        pending = self.pending
        return pending is not None and pending.done() and pending.exception() is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.wait()
        except SaveError as second:
            if error is None:
                raise
            error.add_note(str(second))
        finally:
            self._thread.shutdown()


def check_finite(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    averages: Mapping[str, Tensor] | None = None,
    *,
    target: Path,
    dtype: torch.dtype | None = None,
) -> None:
    """Raises FloatingPointError, which says that `target` was not written, if a weight, a state or
    an average is NaN or infinite, or would be in `dtype`.

    In a process group every rank calls this and all raise the same error. It takes one collective,
    and one wait for the device.
    """
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    if optimizer is not None:
        for name, p in model.named_parameters():
            states = optimizer.state.get(p, {}).items()
            tensors |= {f"{kind} of {name}": s for kind, s in states if isinstance(s, Tensor)}
    tensors |= {f"average of {name}": value for name, value in (averages or {}).items()}
    parts = {name: local(t) for name, t in tensors.items()}
    parts = {name: t for name, t in parts.items() if t.is_floating_point() and t.numel()}
    most = math.inf if dtype is None else torch.finfo(dtype).max
    good = all_finite(parts.values(), next(model.parameters()).device, most=most).float()
    if dist.is_initialized():
        dist.all_reduce(good, dist.ReduceOp.MIN)
    if good.item():
        return
    bad = [name for name, t in parts.items() if not all_finite([t], t.device, most=most)]
    names = sorted({name for of_rank in WriterGroup().gather(bad) for name in of_rank})
    where = "" if dtype is None else f" in {dtype}"
    raise FloatingPointError(f"{target} was not written: not finite{where}: {list_first(names)}")


def fits_in_memory(needed: int, world: World) -> bool:
    """Returns whether every host has `needed` bytes for each of its ranks, and a tenth more.

    Every rank calls this, each with its number of bytes.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    return not world.any(1.1 * needed * ranks >= available_memory())


@contextmanager
def _link_aside(path: Path) -> Iterator[None]:
    """Takes a link at `path` away, for good unless the body fails; what it leads to stays."""
    if not path.is_symlink():
        yield
        return
    link = path.rename(path.with_name(f".{path.name}.link"))
    try:
        yield
    except BaseException:
        link.rename(path)
        raise
    link.unlink()


class Saver(BackgroundWriter):
    """Writes the checkpoints of one run."""

    def __init__(
        self, run_dir: Path, world: World, *, keep: KeepPolicy = KEEP, background: bool = True
    ) -> None:
        super().__init__(world, background=background)
        self.directory, self.metrics = run_dir / "checkpoints", run_dir / "metrics.jsonl"
        self.keep, self._stager = keep, CopyStager()
        self._start_time = 0.0
        self.seconds = 0.0  # that the last checkpoint took, from `save` to the disk

    def save(
        self,
        step: int,
        model: CausalLM,
        optimizer: Optimizer,
        tokenizer: Tokenizer,
        metadata: Mapping[str, Any],
        ema: Ema | None = None,
        *,
        copy: bool = True,
    ) -> Path:
        """Writes checkpoints/step-N, whose run.json has `metadata`; then prunes older ones. Returns
        the path, at once with `background` if host memory has room for a copy, unless copy=False.

        Raises FloatingPointError if a weight or a state is not finite, and SaveError if this or
        the save before it cannot be written.
        """
        self.wait()
        self._start_time = time.monotonic()
        target = self.directory / f"step-{step:08d}"
        check_finite(model, optimizer, None if ema is None else ema.values, target=target)
        state = full_state(model, optimizer, ema)
        content = {
            "step": step,
            "saved_at": time.time(),
            "ranks": self.world.size,
            "stacked_experts": model.config.source.stacked_experts,
            **metadata,
        }

        def describe(directory: Path) -> None:
            write_description(directory, model.config, model.generation_config, tokenizer)
            (directory / RUN).write_text(json.dumps(content, indent=2) + "\n")

        in_background = copy and self.background and self._stager.fits(state, self.world)
        state = self._stager.stage(state) if in_background else state
        write = partial(self._write, step, target, state, describe)
        self.start(target, write, wait=not in_background)
        return target

    def warn_if_full(self, model: CausalLM, optimizer: Optimizer, ema: Ema | None) -> None:
        """Logs a note if a checkpoint does not fit on the disk as it is now. Every rank calls this,
        after a step, which makes the optimizer's states."""
        sizes = {
            part.name: math.prod(part.shape) * shard.memory.itemsize
            for shard, parts in full_state(model, optimizer, ema).values()
            for part in parts
        }
        place = self.directory if self.directory.exists() else self.directory.parent
        try:
            require_space(place, sum(sizes.values()))
        except DiskFullError as error:
            self.world.log_rank0(f"note: {error}, so a checkpoint would end the run")

    def _write(
        self, step: int, target: Path, state: State, describe: Callable[[Path], None]
    ) -> None:
        """Writes the state, and what `describe` adds, to the target, whole or not at all; then
        prunes older checkpoints."""
        ranks = self._ranks
        with ExitStack() as staging:  # which removes what was written before an error
            blocks = assign_blocks(state, ranks)
            needed = sum(ranks.gather(sum(block.rows.nbytes for block in blocks)))
            directory = None
            with ranks.sync_errors():
                if ranks.first:
                    # One of this name is damaged, or of a run that was resumed from before it
                    staging.enter_context(_link_aside(target))
                    stale = is_listed(target)
                    directory = staging.enter_context(
                        new_directory(target, replace=True, needed=needed, stale=stale)
                    )
            place = ranks.gather(directory)[0]
            assert place is not None
            with ranks.sync_errors():
                sums = write_blocks(place, blocks, ranks.rank)
            sums = {n: x for of_rank in ranks.gather(sums) for n, x in of_rank.items()}
            with ranks.sync_errors():
                if ranks.first:
                    describe(place)
                    write_sums(place, sums)
                    staging.close()  # gives the final name
                    self._prune(step)
        self.seconds = time.monotonic() - self._start_time

    def expected(self) -> float:
        """Returns the seconds that a checkpoint would take now, by the last one; 0 before it."""
        remaining = 0.0
        if self.pending is not None and not self.pending.done():
            remaining = max(0.0, self._start_time + self.seconds - time.monotonic())
        return remaining + self.seconds

    def _prune(self, newest: int) -> None:
        """Removes older checkpoints that `keep` does not choose; only logs an OSError."""
        try:
            losses = {
                row["step"]: row["eval_loss"]
                for row in read_metrics(self.metrics)
                if row.get("eval_loss") is not None
            }
            prune(self.directory, newest, self.keep, losses)
        except OSError as error:
            self.world.log_rank0(f"an older checkpoint could not be removed: {error}")


class Exporter(BackgroundWriter):
    """Writes the exports of one run."""

    def export(
        self,
        model: CausalLM,
        target: Path,
        tokenizer: Tokenizer,
        *,
        dtype: torch.dtype,
        values: Mapping[str, Tensor] | None = None,
        copy: bool = True,
    ) -> None:
        """Writes Hugging Face's format, or PEFT's of an adapter; what was at `target` stays until
        the new one is complete. Returns at once with `background` if host memory has room for a
        copy, unless copy=False.

        `values` replace parameters, by name: this rank's shard of each. Raises FloatingPointError
        for weights that `dtype` cannot hold, and SaveError if this or the export before it cannot
        be written.
        """
        held = dtype if model.active_adapter is None else None
        check_finite(model, averages=values, target=target, dtype=held)
        self.wait()
        options: dict[str, Any] = {"tokenizer": tokenizer, "ranks": WriterGroup()}
        if model.active_adapter is not None:  # in the adapter's dtype
            tensors, describe = prepare_adapter(model, **options)
            write: Any = write_adapter
        else:
            tensors, describe = prepare_save(model, dtype=dtype, values=values, **options)
            write = write_model
        nbytes = sum(block.rows * entry.row_bytes for entry in tensors for block in entry.blocks)
        background = copy and self.background and fits_in_memory(nbytes, self.world)
        if background:
            with self._ranks.sync_errors():  # the thread of a rank without a copy would not write
                tensors = copy_to_host(tensors)

        def write_files() -> None:
            with explain_full_disk(target, sum(entry.nbytes for entry in tensors)):
                write(target, tensors, describe, ranks=self._ranks, replace=True)
            self.world.log_rank0(f"exported to {target}")

        self.start(target, write_files, wait=not background)


class CopyStager:
    """Copies states into buffers in host memory, pinned for a GPU, which the next save reuses."""

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}
        self._fits: bool | None = None

    def fits(self, state: State, world: World) -> bool:
        """Returns whether every host has memory for the copies; only the first call measures."""
        if self._fits is None:
            needed = sum(shard.memory.nbytes for shard, _ in state.values())
            self._fits = fits_in_memory(needed, world)
            if not self._fits:
                world.log_rank0(
                    f"async_save: no host memory for a copy of {needed / 2**30:.1f} GiB a rank; "
                    "training waits while checkpoints are written"
                )
        return self._fits

    def stage(self, state: State) -> State:
        """Returns the state copied into host memory, which is kept for the next save."""
        staged: State = {}
        on_gpu = False
        for name, (shard, parts) in state.items():
            memory = shard.memory
            if name not in self.buffers:
                options: dict[str, Any] = {"pin_memory": memory.is_cuda, "device": "cpu"}
                self.buffers[name] = torch.empty(memory.shape, dtype=memory.dtype, **options)
            buffer = self.buffers[name]
            buffer.copy_(memory, non_blocking=memory.is_cuda)
            on_gpu |= memory.is_cuda
            staged[name] = StateShard(shard._replace(memory=buffer), parts)
        if on_gpu:
            torch.cuda.synchronize()
        return staged
