"""Layouts: the ways in which GPUs can divide a run.

# B rows of a micro-batch, T tokens of a row
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from tigon.parallel import MeshSizes
from tigon.settings.config import Config, Parallel

MESH = ("replicate", "fsdp", "context", "tensor", "expert")


@dataclass(frozen=True)
class Layout(MeshSizes):
    """Ranks per dimension of the mesh, and the micro-batches of each rank."""

    rows: int = 1  # B
    micro_batches: int = 1  # per step and rank
    checkpointing: Any = False  # the setting activation_checkpointing
    sharding: Any = "full"

    @property
    def parallel(self) -> Parallel:
        """Returns the ranks of each dimension as the setting `parallel`."""
        return Parallel(self.replicate, self.fsdp, self.context, self.tensor, self.expert)

    def config(self, config: Config) -> Config:
        """Returns the run's settings in this layout; raises ValueError if they exclude it."""
        batch = self.rows * self.micro_batches * self.data
        return replace(
            config, micro_batch_size=self.rows, batch_size=batch, parallel=self.parallel,
            sharding=self.sharding, activation_checkpointing=self.checkpointing,
        )  # fmt: skip

    @property
    def recomputed(self) -> float:
        """Returns the share of blocks that backward recomputes: with "experts" none."""
        return 0.0 if self.checkpointing in (0, "experts") else 1 / int(self.checkpointing)

    def tokens(self, seq_len: int) -> int:
        """Returns the tokens of a micro-batch on each rank, with the padding of the last one."""
        return self.rows * -(-seq_len // self.context)

    @property
    def settings(self) -> str:
        """Returns a line of settings for `tigon train`: micro_batch_size, and others that differ
        from their defaults, without batch_size."""
        sizes = {n: getattr(self, n) for n in MESH}
        words = [f"parallel.{name}={size}" for name, size in sizes.items() if size > 1]
        words.append(f"micro_batch_size={self.rows}")
        if self.checkpointing:
            words.append(f"activation_checkpointing={str(self.checkpointing).lower()}")
        if self.sharding != "full":
            words.append(f"sharding={self.sharding}")
        return " ".join(words)

    @property
    def mesh(self) -> tuple[object, ...]:
        """Returns the ranks of each dimension and the sharding: a plan has one line for each."""
        return *(getattr(self, name) for name in MESH), self.sharding


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Returns all divisors in ascending order, in the time of the square root."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return *small, *(number // n for n in reversed(small) if n * n != number)


def enumerate_meshes(gpus: int, experts: int = 0) -> Iterator[Layout]:
    """Yields every mesh of that many GPUs, for a model with that many experts per layer.

    Replicas of whole weights are left out: sharding=gradients sends as little in less memory.
    """
    for tensor in divisors(gpus):
        for context in divisors(gpus // tensor):
            data = gpus // tensor // context
            for fsdp in divisors(data):
                if fsdp * context > 1 or fsdp == data:
                    mesh = Layout(data // fsdp, fsdp, context, tensor)
                    yield mesh
                    for expert in divisors(mesh.shards * tensor)[1:] if experts else ():
                        if experts % expert == 0:
                            yield replace(mesh, expert=expert)
