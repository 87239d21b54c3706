"""A linear layer whose products, forward and backward, are of 8-bit floats (e4m3).

# T tokens, K columns of x and of the weight, N rows of the weight

y = x W^T, dX = dY W and dW = dY^T x. Both factors of a product are cast, with a scale for every row
or column that is not summed over: x by token for y and by column for dW, W by row for y and by
column for dX, dY by token for dX and by column for dW. That is torchao's rowwise recipe. Gradients
are e4m3 like the rest: with a scale for each row they need precision more than e5m2's range. Scales
come from the numbers themselves and not from earlier steps, so that a recomputed block has the same
bits, and a run no more state than in bf16.

The casts of the forward product read x and W whole, and find the maxima of their columns, too: a
few KiB that are kept, with which the casts of backward read each of them once.

On a GPU the products are those of torch._scaled_mm, on a CPU those of the definition.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels._fp8_casts import (
    ALIGN,
    Scaled,
    cast_both,
    cast_columns,
    cast_rows,
    cast_rows_and_maxima,
    maxima_of,
    note_maxima,
)
from tigon.kernels._fp8_gated import cast_gated_rows, gradients_and_maxima, holds_rows
from tigon.kernels._linear_autograd import computes_later, later, without_numbers
from tigon.kernels._rebuilt import compute_again, fetch_again, recipe_of
from tigon.kernels._triton import check_devices, refuse_second_derivative, runs_triton
from tigon.kernels.gated_act import Activation, check_act, gated_act, may_overwrite

OLDEST = (8, 9)  # compute capability of GPUs with products of e4m3
# Whether tensor cores may add up with fewer bits than fp32 has: torchao and Transformer Engine let
# them in the forward product and not in gradients, whose sums have more terms that nearly cancel
FAST_FORWARD, FAST_BACKWARD = True, False


def fits(weight: Sequence[int]) -> bool:
    """Whether a layer with a weight of this shape, [N, K], can have products of 8-bit floats."""
    return len(weight) == 2 and not any(size % ALIGN for size in weight)


def product_ref(a: Scaled, b: Scaled) -> Tensor:
    """a [M, K] times b [N, K] transposed, summed in fp32 and rounded to bf16: [M, N]."""
    return (a.dequantised() @ b.dequantised().t()).bfloat16()


def _product(a: Scaled, b: Scaled, *, fast: bool, fused: bool) -> Tensor:
    if not fused or a.data.device.type == "cpu":
        return product_ref(a, b)
    scales = {"scale_a": a.scale.unsqueeze(1), "scale_b": b.scale.unsqueeze(0)}
    return torch._scaled_mm(
        a.data, b.data.t(), **scales, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


class Known:
    """Column maxima of x and of the weight, which casts of the forward product find for backward.

    Not among what autograd saves: a recomputed block, which has the same numbers, is asked for what
    it saves before it makes its products (see `later`), and the first pass has found them.
    """

    x: Tensor | None = None
    weight: Tensor | None = None


def _cast(x: Tensor, maxima: bool, fused: bool) -> tuple[Scaled, Tensor | None]:
    return cast_rows_and_maxima(x, fused=fused) if maxima else (cast_rows(x, fused=fused), None)


def _forward(
    x: Tensor, weight: Tensor, of_x: bool, of_weight: bool, fused: bool, known: Known
) -> Tensor:
    """`of_x`, `of_weight`: which gradients will be wanted. Each takes the columns of the other."""
    a, known.x = _cast(x, of_weight, fused)
    b, known.weight = _cast(weight, of_x, fused)
    return _product(a, b, fast=FAST_FORWARD, fused=fused)


class _Fp8Linear(torch.autograd.Function):
    """x [T, K] and weight [N, K] -> y [T, N]. With a recipe, x is computed again in backward.

    With `known`, y is not computed, and that is filled meanwhile; see `later`. `shape`: of what x
    is the rows of.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, *given: Any) -> Tensor:
        recipe, fused, known, shape = given
        of_x, of_weight, *_ = ctx.needs_input_grad
        kept = () if not of_weight else (x,) if recipe is None else recipe.kept
        ctx.save_for_backward(weight if of_x else None, *kept)
        ctx.how = None if recipe is None else recipe.how
        ctx.fused, ctx.shape = fused, shape
        ctx.known = Known() if known is None else known
        if known is not None:
            return without_numbers(x, weight.shape[0])
        return _forward(x, weight, of_x, of_weight, fused, ctx.known)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("fp8_linear")
        weight, *kept = ctx.saved_tensors
        known: Known = ctx.known
        how: dict[str, Any] = {"fused": ctx.fused}
        of_weight, remote = ctx.needs_input_grad[1], None
        if of_weight and ctx.how is not None:
            remote = fetch_again(ctx.how, kept)  # beside the casts and the product of dX
        if not of_weight:
            rows, columns = cast_rows(dy, **how), None
        elif weight is None:
            rows, columns = None, cast_columns(dy, maxima_of(dy).columns, **how)
        else:
            rows, columns = cast_both(dy, maxima_of(dy), **how)
        dx = dw = None
        if rows is not None:
            dx = _dx(rows, weight, known.weight, ctx.fused)
            if remote is not None:
                remote.reduce(dx.view(ctx.shape))  # beside what follows
        if columns is not None:
            x = kept[0] if ctx.how is None else compute_again(ctx.how, kept)
            x = x.view(-1, ctx.shape[-1])
            dw = _product(columns, cast_columns(x, known.x, **how), fast=FAST_BACKWARD, **how)
        return dx, dw, None, None, None, None


def _dx(rows: Scaled, weight: Tensor, maxima: Tensor | None, fused: bool) -> Tensor:
    columns = cast_columns(weight, maxima, fused=fused)
    return _product(rows, columns, fast=FAST_BACKWARD, fused=fused)


def fp8_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What `fp8_linear` returns, without a graph."""
    _check(x, weight)
    rows, fused = x.reshape(-1, x.shape[-1]), runs_triton(x)
    return _finished(_forward(rows, weight, False, False, fused, Known()), x.shape[:-1], bias)


def fp8_gradient(dy: Tensor, weight: Tensor) -> Tensor:
    """That of the x of `fp8_linear`, [T, K], from dY [T, N]."""
    fused = runs_triton(dy)
    return _dx(cast_rows(dy, fused=fused), weight, None, fused)


def _gated_forward(gate_up: Tensor, weight: Tensor, act: Activation, known: Known) -> Tensor:
    """gate_up [T, 2 K], weight [N, K] -> [T, N]. Backward finds the product's maxima itself."""
    b, known.weight = _cast(weight, True, True)
    return _product(cast_gated_rows(gate_up, act), b, fast=FAST_FORWARD, fused=True)


class _Fp8Gated(torch.autograd.Function):
    """gate_up [T, 2 K] and weight [N, K] -> the fp8 product of `gated_act`'s output, [T, N]."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor, *given: Any) -> Tensor:
        ctx.act, ctx.overwrite, known = given
        ctx.save_for_backward(gate_up, weight)
        ctx.known = Known() if known is None else known
        if known is not None:
            return without_numbers(gate_up, weight.shape[0])
        return _gated_forward(gate_up, weight, ctx.act, ctx.known)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("fp8_gated_linear")
        gate_up, weight = ctx.saved_tensors
        how: dict[str, Any] = {"fused": True}
        rows, columns = cast_both(dy, maxima_of(dy), **how)
        of_weight = cast_columns(weight, ctx.known.weight, **how)
        d = _product(rows, of_weight, fast=FAST_BACKWARD, **how)
        del rows, of_weight
        found = gradients_and_maxima(d, gate_up, ctx.act, ctx.overwrite)
        del d
        note_maxima(found.gate_up, found.maxima)
        of_product = cast_columns(found.product, found.product_maxima, **how)
        dw = _product(columns, of_product, fast=FAST_BACKWARD, **how)
        return found.gate_up, dw, None, None, None


def _check(x: Tensor, weight: Tensor, halves: int = 1) -> None:
    check_devices(x=x, weight=weight)
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        raise TypeError(
            f"fp8 products are of bfloat16 inputs and weights: x is {x.dtype}, the weight "
            f"{weight.dtype}"
        )
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        raise ValueError("fp8 products do not run under autocast: load the model in bfloat16")
    if not fits(weight.shape):
        raise ValueError(f"the sizes of the weight {tuple(weight.shape)} are not multiples of 16")
    if x.shape[-1] != halves * weight.shape[1]:
        raise ValueError(f"x has {x.shape[-1]} columns, the weight {tuple(weight.shape)}")


def _finished(y: Tensor, lead: torch.Size, bias: Tensor | None) -> Tensor:
    # As in F.linear: FSDP2 wants no view as a block's output
    y = torch.ops.aten._unsafe_view(y, (*lead, y.shape[-1]))
    return y if bias is None else y + bias


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, fused: bool) -> Tensor:
    recipe = recipe_of(x) if weight.requires_grad else None
    if recipe is not None:
        recipe.keep_gate_up()
    rows, known = x.reshape(-1, x.shape[-1]), Known() if computes_later() else None
    y = _Fp8Linear.apply(rows, weight, recipe, fused, known, x.shape)
    if known is not None:
        learns = rows.requires_grad, weight.requires_grad
        y = later(y, lambda: _forward(rows, weight, *learns, fused, known))
    return _finished(y, x.shape[:-1], bias)


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear(x, weight, bias)` of x [..., K] and weight [N, K] in bf16, with products of e4m3.

    The bias is added to the rounded product. N and K are multiples of 16. Source: torchao's float8
    training, recipe "rowwise"; Micikevicius et al. (arXiv 2209.05433) for the format.
    """
    _check(x, weight)
    if not x.numel():
        return F.linear(x, weight, bias)
    return _linear(x, weight, bias, runs_triton(x))


def fp8_linear_ref(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The definition: casts and products in plain torch, in both directions."""
    return _linear(x, weight, bias, False)


def fp8_gated_linear(
    gate_up: Tensor, act: Activation, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """`fp8_linear(gated_act(gate_up, act), weight, bias)` with the same bits, for gate_up
    [..., 2 K] that nothing else reads: its gradient may take its memory.

    Where both learn, their passes over the product are one in each direction.
    """
    learns = torch.is_grad_enabled() and gate_up.requires_grad and weight.requires_grad
    fused = learns and not torch.compiler.is_compiling() and runs_triton(gate_up)
    if not fused or not gate_up.numel() or not holds_rows(gate_up):
        return fp8_linear(gated_act(gate_up, act, overwrite=True), weight, bias)
    _check(gate_up, weight, halves=2)
    check_act(act)
    known, overwrite = Known() if computes_later() else None, may_overwrite(gate_up)
    rows = gate_up.reshape(-1, gate_up.shape[-1])
    y = _Fp8Gated.apply(rows, weight, act, overwrite, known)
    if known is not None:
        y = later(y, lambda: _gated_forward(rows, weight, act, known))
    return _finished(y, gate_up.shape[:-1], bias)
