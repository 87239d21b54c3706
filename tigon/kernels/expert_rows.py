"""Rows of tokens sorted by the experts that take them, and their sums for each token.

What a mixture of experts sends to other ranks and gets back; `grouped_mlp` does both inside.

# N tokens, k experts per token, S = N k slots sorted by expert, C model dim
"""

from typing import Any

import torch
from torch import Tensor

from tigon.kernels._triton import refuse_second_derivative
from tigon.kernels.grouped_mlp import _combine, _spread


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.k = k
        return _spread(x, inverse, k)

    @staticmethod
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor, None, None]:
        refuse_second_derivative("spread_rows")
        (inverse,) = ctx.saved_tensors
        return _combine(drows.contiguous(), inverse, None, ctx.k), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.k = k
        return _combine(rows, inverse, None, k)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        refuse_second_derivative("combine_rows")
        (inverse,) = ctx.saved_tensors
        return _spread(dx.contiguous(), inverse, ctx.k), None, None


def spread_rows(x: Tensor, inverse: Tensor, k: int) -> Tensor:
    """x [N, C] -> [S, C]: a copy of each token's row at its k places, inverse [S]."""
    return _Spread.apply(x.contiguous(), inverse, k)


def combine_rows(rows: Tensor, inverse: Tensor, k: int) -> Tensor:
    """rows [S, C] -> [N, C]: the sum of each token's k rows, in fp32 and rounded once."""
    return _Combine.apply(rows.contiguous(), inverse, k)
