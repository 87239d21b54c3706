"""How optimizer states are kept.

R rows, C columns: a rank's part of a parameter as a matrix.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tigon.train.optim import eight_bit
from tigon.train.optim.rounding import round_stochastically

States = Mapping[str, Tensor]  # of one parameter, by name
Shape = Sequence[int]


class Format(Protocol):
    """How a state of the name `kind` is kept: as tensors whose names begin with it."""

    def tensors(self, kind: str, shape: Shape) -> dict[str, tuple[Shape, torch.dtype]]: ...

    def read(self, kept: States, kind: str) -> Tensor:
        """float32 [R, C]"""
        ...

    def write(self, kept: States, kind: str, value: Tensor, bits: Tensor | None) -> None: ...


class Float32:
    def tensors(self, kind: str, shape: Shape) -> dict[str, tuple[Shape, torch.dtype]]:
        return {kind: (shape, torch.float32)}

    def read(self, kept: States, kind: str) -> Tensor:
        return kept[kind]

    def write(self, kept: States, kind: str, value: Tensor, bits: Tensor | None) -> None:
        """Nothing to do: what was read is what is kept."""


class BFloat16:
    """With stochastic rounding: exp_avg_sq changes by a share of 1 - beta2, which is less than
    half the spacing of bfloat16 where beta2 is above 0.998."""

    def tensors(self, kind: str, shape: Shape) -> dict[str, tuple[Shape, torch.dtype]]:
        return {kind: (shape, torch.bfloat16)}

    def read(self, kept: States, kind: str) -> Tensor:
        return kept[kind].float()

    def write(self, kept: States, kind: str, value: Tensor, bits: Tensor | None) -> None:
        assert bits is not None
        kept[kind].copy_(round_stochastically(value, bits))


@dataclass(frozen=True)
class EightBit:
    signed: bool

    def tensors(self, kind: str, shape: Shape) -> dict[str, tuple[Shape, torch.dtype]]:
        blocks = (*shape[:-1], shape[-1] // eight_bit.block_size(shape[-1]))
        return {f"{kind}_codes": (shape, torch.uint8), f"{kind}_scale": (blocks, torch.float32)}

    def read(self, kept: States, kind: str) -> Tensor:
        return eight_bit.dequantize(kept[f"{kind}_codes"], kept[f"{kind}_scale"], self.signed)

    def write(self, kept: States, kind: str, value: Tensor, bits: Tensor | None) -> None:
        codes, scale = eight_bit.quantize(value, self.signed)
        kept[f"{kind}_codes"].copy_(codes)
        kept[f"{kind}_scale"].copy_(scale)
