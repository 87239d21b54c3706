"""Linear layers with low-rank additions (LoRA), one for each part of a packed projection.

# ... any leading dimensions, N rows of them, C columns of x, K columns of y, K_p those of part p,
# r rank of a part, R ranks of all parts

y = x W^T + bias, and s (x A^T) B^T is added to the columns of each part. Source: Hu et al. (arXiv
2106.09685); the numbers are those of PEFT's separate projections.

x is read once for the A [R, C] of all parts, and the additions go into the memory of y. With a
frozen base one node computes all of it: it saves u = x A^T [N, R] and, for dA alone, x or how to
recompute it; dX = dY W + dU A. On a GPU the additions are written first and torch's product is
added to them; another base's product, such as fp8, comes first.

With dropout, A reads x with some elements 0 and the additions are multiplied by 1 / (1 - p); the
base's product has all of x. No mask is saved: backward drops the same elements for dA and of
dU A. All parts drop the same.

Rounding below fp32: A and B are cast to the dtype of x; u, dU, every addition to y and to dX, and
dA and dB are fp32 sums that are rounded once. The additions round y and dX a second time, as PEFT's
do. dA and dB are then cast to the parameters' dtype.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels.linear.dropout import Dropout, apply_dropout, apply_dropout_ref
from tigon.kernels.linear.fp8 import ColumnMaxima, fp8_gradient, fp8_linear, fp8_product
from tigon.kernels.linear.linear import (
    chunked_linear,
    chunked_matmul,
    defers_product,
    finish_product,
    has_plain_operands,
    linear,
    placeholder,
    uses_gemv,
)
from tigon.kernels.linear.low_rank import (
    WIDEST_GRADIENTS,
    WIDEST_PRODUCT,
    low_rank_gradients,
    low_rank_product,
    supports_rank,
)
from tigon.kernels.mlp.gated_act import Activation, gradient_and_product
from tigon.kernels.recompute import (
    RecomputeFn,
    find_recompute,
    run_recompute,
    save_input,
    start_fetch,
)
from tigon.kernels.runtime import is_plain_parameter, refuse_second_derivative


class LoRATerm(NamedTuple):
    """The addition to the columns of one part."""

    first: int  # of the part's columns in y
    b: Tensor  # [K_p, r]
    scale: float


class BaseLinear(NamedTuple):
    """The base layer's product: y from x, weight and bias, and dX [N, C] from dY [N, K]."""

    product: Callable[[Tensor, Tensor, Tensor | None], Tensor]  # without a graph
    gradient: Callable[[Tensor, Tensor], Tensor]
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]  # with one, where there is to be one
    plain: bool = False  # they are torch's own, which can add themselves to what there is


PLAIN_BASE = BaseLinear(F.linear, torch.mm, linear, plain=True)


def make_fp8_base() -> BaseLinear:
    """Returns the base of one call in fp8, whose gradient has the weight's maxima from y's cast."""
    kept = ColumnMaxima()
    product, gradient = partial(fp8_product, maxima=kept), partial(fp8_gradient, maxima=kept)
    return BaseLinear(product, gradient, fp8_linear)


def lora_linear_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a: Tensor,
    additions: Sequence[LoRATerm],
    dropout: Dropout | None = None,
) -> Tensor:
    """Returns what `lora_linear` does: its definition, in plain torch."""
    y = F.linear(x, weight, bias)
    if dropout is not None:
        x, additions = apply_dropout_ref(x, dropout), _scale_terms(additions, dropout)
    return _add_terms(y, x, a, additions)


def _scale_terms(additions: Sequence[LoRATerm], dropout: Dropout) -> list[LoRATerm]:
    """Scales the additions by 1 / (1 - p), so that dropout does not change their mean."""
    return [add._replace(scale=add.scale / (1 - dropout.share)) for add in additions]


def _add_terms(y: Tensor, x: Tensor, a: Tensor, additions: Sequence[LoRATerm]) -> Tensor:
    """Returns y plus the terms, by operators that autograd, torch.compile and autocast support."""
    u = chunked_linear(x, a.to(x.dtype))
    pieces, column, rank = [], 0, 0
    for first, b, scale in additions:
        pieces.append(y[..., column:first])
        column, r = first + b.shape[0], b.shape[1]
        values = chunked_linear(u[..., rank : rank + r], b.to(u.dtype)) * scale
        pieces.append(y[..., first:column] + values)
        rank += r
    pieces.append(y[..., column:])
    filled = [piece for piece in pieces if piece.shape[-1]]
    return filled[0] if len(filled) == 1 else torch.cat(filled, -1)


def _add_into(y: Tensor, u: Tensor, additions: Sequence[LoRATerm]) -> Tensor:
    """Adds the terms, from u [N, R], to the memory of y [..., K], and returns y."""
    rows, rank = y.view(-1, y.shape[-1]), 0
    for first, b, scale in additions:
        size, r = b.shape
        values = u.narrow(1, rank, r)
        rows.narrow(1, first, size).addmm_(values, b.to(u.dtype).t(), alpha=scale)
        rank += r
    return y


def _max_rank(additions: Sequence[LoRATerm]) -> int:
    """Returns the largest rank of a term."""
    return max(add.b.shape[1] for add in additions)


def _base_plus_low_rank(
    base: BaseLinear,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    u: Tensor,
    additions: Sequence[LoRATerm],
) -> Tensor:
    """Returns the base's product plus the terms, from u [N, R]."""
    if not (base.plain and supports_rank(u, _max_rank(additions), WIDEST_PRODUCT)):
        return _add_into(base.product(x, weight, bias), u, additions)
    firsts, bs, scales = zip(*additions, strict=True)
    y = low_rank_product(u, bs, firsts, scales, weight.shape[0], bias, False)
    y.addmm_(x.reshape(-1, x.shape[-1]), weight.t())
    # No view: FSDP2 warns of views among what a module returns
    return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[-1]))


def _project_down(x: Tensor, a: Tensor, dropout: Dropout | None) -> Tensor:
    """Returns u [N, R] = x A^T with dropout, for x [..., C]."""
    x = x if dropout is None else apply_dropout(x, dropout)
    return F.linear(x.reshape(-1, x.shape[-1]), a.to(x.dtype))


def _x_gradient(
    base: BaseLinear, dy: Tensor, weight: Tensor, du: Tensor, a: Tensor, dropout: Dropout | None
) -> Tensor:
    """Returns dX [N, C] from dY [N, K] and dU [N, R]."""
    if not (base.plain and supports_rank(du, a.shape[0], WIDEST_PRODUCT)):
        dx = base.gradient(dy, weight)
        if dropout is None:
            return dx.addmm_(du, a.to(du.dtype))
        return dx.add_(apply_dropout(du.mm(a.to(du.dtype)), dropout))
    draws = () if dropout is None else (dropout.keys, dropout.seed, dropout.threshold)
    dx = low_rank_product(du, [a], [0], [1.0], a.shape[1], None, True, *draws)
    return dx.addmm_(dy, weight)


def _low_rank_gradients(
    dy: Tensor, u: Tensor, additions: Sequence[LoRATerm], needed: Sequence[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """Returns dU [N, R], and dB of the parts that need it."""
    if supports_rank(dy, _max_rank(additions), WIDEST_GRADIENTS):
        firsts, bs, scales = zip(*additions, strict=True)
        du, *gradients = low_rank_gradients(dy, u, bs, firsts, scales, any(needed))
        gradients = gradients or bs
        return du, [db if need else None for db, need in zip(gradients, needed, strict=True)]
    du, dbs, rank = dy.new_empty(u.shape), [], 0
    for (first, b, scale), need in zip(additions, needed, strict=True):
        size, r = b.shape
        d = dy.narrow(1, first, size)
        du.narrow(1, rank, r).addmm_(d, b.to(d.dtype), beta=0, alpha=scale)
        db = None
        if need:
            db = chunked_matmul(d.t(), u.narrow(1, rank, r), scale).to(b.dtype)
        dbs.append(db)
        rank += r
    return du, dbs


def _a_gradient(du: Tensor, x: Tensor, dropout: Dropout | None) -> Tensor:
    """Returns dA [R, C] from dU [N, R] and x [..., C]."""
    x = x if dropout is None else apply_dropout(x, dropout)
    # Attention of more ranks than share its heads returns rows that are not next to each other
    return chunked_matmul(du.t(), x.reshape(-1, x.shape[-1]))


class _LoRACall(NamedTuple):
    """The arguments of a call that are no tensors of the graph."""

    base: BaseLinear
    columns_and_scales: Sequence[tuple[int, float]]  # first column and scale of each addition
    recompute_fn: RecomputeFn | None  # x is computed again
    gated: tuple[Activation, bool] | None  # and whether its gradient may overwrite gate_up
    dropout: Dropout | None

    def additions(self, bs: Sequence[Tensor]) -> list[LoRATerm]:
        """Returns the terms with these B matrices, one for each adapted range of columns."""
        return [LoRATerm(f, b, s) for (f, s), b in zip(self.columns_and_scales, bs, strict=True)]


class _LoRALinear(torch.autograd.Function):
    """The layer with a frozen base. Differentiates to `gate_up` instead of x if that is given.

    x is then the gated activation of `gate_up`, and nothing else reads it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_up: Tensor | None, *args: Any) -> Tensor:
        weight, bias, a, u, call, saved_x, *bs = args
        ctx.call, ctx.shape, ctx.columns = call, x.shape, weight.shape[0]
        ctx.save_for_backward(weight, a, u, *bs, *saved_x)
        if defers_product():
            return placeholder(x, ctx.columns)
        return _base_plus_low_rank(call.base, x, weight, bias, u, call.additions(bs))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("a product with low-rank additions")
        call: _LoRACall = ctx.call
        weight, a, u, *rest = ctx.saved_tensors
        bs, saved_x = rest[: len(call.columns_and_scales)], rest[len(call.columns_and_scales) :]
        needs_x, needs_gate_up, _, _, needs_a, *_ = ctx.needs_input_grad
        rows = dy.reshape(-1, ctx.columns)
        # A gated activation has no remote parts
        remote = start_fetch(call.recompute_fn, saved_x) if needs_a else None
        needs_bs = ctx.needs_input_grad[8:][: len(bs)]
        du, dbs = _low_rank_gradients(rows, u, call.additions(bs), needs_bs)
        da = dx = dgate_up = None
        if remote is not None and needs_x:
            dx = _x_gradient(call.base, rows, weight, du, a, call.dropout).view(ctx.shape)
            remote.reduce(dx)
        if needs_a and not needs_gate_up:  # first: what is computed again is gone when dX comes
            da = _a_gradient(du, run_recompute(call.recompute_fn, saved_x), call.dropout)
        if (needs_x or needs_gate_up) and dx is None:
            dx = _x_gradient(call.base, rows, weight, du, a, call.dropout).view(ctx.shape)
        if needs_gate_up:
            assert dx is not None and call.gated is not None
            dgate_up, x = gradient_and_product(dx, saved_x[0], *call.gated)
            da, dx = _a_gradient(du, x, call.dropout), None
        da = None if da is None else da.to(a.dtype)
        return dx, dgate_up, None, None, da, None, None, None, *dbs


def _fits_one_node(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether one autograd node can compute the product of a frozen weight and its additions."""
    return (
        not torch.compiler.is_compiling()
        and is_plain_parameter(weight)
        and not weight.requires_grad
        and (bias is None or not bias.requires_grad)
        and has_plain_operands(x, weight)
    )


def lora_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a: Tensor,
    additions: Sequence[LoRATerm],
    *,
    base: BaseLinear = PLAIN_BASE,
    dropout: Dropout | None = None,
) -> Tensor:
    """Returns `linear(x, weight, bias)`, x [..., C], weight [K, C], plus the parts' additions.

    `a` [R, C] has the rows of all parts in the order of `additions`, whose columns ascend and do
    not overlap. `base` computes the product with the weight. `dropout` applies to the input of A;
    its keys have the rows of x.
    """
    if dropout is not None:
        dropout.check(x)
        additions = _scale_terms(additions, dropout)
    if not (x.numel() and _fits_one_node(x, weight, bias)):
        if (recompute := find_recompute(x)) is not None:
            recompute.single_reader = False  # A reads x, too
        y = base.linear(x, weight, bias)
        return _add_terms(y, x if dropout is None else apply_dropout(x, dropout), a, additions)
    if not torch.is_grad_enabled():
        plain = base.plain and not uses_gemv(x, weight)
        rows = base._replace(product=base.linear, plain=plain)
        u = _project_down(x, a, dropout)
        return _base_plus_low_rank(rows, x, weight, bias, u, additions)
    values, gate_up, recompute_fn, gated = x, None, None, None
    saved_x: Sequence[Tensor | None] = ()
    recompute = find_recompute(x) if a.requires_grad else None
    if recompute is not None and recompute.gated is not None and recompute.single_reader:
        gate_up, act, node = recompute.gated
        values, saved_x, gated = x.detach(), (gate_up,), (act, node.overwrite)
    elif a.requires_grad:
        recompute_fn, saved_x = save_input(x, recompute)
    with torch.no_grad():
        u = _project_down(x, a, dropout)
    columns_and_scales = [(first, scale) for first, _, scale in additions]
    call = _LoRACall(base, columns_and_scales, recompute_fn, gated, dropout)
    bs = [b for _, b, _ in additions]
    y = _LoRALinear.apply(values, gate_up, weight, bias, a, u, call, saved_x, *bs)
    return finish_product(y, lambda: _base_plus_low_rank(base, x, weight, bias, u, additions))
