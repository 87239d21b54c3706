"""Tensors that are decoded or computed when they are read."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from tigon.weights.header import TensorInfo
from tigon.weights.read import Reader

DECODED_BYTES = 8 << 20  # of values that a thread decodes at a time
MEAN_ROWS = 4096  # read at a time for the mean


@dataclass(frozen=True)
class DecodedTensor(ABC):
    """The counterpart of `TensorInfo` for a decoded tensor: name, shape and dtype of its values.

    Values are fp32 on the CPU; the reader rounds them once, to the parameter's dtype. Any range of
    rows can be read; ranges of `unit` rows that begin at a multiple of it are the fastest.
    """

    dtype: ClassVar[torch.dtype] = torch.float32

    name: str
    shape: tuple[int, ...]
    path: Path
    offset: int  # of its first byte in the file

    @property
    def unit(self) -> int:
        """The number of rows that are decoded at once; here 1."""
        return 1

    @property
    def nbytes(self) -> int:
        """The bytes of the values, not of the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    @abstractmethod
    def rows(self, reader: Reader, first: int, count: int) -> Tensor:
        """Decodes rows [first, first + count) to fp32 [count, *shape[1:]] on the CPU.

        A row of a one-dimensional tensor is an element; a scalar has one.
        """


@dataclass(frozen=True)
class RandomTensor(DecodedTensor):
    """A matrix of normal random numbers, for one that the checkpoint lacks; equal on all ranks."""

    std: float
    seed: int = 0

    def rows(self, reader: Reader, first: int, count: int) -> Tensor:
        """Draws rows [first, first + count); the same rows are the same numbers on every rank."""
        generator = torch.Generator().manual_seed(self.seed)
        values = torch.empty(self.shape, device="cpu").normal_(std=self.std, generator=generator)
        return values[first : first + count]


@dataclass(frozen=True)
class ResizedTensor(DecodedTensor):
    """A matrix whose rows beyond the checkpoint's, and those in `mean_rows`, are the mean of all
    rows of the checkpoint."""

    stored: TensorInfo | DecodedTensor
    mean_rows: frozenset[int]

    def rows(self, reader: Reader, first: int, count: int) -> Tensor:
        """Reads rows [first, first + count); new ones and `mean_rows` are the mean."""
        values = torch.empty(count, *self.shape[1:], device="cpu")
        stored = self.stored.shape[0]
        if (rest := min(stored - first, count)) > 0:
            read_rows(reader, self.stored, values[:rest], first)
        new = [r - first for r in range(first, first + count) if r >= stored or r in self.mean_rows]
        if new:
            values[new] = self._mean
        return values

    @cached_property
    def _mean(self) -> Tensor:
        """Returns the mean of the file's rows, summed in float64."""
        total = torch.zeros(self.shape[1:], dtype=torch.float64, device="cpu")
        stored = self.stored.shape[0]
        with Reader() as reader:
            for first in range(0, stored, MEAN_ROWS):
                chunk = torch.empty(min(MEAN_ROWS, stored - first), *self.shape[1:], device="cpu")
                read_rows(reader, self.stored, chunk, first)
                total += chunk.sum(0, dtype=torch.float64)
        return (total / stored).float()


def read_rows(reader: Reader, info: TensorInfo | DecodedTensor, out: Tensor, row: int) -> None:
    """Fills `out` with as many rows from `row` on, converted to its dtype."""
    row_bytes = info.nbytes // max(1, info.shape[0]) if info.shape else info.nbytes
    with torch.no_grad():
        if isinstance(info, TensorInfo):
            reader.read(info.path, info.offset + row * row_bytes, info.dtype, out)
            return
        step = max(1, DECODED_BYTES // max(1, row_bytes * info.unit)) * info.unit
        end = row + len(out)
        while row < end:
            stop = min(end, (row // step + 1) * step)  # all but the ends begin at whole units
            out[: stop - row].copy_(info.rows(reader, row, stop - row))
            out, row = out[stop - row :], stop
