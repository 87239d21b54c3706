"""Linear layers whose products, forward and backward, are of 8-bit floats (e4m3).

# T tokens, K columns of x and of the weight, N rows of the weight

y = x W^T, dX = dY W and dW = dY^T x. Both factors of a product are cast, with a scale for every row
or column that is not summed over, as in torchao's rowwise recipe: x by token for y and by column
for dW, W by row for y and by column for dX, dY by token for dX and by column for dW. Gradients are
e4m3 like the rest: with a scale per row they need precision more than e5m2's range. Scales come
from the numbers themselves and not from earlier steps, so that a recomputed block has the same
bits.

Casts are in `fp8_casts`, a gated MLP as one operator in `fp8_mlp`.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels.linear.fp8_casts import (
    ALIGN,
    ScaledMatrix,
    cast_both,
    cast_columns,
    cast_columns_ref,
    cast_input,
    cast_rows,
    cast_rows_and_maxima,
    cast_rows_ref,
    scaled_product_ref,
)
from tigon.kernels.linear.linear import deferred_product, defers_product, placeholder
from tigon.kernels.linear.maxima import find_maxima, request_maxima
from tigon.kernels.recompute import find_recompute, save_input, start_fetch
from tigon.kernels.runtime import check_devices, refuse_second_derivative, runs_triton

# The forward casts also find the maxima of the columns of x and W, a few KiB that are kept, so that
# the casts of backward read x and W once. On a GPU the products are torch._scaled_mm, on a CPU the
# definition.

MIN_CAPABILITY = (8, 9)  # compute capability of GPUs with products of e4m3
# Whether tensor cores may add up with fewer bits than fp32 has: torchao and Transformer Engine let
# them in the forward product and not in gradients, whose sums have more terms that nearly cancel
FAST_FORWARD, FAST_BACKWARD = True, False


def supports_fp8(weight: Sequence[int]) -> bool:
    """Whether a layer with a weight of this shape [N, K] can have fp8 products."""
    return len(weight) == 2 and not any(size % ALIGN for size in weight)


def scaled_product(a: ScaledMatrix, b: ScaledMatrix, *, fast: bool) -> Tensor:
    """Returns a [M, K] times b [N, K] transposed, summed in fp32 and rounded to bf16: [M, N]."""
    if a.scale.is_cpu or not runs_triton(a.scale):
        return scaled_product_ref(a, b)
    scales = {"scale_a": a.scale.unsqueeze(1), "scale_b": b.scale.unsqueeze(0)}
    return torch._scaled_mm(
        a.data, b.data.t(), **scales, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


class ColumnMaxima:
    """The column maxima of x and of the weight, found by the forward casts for backward.

    Not saved by autograd: a recomputed block has to name what it saves before it computes its
    products (see `deferred_product`), and the first pass has found them.
    """

    x: Tensor | None = None
    weight: Tensor | None = None


def cast_product(
    x: Tensor, weight: Tensor, needs_x: bool, needs_weight: bool, col_maxima: ColumnMaxima
) -> Tensor:
    """Returns the product of the casts in bf16, and keeps maxima for backward in `col_maxima`.

    `needs_x`, `needs_weight`: the gradients that backward will compute.
    """
    a, col_maxima.x = cast_rows_and_maxima(x) if needs_weight else (cast_rows(x), None)
    b, col_maxima.weight = cast_rows_and_maxima(weight) if needs_x else (cast_rows(weight), None)
    return scaled_product(a, b, fast=FAST_FORWARD)


class _Fp8Linear(torch.autograd.Function):
    """y [T, N] of x [T, K] and weight [N, K]. With a `Recompute`, backward computes x again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, *args: Any) -> Tensor:
        recompute, col_maxima, ctx.shape = args
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        ctx.recompute_fn, saved_x = save_input(x, recompute) if needs_weight else (None, ())
        ctx.save_for_backward(weight if needs_x else None, *saved_x)
        ctx.col_maxima = ColumnMaxima() if col_maxima is None else col_maxima
        if col_maxima is not None:
            return placeholder(x, weight.shape[0])
        return cast_product(x, weight, needs_x, needs_weight, ctx.col_maxima)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("fp8_linear")
        weight, *saved_x = ctx.saved_tensors
        col_maxima: ColumnMaxima = ctx.col_maxima
        needs_weight = ctx.needs_input_grad[1]
        # Beside the casts and the product of dX
        remote = start_fetch(ctx.recompute_fn, saved_x) if needs_weight else None
        if not needs_weight:
            rows, columns = cast_rows(dy), None
        elif weight is None:
            rows, columns = None, cast_columns(dy, find_maxima(dy).columns)
        else:
            rows, columns = cast_both(dy, find_maxima(dy))
        dx = dw = None
        if rows is not None:
            dx = cast_gradient(rows, weight, col_maxima.weight)
            if remote is not None:
                remote.reduce(dx.view(ctx.shape))  # beside what follows
        if columns is not None:
            x_columns = cast_input(ctx.recompute_fn, saved_x, ctx.shape[-1], col_maxima.x)
            dw = scaled_product(columns, x_columns, fast=FAST_BACKWARD)
        return dx, dw, None, None, None


def cast_gradient(rows: ScaledMatrix, weight: Tensor, maxima: Tensor | None) -> Tensor:
    """Returns the gradient of the input from the cast rows of dY."""
    return scaled_product(rows, cast_columns(weight, maxima), fast=FAST_BACKWARD)


def fp8_product(x: Tensor, weight: Tensor, bias: Tensor | None, maxima: ColumnMaxima) -> Tensor:
    """Returns `fp8_linear(x, weight, bias)` without a graph; keeps the weight's maxima."""
    check_product(x, weight)
    y = cast_product(x.reshape(-1, x.shape[-1]), weight, True, False, maxima)
    return finish_output(y, x.shape[:-1], bias)


def fp8_gradient(dy: Tensor, weight: Tensor, maxima: ColumnMaxima) -> Tensor:
    """Returns the gradient [T, K] of the x of `fp8_linear`, from dY [T, N], with the `maxima` that
    `fp8_product` has kept."""
    return cast_gradient(cast_rows(dy), weight, maxima.weight)


def check_product(x: Tensor, weight: Tensor) -> None:
    """Raises TypeError or ValueError unless x and weight can have fp8 products."""
    check_devices(x=x, weight=weight)
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        raise TypeError(
            f"fp8 products are of bfloat16 inputs and weights: x is {x.dtype}, the weight "
            f"{weight.dtype}"
        )
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        raise ValueError("fp8 products do not run under autocast: load the model in bfloat16")
    if not supports_fp8(weight.shape):
        raise ValueError(f"the sizes of the weight {tuple(weight.shape)} are not multiples of 16")
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x has {x.shape[-1]} columns, the weight {tuple(weight.shape)}")


def finish_output(y: Tensor, lead: torch.Size, bias: Tensor | None) -> Tensor:
    """Returns y [T, N] plus the bias, with the leading dimensions `lead` in place of T."""
    # As in F.linear: FSDP2 wants no view as a block's output
    y = torch.ops.aten._unsafe_view(y, (*lead, y.shape[-1]))
    y = y if bias is None else y + bias
    if y.requires_grad and not torch.compiler.is_compiling():
        request_maxima(y)
    return y


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns `F.linear(x, weight, bias)` of x [..., K], weight [N, K] in bf16; products in e4m3.

    The bias is added to the rounded product. N and K are multiples of 16. Source: torchao's float8
    training, recipe "rowwise"; Micikevicius et al. (arXiv 2209.05433) for the format.
    """
    check_product(x, weight)
    if not x.numel():
        return F.linear(x, weight, bias)
    recompute = find_recompute(x) if weight.requires_grad else None
    rows, col_maxima = x.reshape(-1, x.shape[-1]), ColumnMaxima() if defers_product() else None
    y = _Fp8Linear.apply(rows, weight, recompute, col_maxima, x.shape)
    if col_maxima is not None:
        learns = rows.requires_grad, weight.requires_grad
        y = deferred_product(y, lambda: cast_product(rows, weight, *learns, col_maxima))
    return finish_output(y, x.shape[:-1], bias)


class _Definition(torch.autograd.Function):
    """The product of x [T, K] and weight [N, K] by casts in plain torch, and its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return scaled_product_ref(cast_rows_ref(x), cast_rows_ref(weight))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        dx = scaled_product_ref(cast_rows_ref(dy), cast_columns_ref(weight))
        return dx, scaled_product_ref(cast_columns_ref(dy), cast_columns_ref(x))


def fp8_linear_ref(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns what `fp8_linear` does: casts and products in plain torch, in both directions."""
    y = _Definition.apply(x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], len(weight))
    return y if bias is None else y + bias
