"""Products of one input with several weights, side by side in one tensor.

# N rows of x, C its columns, K columns of all products together, K_i of one of them

Query, key and value that have weights of their own come out as if they had one: what reads them
together needs no copy, and the gradient of their input is summed in one tensor.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tigon.kernels.linear.linear import (
    chunked_matmul,
    deferred_product,
    defers_product,
    has_plain_operands,
    is_at_risk,
    linear,
    placeholder,
)
from tigon.kernels.recompute import Recompute, find_recompute, run_recompute, save_input
from tigon.kernels.runtime import is_plain_parameter, refuse_second_derivative

Biases = Sequence[Tensor | None]


def packed_linear_ref(x: Tensor, weights: Sequence[Tensor], biases: Biases) -> Tensor:
    """Returns the products [..., K] of x [..., C] with weights [K_i, C]: the definition."""
    products = zip(weights, biases, strict=True)
    return torch.cat([linear(x, weight, bias) for weight, bias in products], -1)


def _products(x: Tensor, weights: Sequence[Tensor], biases: Biases) -> Tensor:
    """Returns `packed_linear_ref`, each product written to its columns."""
    y = x.new_empty(*x.shape[:-1], sum(len(w) for w in weights))
    rows = x.reshape(-1, x.shape[-1])
    columns = y.view(-1, y.shape[-1]).split([len(w) for w in weights], 1)
    for out, weight, bias in zip(columns, weights, biases, strict=True):
        if bias is None:
            torch.mm(rows, weight.t(), out=out)
        else:
            torch.addmm(bias, rows, weight.t(), out=out)
    return y


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Adds a [N, K_i] @ b [K_i, C] to `total`, in place, if there is one; returns the sum."""
    if total is None:
        return chunked_matmul(a, b)
    if is_at_risk(a, len(b), len(a), b.shape[1]):
        return total.add_(chunked_matmul(a, b))
    return total.addmm_(a, b)


class _PackedLinear(torch.autograd.Function):
    """`_products`, whose input is saved, or computed again in backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, recompute: Recompute | None, deferred: bool, *operands: Tensor | None
    ) -> Tensor:
        count = len(operands) // 2  # weights, then biases
        weights: Any = operands[:count]
        ctx.count, ctx.shape = count, x.shape
        learned = any(ctx.needs_input_grad[3 : 3 + count])
        ctx.recompute_fn, inputs = save_input(x, recompute) if learned else (None, ())
        ctx.save_for_backward(*weights, *inputs)
        if deferred:
            return placeholder(x, sum(len(w) for w in weights))
        return _products(x, weights, operands[count:])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("a product with several weights")
        count, needs, saved = ctx.count, ctx.needs_input_grad, ctx.saved_tensors
        weights, inputs = saved[:count], saved[count:]
        parts = dy.reshape(-1, dy.shape[-1]).split([len(w) for w in weights], 1)
        gradients: list[Tensor | None] = [None] * (2 * count)
        if any(needs[3 : 3 + count]):
            # Before the input's gradient: the input is gone when that comes
            x = run_recompute(ctx.recompute_fn, inputs)
            rows = x.reshape(-1, x.shape[-1])
            for i, part in enumerate(parts):
                gradients[i] = chunked_matmul(part.t(), rows) if needs[3 + i] else None
            del x, rows
        for i, part in enumerate(parts):
            gradients[count + i] = part.sum(0) if needs[3 + count + i] else None
        dx: Tensor | None = None
        for part, weight in zip(parts, weights, strict=True) if needs[0] else ():
            dx = _add_product(dx, part, weight)
        return None if dx is None else dx.view(ctx.shape), None, None, *gradients


def packed_linear(x: Tensor, weights: Sequence[Tensor], biases: Biases) -> Tensor:
    """Returns the products [..., K] of x [..., C] with weights [K_i, C], plus biases [K_i] or None.

    The numbers are those of `linear` for each weight, next to each other; the input's gradient is
    rounded after each product, as a sum of their gradients would be. In training an `x` that
    backward can recompute is not saved (`tigon.kernels.recompute`).
    """
    plain = not torch.compiler.is_compiling() and all(
        is_plain_parameter(w) and w.is_contiguous() and has_plain_operands(x, w) for w in weights
    )
    if not plain or x.numel() == x.shape[-1]:  # of one row `linear` has a kernel
        return packed_linear_ref(x, weights, biases)
    if not torch.is_grad_enabled():
        return _products(x, weights, biases) if x.is_cuda else packed_linear_ref(x, weights, biases)
    recompute = find_recompute(x)
    if recompute is not None and recompute.fn.remote is not None:
        return packed_linear_ref(x, weights, biases)
    deferred = defers_product()
    y: Tensor = _PackedLinear.apply(x, recompute, deferred, *weights, *biases)
    return deferred_product(y, lambda: _products(x, weights, biases)) if deferred else y
