"""The kernels of RMSNorm and their launches: forward, backward, and the sum of weight gradients.

# N rows, C model dim, P partial sums of weight gradients
"""

import functools
from typing import NamedTuple

from torch import Tensor

from tigon.kernels.linear.maxima import atomic_max_columns, magnitude
from tigon.kernels.runtime import next_power_of_2, num_sms, num_stages, pdl_wait, tl, triton

SUM_ROWS = 512  # partial sums that are added at once


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
        """Returns the number of programs for N rows."""
        steps = -(-N // self.rows)
        return min(steps, self.per_sm * num_sms(x)) if self.per_sm else steps


@functools.cache
def plan_forward(C: int, sandwich: bool) -> NormLaunch:
    """Chooses the forward launch for rows of C columns."""
    block = next_power_of_2(C)
    if block < 1024:
        return NormLaunch(block, rows=min(2048 // block, 16), warps=4)
    # Where a block is wider than the row, fewer warps leave fewer lanes idle
    if block <= 2048:
        return NormLaunch(block, rows=1, warps=2 if block > C else 4)
    if block == 4096:  # one row of a sandwich moves as much as two of a plain norm
        few = block > C or sandwich
        return NormLaunch(block, rows=1, warps=4) if few else NormLaunch(block, rows=2, warps=16)
    return NormLaunch(block, rows=1, warps=min(block // 512, 32))


@functools.cache
def plan_backward(C: int, width: int, sandwich: bool) -> NormLaunch:
    """Chooses the launch. `width`: bytes per element of all inputs, which wait in shared memory."""
    block = next_power_of_2(C)
    if block < 1024:
        rows, warps, per_sm = min(2048 // block, 16), 2, 4
    elif block <= 2048:
        rows, warps, per_sm = (2, 4, 3) if block > C else (1, 4, 4)
        per_sm = 2 if sandwich else per_sm
    elif not sandwich:
        rows, warps, per_sm = max(8192 // block, 1), min(max(block // 1024, 8), 32), 1
    elif block == 4096 and block > C:
        rows, warps, per_sm = 1, 4, 2
    else:
        rows, warps, per_sm = 1, max(block // 512, 8), 1
    flight = num_stages(rows * block * width)
    return NormLaunch(block, rows, warps, per_sm, flight, late=block < 1024)


@triton.jit
def load_scale(weight, C, OFFSET, BEFORE, BLOCK, ROWS):
    """Loads offset + weight, rounded as the reference rounds it."""
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
def _row_tile(first, columns, N, C, BLOCK, ROWS, CUT):
    """Returns the rows from `first` on, which of them exist, and which elements.

    CUT: the last tile may have rows that do not exist.
    """
    rows = first + tl.arange(0, ROWS)[:, None]
    inside = rows < N
    mask = tl.full([ROWS, BLOCK], True, tl.int1)
    if BLOCK != C:
        mask &= columns < C
    if CUT:
        mask &= inside
    return rows.to(tl.int64), inside, mask


@triton.jit
def _load_rows(x, rows, columns, mask):
    """Loads a tile of `x`, a result of `_rows_of`."""
    return tl.load(x[0] + rows * x[1] + columns, mask=mask, other=0.0)


@triton.jit
def _load_gates(x, rows, columns, mask, C: tl.constexpr):
    """Loads a tile of `x`, a result of `_gates_of`, as fp32."""
    at = rows // x[2] * x[1] + rows % x[2] * C
    return tl.load(x[0] + at + columns, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _norm_gradient(d, n, rstd, C):
    """Returns the gradient of the input of a norm from the gradient d of its output n."""
    return rstd * (d - n * (tl.sum(d * n, 1, keep_dims=True) * (1.0 / C)))


@triton.jit
def _add_weight_gradient(total, d, n, LATE):
    """Adds d * n to the weight's gradient, summed over the tile's rows now or at the end."""
    if LATE:
        total += d * n
    else:
        total += tl.sum(d * n, 0, keep_dims=True)
    return total


@triton.jit
def apply_scale(n, weight, scale, dtype, BEFORE, GATED):
    """Returns n times its scale, rounded as the reference does before the gate."""
    if BEFORE:
        n = n.to(dtype).to(tl.float32)
    n *= scale
    if BEFORE and GATED and weight.dtype.element_ty == dtype:
        n = n.to(dtype).to(tl.float32)
    return n


@triton.jit
def _scaled_branch(n, weight, scale, dtype, BEFORE):
    """Returns what a sandwich adds to the residual, in fp32: n times its scale, rounded."""
    return apply_scale(n, weight, scale, dtype, BEFORE, False).to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["N"])
def norm_forward_kernel(
    x,  # these two: pointer and step from row to row
    residual,
    gate,  # a result of `_gates_of`
    weight,
    post_weight,  # of a norm of x before the residual is added
    y,  # None: only the sum is wanted
    total,  # None: the sum is not
    rstd,  # [N] of what is normed last, if y is wanted, then [N] of x if that is normed, too
    N, eps,
    post_eps,  # of the norm of x
    C: tl.constexpr, OFFSET: tl.constexpr, BEFORE: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    REUSE_RSTD: tl.constexpr,  # rstd is known
    PDL: tl.constexpr,
):  # fmt: skip
    """Norms ROWS rows of x, or of its sum with the residual, and scales and gates them."""
    pdl_wait(PDL)
    dtype: tl.constexpr = x[0].dtype.element_ty
    columns = tl.arange(0, BLOCK)[None, :]
    rows, inside, mask = _row_tile(tl.program_id(0) * ROWS, columns, N, C, BLOCK, ROWS, ROWS > 1)
    h = _load_rows(x, rows, columns, mask).to(tl.float32)
    if residual is not None:
        t = _load_rows(residual, rows, columns, mask).to(tl.float32)
    if post_weight is not None:  # loaded before the reductions, which then hide the wait
        post_scale = load_scale(post_weight, C, OFFSET, BEFORE, BLOCK, ROWS)
    if weight is not None:
        scale = load_scale(weight, C, OFFSET, BEFORE, BLOCK, ROWS)
    if post_weight is not None:
        post_rows = rows if y is None else N + rows
        if REUSE_RSTD:
            r = tl.load(rstd + post_rows, mask=inside, other=0.0)
        else:
            r = tl.math.rsqrt(tl.sum(h * h, 1, keep_dims=True) * (1.0 / C) + post_eps)
            if rstd is not None:
                tl.store(rstd + post_rows, r, mask=inside)
        h = _scaled_branch(h * r, post_weight, post_scale, dtype, BEFORE)
    if residual is not None:
        h = (h + t).to(dtype)
        if total is not None:
            tl.store(total + rows * C + columns, h, mask=mask)
        h = h.to(tl.float32)
    if y is not None:
        if gate is not None:
            z = _load_gates(gate, rows, columns, mask, C)
        if REUSE_RSTD:
            r = tl.load(rstd + rows, mask=inside, other=0.0)
        else:
            r = tl.math.rsqrt(tl.sum(h * h, 1, keep_dims=True) * (1.0 / C) + eps)
            if rstd is not None:
                tl.store(rstd + rows, r, mask=inside)
        h *= r
        if weight is not None:
            h = apply_scale(h, weight, scale, dtype, BEFORE, gate is not None)
        if gate is not None:
            h *= z * tl.sigmoid(z)
        tl.store(y + rows * C + columns, h.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["N"])
def norm_backward_kernel(
    x,  # what is normed last, of a sandwich the residual; these four: pointer and step of rows
    dy, dtotal,
    branch,  # what a sandwich norms first
    gate,  # a result of `_gates_of`
    weight, post_weight, rstd, dx, dgate, dbranch, partials,
    row_bits,  # these two: None, or int32 [N] and [C], which become the maxima of dx
    column_bits, N,
    C: tl.constexpr, OFFSET: tl.constexpr, BEFORE: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, CUT: tl.constexpr, STAGES: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """Walks over rows: writes the gradients of inputs, and partial sums of those of weights."""
    dtype: tl.constexpr = x[0].dtype.element_ty
    columns = tl.arange(0, BLOCK)[None, :]
    if weight is not None:
        scale = load_scale(weight, C, OFFSET, BEFORE, BLOCK, ROWS)
    if post_weight is not None:
        post_scale = load_scale(post_weight, C, OFFSET, BEFORE, BLOCK, ROWS)
    if partials is not None:
        dweight = tl.zeros([ROWS if LATE else 1, BLOCK], tl.float32)
        if post_weight is not None:
            dpost = tl.zeros([ROWS if LATE else 1, BLOCK], tl.float32)
    if column_bits is not None:
        top = tl.zeros([1, BLOCK], tl.int32)
    step = tl.num_programs(0) * ROWS
    for first in tl.range(tl.program_id(0) * ROWS, N, step, num_stages=STAGES):
        rows, inside, mask = _row_tile(first, columns, N, C, BLOCK, ROWS, CUT)
        n = _load_rows(x, rows, columns, mask).to(tl.float32)
        d = _load_rows(dy, rows, columns, mask)
        r = tl.load(rstd + rows, mask=inside, other=0.0)
        if post_weight is not None:  # the sum, as forward has rounded it
            post_r = tl.load(rstd + N + rows, mask=inside, other=0.0)
            normed = _load_rows(branch, rows, columns, mask).to(tl.float32) * post_r
            n += _scaled_branch(normed, post_weight, post_scale, dtype, BEFORE)
            n = n.to(dtype).to(tl.float32)
        n *= r
        d = d.to(tl.float32)
        if gate is not None:
            z = _load_gates(gate, rows, columns, mask, C)
            s = tl.sigmoid(z)
            if dgate is not None:
                m = n
                if weight is not None:
                    m = apply_scale(n, weight, scale, dtype, BEFORE, True)
                m *= d * s * (1.0 + z * (1.0 - s))
                tl.store(dgate + rows * C + columns, m.to(dgate.dtype.element_ty), mask=mask)
            d *= z * s
        if partials is not None:
            dweight = _add_weight_gradient(dweight, d, n, LATE)
        if dx is not None or post_weight is not None:
            if weight is not None:
                d *= scale
            d = _norm_gradient(d, n, r, C)
            if dtotal is not None:
                d += _load_rows(dtotal, rows, columns, mask).to(tl.float32)
        if dx is not None:
            rounded = d.to(dx.dtype.element_ty)
            tl.store(dx + rows * C + columns, rounded, mask=mask)
            if column_bits is not None:
                bits = magnitude(rounded.to(tl.float32))
                tl.store(row_bits + rows, tl.max(bits, 1, keep_dims=True), mask=inside)
                top = tl.maximum(top, tl.max(bits, 0, keep_dims=True))
        if post_weight is not None:
            if partials is not None:
                dpost = _add_weight_gradient(dpost, d, normed, LATE)
            if dbranch is not None:
                d = _norm_gradient(d * post_scale, normed, post_r, C)
                tl.store(dbranch + rows * C + columns, d.to(dtype), mask=mask)
    if column_bits is not None:
        atomic_max_columns(column_bits, columns, top, columns < C)
    if partials is not None:
        at = partials + tl.program_id(0).to(tl.int64) * C + columns
        tl.store(at, tl.sum(dweight, 0, keep_dims=True), mask=columns < C)
        if post_weight is not None:
            at += tl.num_programs(0).to(tl.int64) * C
            tl.store(at, tl.sum(dpost, 0, keep_dims=True), mask=columns < C)


@triton.jit(do_not_specialize=["P", "P2"])
def _sum_kernel(
    partials, out, out2, P, P2, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Sums [P, C] over P in a fixed order to `out`; the [P2, C] that follows it to `out2`."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    partials += tl.program_id(1).to(tl.int64) * P * C
    P = tl.where(tl.program_id(1) == 0, P, P2)
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


def sum_partials(
    partials: Tensor, P: int, C: int, out: Tensor, out2: Tensor | None = None, P2: int | None = None
) -> None:
    """Sums [P, C] to out [C] and, if there is `out2`, the [P2, C] behind it, by default as many
    rows, to that; in few steps: the wait for memory is all."""
    grid = (-(-C // 16), 1 if out2 is None else 2)
    P2 = P if P2 is None else P2
    # Two sizes, so that few rows compile no other kernels
    rows = min(256 if max(P, P2) <= 256 else 512, SUM_ROWS)
    _sum_kernel[grid](partials, out, out2, P, P2, C, rows, 16, num_warps=8)
