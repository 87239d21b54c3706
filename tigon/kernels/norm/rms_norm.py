"""RMSNorm with the residual addition that precedes it, alone or between two norms (sandwich).

# ... any leading dimensions, N rows of them, C model dim, P partial sums of weight gradients

Bytes per element in bf16: forward 4, with a residual 8; backward 6, with a residual 8. Every input
is read once and every output is written once, which is the minimum. A sandwich norm saves its
input, the sum and both 1 / rms: forward 8 (branch and residual in, normed and sum out), backward 12
(branch, the sum and both gradients in, two out).
"""

import functools
from typing import Any, Literal, NamedTuple, get_args, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels.linear.maxima import (
    Maxima,
    are_maxima_requested,
    atomic_max_columns,
    magnitude,
    note_maxima,
)
from tigon.kernels.recompute import note_recompute
from tigon.kernels.runtime import (
    DTYPES,
    as_rows,
    check_devices,
    next_power_of_2,
    num_sms,
    num_stages,
    operator,
    pdl_options,
    pdl_wait,
    refuse_second_derivative,
    runs_triton,
    tl,
    triton,
)

Cast = Literal["before_weight", "after_weight"]
CASTS = get_args(Cast)
# A kernel holds whole rows in registers, with a sandwich of both weights' gradients; wider rows
# take the reference
MAX_COLUMNS, MAX_SANDWICH_COLUMNS = 32768, 8192


def check_norm(eps: float, offset: float, cast: str) -> None:
    """Raises ValueError for a negative eps or offset, or an unknown cast."""
    if cast not in CASTS:
        raise ValueError(f"cast={cast!r} is not one of {CASTS}")
    # Dynamo has to see each float before autograd.Function, or it takes it for a constant
    if eps < 0 or offset < 0:
        raise ValueError(f"eps={eps} and offset={offset} must not be negative")


def rms_norm_ref(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    offset: float = 0.0,
    cast: Cast = "before_weight",
    gate: Tensor | None = None,
) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * (offset + weight) * silu(gate)`, fp32 inside.

    With `cast="before_weight"` it is rounded to the dtype of x before the weight multiplies it.
    """
    h = F.rms_norm(x.float(), x.shape[-1:], eps=eps)
    if weight is not None:
        if cast == "before_weight":  # Llama rounds to the input's dtype first; Gemma and OLMo last
            h = (offset + weight if offset else weight) * h.to(x.dtype)
        else:
            h = h * (offset + weight.float())
    if gate is not None:
        h = h * F.silu(gate.float())
    return h.to(x.dtype)


def sandwich_norm_ref(
    x: Tensor,
    residual: Tensor,
    post_weight: Tensor,
    weight: Tensor,
    eps: float,
    *,
    post_eps: float | None = None,
    offset: float = 1.0,
    cast: Cast = "after_weight",
) -> tuple[Tensor, Tensor]:
    """Returns the norm of residual + norm(x), and that sum: the definition."""
    post_eps = eps if post_eps is None else post_eps
    total = residual + rms_norm_ref(x, post_weight, post_eps, offset=offset, cast=cast)
    return rms_norm_ref(total, weight, eps, offset=offset, cast=cast), total


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
def _launch_forward(C: int, sandwich: bool) -> NormLaunch:
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
def _launch_backward(C: int, width: int, sandwich: bool) -> NormLaunch:
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


@triton.jit(do_not_specialize=["N"])
def _forward_kernel(
    x,  # these two: pointer and step from row to row
    residual,
    gate,  # a result of `_gates_of`
    weight,
    post_weight,  # of a norm of x before the residual is added
    y, total,
    rstd,  # [N] of what is normed last, then [N] of x if that is normed, too
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
        r = tl.math.rsqrt(tl.sum(h * h, 1, keep_dims=True) * (1.0 / C) + post_eps)
        if rstd is not None:
            tl.store(rstd + N + rows, r, mask=inside)
        h = (
            apply_scale(h * r, post_weight, post_scale, dtype, BEFORE, False)
            .to(dtype)
            .to(tl.float32)
        )
    if residual is not None:
        h = (h + t).to(total.dtype.element_ty)
        tl.store(total + rows * C + columns, h, mask=mask)
        h = h.to(tl.float32)
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
def _backward_kernel(
    x,  # what is normed last; these four: pointer and step from row to row
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
        n = _load_rows(x, rows, columns, mask)
        d = _load_rows(dy, rows, columns, mask)
        r = tl.load(rstd + rows, mask=inside, other=0.0)
        n = n.to(tl.float32) * r
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
            n = _load_rows(branch, rows, columns, mask).to(tl.float32)
            r = tl.load(rstd + N + rows, mask=inside, other=0.0)
            n *= r
            if partials is not None:
                dpost = _add_weight_gradient(dpost, d, n, LATE)
            if dbranch is not None:
                d = _norm_gradient(d * post_scale, n, r, C)
                tl.store(dbranch + rows * C + columns, d.to(dtype), mask=mask)
    if column_bits is not None:
        atomic_max_columns(column_bits, columns, top, columns < C)
    if partials is not None:
        at = partials + tl.program_id(0).to(tl.int64) * C + columns
        tl.store(at, tl.sum(dweight, 0, keep_dims=True), mask=columns < C)
        if post_weight is not None:
            at += tl.num_programs(0).to(tl.int64) * C
            tl.store(at, tl.sum(dpost, 0, keep_dims=True), mask=columns < C)


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
    """Sums [P, C] or [2, P, C] to [C] each, in one step: the wait for memory is all."""
    grid = (-(-C // 16), 1 if out2 is None else 2)
    rows = 256 if P <= 256 else 512  # two sizes, so that few rows compile no other kernels
    _sum_kernel[grid](partials, out, out2, P, C, rows, 16, num_warps=8)


def _empty_like(x: Tensor) -> Tensor:
    """Allocates a contiguous tensor with the shape and dtype of x."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _rows_of(x: Tensor | None, C: int) -> tuple[Tensor, int] | None:
    """Returns `x` as rows with adjacent columns, and the step from row to row; None for None."""
    if x is None:
        return None
    if x.is_contiguous():
        return x, C
    x = as_rows(x)
    return x, x.stride(0)


def _gates_of(x: Tensor | None, C: int) -> tuple[Tensor, int, int] | None:
    """Returns `x` as runs of adjacent rows, such as the heads of a token in a projection of more,
    the step from run to run, and the rows of a run; None for None."""
    if x is None:
        return None
    if x.is_contiguous():
        return x, C, 1
    run = 1
    if x.dim() > 2 and x.stride(-1) == 1 and x.stride(-2) == C:
        run, x = x.shape[-2], x.flatten(-2)
    x = as_rows(x)
    return x, x.stride(0), run


def _outputs(
    x: Tensor,
    residual: Tensor | None,
    save: bool,
    gate: Any,
    weight: Any,
    post_weight: Any,
    *_: Any,
) -> list[Tensor]:
    """Allocates the normed rows, the residual sum and 1 / rms where they are saved."""
    outputs = [_empty_like(x)]
    if residual is not None:
        outputs.append(_empty_like(x))
    if save:
        N = x.numel() // max(x.shape[-1], 1)
        size = N if post_weight is None else 2 * N
        outputs.append(torch.empty(size, dtype=torch.float32, device=x.device))
    return outputs


@operator("rms_norm", _outputs)
def _forward(
    x: Tensor,  # [..., C]
    residual: Tensor | None,  # [..., C]
    save: bool,
    gate: Tensor | None,  # [..., C]
    weight: Tensor | None,  # [C]
    post_weight: Tensor | None,  # [C]: x is normed before the residual is added
    eps: float,
    post_eps: float,
    offset: float,
    before: bool,  # round before the weight
) -> list[Tensor]:  # normed; with a residual, the sum; to save, 1 / rms [N], of x, too, [2N]
    """Norms rows of x, or of residual + x, or of residual + norm(x); returns `_outputs`."""
    outputs = _outputs(x, residual, save, gate, weight, post_weight)
    y, total = outputs[0], None if residual is None else outputs[1]
    rstd = outputs[-1] if save else None
    norm = eps, post_eps, offset, before
    _launch(x, residual, gate, weight, post_weight, y, total, rstd, *norm)
    return outputs


def _launch(x: Tensor, *args: Any, reuse_rstd: bool = False) -> None:
    """Runs `_forward_kernel`, whose arguments without sizes these are."""
    residual, gate, weight, post_weight, y, total, rstd, eps, post_eps, offset, before = args
    if x.numel() == 0:
        return
    C = x.shape[-1]
    N, launch = x.numel() // C, _launch_forward(C, post_weight is not None)
    _forward_kernel[(launch.programs(x, N),)](
        *(_rows_of(t, C) for t in (x, residual)),
        _gates_of(gate, C),
        *(None if t is None else t.contiguous() for t in (weight, post_weight)),
        *(
            y,
            total,
            rstd,
            N,
            eps,
            post_eps,
            C,
            offset,
            before,
            launch.block,
            launch.rows,
            reuse_rstd,
        ),
        num_warps=launch.warps,
        # A fused multiply-add would not round a normed branch
        **({} if post_weight is None else {"enable_fp_fusion": False}),
        **pdl_options(x),
    )


@operator("rms_norm_again", lambda x, *_: _empty_like(x))
def recompute_norm(
    x: Tensor,  # [..., C]: what was normalized
    rstd: Tensor,  # [N]
    gate: Tensor | None,  # [..., C]
    weight: Tensor | None,  # [C]
    offset: float,
    before: bool,
) -> Tensor:
    """Recomputes the output bit for bit from the saved rstd."""
    y = _empty_like(x)
    norm = 0.0, 0.0, offset, before
    _launch(x, None, gate, weight, None, y, None, rstd, *norm, reuse_rstd=True)
    return y


def _gradients(
    x: Tensor,
    gate: Any,
    branch: Any,
    weight: Any,
    post_weight: Any,
    needs: list[bool],
    maxima: bool,
    *_: Any,
) -> list[Tensor]:
    """Allocates the needed gradients of the first five arguments, and the maxima of dx."""
    expected = zip((x, gate, branch, weight, post_weight), needs, strict=True)
    gradients = [_empty_like(t) for t, needed in expected if needed and t is not None]
    C = x.shape[-1]
    bits = [x.new_zeros(n, dtype=torch.int32) for n in (x.numel() // max(C, 1), C) if maxima]
    return gradients + bits


@operator("rms_norm_backward", _gradients)
def _backward(
    x: Tensor,  # [..., C]: what was normalized last
    gate: Tensor | None,  # [..., C]
    branch: Tensor | None,  # [..., C]: what was normalized first
    weight: Tensor | None,  # [C]
    post_weight: Tensor | None,  # [C]
    needs: list[bool],  # the gradients of these five, returned in this order
    maxima: bool,  # and after them the largest magnitudes of dx, as bits
    rstd: Tensor,  # [N] or [2N]
    dy: Tensor,  # [..., C]
    dtotal: Tensor | None,  # [..., C]
    offset: float,
    before: bool,
) -> list[Tensor]:
    """Returns the gradients of x, gate, branch and both weights, as `_gradients` allocates them."""
    gradients = _gradients(x, gate, branch, weight, post_weight, needs, maxima)
    if x.numel() == 0:
        return [g.zero_() for g in gradients]
    made = iter(gradients)
    dx, dgate, dbranch, dweight, dpost = (next(made) if needed else None for needed in needs)
    bits = made if maxima else (None, None)
    C = x.shape[-1]
    N, inputs = x.numel() // C, (x, dy, dtotal, branch)
    width = sum(t.element_size() for t in (*inputs, gate) if t is not None)
    launch = _launch_backward(C, width, branch is not None)
    grid = launch.programs(x, N)
    partials = None
    if dweight is not None:
        size = grid * C if dpost is None else 2 * grid * C
        partials = torch.empty(size, dtype=torch.float32, device=x.device)
    _backward_kernel[(grid,)](
        *(_rows_of(t, C) for t in inputs),
        _gates_of(gate, C),
        *(None if t is None else t.contiguous() for t in (weight, post_weight)),
        *(rstd, dx, dgate, dbranch, partials, *bits, N, C, offset, before),
        *(launch.block, launch.rows, N % launch.rows > 0, launch.stages, launch.late),
        num_warps=launch.warps,
    )
    if partials is not None and dweight is not None:
        sum_partials(partials, grid, C, dweight, dpost)
    return gradients


class _RMSNorm(torch.autograd.Function):
    """RMSNorm, with the residual sum or a sandwich, and its gradients."""

    @staticmethod
    def forward(ctx: Any, through: bool, maxima: bool, *args: Any) -> Any:  # what `_forward` takes
        """With `through`, x is returned beside its norm, as a sum is.

        `maxima`: whether the maxima of the gradient of x are noted on it, if it is the sum's.
        """
        if not torch.compiler.is_compiling():  # Dynamo need not know it; it passes zeros
            ctx.set_materialize_grads(False)
        x, _, _, gate, weight, post_weight, _, _, *constants = args
        ctx.constants, ctx.maxima = constants, maxima
        y, *total, rstd = _forward(*args)
        stream = total[0] if total else x
        branch = None if post_weight is None else x
        ctx.save_for_backward(stream, gate, branch, weight, post_weight, rstd)
        if not torch.compiler.is_compiling():
            last_rstd = rstd if branch is None else rstd[: len(rstd) // 2]
            note_recompute(y, recompute_norm, (stream, last_rstd, gate, weight), *constants)
        if through:
            return y, x.detach()
        return (y, stream) if total else y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None = None) -> Any:
        x, gate, branch, weight, post_weight, rstd = ctx.saved_tensors
        refuse_second_derivative("rms_norm" if branch is None else "sandwich_norm")
        needs_x, needs_residual, _, needs_gate, *needs_weights = ctx.needs_input_grad[2:8]
        if dy is None and branch is None:  # only the sum was used
            return None, None, dtotal, dtotal if needs_residual else None, *8 * (None,)
        dy = torch.zeros_like(x) if dy is None else dy
        inputs, weights = needs_x or needs_residual, any(needs_weights)
        needs = [inputs, needs_gate, inputs and branch is not None]
        needs += [weights, weights and branch is not None]
        saved = x, gate, branch, weight, post_weight
        maxima = ctx.maxima and inputs and branch is None
        computed = iter(_backward(*saved, needs, maxima, rstd, dy, dtotal, *ctx.constants))
        dx, dgate, dbranch, *dweights = (next(computed) if needed else None for needed in needs)
        x_gradient = (dx if branch is None else dbranch) if needs_x else None
        dweight, dpost = (d if n else None for d, n in zip(dweights, needs_weights, strict=True))
        if maxima and dx is not None:
            note_maxima(dx, Maxima(*computed))
        gradients = x_gradient, dx if needs_residual else None, None, dgate, dweight, dpost
        return None, None, *gradients, *4 * (None,)


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    offset: float = ...,
    cast: Cast = ...,
    residual: None = None,
    gate: Tensor | None = ...,
) -> Tensor: ...
@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    offset: float = ...,
    cast: Cast = ...,
    residual: Tensor,
    gate: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...
def rms_norm(
    x: Tensor,  # [..., C]
    weight: Tensor | None,  # [C]; None: no scale
    eps: float,
    *,
    offset: float = 0.0,
    cast: Cast = "before_weight",
    residual: Tensor | None = None,  # [..., C]
    gate: Tensor | None = None,  # [..., C]
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns RMSNorm of `x` times `offset + weight`; with a residual of `x + residual`, and then
    `(normed, sum)` is returned.

    `cast`: whether normed numbers are rounded to the dtype of x before or after the weight.
    `offset` 1 and `cast="after_weight"` is Gemma's variant; a gate multiplies the result by
    silu(gate), as in Qwen3-Next. Source: Zhang & Sennrich 2019 (arXiv 1910.07467); the cast orders
    are those of transformers' modeling files.
    """
    check_norm(eps, offset, cast)
    served = residual is None or residual.dtype == x.dtype
    differentiable = x.requires_grad
    expected = x.shape[-1:]
    for name, t in (("weight", weight), ("residual", residual), ("gate", gate)):
        if t is not None:
            if t.device != x.device:
                check_devices(x=x, weight=weight, residual=residual, gate=gate)
            if t.shape != expected:
                raise ValueError(f"{name} {tuple(t.shape)} does not fit x {tuple(x.shape)}")
            served = served and t.dtype in DTYPES
            differentiable = differentiable or t.requires_grad
        expected = x.shape
    if not (runs_triton(x) and served and x.shape[-1] <= MAX_COLUMNS):
        total = x if residual is None else x + residual
        y = rms_norm_ref(total, weight, eps, offset=offset, cast=cast, gate=gate)
        return y if residual is None else (y, total)
    before = cast == "before_weight"
    if differentiable and torch.is_grad_enabled():
        norm = eps, eps, offset, before
        maxima = are_maxima_requested(x)
        return _RMSNorm.apply(False, maxima, x, residual, True, gate, weight, None, *norm)
    outputs = _forward(x, residual, False, gate, weight, None, eps, eps, offset, before)
    return outputs[0] if residual is None else (outputs[0], outputs[1])


def rms_norm_with_input(
    x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, cast: Cast = "before_weight"
) -> tuple[Tensor, Tensor]:
    """Returns `(rms_norm(x), x)`, like `rms_norm` with a residual where the sum exists already.

    The kernel adds the gradients of both and rounds once, so that a block that takes the sum has
    the gradients of one that computes it.
    """
    learns = x.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    fits = weight.shape == x.shape[-1:] and weight.device == x.device and x.shape[-1] <= MAX_COLUMNS
    if not (learns and fits and weight.dtype in DTYPES and runs_triton(x)):
        return rms_norm(x, weight, eps, offset=offset, cast=cast), x
    check_norm(eps, offset, cast)
    before = cast == "before_weight"
    norm = eps, eps, offset, before
    y, stream = _RMSNorm.apply(True, False, x, None, True, None, weight, None, *norm)
    return y, stream


def sandwich_norm(
    x: Tensor,  # [..., C], output of attention or MLP
    residual: Tensor,  # [..., C]
    post_weight: Tensor,  # [C]
    weight: Tensor,  # [C]
    eps: float,
    *,
    post_eps: float | None = None,  # of the norm of x; None: eps
    offset: float = 1.0,
    cast: Cast = "after_weight",
) -> tuple[Tensor, Tensor]:
    """Returns rms_norm(total, weight) and total, `residual + rms_norm(x, post_weight)`.

    Source: Gemma 2 (arXiv 2408.00118), which norms the input and the output of each sublayer.
    """
    post_eps = eps if post_eps is None else post_eps
    check_norm(min(eps, post_eps), offset, cast)
    served = residual.dtype == x.dtype
    differentiable = x.requires_grad
    expected = x.shape
    for name, t in (("residual", residual), ("post_weight", post_weight), ("weight", weight)):
        if t.device != x.device:
            check_devices(x=x, residual=residual, post_weight=post_weight, weight=weight)
        if t.shape != expected:
            raise ValueError(f"{name} {tuple(t.shape)} does not fit x {tuple(x.shape)}")
        served = served and t.dtype in DTYPES
        differentiable = differentiable or t.requires_grad
        expected = x.shape[-1:]
    if not (runs_triton(x) and served and x.shape[-1] <= MAX_SANDWICH_COLUMNS):
        options: dict[str, Any] = {"post_eps": post_eps, "offset": offset, "cast": cast}
        return sandwich_norm_ref(x, residual, post_weight, weight, eps, **options)
    args = None, weight, post_weight, eps, post_eps, offset, cast == "before_weight"
    if differentiable and torch.is_grad_enabled():
        return _RMSNorm.apply(False, False, x, residual, True, *args)
    y, total = _forward(x, residual, False, *args)
    return y, total
