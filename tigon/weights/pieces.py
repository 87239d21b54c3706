"""What a process writes of the tensors of a checkpoint."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 16 << 20  # bytes that a thread converts, stages and writes at a time


class Piece(NamedTuple):
    """Rows of a tensor of the checkpoint that this process writes.

    A row is the last dimension of a tensor that has several, [E, N, D] has E * N; else an element.
    """

    row: int  # of the tensor, where they begin
    rows: int
    # (first of these rows, how many) -> those, on any device, of any dtype; called by any thread
    read: Callable[[int, int], Tensor]
    column: int = 0  # where what it has of each row begins
    columns: int | None = None  # None: all


class Entry(NamedTuple):
    """A tensor of the checkpoint, and what this process writes of it."""

    name: str
    shape: Sequence[int]
    dtype: torch.dtype
    pieces: Sequence[Piece]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> "Entry":
        """A whole tensor as it is."""
        whole = tensor.detach()
        shape = tuple(whole.shape)
        rows = whole.reshape(height(shape), *shape[1:][-1:])
        piece = Piece(0, len(rows), lambda first, count: rows.narrow(0, first, count))
        return cls(name, shape, whole.dtype, [piece])

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:][-1:]) * self.dtype.itemsize


def height(shape: Sequence[int]) -> int:
    """Rows of a tensor, as pieces count them."""
    return math.prod(shape[:-1] if len(shape) > 1 else shape)


def cut(rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """(first, number) of groups of rows of at most CHUNK bytes."""
    step = max(1, CHUNK // max(1, row_bytes))
    return ((first, min(step, rows - first)) for first in range(0, rows, step))
