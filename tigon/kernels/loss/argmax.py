"""The argmax of logits, as in greedy decoding.

torch's argmax reads a row in one program, and takes several times as long for a vocabulary.

# N rows, V columns, K keys of a row: one for every BLOCK columns
"""

import torch
from torch import Tensor

from tigon.kernels.runtime import (
    next_power_of_2,
    operator,
    pdl_options,
    pdl_wait,
    runs_triton,
    tl,
    triton,
)

BLOCK = 4096
NOT_FINITE = -2  # in place of a column whose score is no finite number
# Infinity and minus infinity among fp32 numbers as ordered integers; NaN is the largest of these
INFINITY, MINUS_INFINITY, NAN = 0x7F800000, -0x7F800001, 0x7FFFFFFF
NO_KEY = -(2**63)


def argmax_ref(scores: Tensor) -> Tensor:
    """Returns each row's argmax, or NOT_FINITE where the largest score is not: the definition."""
    column = scores.argmax(-1)  # of a NaN, if there is one
    value = scores.gather(-1, column[..., None])[..., 0]
    return column.masked_fill(~value.isfinite(), NOT_FINITE)


@triton.jit
def _keys_kernel(
    scores, keys, V, K,
    LAST: tl.constexpr, NAN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Packs the largest score of a part of a row and its index into one integer."""
    pdl_wait(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(scores + row * V + columns, mask=columns < V, other=float("-inf")).to(tl.float32)
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 is as large as 0.0
    order = tl.where(bits < 0, bits ^ LAST, bits)
    order = tl.where(x != x, NAN, order)
    key = (order.to(tl.int64) << 32) + (LAST - columns)  # of equal scores the first is the largest
    tl.store(keys + row * K + part, tl.max(key, 0))


@triton.jit
def _columns_kernel(
    keys, y, K,
    LAST: tl.constexpr, NO_KEY: tl.constexpr, MINUS_INFINITY: tl.constexpr, INFINITY: tl.constexpr,
    NOT_FINITE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Takes the largest key of each row and unpacks its index."""
    pdl_wait(PDL)
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    key = tl.max(tl.load(keys + row * K + at, mask=at < K, other=NO_KEY), 0)
    order, column = key >> 32, LAST - (key & LAST)
    tl.store(y + row, tl.where((order > MINUS_INFINITY) & (order < INFINITY), column, NOT_FINITE))


def _output(scores: Tensor) -> Tensor:
    """Allocates the indices."""
    return scores.new_empty(scores.shape[:-1], dtype=torch.int64)


@operator("argmax", _output)
def _argmax(scores: Tensor) -> Tensor:
    """Returns the argmax of contiguous scores, or NOT_FINITE, by both kernels."""
    y, V = _output(scores), scores.shape[-1]
    N, K = y.numel(), triton.cdiv(V, BLOCK)
    keys, last = y.new_empty(N, K), 2**31 - 1
    options = pdl_options(scores)
    _keys_kernel[(N, K)](scores, keys, V, K, last, NAN, BLOCK, num_warps=4, **options)
    args = keys, y, K, last, NO_KEY, MINUS_INFINITY, INFINITY, NOT_FINITE, next_power_of_2(K)
    _columns_kernel[(N,)](*args, num_warps=1, **options)
    return y


def argmax(scores: Tensor) -> Tensor:
    """Returns the argmax of scores [..., V], the first of equal ones: int64 [...].

    A row with a NaN, or whose largest score is infinite, gives `NOT_FINITE`.
    """
    if scores.numel() == 0 or not runs_triton(scores):
        return argmax_ref(scores)
    return _argmax(scores.detach().contiguous())
