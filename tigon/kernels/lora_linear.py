"""A linear layer with low-rank additions (LoRA), one for each part of a packed projection.

# ... any leading dimensions, N rows of them, C columns of x, K of y, K_p those of a part,
# r rank of a part, R ranks of all parts together

y = x W^T + bias, and to the columns of each part s (x A^T) B^T is added. Source: Hu et al. (arXiv
2106.09685); the numbers are those of PEFT's separate projections. x is read once for all parts'
A [R, C], and the additions go into the memory of y. Where the base is frozen there is one node for
all of it: it keeps u = x A^T [N, R] and x, or how x is computed again (`_rebuilt`), which only dA
needs; dX = dY W + dU A, and nothing is computed for the base. On a GPU what is added is written
first, and torch's product adds itself to it (`_low_rank`); another base's product, such as that of
8-bit floats, comes first.

With dropout (`tigon.kernels.dropout`) A reads x with some elements 0, and what is added is
multiplied by 1 / (1 - p); the base's product has all of x. Nothing is kept for it: backward drops
the same of x, for dA, and of dU A. Parts share what is dropped.

Rounding, below fp32: A and B are cast to the dtype of x; u, dU, every addition to y and to dX, and
dA and dB are sums in fp32 that are rounded once. y and dX are rounded a second time by the
additions, as PEFT's are. dA and dB are then cast to the parameters' dtype.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels._linear_autograd import computes_later, later, summed_linear, without_numbers
from tigon.kernels._long_sums import long_sum
from tigon.kernels._low_rank import (
    low_rank_gradients,
    low_rank_product,
    serves_gradients,
    serves_product,
)
from tigon.kernels._rebuilt import How, compute_again, fetch_again, recipe_of, sees_products
from tigon.kernels._triton import autocast_dtype, refuse_second_derivative
from tigon.kernels.dropout import Dropout, drop, drop_ref
from tigon.kernels.fp8_linear import fp8_gradient, fp8_linear, fp8_product
from tigon.kernels.gated_act import Activation, gradient_and_product
from tigon.kernels.row_linear import linear, takes_row


class Addition(NamedTuple):
    """What is added to the columns of a part."""

    first: int  # of the part's columns in y
    b: Tensor  # [K_p, r]
    scale: float


class Base(NamedTuple):
    """The product that is added to: y of x, weight and bias, and dX [N, C] of dY [N, K]."""

    product: Callable[[Tensor, Tensor, Tensor | None], Tensor]  # without a graph
    gradient: Callable[[Tensor, Tensor], Tensor]
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]  # with one, where there is to be one
    plain: bool = False  # they are torch's own, which can add themselves to what there is


PLAIN = Base(F.linear, torch.mm, linear, plain=True)
FP8 = Base(fp8_product, fp8_gradient, fp8_linear)


def lora_linear_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a: Tensor,
    additions: Sequence[Addition],
    dropout: Dropout | None = None,
) -> Tensor:
    """The definition."""
    y = F.linear(x, weight, bias)
    if dropout is not None:
        x, additions = drop_ref(x, dropout), _scaled(additions, dropout)
    return _added(y, x, a, additions)


def _scaled(additions: Sequence[Addition], dropout: Dropout) -> list[Addition]:
    """By 1 / (1 - p), so that their mean is that without dropout."""
    return [add._replace(scale=add.scale / (1 - dropout.share)) for add in additions]


def _added(y: Tensor, x: Tensor, a: Tensor, additions: Sequence[Addition]) -> Tensor:
    """By operators that autograd, torch.compile and autocast know."""
    u = summed_linear(x, a.to(x.dtype))
    pieces, column, rank = [], 0, 0
    for first, b, scale in additions:
        pieces.append(y[..., column:first])
        column, r = first + b.shape[0], b.shape[1]
        own = summed_linear(u[..., rank : rank + r], b.to(u.dtype)) * scale
        pieces.append(y[..., first:column] + own)
        rank += r
    pieces.append(y[..., column:])
    filled = [piece for piece in pieces if piece.shape[-1]]
    return filled[0] if len(filled) == 1 else torch.cat(filled, -1)


def _add_into(y: Tensor, u: Tensor, additions: Sequence[Addition]) -> Tensor:
    """Adds to the memory of y [..., K], of u [N, R]."""
    rows, rank = y.view(-1, y.shape[-1]), 0
    for first, b, scale in additions:
        size, r = b.shape
        own = u.narrow(1, rank, r)
        rows.narrow(1, first, size).addmm_(own, b.to(u.dtype).t(), alpha=scale)
        rank += r
    return y


def _ranks(additions: Sequence[Addition]) -> int:
    """The largest."""
    return max(add.b.shape[1] for add in additions)


def _sum(
    base: Base,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    u: Tensor,
    additions: Sequence[Addition],
) -> Tensor:
    """The base's product and what is added to it, of u [N, R]."""
    if not (base.plain and serves_product(u, _ranks(additions))):
        return _add_into(base.product(x, weight, bias), u, additions)
    firsts, bs, scales = zip(*additions, strict=True)
    y = low_rank_product(u, bs, firsts, scales, weight.shape[0], bias, False)
    y.addmm_(x.reshape(-1, x.shape[-1]), weight.t())
    # No view: FSDP2 warns of views among what a module returns
    return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[-1]))


def _of_x(x: Tensor, a: Tensor, dropout: Dropout | None) -> Tensor:
    """u [N, R], of x [..., C]."""
    x = x if dropout is None else drop(x, dropout)
    return F.linear(x.reshape(-1, x.shape[-1]), a.to(x.dtype))


def _gradient(
    base: Base, dy: Tensor, weight: Tensor, du: Tensor, a: Tensor, dropout: Dropout | None
) -> Tensor:
    """dX [N, C], of dY [N, K] and dU [N, R]."""
    if not (base.plain and serves_product(du, a.shape[0])):
        dx = base.gradient(dy, weight)
        if dropout is None:
            return dx.addmm_(du, a.to(du.dtype))
        return dx.add_(drop(du.mm(a.to(du.dtype)), dropout))
    how = () if dropout is None else (dropout.keys, dropout.place, dropout.threshold)
    dx = low_rank_product(du, [a], [0], [1.0], a.shape[1], None, True, *how)
    return dx.addmm_(dy, weight)


def _low_rank_gradients(
    dy: Tensor, u: Tensor, additions: Sequence[Addition], needed: Sequence[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """dU [N, R], and dB of those parts that need it."""
    if serves_gradients(dy, _ranks(additions)):
        firsts, bs, scales = zip(*additions, strict=True)
        du, *found = low_rank_gradients(dy, u, bs, firsts, scales, any(needed))
        found = found or bs
        return du, [db if need else None for db, need in zip(found, needed, strict=True)]
    du, dbs, rank = dy.new_empty(u.shape), [], 0
    for (first, b, scale), need in zip(additions, needed, strict=True):
        size, r = b.shape
        d = dy.narrow(1, first, size)
        du.narrow(1, rank, r).addmm_(d, b.to(d.dtype), beta=0, alpha=scale)
        db = None
        if need:
            db = long_sum(d.t(), u.narrow(1, rank, r), scale).to(b.dtype)
        dbs.append(db)
        rank += r
    return du, dbs


def _of_a(du: Tensor, x: Tensor, dropout: Dropout | None) -> Tensor:
    """dA [R, C], of dU [N, R] and x [..., C]."""
    x = x if dropout is None else drop(x, dropout)
    # Attention of more ranks than share its heads returns rows that are not next to each other
    return long_sum(du.t(), x.reshape(-1, x.shape[-1]))


class _Call(NamedTuple):
    """What is no tensor of the graph."""

    base: Base
    places: Sequence[tuple[int, float]]  # first column and scale of each addition
    how: How | None  # x is computed again
    gated: tuple[Activation, bool] | None  # and whether its gradient may overwrite gate_up
    apart: bool
    dropout: Dropout | None

    def additions(self, bs: Sequence[Tensor]) -> list[Addition]:
        return [Addition(f, b, s) for (f, s), b in zip(self.places, bs, strict=True)]


class _LoRALinear(torch.autograd.Function):
    """`gate_up` is given in place of x's graph, where x is its gated activation and nobody else's.

    `apart`: y is not computed; see `later`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_up: Tensor | None, *given: Any) -> Tensor:
        weight, bias, a, u, call, kept, *bs = given
        ctx.call, ctx.shape, ctx.columns = call, x.shape, weight.shape[0]
        ctx.save_for_backward(weight, a, u, *bs, *kept)
        if call.apart:
            return without_numbers(x, ctx.columns)
        return _sum(call.base, x, weight, bias, u, call.additions(bs))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("a product with low-rank additions")
        call: _Call = ctx.call
        weight, a, u, *rest = ctx.saved_tensors
        bs, kept = rest[: len(call.places)], rest[len(call.places) :]
        of_x, of_gate_up, _, _, of_a, *_ = ctx.needs_input_grad
        rows = dy.reshape(-1, ctx.columns)
        remote = None
        if of_a and call.how is not None:  # not of a gated activation
            remote = fetch_again(call.how, kept)
        du, dbs = _low_rank_gradients(
            rows, u, call.additions(bs), ctx.needs_input_grad[8:][: len(bs)]
        )
        da = dx = dgate_up = None
        if remote is not None and of_x:
            dx = _gradient(call.base, rows, weight, du, a, call.dropout).view(ctx.shape)
            remote.reduce(dx)
        if of_a and not of_gate_up:  # else first: what is computed again is gone when dX comes
            x = kept[0] if call.how is None else compute_again(call.how, kept)
            da = _of_a(du, x, call.dropout)
            del x
        if (of_x or of_gate_up) and dx is None:
            dx = _gradient(call.base, rows, weight, du, a, call.dropout).view(ctx.shape)
        if of_gate_up:
            assert dx is not None and call.gated is not None
            dgate_up, x = gradient_and_product(dx, kept[0], *call.gated)
            da, dx = _of_a(du, x, call.dropout), None
        da = None if da is None else da.to(a.dtype)
        return dx, dgate_up, None, None, da, None, None, None, *dbs


def _as_one(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether one node may stand for the product of a frozen weight and what is added to it."""
    return (
        not torch.compiler.is_compiling()
        and type(x) is Tensor
        and type(weight) is torch.nn.Parameter
        and not weight.requires_grad
        and (bias is None or not bias.requires_grad)
        and x.dtype == weight.dtype
        and autocast_dtype(x.device) is None
        and not sees_products()
    )


def lora_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a: Tensor,
    additions: Sequence[Addition],
    *,
    base: Base = PLAIN,
    dropout: Dropout | None = None,
) -> Tensor:
    """`linear(x, weight, bias)` of x [..., C] and weight [K, C], plus what the parts add to it.

    `a` [R, C] has the rows of all parts in the order of `additions`, whose columns do not overlap
    and ascend. `base` computes the product with the weight. `dropout` is of what A reads; its keys
    have the rows of x.
    """
    if dropout is not None:
        dropout.check(x)
        additions = _scaled(additions, dropout)
    if not (x.numel() and _as_one(x, weight, bias)):
        if (recipe := recipe_of(x)) is not None:
            recipe.alone = False  # A reads x, too
        y = base.linear(x, weight, bias)
        return _added(y, x if dropout is None else drop(x, dropout), a, additions)
    if not torch.is_grad_enabled():
        plain = base.plain and not takes_row(x, weight)
        rows = base._replace(product=base.linear, plain=plain)
        u = _of_x(x, a, dropout)
        return _sum(rows, x, weight, bias, u, additions)
    apart = computes_later()
    own, gate_up, how, gated = x, None, None, None
    kept: tuple[Tensor | None, ...] = (x,) if a.requires_grad else ()
    recipe = recipe_of(x) if a.requires_grad else None
    if recipe is not None and recipe.gated is not None and recipe.alone:
        gate_up, act, node = recipe.gated
        own, kept, gated = x.detach(), (gate_up,), (act, node.overwrite)
    elif recipe is not None:
        recipe.keep_gate_up()
        how, kept = recipe.how, recipe.kept
    with torch.no_grad():
        u = _of_x(x, a, dropout)
    places = [(first, scale) for first, _, scale in additions]
    call = _Call(base, places, how, gated, apart, dropout)
    bs = [b for _, b, _ in additions]
    place: Tensor = _LoRALinear.apply(own, gate_up, weight, bias, a, u, call, kept, *bs)
    if not apart:
        return place
    return later(place, lambda: _sum(base, x, weight, bias, u, additions))
