"""Embeddings and heads with another number of rows than the checkpoint's."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tigon.weights.checkpoint import read_rows
from tigon.weights.decoded import DecodedTensor
from tigon.weights.header import TensorInfo
from tigon.weights.read import Reader

ROWS = 4096  # read at a time for the mean


@dataclass(frozen=True)
class ResizedTensor(DecodedTensor):
    """A matrix whose rows beyond the checkpoint's, and those in `mean_rows`, are the mean of all
    rows of the checkpoint."""

    stored: TensorInfo | DecodedTensor
    mean_rows: frozenset[int]

    def rows(self, reader: Reader, first: int, count: int) -> Tensor:
        values = torch.empty(count, *self.shape[1:])
        stored = self.stored.shape[0]
        if (rest := min(stored - first, count)) > 0:
            read_rows(reader, self.stored, values[:rest], first)
        new = [r - first for r in range(first, first + count) if r >= stored or r in self.mean_rows]
        if new:
            values[new] = self._mean
        return values

    @cached_property
    def _mean(self) -> Tensor:
        total = torch.zeros(self.shape[1:], dtype=torch.float64)
        stored = self.stored.shape[0]
        with Reader() as reader:
            for first in range(0, stored, ROWS):
                chunk = torch.empty(min(ROWS, stored - first), *self.shape[1:])
                read_rows(reader, self.stored, chunk, first)
                total += chunk.sum(0, dtype=torch.float64)
        return (total / stored).float()
