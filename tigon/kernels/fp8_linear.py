"""A linear layer whose products, forward and backward, are of 8-bit floats (e4m3).

# T tokens, K columns of x and of the weight, N rows of the weight

y = x W^T, dX = dY W and dW = dY^T x. Both factors of a product are cast, with a scale for every row
or column that is not summed over: x by token for y and by column for dW, W by row for y and by
column for dX, dY by token for dX and by column for dW. That is torchao's rowwise recipe. Gradients
are e4m3 like the rest: with a scale for each row they need precision more than e5m2's range. Scales
come from the numbers themselves and not from earlier steps, so that a recomputed block has the same
bits, and a run no more state than in bf16.

On a GPU the products are those of torch._scaled_mm, on a CPU those of the definition.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels._fp8_casts import ALIGN, Scaled, cast_both, cast_columns, cast_rows
from tigon.kernels._linear_autograd import computes_later, later, without_numbers
from tigon.kernels._rebuilt import compute_again, recipe_of
from tigon.kernels._triton import check_devices, refuse_second_derivative, runs_triton

OLDEST = (8, 9)  # compute capability of GPUs with products of e4m3
# Whether tensor cores may add up with fewer bits than fp32 has: torchao and Transformer Engine let
# them in the forward product and not in gradients, whose sums have more terms that nearly cancel
FAST_FORWARD, FAST_BACKWARD = True, False


def fits(weight: Tensor) -> bool:
    """Whether a layer with this weight [N, K] can have products of 8-bit floats."""
    return weight.dim() == 2 and not any(size % ALIGN for size in weight.shape)


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


def _forward(x: Tensor, weight: Tensor, fused: bool) -> Tensor:
    factors = cast_rows(x, fused=fused), cast_rows(weight, fused=fused)
    return _product(*factors, fast=FAST_FORWARD, fused=fused)


class _Fp8Linear(torch.autograd.Function):
    """x [T, K] and weight [N, K] -> y [T, N]. With a recipe, x is computed again in backward.

    `apart`: y is not computed; see `later`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, *given: Any) -> Tensor:
        recipe, fused, apart = given
        of_x, of_weight, *_ = ctx.needs_input_grad
        kept = () if not of_weight else (x,) if recipe is None else recipe.kept
        ctx.save_for_backward(weight if of_x else None, *kept)
        ctx.how = None if recipe is None else recipe.how
        ctx.fused, ctx.columns = fused, x.shape[1]
        return without_numbers(x, weight.shape[0]) if apart else _forward(x, weight, fused)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("fp8_linear")
        weight, *kept = ctx.saved_tensors
        how: dict[str, Any] = {"fused": ctx.fused}
        of_weight = ctx.needs_input_grad[1]
        if not of_weight:
            rows, columns = cast_rows(dy, **how), None
        elif weight is None:
            rows, columns = None, cast_columns(dy, **how)
        else:
            rows, columns = cast_both(dy, **how)
        dx = dw = None
        if rows is not None:
            dx = _dx(rows, weight, ctx.fused)
        if columns is not None:
            x = kept[0] if ctx.how is None else compute_again(ctx.how, kept).view(-1, ctx.columns)
            dw = _product(columns, cast_columns(x, **how), fast=FAST_BACKWARD, **how)
        return dx, dw, None, None, None


def fp8_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What `fp8_linear` returns, without a graph."""
    _check(x, weight)
    y = _forward(x.reshape(-1, x.shape[-1]), weight, runs_triton(x))
    y = torch.ops.aten._unsafe_view(y, (*x.shape[:-1], weight.shape[0]))
    return y if bias is None else y + bias


def fp8_gradient(dy: Tensor, weight: Tensor) -> Tensor:
    """That of the x of `fp8_linear`, [T, K], from dY [T, N]."""
    fused = runs_triton(dy)
    return _dx(cast_rows(dy, fused=fused), weight, fused)


def _dx(rows: Scaled, weight: Tensor, fused: bool) -> Tensor:
    columns = cast_columns(weight, fused=fused)
    return _product(rows, columns, fast=FAST_BACKWARD, fused=fused)


def _check(x: Tensor, weight: Tensor) -> None:
    check_devices(x=x, weight=weight)
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        raise TypeError(
            f"fp8 products are of bfloat16 inputs and weights: x is {x.dtype}, the weight "
            f"{weight.dtype}"
        )
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        raise ValueError("fp8 products do not run under autocast: load the model in bfloat16")
    if not fits(weight):
        raise ValueError(f"the sizes of the weight {tuple(weight.shape)} are not multiples of 16")
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x has {x.shape[-1]} columns, the weight {tuple(weight.shape)}")


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, fused: bool) -> Tensor:
    recipe = recipe_of(x) if weight.requires_grad else None
    if recipe is not None and not recipe.alone:
        recipe.keep_gate_up()
    rows, apart = x.reshape(-1, x.shape[-1]), computes_later()
    y = _Fp8Linear.apply(rows, weight, recipe, fused, apart)
    if apart:
        y = later(y, lambda: _forward(rows, weight, fused))
    # As in F.linear: FSDP2 wants no view as a block's output
    y = torch.ops.aten._unsafe_view(y, (*x.shape[:-1], weight.shape[0]))
    return y if bias is None else y + bias


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
