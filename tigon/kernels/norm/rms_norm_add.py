"""RMSNorm of a branch, added to the residual stream in the same pass: residual + norm(x).

A "fused add RMSNorm" elsewhere, norm(x + residual), is `rms_norm` with a residual here.

# ... any leading dimensions, N rows of them, C model dim

Bytes per element in bf16: forward 6 (branch and residual in, the sum out), backward 6 (branch and
the sum's gradient in, the branch's out). The sum is noted as computed from both, so that a product
of it keeps neither it nor, in turn, a sum that it is made of.
"""

from typing import Any

import torch
from torch import Tensor

from tigon.kernels.norm.rms_norm import (
    MAX_COLUMNS,
    Cast,
    backward_norm,
    check_norm,
    check_operands,
    launch_norm,
    recompute_sandwich,
    rms_norm_ref,
)
from tigon.kernels.recompute import RecomputeFn, chain_recompute, note_recompute, run_recompute
from tigon.kernels.runtime import operator, refuse_second_derivative, runs_triton


def rms_norm_add_ref(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    cast: Cast = "before_weight",
) -> Tensor:
    """Returns residual + norm(x): the definition."""
    return residual + rms_norm_ref(x, weight, eps, offset=offset, cast=cast)


def _outputs(x: Tensor, residual: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Allocates the sum and 1 / rms of x."""
    total = x.new_empty(x.shape)
    rows = x.numel() // max(x.shape[-1], 1)
    return total, torch.empty(rows, dtype=torch.float32, device=x.device)


@operator("rms_norm_add", _outputs)
def _forward(
    x: Tensor,  # [..., C]
    residual: Tensor,  # [..., C]
    weight: Tensor,  # [C]
    eps: float,
    offset: float,
    before: bool,  # round before the weight
) -> tuple[Tensor, Tensor]:
    """Returns residual + norm(x) [..., C], and 1 / rms of x [N]."""
    total, rstd = _outputs(x, residual)
    launch_norm(x, residual, None, None, weight, None, total, rstd, eps, eps, offset, before)
    return total, rstd


class _RMSNormAdd(torch.autograd.Function):
    """`rms_norm_add` and its gradients; an x that can be recomputed is not saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, *how: Any) -> Tensor:
        _, *ctx.constants = how
        total, rstd = _forward(x, residual, weight, *how)
        saved: tuple[Tensor | None, ...] = (x,)
        ctx.recompute_fn = None
        if not torch.compiler.is_compiling():
            compute, saved = chain_recompute(torch.Tensor.detach, (x,))
            ctx.recompute_fn = None if saved[0] is x else RecomputeFn(compute, ())
            sources = x, residual, rstd, weight, None
            note_recompute(total, recompute_sandwich, sources, *ctx.constants, chained=True)
        ctx.save_for_backward(weight, rstd, *saved)
        return total

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("rms_norm_add")
        weight, rstd, *saved = ctx.saved_tensors
        needs_x, needs_residual, needs_weight, *_ = ctx.needs_input_grad
        x = run_recompute(ctx.recompute_fn, saved)
        needs = [needs_x, False, False, needs_weight, False]
        given = x, None, None, weight, None, needs, False, rstd, dtotal, None, *ctx.constants
        computed = iter(backward_norm(*given) if needs_x or needs_weight else ())
        dx, dweight = (next(computed) if n else None for n in (needs_x, needs_weight))
        return dx, dtotal if needs_residual else None, dweight, None, None, None


def rms_norm_add(
    x: Tensor,  # [..., C]
    residual: Tensor,  # [..., C]
    weight: Tensor,  # [C]
    eps: float,
    *,
    offset: float = 0.0,
    cast: Cast = "before_weight",
) -> Tensor:
    """Returns `residual + rms_norm(x, weight)`, the bits of the two, in one pass.

    Raises ValueError for shapes and devices that do not match, a negative eps or offset, and an
    unknown cast.
    """
    check_norm(eps, offset, cast)
    served, differentiable = check_operands(x, residual, ("weight", weight, x.shape[-1:]))
    if not (runs_triton(x) and served and x.shape[-1] <= MAX_COLUMNS):
        return rms_norm_add_ref(x, residual, weight, eps, offset=offset, cast=cast)
    how = eps, offset, cast == "before_weight"
    if differentiable and torch.is_grad_enabled():
        total: Tensor = _RMSNormAdd.apply(x, residual, weight, *how)
        return total
    return _forward(x, residual, weight, *how)[0]
