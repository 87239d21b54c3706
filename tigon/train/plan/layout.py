"""The ways in which GPUs can share a run, and why some cannot be.

# B rows of a micro-batch, T tokens of a row
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from tigon.data.examples import format_count
from tigon.parallel import MeshSizes, check_context
from tigon.train.config import Config
from tigon.train.graphs import check_run
from tigon.train.optim import check_part, check_ranks
from tigon.train.parallel import World
from tigon.train.parallel_settings import Parallel
from tigon.train.plan.gpu import GPU, Constants
from tigon.train.plan.work import Shapes, tokens_of

MOST_TOKENS = 2**16  # of a micro-batch on a GPU, if it has several rows: more gains nothing
# As the setting activation_checkpointing: no block is recomputed, every second one, all
MESH = ("replicate", "fsdp", "context", "tensor", "expert")
AGAIN: dict[bool | int, float] = {False: 0.0, 2: 0.5, True: 1.0}
CUDA = torch.device("cuda")


@dataclass(frozen=True)
class Job:
    """What is to be trained on what."""

    shapes: Shapes
    config: Config  # settings of the run; those of layouts in it do not matter
    gpus: int
    gpu: GPU
    constants: Constants
    seq_len: int  # T
    batch_rows: int  # of a step, on all GPUs together


@dataclass(frozen=True)
class Layout(MeshSizes):
    """Ranks of each dimension of the mesh, and what each computes at once."""

    rows: int = 1  # B
    micro_batches: int = 1  # of a step, on each rank
    checkpointing: bool | int = False
    sharding: Any = "full"

    @property
    def parallel(self) -> Parallel:
        """As the setting."""
        return Parallel(self.replicate, self.fsdp, self.context, self.tensor, self.expert)

    def config(self, config: Config) -> Config:
        """The settings of a run in this layout, of as many rows as it has. ValueError if they
        exclude it."""
        return replace(
            config,
            micro_batch_size=self.rows,
            batch_size=self.rows * self.micro_batches * self.data,
            parallel=self.parallel,
            sharding=self.sharding,
            activation_checkpointing=self.checkpointing,
            memory_budget=None,
        )

    @property
    def again(self) -> float:
        """The share of blocks that are recomputed."""
        return 1 / self.checkpointing if self.checkpointing else 0.0

    @property
    def settings(self) -> str:
        """For `tigon train`."""
        sizes = {n: getattr(self, n) for n in MESH}
        found = [f"parallel.{name}={size}" for name, size in sizes.items() if size > 1]
        found.append(f"micro_batch_size={self.rows}")
        if self.checkpointing:
            found.append(f"activation_checkpointing={str(self.checkpointing).lower()}")
        if self.sharding != "full":
            found.append(f"sharding={self.sharding}")
        return " ".join(found)

    @property
    def mesh(self) -> tuple[object, ...]:
        """What of it a plan has one line for."""
        return *(getattr(self, name) for name in MESH), self.sharding


@cache
def divisors(number: int) -> tuple[int, ...]:
    """In order; takes as long as there are numbers up to the root."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return *small, *(number // n for n in reversed(small) if n * n != number)


def meshes(gpus: int, experts: int = 0) -> Iterator[Layout]:
    """Every product of four dimensions that has so many GPUs, but copies of weights that no ranks
    divide: sharding=gradients sends no more, and takes less memory. `experts` of a layer are
    divided in every way, too."""
    for tensor in divisors(gpus):
        for context in divisors(gpus // tensor):
            left = gpus // tensor // context
            for fsdp in divisors(left):
                if fsdp * context > 1 or fsdp == left:
                    mesh = Layout(left // fsdp, fsdp, context, tensor)
                    yield mesh
                    for expert in divisors(mesh.shards * tensor)[1:] if experts else ():
                        if experts % expert == 0:
                            yield replace(mesh, expert=expert)


def misfit(job: Job, layout: Layout) -> str | None:
    """Why the job cannot have this mesh, whatever its micro-batch; None if it can."""
    t, host = layout.tensor, job.gpu.host
    if t > host:
        return f"tensor is above {host}, the number of GPUs that NVLink connects"
    if (reason := excluded(job, layout)) is not None:
        return reason
    try:
        part = job.shapes.part(t, layout.expert)
        check_context(part, layout.context)
        check_part(part, job.config)
    except ValueError as error:
        return str(error)
    if job.batch_rows % layout.data:
        rows, tokens = format_count(job.batch_rows, "row"), job.batch_rows * job.seq_len
        why = "is more than" if job.batch_rows < layout.data else "does not divide"
        return (
            f"replicate x fsdp={layout.data:,} {why} the {rows} of a step ({tokens:,} tokens): "
            "each rank needs equally many"
        )
    return None


def excluded(job: Job, layout: Layout) -> str | None:
    """What of the settings the trainer refuses for the layout."""
    try:
        config = layout.config(job.config)
        check_ranks(config, layout.data)
        check_run(config, World(0, job.gpus, CUDA))
    except ValueError as error:
        return str(error)
    return None


def as_set(job: Job, mesh: Layout) -> Iterator[Layout]:
    """A mesh with what the job's settings say."""
    c, rows = job.config, job.batch_rows // mesh.data
    if rows % c.micro_batch_size:
        return
    again = AGAIN if c.activation_checkpointing == "auto" else (c.activation_checkpointing,)
    for checkpointing in again:
        layout = replace(mesh, rows=c.micro_batch_size, micro_batches=rows // c.micro_batch_size)
        layout = replace(layout, checkpointing=checkpointing, sharding=c.sharding)
        if excluded(job, layout) is None:
            yield layout


def variants(job: Job, mesh: Layout) -> Iterator[Layout]:
    """A mesh with every micro-batch, sharding and checkpointing that it may have."""
    each = job.batch_rows // mesh.data
    ways = ("full", "gradients") if mesh.shards > 1 else ("full",)  # one rank has nothing to divide
    for rows in divisors(each):
        if rows > 1 and tokens_of(rows, job.seq_len, mesh.context) > MOST_TOKENS:
            break
        for sharding in ways:
            layout = replace(mesh, rows=rows, micro_batches=each // rows, sharding=sharding)
            if excluded(job, layout) is None:
                yield from (replace(layout, checkpointing=again) for again in AGAIN)
