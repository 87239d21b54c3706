"""Tensors of a checkpoint that are stored in another form than they are used in."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from tigon.weights.header import TensorInfo
from tigon.weights.read import Reader


@dataclass(frozen=True)
class DecodedTensor(ABC):
    """What `TensorInfo` is for a plain tensor: name, shape and dtype are those of the values.

    The values are fp32 on the CPU; the reader rounds them once, to the dtype of the parameter.
    Any range of rows can be read, and `unit` rows that begin at a multiple of it cost the least.
    """

    dtype: ClassVar[torch.dtype] = torch.float32

    name: str
    shape: tuple[int, ...]
    path: Path
    offset: int  # of the file's byte where it begins

    @property
    def unit(self) -> int:
        return 1

    @property
    def in_file(self) -> tuple[TensorInfo, ...]:
        """The tensors that it is made of, where the file has them as such."""
        return ()

    @property
    def nbytes(self) -> int:
        """Of the values, not of the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    @abstractmethod
    def rows(self, reader: Reader, first: int, count: int) -> Tensor:
        """Rows [first, first + count): fp32 [count, *shape[1:]] on the CPU.

        A row of a one-dimensional tensor is an element; a scalar has one.
        """


@dataclass(frozen=True)
class RandomTensor(DecodedTensor):
    """A matrix that the checkpoint lacks: normal numbers, the same on every rank."""

    std: float
    seed: int = 0

    def rows(self, reader: Reader, first: int, count: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        values = torch.empty(self.shape).normal_(std=self.std, generator=generator)
        return values[first : first + count]
