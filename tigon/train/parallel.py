"""Processes, devices and sharding: the same code on one process and on many."""

import gc
import json
import math
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tigon.models import CausalLM
from tigon.parallel import Meshes, MeshSizes, Place, find_zero, shard_blocks
from tigon.train.board import LATE, Board, ended_with_parent, told
from tigon.train.config import Parallel
from tigon.train.signals import Signals
from tigon.utils.terminal import one_line
from tigon.version import __version__


class InputError(ValueError):
    """What is wrong with the inputs of some ranks; all ranks raise the same."""


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    device: torch.device
    board: Board = field(default_factory=Board)
    signals: Signals = field(default_factory=Signals)
    closing: ExitStack = field(default_factory=ExitStack)  # closed when the process group is
    meshes: Meshes | None = None  # None: each rank has other rows, and a share of the weights

    @property
    def main(self) -> bool:
        return self.rank == 0

    @property
    def data(self) -> Place:
        """This rank's among those with different rows of the data."""
        return Place(self.rank, self.size) if self.meshes is None else self.meshes.data

    @property
    def tells(self) -> bool:
        """Whether it is the first of the ranks with the same rows, which know the same of them."""
        return self.rank == self.data.rank * (self.size // self.data.size)

    @property
    def sizes(self) -> MeshSizes:
        return MeshSizes(fsdp=self.size) if self.meshes is None else self.meshes.sizes

    def say(self, *texts: str) -> None:
        """Print each as a line."""
        if self.main:
            with outlived(sys.stdout):
                print(*map(one_line, texts), sep="\n", flush=True)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks with different rows, in place; of those with the same, each has
        all values of them."""
        dist.all_reduce(tensor, group=None if self.meshes is None else self.meshes.loss)
        return tensor

    def agreed(self, loss: Tensor) -> Tensor:
        """The step's loss, the same on all ranks: the largest, or NaN if it is not finite on one of
        them. Ranks with the same rows would else decide differently after a fault of one."""
        if self.size == self.data.size:  # what `sum` returns is the same on all
            return loss
        finite = loss.isfinite()
        known = loss.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        bad, largest = self.top(torch.stack([(~finite).to(loss.dtype), known])).unbind()
        return torch.where(bad > 0, torch.where(finite, math.nan, loss), largest)

    def top(self, tensor: Tensor) -> Tensor:
        """The largest over all ranks, in place."""
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor

    def barrier(self) -> None:
        dist.barrier()

    def most(self, number: int) -> int:
        """The largest of all ranks' numbers. They are on the host: no GPU is waited for."""
        return int(self.top(torch.tensor(number)))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inputs that are wrong on some ranks end all of them, with the same InputError."""
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
        answers = self.board.gather(text, **({"late": LATE} if text else {}))
        if problems := told(answers):
            self.board.close()
            raise InputError(problems) from None


@contextmanager
def outlived(output: TextIO) -> Iterator[None]:
    """A run goes on where nobody reads what it says, such as a `tee` that Ctrl-C has ended, and
    where the disk of its log is full."""
    try:
        yield
    except OSError:
        with suppress(OSError, ValueError):  # later writes, and the last flush, go nowhere
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, output.fileno())
            os.close(nowhere)


def pick_device(name: str) -> torch.device:
    """This rank's device: auto, cuda or cpu."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(f"device={name}, but torch sees no CUDA device here")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


def launched() -> bool:
    """Whether --nproc or torchrun has started this process. ValueError for half of what they set,
    as where another program has left WORLD_SIZE behind."""
    if "WORLD_SIZE" not in os.environ:
        return False
    missing = [n for n in ("RANK", "MASTER_ADDR", "MASTER_PORT") if n not in os.environ]
    if missing:
        raise ValueError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} is in the environment without "
            f"{', '.join(missing)}: unset it to run on one process, or start with torchrun"
        )
    for name in ("WORLD_SIZE", "RANK", "MASTER_PORT"):
        if not os.environ[name].isdecimal():
            raise ValueError(
                f"{name}={os.environ[name]} in the environment is no number: unset it to run on "
                "one process, or start with torchrun"
            )
    return True


def check_interfaces() -> None:
    """ValueError for a name in GLOO_SOCKET_IFNAME that is no network interface of this host."""
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    here = [name for _, name in socket.if_nameindex()]
    if missing := [name for name in names.split(",") if name and name not in here]:
        raise ValueError(
            f"GLOO_SOCKET_IFNAME={names}: this host has no network interface {missing[0]}, and has "
            f"{', '.join(here)}: give one of these, or unset it"
        )


@contextmanager
def start(
    name: str = "auto",
    signals: Signals | None = None,
    parallel: Parallel | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Iterator[World]:
    """The process group of --nproc or torchrun, or one of this process alone; nothing of the run
    may outlive it. ValueError for a number of ranks that `parallel` does not divide, and InputError
    if ranks have different `settings`."""
    started = launched()
    check_interfaces()
    sizes = (parallel or Parallel()).sizes(int(os.environ["WORLD_SIZE"]) if started else 1)
    device = pick_device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    with ended_with_parent():
        if started:
            join_ranks(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        rank, size = dist.get_rank(), dist.get_world_size()
        board = Board(rank, size)
    try:
        check_settings(board, settings or {})
        meshes = Meshes.of(device.type, sizes)
        with ExitStack() as closing:
            yield World(rank, size, device, board, signals or Signals(), closing, meshes)
    finally:
        board.close()
        gc.collect()  # gloo's threads abort the process if they still hold tensors when it exits
        dist.destroy_process_group()


def join_ranks(backend: str) -> None:
    """The process group of the environment. OSError for a port that another program listens on."""
    try:
        dist.init_process_group(backend)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise OSError(
            f"MASTER_PORT={os.environ['MASTER_PORT']}: another program listens on this port, "
            "perhaps another run: give all ranks another MASTER_PORT"
        ) from None


def check_settings(board: Board, settings: Mapping[str, Any]) -> None:
    """Raises InputError if ranks have other settings than the first one, before a collective that
    some of them would wait for without end."""
    own = {name: json.dumps(value, default=str) for name, value in settings.items()}
    own |= {"tigon": __version__}
    first, *others = (json.loads(answer or "{}") for answer in board.gather(json.dumps(own)))
    for rank, other in enumerate(others, start=1):
        if names := [n for n in first | other if first.get(n) != other.get(n)]:
            raise InputError(
                f"rank {rank} has other settings ({', '.join(names)}) than rank 0: start all ranks "
                "with the same settings and the same version of Tigon"
            )


def shard(
    model: CausalLM, world: World, compute_dtype: torch.dtype, *, one_backward: bool = False
) -> None:
    """FSDP2 over the ranks that divide the weights, and of experts that ranks share over those that
    have the same. Gradients are summed, not averaged: the loss is already divided by the
    denominator of the whole step. `one_backward`: a step has one micro-batch.
    """
    meshes = meshes_of(world)
    # Inputs are not cast: RoPE's tables and loss weights keep their precision
    shard_blocks(
        model,
        meshes.weights,
        compute=compute_dtype,
        experts=meshes.experts,
        keeps_ends=True,
        one_backward=one_backward,
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Otherwise by PREMUL_SUM with 1.0, which gloo does not have, and which in bfloat16 is
            # all zeros over NCCL: torch passes the factor as a float32 (pytorch issue 190745)
            module.set_force_sum_reduction_for_comms(True)


def meshes_of(world: World) -> Meshes:
    """Those of a world in which models are divided."""
    if world.meshes is None:
        raise ValueError("a World without meshes divides no model: `start` makes one with them")
    return world.meshes


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a parameter, a gradient or a state, sharded or not."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sync_gradients(model: CausalLM, on: bool) -> None:
    """Whether the next backward reduces gradients over ranks, or only adds them up here."""
    if (zero := find_zero(model)) is not None:
        zero.reduces = on
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(on)


def reshard(model: CausalLM) -> None:
    """After forwards without a backward: give up the gathered weights, so that all are shards."""
    if (zero := find_zero(model)) is not None:
        zero.release()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
