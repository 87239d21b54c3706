"""Heads divided over ranks in one copy, as all-to-all sends them.

# B batch, S tokens, n ranks, H heads of one tensor and h of them per rank, D head dim
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tigon.kernels._triton import refuse_second_derivative


def divide_heads(xs: Sequence[Tensor], ranks: int) -> Tensor:
    """Several [B, S, H, D] -> [n, B, S, the sum of their h, D]: for each rank its heads of all."""
    return _Divide.apply(ranks, *xs)


def join_heads(x: Tensor) -> Tensor:
    """[n, B, S, h, D], the heads of each rank -> [B, S, n h, D]."""
    return _Join.apply(x)


class _Divide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: int, *xs: Tensor) -> Tensor:
        ctx.heads = [x.shape[2] for x in xs]
        return _divided(xs, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("heads of ranks")
        return None, *_joined(grad, ctx.heads)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.ranks = len(x)
        return _joined(x, [len(x) * x.shape[3]])[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        refuse_second_derivative("heads of ranks")
        return _divided([grad], ctx.ranks)


def _divided(xs: Sequence[Tensor], ranks: int) -> Tensor:
    batch, tokens, _, dim = xs[0].shape
    own = [x.shape[2] // ranks for x in xs]
    out = xs[0].new_empty(ranks, batch, tokens, sum(own), dim)
    for x, part in zip(xs, out.split(own, 3), strict=True):
        _copy(part, _by_rank(x, ranks))
    return out


def _joined(x: Tensor, heads: Sequence[int]) -> list[Tensor]:
    """The inverse: of each tensor, all its heads."""
    ranks, batch, tokens, _, dim = x.shape
    out = [x.new_empty(batch, tokens, count, dim) for count in heads]
    parts = x.split([count // ranks for count in heads], 3)
    for whole, part in zip(out, parts, strict=True):
        _copy(_by_rank(whole, ranks), part)
    return out


def _by_rank(x: Tensor, ranks: int) -> Tensor:
    """[B, S, H, D] -> [n, B, S, h, D], a view."""
    return x.unflatten(2, (ranks, -1)).permute(2, 0, 1, 3, 4)


def _copy(out: Tensor, x: Tensor) -> None:
    """In numbers of 16 bytes, if both allow it: a strided copy on a GPU moves one at a time."""
    wide = torch.complex128
    count = wide.itemsize // x.itemsize
    if all(_in_steps_of(count, t) for t in (out, x)):
        out, x = out.view(wide), x.view(wide)
    out.copy_(x)


def _in_steps_of(count: int, x: Tensor) -> bool:
    """Whether every run of so many numbers is in one place, and begins at a multiple of them."""
    starts = (x.storage_offset(), x.shape[-1], *x.stride()[:-1])
    return x.stride(-1) == 1 and not any(start % count for start in starts)
