"""Code shared by `rms_norm` and `sandwich_norm`: launches, tiles of rows, weight gradients.

# ... any leading dimensions, N rows of them, C model dim, P partial sums of the weight's gradient
"""

import functools
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from tigon.kernels.runtime import as_rows, next_power_of_2, num_sms, tl, triton

Cast = Literal["before_weight", "after_weight"]
CASTS = get_args(Cast)


def check_norm(eps: float, offset: float, cast: str) -> None:
    if cast not in CASTS:
        raise ValueError(f"cast={cast!r} is not one of {CASTS}")
    # Dynamo has to see each float before autograd.Function, or it takes it for a constant
    if eps < 0 or offset < 0:
        raise ValueError(f"eps={eps} and offset={offset} must not be negative")


class NormLaunch(NamedTuple):
    """Launch parameters; tuned on an H200."""

    block: int  # columns, a power of two
    rows: int  # at a time
    warps: int
    # Backward, where each program walks over many rows:
    per_sm: int = 0  # programs per multiprocessor
    stages: int = 1  # steps in flight
    # Whether to sum the weight's gradient over the rows of a step only after the last step: for
    # blocks so narrow that these rows lie in different threads
    late: bool = False

    def programs(self, x: Tensor, N: int) -> int:
        steps = -(-N // self.rows)
        return min(steps, self.per_sm * num_sms(x)) if self.per_sm else steps


@functools.cache
def launch_forward(C: int) -> NormLaunch:
    block = next_power_of_2(C)
    if block < 1024:
        return NormLaunch(block, rows=min(2048 // block, 16), warps=4)
    # Where a block is wider than the row, fewer warps leave fewer lanes idle
    if block <= 2048:
        return NormLaunch(block, rows=1, warps=2 if block > C else 4)
    if block == 4096:
        return (
            NormLaunch(block, rows=1, warps=4) if block > C else NormLaunch(block, rows=2, warps=16)
        )
    return NormLaunch(block, rows=1, warps=min(block // 512, 32))


def num_stages(step: int, most: int = 3) -> int:
    """Returns the steps in flight: `most` if every GPU from sm_80 on has shared memory for them."""
    return 1 + min(most - 1, (96 << 10) // step)


@triton.jit
def load_scale(weight, C, OFFSET, BEFORE, BLOCK, ROWS):
    columns = tl.arange(0, BLOCK)
    if BLOCK < 1024:  # a copy for each row saves a detour through shared memory
        columns = columns[None, :] + tl.zeros([ROWS, 1], tl.int32)
    w = tl.load(weight + columns, mask=columns < C, other=0.0)
    scale = w.to(tl.float32) + OFFSET
    if BEFORE:  # the reference adds the offset in the weight's dtype
        scale = scale.to(w.dtype).to(tl.float32)
    if BLOCK >= 1024:
        scale = scale[None, :]
    return scale


@triton.jit
def row_tile(first, columns, N, C, BLOCK, ROWS):
    """Returns the rows from `first` on, which of them exist, and which elements."""
    rows = first + tl.arange(0, ROWS)[:, None]
    inside = rows < N
    mask = tl.full([ROWS, BLOCK], True, tl.int1)
    if BLOCK != C:
        mask &= columns < C
    if ROWS > 1:
        mask &= inside
    return rows.to(tl.int64), inside, mask


@triton.jit
def load_rows(x, rows, columns, mask):
    """Loads a tile of `x`, a result of `rows_of`."""
    return tl.load(x[0] + rows * x[1] + columns, mask=mask, other=0.0)


@triton.jit
def norm_gradient(d, n, rstd, C):
    """Returns the gradient of the input of a norm from the gradient d of its output n."""
    return rstd * (d - n * (tl.sum(d * n, 1, keep_dims=True) * (1.0 / C)))


@triton.jit
def add_weight_gradient(total, d, n, LATE):
    if LATE:
        total += d * n
    else:
        total += tl.sum(d * n, 0, keep_dims=True)
    return total


@triton.jit(do_not_specialize=["P"])
def _sum_kernel(partials, out, out2, P, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums [P, C] over P in a fixed order to `out`; the [P, C] that follows it to `out2`."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    partials += tl.program_id(1).to(tl.int64) * P * C
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, P, ROWS):
        rows = (first + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        total += tl.load(partials + rows * C + columns, mask=(rows < P) & (columns < C), other=0.0)
    total = tl.sum(total, 0, keep_dims=True)
    inside = columns < C
    if tl.program_id(1) == 0:
        tl.store(out + columns, total.to(out.dtype.element_ty), mask=inside)
    elif out2 is not None:
        tl.store(out2 + columns, total.to(out2.dtype.element_ty), mask=inside)


def sum_partials(partials: Tensor, P: int, C: int, out: Tensor, out2: Tensor | None = None) -> None:
    """Sums [P, C] or [2, P, C] to [C] each: all of P in one step, since the wait for memory is
    all."""
    grid = (-(-C // 16), 1 if out2 is None else 2)
    rows = min(next_power_of_2(P), 512)
    _sum_kernel[grid](partials, out, out2, P, C, rows, 16, num_warps=8)


def empty_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def rows_of(x: Tensor | None, C: int) -> tuple[Tensor, int] | None:
    """Returns `x` as rows with adjacent columns, and the step from row to row; None for None."""
    if x is None:
        return None
    if x.is_contiguous():
        return x, C
    x = as_rows(x)
    return x, x.stride(0)
