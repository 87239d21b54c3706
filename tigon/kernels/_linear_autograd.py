"""A linear layer in training that computes its input again instead of keeping it.

# ... any leading dimensions, N rows of them, C columns of x, K of the output, I intermediate size

Bytes in bf16 that a pre-norm block of a Llama keeps less: 2 N C for each of two normed inputs and
2 N I for what goes into down_proj. Bytes that it moves more: 4 N C for each of the two (the stream
is read, the normed rows are written), and 2 N I, which the gated activation's backward writes.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels._rebuilt import compute_again, recipe_of, sees_products
from tigon.kernels._triton import autocast_dtype, refuse_second_derivative
from tigon.kernels.gated_act import gradient_and_product


def _parameter_gradients(dy: Tensor, x: Tensor, bias: bool) -> tuple[Tensor, Tensor | None]:
    """Of weight and bias, from the rows dy [N, K] and x [..., C], as F.linear computes them."""
    return dy.t().mm(x.view(-1, x.shape[-1])), dy.sum(0) if bias else None


class _Rebuilt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Any) -> Tensor:
        ctx.how, ctx.shape = recipe.how, x.shape
        ctx.save_for_backward(weight, *recipe.kept)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("a product that computes its input again")
        weight, *kept = ctx.saved_tensors
        needs_x, _, needs_bias, _ = ctx.needs_input_grad
        rows = dy.reshape(-1, dy.shape[-1])
        # The weight's gradient first: x is gone when its gradient comes
        x = compute_again(ctx.how, kept).view(ctx.shape)
        dweight, dbias = _parameter_gradients(rows, x, needs_bias)
        del x
        return rows.mm(weight).view(ctx.shape) if needs_x else None, dweight, dbias, None


class _GatedLinear(torch.autograd.Function):
    """`F.linear(product, weight, bias)`, differentiated to the gate_up that the product is of."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, product: Tensor, *given: Any) -> Tensor:
        weight, bias, ctx.act, ctx.overwrite = given
        ctx.shape = product.shape
        ctx.save_for_backward(gate_up, weight)
        return F.linear(product, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("a product with a gated activation")
        gate_up, weight = ctx.saved_tensors
        rows = dy.reshape(-1, dy.shape[-1])
        d = rows.mm(weight).view(ctx.shape)
        gradient, product = gradient_and_product(d, gate_up, ctx.act, ctx.overwrite)
        del d
        dweight, dbias = _parameter_gradients(rows, product, ctx.needs_input_grad[3])
        return gradient, None, dweight, dbias, None, None


def trained_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` with the same bits in forward and backward.

    Where `x` says how it is computed again (`recipe_of`), that is kept instead of `x`. Only for
    plain parameters that learn: without a weight's gradient nothing is kept, and parametrised or
    quantised weights have products of their own.
    """
    if not weight.requires_grad or (recipe := recipe_of(x)) is None:
        return F.linear(x, weight, bias)
    if (
        type(weight) is not torch.nn.Parameter
        or x.dtype != weight.dtype
        or not weight.is_contiguous()  # the weight's gradient would be another product
        or autocast_dtype(x.device) is not None
        or sees_products()
    ):
        return F.linear(x, weight, bias)
    if recipe.gated is not None:
        gate_up, act, node = recipe.gated
        if recipe.alone:
            return _GatedLinear.apply(gate_up, x.detach(), weight, bias, act, node.overwrite)
        recipe.keep_gate_up()
    return _Rebuilt.apply(x, weight, bias, recipe)
