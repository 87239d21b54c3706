"""Tensors in ggml's types, plain and in quantised blocks: what GGUF files hold.

# D a head's size
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tigon.weights.decoded import Decoded
from tigon.weights.read import Reader

PLAIN = {0: torch.float32, 1: torch.float16, 28: torch.float64, 30: torch.bfloat16}


@dataclass(frozen=True)
class GGMLTensor(Decoded):
    """Its values as `gguf.quants.dequantize` gives them, in the order of Hugging Face's rows."""

    kind: int
    row_bytes: int
    # llama.cpp turns neighbours, (0, 1), (2, 3) ..., where transformers turns halves,
    # (0, D / 2), (1, D / 2 + 1) ...: rows of queries and keys are in that order, in heads of this
    # many. 0: they are as in transformers.
    head: int = 0
    plus: float = 0.0  # was added when the file was written

    @property
    def unit(self) -> int:
        return self.head or 1

    def rows(self, reader: Reader, first: int, count: int) -> Tensor:
        if not self.head:
            return self._values(reader, first, count)
        begin = first // self.head * self.head
        end = -(-(first + count) // self.head) * self.head
        turned = self._values(reader, begin, end - begin)
        heads = turned.view(-1, self.head // 2, 2, *self.shape[1:]).transpose(1, 2)
        return heads.reshape(turned.shape)[first - begin : first - begin + count]

    def _values(self, reader: Reader, first: int, count: int) -> Tensor:
        stored = torch.empty(count * self.row_bytes, dtype=torch.uint8)
        reader.read(self.path, self.offset + first * self.row_bytes, stored.dtype, stored)
        if self.kind in PLAIN:
            values = stored.view(PLAIN[self.kind]).float()
        else:
            quants, kind = package().quants, package().GGMLQuantizationType(self.kind)
            with np.errstate(all="ignore"):  # a block may hold any number
                found = quants.dequantize(stored.numpy().reshape(count, self.row_bytes), kind)
            values = torch.from_numpy(found)
        if self.plus:
            values -= self.plus
        return values.view(count, *self.shape[1:])


def package() -> Any:
    """The `gguf` package; an ImportError says how to get it."""
    try:
        import gguf
        import gguf.quants
    except ImportError as error:
        raise ImportError(f"GGUF files need pip install 'tigon[gguf]': {error}") from error
    return gguf


@cache
def block_of(kind: int) -> tuple[int, int, str]:
    """Values and bytes of a block of the type, and its name; ValueError if it is not read."""
    gguf = package()
    try:
        known = gguf.GGMLQuantizationType(kind)
        length, size = gguf.GGML_QUANT_SIZES[known]
        if kind not in PLAIN:
            gguf.quants.dequantize(np.zeros((1, size), dtype=np.uint8), known)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise ValueError(f"ggml's type {kind} is not read: {error}") from None
    return length, size, known.name
