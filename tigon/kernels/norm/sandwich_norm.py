"""Two norms around a residual addition, as in Gemma 2 and 3, in one pass.

# ... any leading dimensions, N rows of them, C model dim, P partial sums of weight gradients

Saved for the backward pass: x, the sum and both 1 / rms. Bytes per element in bf16: forward 8 (x
and residual in, normed and sum out), backward 12 (x, the sum and both gradients in, two out).
"""

import functools
from typing import Any

import torch
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
from tigon.kernels.norm.rms_norm import recompute_norm, rms_norm_ref
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

# A program holds a row and two weights' gradients; wider rows take the reference
MAX_COLUMNS = 8192


def sandwich_norm_ref(
    x: Tensor,
    residual: Tensor,
    post_weight: Tensor,
    weight: Tensor,
    eps: float,
    *,
    offset: float = 1.0,
    cast: Cast = "after_weight",
) -> tuple[Tensor, Tensor]:
    total = residual + rms_norm_ref(x, post_weight, eps, offset=offset, cast=cast)
    return rms_norm_ref(total, weight, eps, offset=offset, cast=cast), total


@functools.cache
def _launch_forward(C: int) -> NormLaunch:
    launch = launch_forward(C)
    # One row of two inputs and two outputs is as much as two rows of a plain norm
    return launch._replace(rows=1, warps=4) if launch.block == 4096 else launch


@functools.cache
def _launch_backward(C: int, width: int) -> NormLaunch:
    """Chooses the launch. `width`: bytes per element of all inputs, which wait in shared memory."""
    block = next_power_of_2(C)
    if block < 1024:
        rows, warps, per_sm = min(2048 // block, 16), 2, 4
    elif block <= 2048:
        rows, warps, per_sm = (2, 4, 2) if block > C else (1, 4, 2)
    elif block == 4096 and block > C:
        rows, warps, per_sm = 1, 4, 2
    else:
        rows, warps, per_sm = 1, max(block // 512, 8), 1
    return NormLaunch(
        block, rows, warps, per_sm, num_stages(rows * block * width), late=block < 1024
    )


@triton.jit
def _forward_kernel(
    x,  # these two: pointer and step from row to row
    residual,
    post_weight,
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
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    columns = tl.arange(0, BLOCK)[None, :]
    rows, inside, mask = row_tile(tl.program_id(0) * ROWS, columns, N, C, BLOCK, ROWS)
    h = load_rows(x, rows, columns, mask)
    t = load_rows(residual, rows, columns, mask)
    post_scale = load_scale(post_weight, C, OFFSET, BEFORE, BLOCK, ROWS)
    scale = load_scale(weight, C, OFFSET, BEFORE, BLOCK, ROWS)
    dtype: tl.constexpr = y.dtype.element_ty

    h = h.to(tl.float32)
    r = tl.math.rsqrt(tl.sum(h * h, 1, keep_dims=True) * (1.0 / C) + eps)
    if rstd is not None:
        tl.store(rstd + rows, r, mask=inside)
    h *= r
    if BEFORE:
        h = h.to(dtype).to(tl.float32)
    h = (h * post_scale).to(dtype).to(tl.float32)

    t = (t.to(tl.float32) + h).to(dtype)
    tl.store(total + rows * C + columns, t, mask=mask)
    t = t.to(tl.float32)
    r = tl.math.rsqrt(tl.sum(t * t, 1, keep_dims=True) * (1.0 / C) + eps)
    if rstd is not None:
        tl.store(rstd + N + rows, r, mask=inside)
    t *= r
    if BEFORE:
        t = t.to(dtype).to(tl.float32)
    tl.store(y + rows * C + columns, (t * scale).to(dtype), mask=mask)


@triton.jit
def _backward_kernel(
    x,  # these three: pointer and step from row to row
    dy,
    dtotal,
    total,
    post_weight,
    weight,
    rstd,
    dx,
    dresidual,
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
    columns = tl.arange(0, BLOCK)[None, :]
    post_scale = load_scale(post_weight, C, OFFSET, BEFORE, BLOCK, ROWS)
    scale = load_scale(weight, C, OFFSET, BEFORE, BLOCK, ROWS)
    if partials is not None:
        dpost = tl.zeros([ROWS if LATE else 1, BLOCK], tl.float32)
        dweight = tl.zeros([ROWS if LATE else 1, BLOCK], tl.float32)
    step = tl.num_programs(0) * ROWS
    for first in tl.range(tl.program_id(0) * ROWS, N, step, num_stages=STAGES):
        rows, inside, mask = row_tile(first, columns, N, C, BLOCK, ROWS)
        n = tl.load(total + rows * C + columns, mask=mask, other=0.0).to(tl.float32)
        d = load_rows(dy, rows, columns, mask).to(tl.float32)
        r = tl.load(rstd + N + rows, mask=inside, other=0.0)
        n *= r
        if partials is not None:
            dweight = add_weight_gradient(dweight, d, n, LATE)
        d *= scale
        d = norm_gradient(d, n, r, C)
        if dtotal is not None:
            d += load_rows(dtotal, rows, columns, mask).to(tl.float32)
        if dresidual is not None:
            tl.store(dresidual + rows * C + columns, d.to(dresidual.dtype.element_ty), mask=mask)

        n = load_rows(x, rows, columns, mask).to(tl.float32)
        r = tl.load(rstd + rows, mask=inside, other=0.0)
        n *= r
        if partials is not None:
            dpost = add_weight_gradient(dpost, d, n, LATE)
        if dx is not None:
            d *= post_scale
            d = norm_gradient(d, n, r, C)
            tl.store(dx + rows * C + columns, d.to(dx.dtype.element_ty), mask=mask)
    if partials is not None:
        programs = tl.num_programs(0).to(tl.int64)
        at = partials + tl.program_id(0).to(tl.int64) * C + columns
        tl.store(at, tl.sum(dpost, 0, keep_dims=True), mask=columns < C)
        tl.store(at + programs * C, tl.sum(dweight, 0, keep_dims=True), mask=columns < C)


def _outputs(x: Tensor, save: bool, *_: Any) -> list[Tensor]:
    outputs = [empty_like(x), empty_like(x)]
    if save:
        N = x.numel() // max(x.shape[-1], 1)
        outputs.append(torch.empty(2 * N, dtype=torch.float32, device=x.device))
    return outputs


@operator("sandwich_norm", _outputs)
def _forward(
    x: Tensor,  # [..., C]
    save: bool,
    residual: Tensor,  # [..., C]
    post_weight: Tensor,  # [C]
    weight: Tensor,  # [C]
    eps: float,
    offset: float,
    before: bool,  # round before the weight
) -> list[Tensor]:  # normed, the sum; to save, 1 / rms of x and of the sum [2N]
    outputs = _outputs(x, save)
    if x.numel() == 0:
        return outputs
    C = x.shape[-1]
    N = x.numel() // C
    launch = _launch_forward(C)
    _forward_kernel[(launch.programs(x, N),)](
        rows_of(x, C),
        rows_of(residual, C),
        post_weight.contiguous(),
        weight.contiguous(),
        outputs[0],
        outputs[1],
        outputs[2] if save else None,
        N,
        eps,
        C,
        offset,
        before,
        launch.block,
        launch.rows,
        num_warps=launch.warps,
        enable_fp_fusion=False,  # a fused multiply-add would not round the normed branch
        **pdl_options(x),
    )
    return outputs


def _gradients(
    x: Tensor, post_weight: Tensor, weight: Tensor, needs_inputs: bool, needs_weights: bool, *_: Any
) -> list[Tensor]:
    inputs = (x, x) if needs_inputs else ()
    weights = (post_weight, weight) if needs_weights else ()
    return [empty_like(t) for t in inputs + weights]


@operator("sandwich_norm_backward", _gradients)
def _backward(
    x: Tensor,  # [..., C]
    post_weight: Tensor,  # [C]
    weight: Tensor,  # [C]
    needs_inputs: bool,
    needs_weights: bool,
    total: Tensor,  # [..., C]
    rstd: Tensor,  # [2N]
    dy: Tensor,  # [..., C]
    dtotal: Tensor | None,  # [..., C]
    offset: float,
    before: bool,
) -> list[Tensor]:  # of x and residual, if needed; of both weights, if needed
    gradients = _gradients(x, post_weight, weight, needs_inputs, needs_weights)
    if x.numel() == 0:
        return [g.zero_() for g in gradients]
    C = x.shape[-1]
    N = x.numel() // C
    launch = _launch_backward(C, (3 + (dtotal is not None)) * x.element_size())
    grid = launch.programs(x, N)
    partials = None
    if needs_weights:
        partials = torch.empty(2 * grid * C, dtype=torch.float32, device=x.device)
    _backward_kernel[(grid,)](
        *(rows_of(t, C) for t in (x, dy, dtotal)),
        total,
        post_weight.contiguous(),
        weight.contiguous(),
        rstd,
        gradients[0] if needs_inputs else None,
        gradients[1] if needs_inputs else None,
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
    if partials is not None:
        sum_partials(partials, grid, C, gradients[-2], gradients[-1])
    return gradients


class _SandwichNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:  # what `_forward` takes
        if not torch.compiler.is_compiling():  # Dynamo need not know it; it passes zeros
            ctx.set_materialize_grads(False)
        x, _, _, post_weight, weight, _, *constants = args
        ctx.constants = constants
        y, total, rstd = _forward(*args)
        ctx.save_for_backward(x, post_weight, weight, total, rstd)
        if not torch.compiler.is_compiling():
            total_rstd = rstd[len(rstd) // 2 :]
            note_recompute(y, recompute_norm, (total, total_rstd, None, weight), *constants)
        return y, total

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None) -> Any:
        refuse_second_derivative("sandwich_norm")
        x, post_weight, weight, total, rstd = ctx.saved_tensors
        needs = ctx.needs_input_grad
        inputs, weights = needs[0] or needs[2], needs[3] or needs[4]
        if dy is None:  # only the sum was used
            dy = torch.zeros_like(total)
        saved = total, rstd, dy, dtotal
        computed = _backward(x, post_weight, weight, inputs, weights, *saved, *ctx.constants)
        dx, dresidual = computed[:2] if inputs else (None, None)
        dpost, dweight = computed[-2:] if weights else (None, None)
        gradients = dx, None, dresidual, dpost, dweight
        return (
            *(g if needed else None for g, needed in zip(gradients, needs[:5], strict=True)),
            None,
            None,
            None,
        )


def sandwich_norm(
    x: Tensor,  # [..., C], output of attention or MLP
    residual: Tensor,  # [..., C]
    post_weight: Tensor,  # [C]
    weight: Tensor,  # [C]
    eps: float,
    *,
    offset: float = 1.0,
    cast: Cast = "after_weight",
) -> tuple[Tensor, Tensor]:
    """`total = residual + rms_norm(x, post_weight)`; returns `(rms_norm(total, weight), total)`.

    Source: Gemma 2 (arXiv 2408.00118), which norms the input and the output of each sublayer.
    """
    check_norm(eps, offset, cast)
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
    if not (runs_triton(x) and served and x.shape[-1] <= MAX_COLUMNS):
        return sandwich_norm_ref(x, residual, post_weight, weight, eps, offset=offset, cast=cast)
    before = cast == "before_weight"
    if differentiable and torch.is_grad_enabled():
        return _SandwichNorm.apply(x, True, residual, post_weight, weight, eps, offset, before)
    y, total = _forward(x, False, residual, post_weight, weight, eps, offset, before)
    return y, total
