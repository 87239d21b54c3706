"""A linear layer whose frozen weight is kept in few bits and made of them where it is used.

# ... any leading dimensions, C columns of x and of the weight, K rows of the weight

y = x W^T + bias and dX = dY W each dequantise W anew, into memory that is free again behind the
product: nothing of 16 bits is kept from forward to backward, nor is x.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels._triton import refuse_second_derivative
from tigon.kernels.lora_linear import Base

Dequantise = Callable[[], Tensor]  # the weight [K, C]


class _QuantisedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, *given: Any) -> Tensor:
        ctx.dequantise, ctx.inner = given
        y: Tensor = ctx.inner.product(x, ctx.dequantise(), bias)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("a product with a quantised weight")
        of_x, of_bias, *_ = ctx.needs_input_grad
        rows = dy.reshape(-1, dy.shape[-1])
        dx = None
        if of_x:
            weight = ctx.dequantise().to(dy.dtype)  # another one under autocast
            dx = ctx.inner.gradient(rows, weight).view(*dy.shape[:-1], -1)
        return dx, rows.sum(0) if of_bias else None, None, None


def quantised_linear(x: Tensor, bias: Tensor | None, dequantise: Dequantise, inner: Base) -> Tensor:
    """`F.linear(x, dequantise(), bias)` of x [..., C], whose weight has no gradient.

    `inner` computes the products. Under torch.compile autograd may keep the dequantised weight.
    """
    learns = x.requires_grad or (bias is not None and bias.requires_grad)
    if torch.compiler.is_compiling() or not x.numel():
        return F.linear(x, dequantise(), bias)
    if not (learns and torch.is_grad_enabled()):
        return inner.linear(x, dequantise(), bias)
    y: Tensor = _QuantisedLinear.apply(x, bias, dequantise, inner)
    return y


def quantised_base(dequantise: Dequantise, inner: Base) -> Base:
    """The same as the base of `lora_linear`, whose weight then only says shape and dtype."""
    return Base(
        lambda x, _, bias: inner.product(x, dequantise(), bias),
        lambda dy, _: inner.gradient(dy, dequantise()),
        lambda x, _, bias: quantised_linear(x, bias, dequantise, inner),
    )
