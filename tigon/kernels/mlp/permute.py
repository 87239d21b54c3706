"""Copies rows of tokens to the several positions that take them, and sums them from there.

A mixture of experts has a position for each expert of a token, and sends tokens to several ranks.

# N tokens, k positions of a token, some of which may be absent, S rows at those that are there,
# C numbers of a row
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels.runtime import runs_triton, tl, triton

# Columns and warps of one program: the best of some tried on an H200
SPREAD = (4096, 4)
COMBINE = (1024, 4)


@triton.jit(do_not_specialize=["S"])
def _spread_kernel(x, positions, rows, S, C, K: tl.constexpr, BLOCK: tl.constexpr):
    """Copies a token's row to each of its positions: read once, written k times."""
    token = tl.program_id(0).to(tl.int64)
    for start in range(0, C, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        keep = cols < C
        row = tl.load(x + token * C + cols, mask=keep)
        for j in tl.static_range(K):
            position = tl.load(positions + token * K + j)
            tl.store(rows + position * C + cols, row, mask=cols < tl.where(position < S, C, 0))


@triton.jit(do_not_specialize=["S"])
def _combine_kernel(rows, positions, weights, x, S, C, K: tl.constexpr, BLOCK: tl.constexpr):
    """Sums a token's rows, weighted if there are weights, in fp32 and rounded once."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = cols < C
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        position = tl.load(positions + token * K + j)
        row_mask = cols < tl.where(position < S, C, 0)
        row = tl.load(rows + position * C + cols, mask=row_mask, other=0.0).to(tl.float32)
        if weights is not None:
            row *= tl.load(weights + token * K + j).to(tl.float32)
        total += row
    tl.store(x + token * C + cols, total, mask=keep)


def spread_rows(x: Tensor, positions: Tensor, k: int, size: int) -> Tensor:
    """Copies each token's row of x [N, C] to its k positions [N k] int64: [size, C].

    Places from `size` on are absent. Rows without a token are not written.
    """
    if not runs_triton(x):
        rows = x.new_empty(size + 1, x.shape[1])  # the last is for what is absent
        return rows.index_copy_(0, positions.clamp(max=size), x.repeat_interleave(k, 0))[:size]
    rows = x.new_empty(size, x.shape[1])
    if x.numel() and not x.is_meta:
        block, warps = SPREAD
        block = min(block, triton.next_power_of_2(x.shape[1]))
        sizes = size, x.shape[1]
        _spread_kernel[(len(x),)](x, positions, rows, *sizes, K=k, BLOCK=block, num_warps=warps)
    return rows


def combine_rows(rows: Tensor, positions: Tensor, weights: Tensor | None, k: int) -> Tensor:
    """Sums each token's rows of [S, C] to [N, C], in fp32 and rounded once.

    Its k positions [N k], int64, are absent from S on; weights [N, k] multiply the rows.
    """
    n, c = len(positions) // k, rows.shape[1]
    if not runs_triton(rows):
        return _combine_ref(rows, positions, weights, k)
    x = rows.new_empty(n, c)
    if x.numel() and not x.is_meta:
        block, warps = COMBINE
        block = min(block, triton.next_power_of_2(c))
        grid = (n, triton.cdiv(c, block))
        args = rows, positions, weights, x, len(rows), c
        _combine_kernel[grid](*args, K=k, BLOCK=block, num_warps=warps)
    return x


def _combine_ref(rows: Tensor, positions: Tensor, weights: Tensor | None, k: int) -> Tensor:
    """Sums each token's k rows, weighted: the definition."""
    dtype = rows.dtype
    rows = F.pad(rows, (0, 0, 0, 1))  # zeros for what is absent
    slots = rows.index_select(0, positions.clamp(max=len(rows) - 1)).unflatten(0, (-1, k))
    slots = slots.to(torch.promote_types(dtype, torch.float32))
    return (slots if weights is None else slots * weights[..., None]).sum(1).to(dtype)
