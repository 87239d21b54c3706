"""Tensors that are decoded or computed when they are read."""

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
        return 1

    @property
    def in_file(self) -> tuple[TensorInfo, ...]:
        """The plain tensors of the file that it is decoded from, if any."""
        return ()

    @property
    def nbytes(self) -> int:
        """The bytes of the values, not of the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    @abstractmethod
    def rows(self, reader: Reader, first: int, count: int) -> Tensor:
        """Decode rows [first, first + count) to fp32 [count, *shape[1:]] on the CPU.

        A row of a one-dimensional tensor is an element; a scalar has one.
        """


@dataclass(frozen=True)
class RandomTensor(DecodedTensor):
    """A matrix of normal random numbers, for one that the checkpoint lacks; equal on all ranks."""

    std: float
    seed: int = 0

    def rows(self, reader: Reader, first: int, count: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        values = torch.empty(self.shape).normal_(std=self.std, generator=generator)
        return values[first : first + count]
