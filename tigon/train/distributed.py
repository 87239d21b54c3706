"""The ranks of a run: process group, devices, collectives, sharding, signals, errors."""

import gc
import json
import math
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tigon.models import CausalLM
from tigon.parallel import DataRank, Meshes, MeshSizes, shard_blocks
from tigon.settings.config import Config, Parallel
from tigon.train.signals import Signals
from tigon.utils.launcher import count_ranks, is_launched
from tigon.utils.terminal import one_line
from tigon.version import __version__
from tigon.weights import WriterGroup

NO_TIMEOUT = timedelta(days=365)
LINGER = 10.0  # seconds for a failed rank to leave the process group
OTHER_SETTINGS = (
    "has other settings ({}) than rank 0: start all ranks with the same settings and the same "
    "version of Tigon"
)

T = TypeVar("T")


class InputError(ValueError):
    """Says what is wrong with the inputs of one or more ranks; all ranks raise the same."""


@dataclass
class Progress:
    """Holds the step that this rank is in, for error messages."""

    step: int = 0  # the last that this rank has begun; 0 before the first


@dataclass(frozen=True)
class World:
    """Describes this rank among all ranks of the run, with the collectives of the trainer."""

    rank: int
    size: int
    device: torch.device
    progress: Progress = field(default_factory=Progress)
    signals: Signals = field(default_factory=Signals)
    closing: ExitStack = field(default_factory=ExitStack)  # closed when the process group is
    meshes: Meshes | None = None  # None: each rank has other rows, and a share of the weights
    group: dist.ProcessGroup | None = None  # gloo, whose collectives may take any time

    @property
    def main(self) -> bool:
        return self.rank == 0

    @property
    def data(self) -> DataRank:
        """Returns this rank's place among those with different rows of the data."""
        return DataRank(self.rank, self.size) if self.meshes is None else self.meshes.data

    @property
    def is_data_leader(self) -> bool:
        """Returns whether this is the first of the ranks with the same rows."""
        return self.rank == self.data.rank * (self.size // self.data.size)

    @property
    def sizes(self) -> MeshSizes:
        """Returns the ranks of each dimension of the mesh; without meshes, all are FSDP's."""
        return MeshSizes(fsdp=self.size) if self.meshes is None else self.meshes.sizes

    def log_rank0(self, *texts: str) -> None:
        """Prints each text as a line, on the first rank."""
        if self.main:
            with ignore_closed_output(sys.stdout):
                print(*map(one_line, texts), sep="\n", flush=True)

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """All-reduces (sum) in place over the data-parallel ranks and returns the tensor; ranks
        that share rows hold the same values already."""
        dist.all_reduce(tensor, group=None if self.meshes is None else self.meshes.loss)
        return tensor

    def same_loss(self, loss: Tensor) -> Tensor:
        """Returns the largest of all ranks' losses; if one is not finite, its own value on that
        rank and NaN on the others, so that ranks with the same rows decide alike after a fault of
        one. Where no ranks share rows, returns `loss`, which is the same on all."""
        if self.size == self.data.size:  # what `all_reduce_sum` returns is the same on all
            return loss
        finite = loss.isfinite()
        known = loss.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        bad, largest = self.all_reduce_max(torch.stack([(~finite).to(loss.dtype), known])).unbind()
        return torch.where(bad > 0, torch.where(finite, math.nan, loss), largest)

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """All-reduces (max) in place over all ranks and returns the tensor."""
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor

    def gather(self, value: T) -> list[T]:
        """Returns the value of every rank, in their order, on all ranks."""
        return WriterGroup(self.group).gather(value) if self.size > 1 else [value]

    def share(self, find: Callable[[], T]) -> T:
        """Returns, on all ranks, what `find` returns on the first; raises its error on all."""
        with self.raise_on_all_ranks():
            found = find() if self.main else None
        return cast(T, self.gather(found)[0])

    def check_same(self, values: Mapping[str, Any], fault: str) -> None:
        """Raises InputError, on all ranks, if a rank has other values than rank 0: with `fault`,
        whose {} gets the names of what differs."""
        local = {name: json.dumps(value, default=str) for name, value in values.items()}
        first, *others = self.gather(local)
        for rank, other in enumerate(others, start=1):
            if names := [n for n in first | other if first.get(n) != other.get(n)]:
                raise InputError(f"rank {rank} {fault.format(', '.join(names))}")

    def all_reduce_max_int(self, number: int) -> int:
        """Returns the largest of all ranks' numbers, on the host: it waits for no GPU."""
        return int(self.all_reduce_max(torch.tensor(number, device="cpu")))

    def any(self, flag: bool) -> bool:
        """Returns whether the flag is true on any rank; every rank calls this."""
        return self.all_reduce_max_int(flag) > 0

    @contextmanager
    def raise_on_all_ranks(self) -> Iterator[None]:
        """Raises the same InputError on all ranks if one raises ValueError, OSError or ImportError
        in the `with` block; on one process, the error itself."""
        problem = None
        try:
            yield
        except (ValueError, OSError, ImportError) as error:
            problem = error
        if self.size == 1:
            if problem is not None:
                raise problem
            return
        text = "" if problem is None else str(problem) or type(problem).__name__
        if problems := format_rank_errors(self.gather(text)):
            raise InputError(problems) from None


@contextmanager
def ignore_closed_output(output: TextIO) -> Iterator[None]:
    """Ignores an OSError of writing to `output` and sends all that follows nowhere: training goes
    on when stdout is closed, as by `tee` after Ctrl-C, or its disk is full."""
    try:
        yield
    except OSError:
        with suppress(OSError, ValueError):  # later writes, and the last flush, go nowhere
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, output.fileno())
            os.close(nowhere)


def pick_device(name: str) -> torch.device:
    """Returns this rank's device for auto, cuda or cpu; ValueError for cuda without one."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(f"device={name}, but torch sees no CUDA device here")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


@contextmanager
def start(
    name: str = "auto",
    signals: Signals | None = None,
    parallel: Parallel | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Iterator[World]:
    """Opens the process group of --nproc or torchrun, or of this process alone, for a whole run.

    Raises ValueError if `parallel` does not divide the ranks, OSError for a port in use, and
    InputError if ranks have different `settings`, or if the environment has a part of what torchrun
    sets, as where another program has left WORLD_SIZE.
    """
    started = is_launched()
    sizes = (parallel or Parallel()).sizes(count_ranks())
    device = pick_device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    try:
        dist.init_process_group(backend, **({} if started else alone))
    except ValueError as error:
        if not started:
            raise
        advice = "unset WORLD_SIZE to run on one process, or start with torchrun"
        raise InputError(f"{error}: {advice}") from None
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        port = f"MASTER_PORT={os.environ['MASTER_PORT']}"
        raise OSError(f"{port}: another program listens on this port: give another") from None
    rank, size = dist.get_rank(), dist.get_world_size()
    try:
        group = dist.new_group(backend="gloo", timeout=NO_TIMEOUT) if size > 1 else None
        world = World(rank, size, device, signals=signals or Signals(), group=group)
        # Before the meshes: ranks with others would wait for a collective without end
        world.check_same({**(settings or {}), "tigon": __version__}, OTHER_SETTINGS)
        with world.closing:
            yield replace(world, meshes=Meshes.of(device.type, sizes))
    finally:
        gc.collect()  # gloo's threads abort the process if they still hold tensors when it exits
        dist.destroy_process_group()


def shard(
    model: CausalLM, world: World, compute_dtype: torch.dtype, *, one_backward: bool = False
) -> None:
    """Shards the model by FSDP2: shared experts over the ranks that have the same, the rest over
    all that shard the weights. `one_backward`: a step has one micro-batch.

    Gradients are summed, not averaged: the loss is already divided by the step's denominator.
    """
    meshes = meshes_of(world)
    # Inputs are not cast: RoPE's tables and loss weights keep their precision
    shard_blocks(
        model, meshes.weights, compute=compute_dtype, experts=meshes.experts, keeps_ends=True,
        one_backward=one_backward,
    )  # fmt: skip
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Otherwise by PREMUL_SUM with 1.0, which gloo does not have, and which in bfloat16 is
            # all zeros over NCCL: torch passes the factor as a float32 (pytorch issue 190745)
            module.set_force_sum_reduction_for_comms(True)


def meshes_of(world: World) -> Meshes:
    """Returns the meshes of a world over which models are sharded."""
    if world.meshes is None:
        raise ValueError("a World without meshes shards no model: `start` makes one with them")
    return world.meshes


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a parameter, a gradient or a state, or all of one without."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sync_gradients(model: CausalLM, on: bool) -> None:
    """Lets the next backward reduce gradients over ranks, or only add them up here."""
    if model.zero2 is not None:
        model.zero2.reduces = on
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(on)


def reshard(model: CausalLM) -> None:
    """Frees the gathered weights after forwards without a backward."""
    if model.zero2 is not None:
        model.zero2.release()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def eval_mode(model: CausalLM) -> Iterator[None]:
    """Has the model in evaluation mode in the `with` block, and then in training mode again, with
    the weights freed that forwards have gathered."""
    model.eval()
    try:
        yield
    finally:
        model.train()
        reshard(model)


def format_rank_errors(errors: Sequence[str]) -> str:
    """Returns the errors of ranks as lines, one of all ranks once; "" without any."""
    by_text: dict[str, list[int]] = {}
    for rank, text in enumerate(errors):
        if text:
            by_text.setdefault(text, []).append(rank)
    if len(by_text) == 1 and len(next(iter(by_text.values()))) == len(errors):
        return next(iter(by_text))
    return "\n  ".join(
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {text}"
        for text, ranks in by_text.items()
    )


def describe_failure(world: World, error: BaseException) -> str:
    """Returns a text that says which rank failed, in which step, and with what error."""
    step = f" in step {world.progress.step}" if world.progress.step else ""
    return f"rank {world.rank} failed{step}: {type(error).__name__}: {error}"


def end_soon(code: int) -> None:
    """Ends this process and its children after LINGER s: leaving a dead group may never end."""

    def end() -> None:
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(code)

    timer = threading.Timer(LINGER, end)
    timer.daemon = True
    timer.start()


def prepare_flight_recorder(config: Config) -> None:
    """Sets NCCL's variables that the environment does not have, before the process group.

    After torch's time limit of a collective, ten minutes, NCCL's flight recorder then writes the
    last collectives of every rank to run_dir/flight-recorder-N, which `torchfrtrace` reads.
    """
    path = Path(config.run_dir).absolute() / "flight-recorder-"
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(path))
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
