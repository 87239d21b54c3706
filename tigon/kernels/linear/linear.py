"""Linear layers in training: products with long sums, and inputs that backward recomputes.

# K and C rows and columns of a product, L summands; N rows of x, I intermediate size

cuBLAS 13.1 on an H200 leaves summands out of some 16-bit products without an error: with [L, K]^T
[L, C] of K = 16 and C = 4,096 the last of L = 2,561, 2,689 and most other 128 j + 1, the last two
of 6,338 with K = 64 and C = 2,048, and more of long rows. All wrong products had at most 2^21
results and few summands after a multiple of 64, at most one in 1,500; bench/long_sums.py looks for
more. Weight gradients of routers, of low-rank factors and of small models are such products.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels.mlp.gated_act import gradient_and_product
from tigon.kernels.recompute import find_recompute, has_function_mode, run_recompute, start_fetch
from tigon.kernels.runtime import autocast_dtype, refuse_second_derivative

SMALL = 2**22  # numbers of a result; all that were wrong had at most half as many
RARE = 1024  # one in so many summands and fewer may be lost; all that were lost were rarer


def may_drop_summands(summands: int, k: int, c: int) -> bool:
    """Whether cuBLAS may leave summands out of a 16-bit product [k, c]."""
    behind = summands % 32 or summands % 64 or summands % 128  # a multiple of the products' blocks
    return k * c <= SMALL and 0 < behind <= summands // RARE


def is_at_risk(x: Tensor, summands: int, k: int, c: int) -> bool:
    """Whether `may_drop_summands` holds for a product of factors with the dtype and device of x."""
    return (
        x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float16)
        and may_drop_summands(summands, k, c)
    )


def reduction_chunks(a: Tensor, b: Tensor) -> list[slice]:
    """Returns the ranges of the L summands of a [K, L] @ b [L, C] that can be multiplied at
    once."""
    length = len(b)
    if not is_at_risk(a, length, len(a), b.shape[1]):
        return [slice(0, length)]
    end = length // 128 * 128
    return [slice(0, end), slice(end, length)]


def add_matmul(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Adds a [K, L] @ b [L, C] to `total` in fp32, in place, for 16-bit factors on a GPU."""
    for run in reduction_chunks(a, b):
        values = a[:, run], b[run]
        if total is None:
            total = torch.mm(*values, out_dtype=torch.float32)
        else:
            total = torch.addmm(total, *values, out_dtype=torch.float32, out=total)
    assert total is not None
    return total


def chunked_matmul(a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
    """Returns `scale` a [K, L] @ b [L, C] with all summands, rounded once."""
    if is_at_risk(a, len(b), len(a), b.shape[1]):
        return add_matmul(None, a, b).mul_(scale).to(a.dtype)
    if scale == 1:
        return a @ b
    return a.new_empty(len(a), b.shape[1]).addmm_(a, b, beta=0, alpha=scale)


def matmul_into(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Writes a [K, L] @ b [L, C] with all summands to `out`."""
    if a.is_cuda and not is_at_risk(a, len(b), len(a), b.shape[1]):
        torch.mm(a, b, out=out)
    else:
        out.copy_(chunked_matmul(a, b))


# Linear layers in training that recompute their input instead of saving it.
#
# A pre-norm block of a Llama in bf16 saves 2 N C bytes less for each of two normed inputs and 2 N I
# for the input of down_proj. It moves 4 N C bytes more for each of the two (the stream is read, the
# normed rows are written), and 2 N I, which the gated activation's backward writes.
#
# Backward recomputes a checkpointed block until it has saved all that the first pass did
# (torch.utils.checkpoint's early stop), and nothing reads its output. But a Function saves its
# tensors after its forward, so its last product, a tenth of a block's operations or more, would be
# computed in vain. There a product is two nodes: one that saves and returns a `placeholder`, and
# one that computes (`deferred_product`).


def _parameter_gradients(dy: Tensor, x: Tensor, bias: bool) -> tuple[Tensor, Tensor | None]:
    """Returns the gradients of weight and bias from dy [N, K] and x [..., C], as F.linear does."""
    return chunked_matmul(dy.t(), x.view(-1, x.shape[-1])), dy.sum(0) if bias else None


def defers_product() -> bool:
    """Whether this forward pass runs inside a backward pass, as that of a checkpointed block."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def placeholder(x: Tensor, columns: int) -> Tensor:
    """Returns [..., columns] for x [..., C] without memory: the output of a node that only
    saves."""
    return x.new_empty(()).expand(*x.shape[:-1], columns)


class _DeferredProduct(torch.autograd.Function):
    """Returns `compute()` and passes the gradient on to `place`."""

    @staticmethod
    def forward(ctx: Any, place: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        return compute()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


def deferred_product(place: Tensor, compute: Callable[[], Tensor]) -> Tensor:
    """Computes the product that the node of `place` has deferred."""
    y: Tensor = _DeferredProduct.apply(place, compute)
    return y


class _RecomputedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *args: Any) -> Tensor:
        weight, bias, recompute, deferred = args
        ctx.recompute_fn, ctx.shape = recompute.fn, x.shape
        ctx.save_for_backward(weight, *recompute.saved)
        return placeholder(x, weight.shape[0]) if deferred else F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("a product that computes its input again")
        weight, *saved_x = ctx.saved_tensors
        needs_x, _, needs_bias, *_ = ctx.needs_input_grad
        rows = dy.reshape(-1, dy.shape[-1])
        dx = None
        if (remote := start_fetch(ctx.recompute_fn, saved_x)) is not None and needs_x:
            dx = rows.mm(weight).view(ctx.shape)  # beside the fetch; what follows, beside a sum
            remote.reduce(dx)
        # Else the weight's gradient first: x is gone when its gradient comes
        x = run_recompute(ctx.recompute_fn, saved_x).view(ctx.shape)
        dweight, dbias = _parameter_gradients(rows, x, needs_bias)
        del x
        if needs_x and dx is None:
            dx = rows.mm(weight).view(ctx.shape)
        return dx, dweight, dbias, None, None


class _GatedLinear(torch.autograd.Function):
    """`F.linear(product, weight, bias)`, differentiated with respect to the gate_up of
    `product`."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, product: Tensor, *args: Any) -> Tensor:
        weight, bias, ctx.act, ctx.overwrite, deferred = args
        ctx.shape = product.shape
        ctx.save_for_backward(gate_up, weight)
        return (
            placeholder(product, weight.shape[0]) if deferred else F.linear(product, weight, bias)
        )

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("a product with a gated activation")
        gate_up, weight = ctx.saved_tensors
        rows = dy.reshape(-1, dy.shape[-1])
        d = rows.mm(weight).view(ctx.shape)
        gradient, product = gradient_and_product(d, gate_up, ctx.act, ctx.overwrite)
        del d
        dweight, dbias = _parameter_gradients(rows, product, ctx.needs_input_grad[3])
        return gradient, None, dweight, dbias, None, None, None


class _ChunkedLinear(torch.autograd.Function):
    """`F.linear` whose gradients have all summands; see the head of this file."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("a product with a small weight")
        x, weight = ctx.saved_tensors
        needs_x, _, needs_bias = ctx.needs_input_grad
        rows = dy.reshape(-1, dy.shape[-1])
        dweight, dbias = _parameter_gradients(rows, x.reshape(-1, x.shape[-1]), needs_bias)
        return chunked_matmul(rows, weight).view(x.shape) if needs_x else None, dweight, dbias


def _is_risky(x: Tensor, weight: Tensor) -> bool:
    """Whether cuBLAS may leave summands out of a gradient of `F.linear(x, weight)`."""
    rows, columns = x.numel() // max(1, x.shape[-1]), x.shape[-1]
    return is_at_risk(x, rows, *weight.shape) or is_at_risk(x, len(weight), rows, columns)


def chunked_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` whose gradients have all summands if the weight requires a gradient."""
    if (
        weight.requires_grad
        and not torch.compiler.is_compiling()
        and _is_risky(x, weight)
        and type(x) is Tensor
        and type(weight) in (Tensor, torch.nn.Parameter)
        and x.dtype == weight.dtype
        and autocast_dtype(x.device) is None
        and not has_function_mode()
    ):
        y: Tensor = _ChunkedLinear.apply(x, weight, bias)
        return y
    return F.linear(x, weight, bias)


def training_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` with the same bits, which saves less: an `x` that can be recomputed is not saved.

    Only for plain parameters that require a gradient: without one nothing is saved, and
    parametrized or quantized weights have products of their own.
    """
    if not weight.requires_grad or (recompute := find_recompute(x)) is None:
        return chunked_linear(x, weight, bias)
    if (
        type(weight) is not torch.nn.Parameter
        or x.dtype != weight.dtype
        or not weight.is_contiguous()  # the weight's gradient would be another product
        or autocast_dtype(x.device) is not None
        or has_function_mode()
    ):
        return chunked_linear(x, weight, bias)
    deferred = defers_product()
    if recompute.gated is not None and recompute.single_reader:
        gate_up, act, node = recompute.gated
        values = act, node.overwrite, deferred
        y: Tensor = _GatedLinear.apply(gate_up, x.detach(), weight, bias, *values)
    else:
        recompute.keep_gate_up()
        y = _RecomputedLinear.apply(x, weight, bias, recompute, deferred)
    return deferred_product(y, lambda: F.linear(x, weight, bias)) if deferred else y
