"""RMSNorm, with the residual addition that precedes it.

# ... any leading dimensions, N rows of them, C model dim, P partial sums of the weight's gradient

Bytes per element in bf16: forward 4, with a residual 8; backward 6, with a residual 8. Every input
is read once and every output is written once, which is the minimum.
"""

import functools
from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels.norm.common import (
    Cast,
    NormLaunch,
    add_weight_gradient,
    check_norm,
    empty_like,
    launch_forward,
    load_rows,
    load_scale,
    norm_gradient,
    num_stages,
    row_tile,
    rows_of,
    sum_partials,
)
from tigon.kernels.recompute import note_recompute
from tigon.kernels.runtime import (
    DTYPES,
    check_devices,
    next_power_of_2,
    operator,
    pdl_options,
    pdl_wait,
    refuse_second_derivative,
    runs_triton,
    tl,
    triton,
)

MAX_COLUMNS = 32768  # a kernel holds whole rows in registers; wider ones take the reference


def rms_norm_ref(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    offset: float = 0.0,
    cast: Cast = "before_weight",
    gate: Tensor | None = None,
) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * (offset + weight) * silu(gate)`, fp32 inside."""
    h = F.rms_norm(x.float(), x.shape[-1:], eps=eps)
    if weight is not None:
        if cast == "before_weight":  # Llama rounds to the input's dtype first; Gemma and OLMo last
            h = (offset + weight if offset else weight) * h.to(x.dtype)
        else:
            h = h * (offset + weight.float())
    if gate is not None:
        h = h * F.silu(gate.float())
    return h.to(x.dtype)


@functools.cache
def _launch_backward(C: int, width: int) -> NormLaunch:
    """Chooses the launch. `width`: bytes per element of all inputs, which wait in shared memory."""
    block = next_power_of_2(C)
    if block < 1024:
        rows, warps, per_sm = min(2048 // block, 16), 2, 4
    elif block <= 2048:
        rows, warps, per_sm = (2, 4, 3) if block > C else (1, 4, 4)
    else:
        rows, warps, per_sm = max(8192 // block, 1), min(max(block // 1024, 8), 32), 1
    flight = num_stages(rows * block * width)
    return NormLaunch(block, rows, warps, per_sm, flight, late=block < 1024)


@triton.jit
def _scaled(n, weight, scale, dtype, BEFORE, GATED):
    """Returns n times its scale, rounded as the reference does before the gate."""
    if BEFORE:
        n = n.to(dtype).to(tl.float32)
    n *= scale
    if BEFORE and GATED and weight.dtype.element_ty == dtype:
        n = n.to(dtype).to(tl.float32)
    return n


@triton.jit
def _forward_kernel(
    x,  # these three: pointer and step from row to row
    residual,
    gate,
    weight,
    y,
    total,
    rstd,
    N,
    eps,
    C: tl.constexpr,
    OFFSET: tl.constexpr,
    BEFORE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    REUSE_RSTD: tl.constexpr,  # rstd is known
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    dtype: tl.constexpr = x[0].dtype.element_ty
    columns = tl.arange(0, BLOCK)[None, :]
    rows, inside, mask = row_tile(tl.program_id(0) * ROWS, columns, N, C, BLOCK, ROWS)
    h = load_rows(x, rows, columns, mask).to(tl.float32)
    if residual is not None:
        h += load_rows(residual, rows, columns, mask).to(tl.float32)
        h = h.to(total.dtype.element_ty)
        tl.store(total + rows * C + columns, h, mask=mask)
        h = h.to(tl.float32)
    if weight is not None:  # loaded before the reduction, which then hides the wait
        scale = load_scale(weight, C, OFFSET, BEFORE, BLOCK, ROWS)
    if gate is not None:
        z = load_rows(gate, rows, columns, mask).to(tl.float32)
    if REUSE_RSTD:
        r = tl.load(rstd + rows, mask=inside, other=0.0)
    else:
        r = tl.math.rsqrt(tl.sum(h * h, 1, keep_dims=True) * (1.0 / C) + eps)
        if rstd is not None:
            tl.store(rstd + rows, r, mask=inside)
    h *= r
    if weight is not None:
        h = _scaled(h, weight, scale, dtype, BEFORE, gate is not None)
    if gate is not None:
        h *= z * tl.sigmoid(z)
    tl.store(y + rows * C + columns, h.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    x,  # these four: pointer and step from row to row
    gate,
    dy,
    dtotal,
    weight,
    rstd,
    dx,
    dgate,
    partials,
    N,
    C: tl.constexpr,
    OFFSET: tl.constexpr,
    BEFORE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    LATE: tl.constexpr,
):
    dtype: tl.constexpr = x[0].dtype.element_ty
    columns = tl.arange(0, BLOCK)[None, :]
    if weight is not None:
        scale = load_scale(weight, C, OFFSET, BEFORE, BLOCK, ROWS)
    if partials is not None:
        dw = tl.zeros([ROWS if LATE else 1, BLOCK], tl.float32)
    step = tl.num_programs(0) * ROWS
    for first in tl.range(tl.program_id(0) * ROWS, N, step, num_stages=STAGES):
        rows, inside, mask = row_tile(first, columns, N, C, BLOCK, ROWS)
        n = load_rows(x, rows, columns, mask)
        d = load_rows(dy, rows, columns, mask)
        r = tl.load(rstd + rows, mask=inside, other=0.0)
        n = n.to(tl.float32) * r
        d = d.to(tl.float32)
        if gate is not None:
            z = load_rows(gate, rows, columns, mask).to(tl.float32)
            s = tl.sigmoid(z)
            if dgate is not None:
                m = n
                if weight is not None:
                    m = _scaled(n, weight, scale, dtype, BEFORE, True)
                m *= d * s * (1.0 + z * (1.0 - s))
                tl.store(dgate + rows * C + columns, m.to(dgate.dtype.element_ty), mask=mask)
            d *= z * s
        if partials is not None:
            dw = add_weight_gradient(dw, d, n, LATE)
        if dx is not None:
            if weight is not None:
                d *= scale
            d = norm_gradient(d, n, r, C)
            if dtotal is not None:
                d += load_rows(dtotal, rows, columns, mask).to(tl.float32)
            tl.store(dx + rows * C + columns, d.to(dx.dtype.element_ty), mask=mask)
    if partials is not None:
        at = partials + tl.program_id(0).to(tl.int64) * C + columns
        tl.store(at, tl.sum(dw, 0, keep_dims=True), mask=columns < C)


def _outputs(x: Tensor, residual: Tensor | None, save: bool, *_: Any) -> list[Tensor]:
    outputs = [empty_like(x)]
    if residual is not None:
        outputs.append(empty_like(x))
    if save:
        N = x.numel() // max(x.shape[-1], 1)
        outputs.append(torch.empty(N, dtype=torch.float32, device=x.device))
    return outputs


@operator("rms_norm", _outputs)
def _forward(
    x: Tensor,  # [..., C]
    residual: Tensor | None,  # [..., C]
    save: bool,
    gate: Tensor | None,  # [..., C]
    weight: Tensor | None,  # [C]
    eps: float,
    offset: float,
    before: bool,  # round before the weight
) -> list[Tensor]:  # normed; with a residual, the sum; to save, 1 / rms [N]
    outputs = _outputs(x, residual, save)
    y, total = outputs[0], None if residual is None else outputs[1]
    rstd = outputs[-1] if save else None
    _launch_forward(x, residual, gate, weight, y, total, rstd, eps, offset, before)
    return outputs


def _launch_forward(
    x: Tensor,
    residual: Tensor | None,
    gate: Tensor | None,
    weight: Tensor | None,
    y: Tensor,
    total: Tensor | None,
    rstd: Tensor | None,
    eps: float,
    offset: float,
    before: bool,
    reuse_rstd: bool = False,
) -> None:
    if x.numel() == 0:
        return
    C = x.shape[-1]
    N, launch = x.numel() // C, launch_forward(C)
    _forward_kernel[(launch.programs(x, N),)](
        rows_of(x, C),
        rows_of(residual, C),
        rows_of(gate, C),
        None if weight is None else weight.contiguous(),
        y,
        total,
        rstd,
        N,
        eps,
        C,
        offset,
        before,
        launch.block,
        launch.rows,
        reuse_rstd,
        num_warps=launch.warps,
        **pdl_options(x),
    )


def _normed(x: Tensor, *_: Any) -> Tensor:
    return empty_like(x)


@operator("rms_norm_again", _normed)
def recompute_norm(
    x: Tensor,  # [..., C]: what was normalized
    rstd: Tensor,  # [N]
    gate: Tensor | None,  # [..., C]
    weight: Tensor | None,  # [C]
    offset: float,
    before: bool,
) -> Tensor:
    """Recomputes the output bit for bit from the saved rstd."""
    y = _normed(x)
    _launch_forward(x, None, gate, weight, y, None, rstd, 0.0, offset, before, reuse_rstd=True)
    return y


def _gradients(
    x: Tensor, gate: Tensor | None, weight: Tensor | None, needs: list[bool], *_: Any
) -> list[Tensor]:
    """Allocates the needed gradients of (x, gate, weight)."""
    expected = zip((x, gate, weight), needs, strict=True)
    return [empty_like(t) for t, needed in expected if needed and t is not None]


@operator("rms_norm_backward", _gradients)
def _backward(
    x: Tensor,  # [..., C]: what was normalized
    gate: Tensor | None,  # [..., C]
    weight: Tensor | None,  # [C]
    needs: list[bool],  # the gradients of x, gate, weight; returned in this order
    rstd: Tensor,  # [N]
    dy: Tensor,  # [..., C]
    dtotal: Tensor | None,  # [..., C]
    offset: float,
    before: bool,
) -> list[Tensor]:
    gradients = _gradients(x, gate, weight, needs)
    dx = gradients[0] if needs[0] else None
    dgate = gradients[needs[0]] if needs[1] else None
    dweight = gradients[-1] if needs[2] else None
    if x.numel() == 0:
        if dweight is not None:
            dweight.zero_()
        return gradients
    C = x.shape[-1]
    N, inputs = x.numel() // C, (x, gate, dy, dtotal)
    width = sum(t.element_size() for t in inputs if t is not None)
    launch = _launch_backward(C, width)
    grid = launch.programs(x, N)
    partials = None
    if dweight is not None:
        partials = torch.empty(grid * C, dtype=torch.float32, device=x.device)
    _backward_kernel[(grid,)](
        *(rows_of(t, C) for t in inputs),
        None if weight is None else weight.contiguous(),
        rstd,
        dx,
        dgate,
        partials,
        N,
        C,
        offset,
        before,
        launch.block,
        launch.rows,
        launch.stages,
        launch.late,
        num_warps=launch.warps,
    )
    if partials is not None and dweight is not None:
        sum_partials(partials, grid, C, dweight)
    return gradients


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, through: bool, *args: Any) -> Any:  # what `_forward` takes
        """With `through`, x is returned beside its norm, as a sum is."""
        if not torch.compiler.is_compiling():  # Dynamo need not know it; it passes zeros
            ctx.set_materialize_grads(False)
        x, _, _, gate, weight, _, *constants = args
        ctx.constants = constants
        y, *total, rstd = _forward(*args)
        stream = total[0] if total else x
        ctx.save_for_backward(stream, gate, weight, rstd)
        if not torch.compiler.is_compiling():
            note_recompute(y, recompute_norm, (stream, rstd, gate, weight), *constants)
        if through:
            return y, x.detach()
        return (y, stream) if total else y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None = None) -> Any:
        refuse_second_derivative("rms_norm")
        x, gate, weight, rstd = ctx.saved_tensors
        needs_x, needs_residual, _, needs_gate, needs_weight = ctx.needs_input_grad[1:6]
        if dy is None:  # only the sum was used
            return None, dtotal, dtotal if needs_residual else None, *6 * (None,)
        needs = [needs_x or needs_residual, needs_gate, needs_weight]
        computed = iter(_backward(x, gate, weight, needs, rstd, dy, dtotal, *ctx.constants))
        dx, dgate, dweight = (next(computed) if needed else None for needed in needs)
        x_gradient, residual_gradient = dx if needs_x else None, dx if needs_residual else None
        return None, x_gradient, residual_gradient, None, dgate, dweight, None, None, None


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
    """RMSNorm of `x`; with a residual, of `x + residual`, and then `(normed, sum)` is returned.

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
        return _RMSNorm.apply(False, x, residual, True, gate, weight, eps, offset, before)
    outputs = _forward(x, residual, False, gate, weight, eps, offset, before)
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
    y, stream = _RMSNorm.apply(True, x, None, True, None, weight, eps, offset, before)
    return y, stream
