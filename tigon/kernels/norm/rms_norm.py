"""RMSNorm with the residual addition that precedes it, alone or between two norms (sandwich).

# ... any leading dimensions, N rows of them, C model dim, P partial sums of weight gradients

Bytes per element in bf16: forward 4, with a residual 8; backward 6, with a residual 8. Every input
is read once and every output is written once, which is the minimum. A sandwich norm saves its
inputs and both 1 / rms: forward 8 (branch and residual in, normed and sum out), backward 12
(branch, residual and both gradients in, two out). It adds up the sum again, since the residual is
a stream that a norm before it has saved anyway.
"""

from typing import Any, Literal, get_args, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels.linear.maxima import Maxima, are_maxima_requested, note_maxima
from tigon.kernels.norm.rms_norm_kernels import (
    norm_backward_kernel,
    norm_forward_kernel,
    plan_backward,
    plan_forward,
    sum_partials,
)
from tigon.kernels.recompute import note_recompute
from tigon.kernels.runtime import (
    DTYPES,
    as_rows,
    check_devices,
    operator,
    pdl_options,
    refuse_second_derivative,
    runs_triton,
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
    x: Tensor, residual: Any, save: bool, gate: Any, weight: Any, post_weight: Any, *_: Any
) -> list[Tensor]:
    """Allocates the normed rows, the residual sum and 1 / rms where they are saved."""
    outputs = [x.new_empty(x.shape)]
    if residual is not None:
        outputs.append(x.new_empty(x.shape))
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
    launch_norm(
        x, residual, gate, weight, post_weight, y, total, rstd, eps, post_eps, offset, before
    )
    return outputs


def launch_norm(x: Tensor, *args: Any, reuse_rstd: bool = False) -> None:
    """Runs `norm_forward_kernel`, whose arguments without sizes these are."""
    residual, gate, weight, post_weight, y, total, rstd, eps, post_eps, offset, before = args
    if x.numel() == 0:
        return
    C = x.shape[-1]
    N, launch = x.numel() // C, plan_forward(C, post_weight is not None)
    norm_forward_kernel[(launch.programs(x, N),)](
        *(_rows_of(t, C) for t in (x, residual)),
        _gates_of(gate, C),
        *(None if t is None else t.contiguous() for t in (weight, post_weight)),
        *(y, total, rstd, N, eps, post_eps, C, offset, before),
        *(launch.block, launch.rows, reuse_rstd),
        num_warps=launch.warps,
        **rounding_options(post_weight),
        **pdl_options(x),
    )


def rounding_options(post_weight: Tensor | None) -> dict[str, bool]:
    """Returns the option of a kernel that adds a normed branch: a fused multiply-add would not
    round it."""
    return {} if post_weight is None else {"enable_fp_fusion": False}


@operator("rms_norm_again", lambda x, *_: x.new_empty(x.shape))
def recompute_norm(
    x: Tensor,  # [..., C]: what was normalized
    rstd: Tensor,  # [N]
    gate: Tensor | None,  # [..., C]
    weight: Tensor | None,  # [C]
    offset: float,
    before: bool,
) -> Tensor:
    """Recomputes the output bit for bit from the saved rstd."""
    y = x.new_empty(x.shape)
    norm = 0.0, 0.0, offset, before
    launch_norm(x, None, gate, weight, None, y, None, rstd, *norm, reuse_rstd=True)
    return y


@operator("sandwich_norm_again", lambda x, *_: x.new_empty(x.shape))
def recompute_sandwich(
    x: Tensor,  # [..., C]
    residual: Tensor,  # [..., C]
    rstd: Tensor,  # [2N]; without a weight those of x alone, [N]
    post_weight: Tensor,  # [C]
    weight: Tensor | None,  # [C]
    offset: float,
    before: bool,
) -> Tensor:
    """Recomputes a sandwich's output, or without a weight its sum, bit for bit."""
    out = x.new_empty(x.shape)
    y, total = (out, None) if weight is not None else (None, out)
    norm = 0.0, 0.0, offset, before
    launch_norm(x, residual, None, weight, post_weight, y, total, rstd, *norm, reuse_rstd=True)
    return out


def _gradients(
    x: Tensor, gate: Any, branch: Any, weight: Any, post: Any, needs: Any, maxima: bool, *_: Any
) -> list[Tensor]:
    """Allocates the needed gradients of the first five arguments, and the maxima of dx."""
    expected = zip((x, gate, branch, weight, post), needs, strict=True)
    gradients = [t.new_empty(t.shape) for t, needed in expected if needed and t is not None]
    C = x.shape[-1]
    bits = [x.new_zeros(n, dtype=torch.int32) for n in (x.numel() // max(C, 1), C) if maxima]
    return gradients + bits


@operator("rms_norm_backward", _gradients)
def backward_norm(
    x: Tensor,  # [..., C]: what was normalized last, with a branch the residual
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
    launch = plan_backward(C, width, branch is not None)
    grid = launch.programs(x, N)
    partials = None
    if dweight is not None:
        size = grid * C if dpost is None else 2 * grid * C
        partials = torch.empty(size, dtype=torch.float32, device=x.device)
    norm_backward_kernel[(grid,)](
        *(_rows_of(t, C) for t in inputs),
        _gates_of(gate, C),
        *(None if t is None else t.contiguous() for t in (weight, post_weight)),
        *(rstd, dx, dgate, dbranch, partials, *bits, N, C, offset, before),
        *(launch.block, launch.rows, N % launch.rows > 0, launch.stages, launch.late),
        num_warps=launch.warps,
        **rounding_options(post_weight if x.dtype == torch.float32 else None),
    )
    if partials is not None and dweight is not None:
        sum_partials(partials, grid, C, dweight, dpost)
    return gradients


class _RMSNorm(torch.autograd.Function):
    """RMSNorm, with the residual sum or a sandwich, and its gradients."""

    @staticmethod
    def forward(
        ctx: Any, returns_x: bool, maxima: bool, *args: Any
    ) -> Any:  # what `_forward` takes
        """With `returns_x`, x is returned beside its norm, as a sum is.

        `maxima`: whether the maxima of the gradient of x are noted on it, if it is the sum's.
        """
        if not torch.compiler.is_compiling():  # Dynamo need not know it; it passes zeros
            ctx.set_materialize_grads(False)
        x, residual, _, gate, weight, post_weight, _, _, *constants = args
        ctx.constants, ctx.maxima = constants, maxima
        y, *total, rstd = _forward(*args)
        stream = total[0] if total else x
        branch, kept = (None, stream) if post_weight is None else (x, residual)
        ctx.save_for_backward(kept, gate, branch, weight, post_weight, rstd)
        if not torch.compiler.is_compiling():
            if branch is None:
                note_recompute(y, recompute_norm, (stream, rstd, gate, weight), *constants)
            else:
                sources = branch, residual, rstd, post_weight, weight
                note_recompute(y, recompute_sandwich, sources, *constants)
                sources = branch, residual, rstd[len(rstd) // 2 :], post_weight, None
                note_recompute(stream, recompute_sandwich, sources, *constants)
        if returns_x:
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
        computed = iter(backward_norm(*saved, needs, maxima, rstd, dy, dtotal, *ctx.constants))
        dx, dgate, dbranch, *dweights = (next(computed) if needed else None for needed in needs)
        x_gradient = (dx if branch is None else dbranch) if needs_x else None
        dweight, dpost = (d if n else None for d, n in zip(dweights, needs_weights, strict=True))
        if maxima and dx is not None:
            note_maxima(dx, Maxima(*computed))
        gradients = x_gradient, dx if needs_residual else None, None, dgate, dweight, dpost
        return None, None, *gradients, *4 * (None,)


def check_operands(
    x: Tensor, residual: Tensor | None, *others: tuple[str, Tensor | None, torch.Size]
) -> tuple[bool, bool]:
    """Returns whether the kernels know the dtypes, and whether a gradient is required; raises
    ValueError for a tensor on another device or of another shape than expected."""
    served = residual is None or residual.dtype == x.dtype
    differentiable = x.requires_grad
    for name, t, shape in (("residual", residual, x.shape), *others):
        if t is not None:
            if t.device != x.device:
                check_devices(**{"x": x, name: t})
            if t.shape != shape:
                raise ValueError(f"{name} {tuple(t.shape)} does not fit x {tuple(x.shape)}")
            served = served and t.dtype in DTYPES
            differentiable = differentiable or t.requires_grad
    return served, differentiable


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
    served, differentiable = check_operands(
        x, residual, ("weight", weight, x.shape[-1:]), ("gate", gate, x.shape)
    )
    if not (runs_triton(x) and served and x.shape[-1] <= MAX_COLUMNS):
        total = x if residual is None else x + residual
        y = rms_norm_ref(total, weight, eps, offset=offset, cast=cast, gate=gate)
        return y if residual is None else (y, total)
    args = gate, weight, None, eps, eps, offset, cast == "before_weight"
    if differentiable and torch.is_grad_enabled():
        return _RMSNorm.apply(False, are_maxima_requested(x), x, residual, True, *args)
    outputs = _forward(x, residual, False, *args)
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
    norm = eps, eps, offset, cast == "before_weight"
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
    row = x.shape[-1:]
    served, differentiable = check_operands(
        x, residual, ("post_weight", post_weight, row), ("weight", weight, row)
    )
    if not (runs_triton(x) and served and x.shape[-1] <= MAX_SANDWICH_COLUMNS):
        options: dict[str, Any] = {"post_eps": post_eps, "offset": offset, "cast": cast}
        return sandwich_norm_ref(x, residual, post_weight, weight, eps, **options)
    args = None, weight, post_weight, eps, post_eps, offset, cast == "before_weight"
    if differentiable and torch.is_grad_enabled():
        return _RMSNorm.apply(False, False, x, residual, True, *args)
    y, total = _forward(x, residual, False, *args)
    return y, total
