"""Dropout that backward can draw again, since every element's draw is a function of its position.

# ... any leading dimensions, N rows of them, C columns

The sum of the row's key and the layer's seed is a stream of SplitMix64 (`tigon.utils.random`):
column c takes the (c mod 4)-th 16 bits of the 64 at c // 4, and is dropped if these are below p in
units of 2**-16. Other elements stay as they are: 1 / (1 - p) is a factor of the following product.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.kernels.optim.low_bits import draw_bits, extract_16_bits
from tigon.kernels.runtime import (
    INTERPRETED,
    as_rows,
    operator,
    refuse_second_derivative,
    runs_triton,
    tl,
    triton,
)
from tigon.utils.random import random_bits, take_16_bits

# Rows, columns and warps of a tile; not tuned. The interpreter tests with several tiles
TILE = (4, 32, 1) if INTERPRETED else (8, 512, 4)


class Dropout(NamedTuple):
    """The dropout of a product's input x [..., C]."""

    keys: Tensor  # int64 [...], with random bits of each row
    seed: int  # of the layer, an int64 with random bits
    p: float  # how much, in [0, 1)

    @property
    def threshold(self) -> int:
        """p in units of 2**-16."""
        return min(round(self.p * 65536), 65535)

    @property
    def share(self) -> float:
        """p as it is drawn, a multiple of 2**-16."""
        return self.threshold / 65536

    def check(self, x: Tensor) -> None:
        """Raises ValueError unless there is a key for each row of x."""
        if self.keys.dtype != torch.int64 or self.keys.numel() != math.prod(x.shape[:-1]):
            raise ValueError(
                f"dropout keys {self.keys.dtype} {tuple(self.keys.shape)} are not one int64 for "
                f"each row of {tuple(x.shape)}"
            )


def keep_mask_ref(dropout: Dropout, columns: int) -> Tensor:
    """Returns bool [..., C], False where an element is dropped: the definition."""
    keys = dropout.keys
    words = torch.arange(-(-columns // 4), device=keys.device)
    bits = random_bits((keys + dropout.seed)[..., None], words)
    parts = torch.stack([take_16_bits(bits, i) for i in range(4)], -1).flatten(-2)
    return parts[..., :columns] >= dropout.threshold


def apply_dropout_ref(x: Tensor, dropout: Dropout) -> Tensor:
    """Returns x with 0 where an element is dropped."""
    return torch.where(keep_mask_ref(dropout, x.shape[-1]).view(x.shape), x, 0)


@triton.jit
def keep_mask(streams, first, threshold, COLUMNS: tl.constexpr):
    """Returns bool [ROWS, COLUMNS] from column `first`, a multiple of 4; streams are int64."""
    bits = draw_bits(first // 4, tl.arange(0, COLUMNS // 4)[None, :], streams[:, None])
    even = tl.interleave(extract_16_bits(bits, 0), extract_16_bits(bits, 2))
    odd = tl.interleave(extract_16_bits(bits, 1), extract_16_bits(bits, 3))
    return tl.interleave(even, odd) >= threshold


@triton.jit(do_not_specialize=["seed", "threshold", "N"])
def _drop_kernel(
    y, x, keys, seed, threshold, N, C, x_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Writes x with 0 where an element is dropped."""
    blocks = tl.cdiv(C, COLUMNS)
    i = tl.program_id(0) // blocks
    start = (tl.program_id(0) - i * blocks) * COLUMNS
    rows, columns = i * ROWS + tl.arange(0, ROWS), start + tl.arange(0, COLUMNS)
    streams = tl.load(keys + rows, mask=rows < N, other=0) + seed
    inside = (rows < N)[:, None] & (columns < C)[None, :]
    at = rows.to(tl.int64)[:, None]
    values = tl.load(x + at * x_row + columns[None, :], mask=inside, other=0.0)
    values = tl.where(keep_mask(streams, start, threshold, COLUMNS), values, 0.0)
    tl.store(y + at * C + columns[None, :], values.to(y.dtype.element_ty), mask=inside)


@operator("apply_dropout", lambda x, *_: x.new_empty(x.shape))
def _dropout(x: Tensor, keys: Tensor, seed: int, threshold: int) -> Tensor:
    """Returns a copy of x with 0 where an element is dropped, by the kernel."""
    y = x.new_empty(x.shape)
    if y.numel():
        rows, (height, width, warps) = as_rows(x), TILE
        N, C = rows.shape
        grid = (triton.cdiv(N, height) * triton.cdiv(C, width),)
        _drop_kernel[grid](
            y, rows, keys.contiguous(), seed, threshold, N, C, rows.stride(0),
            ROWS=height, COLUMNS=width, num_warps=warps,
        )  # fmt: skip
    return y


class _ApplyDropout(torch.autograd.Function):
    """Applies the same dropout to x and, in backward, to its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dropout: Dropout) -> Tensor:
        ctx.dropout = dropout
        return apply_dropout(x, dropout)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        refuse_second_derivative("dropout")
        return apply_dropout(dy, ctx.dropout), None


def apply_dropout(x: Tensor, dropout: Dropout) -> Tensor:
    """Returns x with 0 where it is dropped, not scaled; backward draws the mask again."""
    if torch.compiler.is_compiling():
        return apply_dropout_ref(x, dropout)
    if x.requires_grad and torch.is_grad_enabled():
        return _ApplyDropout.apply(x, dropout)
    if not runs_triton(x):
        return apply_dropout_ref(x, dropout)
    return _dropout(x, dropout.keys, dropout.seed, dropout.threshold)
