"""Linear layers with low-rank additions (LoRA), one for each part of a packed projection.

# ... any leading dimensions, N rows of them, C columns of x, K columns of y, K_p those of part p,
# r rank of a part, R ranks of all parts, P rank of a tile (r padded to a power of 2), S strips of
# columns, L runs of rows

y = x W^T + bias, and s (x A^T) B^T is added to the columns of each part. Source: Hu et al. (arXiv
2106.09685); the numbers are those of PEFT's separate projections. Part p has the columns from
`firsts[p]` on, as many as its B_p [K_p, r] has rows, and the columns of u = x A^T [N, R] after
those of the parts before it. Columns may belong to no part.

`low_rank_product` writes 2 N K bytes in bf16, of s_p u_p B_p^T. cuBLAS, asked to add a product to
it, reads it while it computes, which takes less time than an addition to a finished product.

`low_rank_gradients` reads the 2 N K bytes of dY once for dU_p = s_p dY_p B_p and dB_p = s_p dY_p^T
u_p. A program has a strip of columns and a run of rows and writes its share of dU and dB in fp32; a
second kernel adds the shares in a fixed order: 4 N S P and 4 L K P bytes, written and read.

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

from tigon.kernels.linear.dropout import Dropout, apply_dropout, apply_dropout_ref, keep_mask
from tigon.kernels.linear.fp8 import ColumnMaxima, fp8_gradient, fp8_linear, fp8_product
from tigon.kernels.linear.linear import (
    chunked_linear,
    chunked_matmul,
    deferred_product,
    defers_product,
    has_plain_operands,
    linear,
    placeholder,
    uses_gemv,
)
from tigon.kernels.mlp.gated_act import Activation, gradient_and_product
from tigon.kernels.recompute import RecomputeFn, find_recompute, run_recompute, start_fetch
from tigon.kernels.runtime import (
    INTERPRETED,
    as_rows,
    next_power_of_2,
    operator,
    refuse_second_derivative,
    runs_triton,
    tl,
    triton,
)

# Rows, columns and warps of a tile of `low_rank_product`, the best of some tried on an H200. The
# interpreter, which takes as long for a tile of any size, tests with more of them
TILE = (16, 32, 1) if INTERPRETED else (64, 128, 4)
# Rows of a step, columns of a strip, warps, and steps in flight of `low_rank_gradients`; and how
# many programs there are to be at least, as far as runs of LEAST rows allow
STRIP = (16, 32, 1, 1) if INTERPRETED else (32, 256, 4, 3)
PROGRAMS, LEAST = 512, 32 if INTERPRETED else 128
ROWS, SHARES = 16, 8  # of the sums of shares: rows of a program, and shares that are read at once
# Up to which rank the kernels are used, in bytes of a row of a tile: the tiles fit in registers
# and shared memory. Shares of dU with a larger rank are no less than dY
WIDEST_PRODUCT, WIDEST_GRADIENTS = 256, 64


def _pad_rank(rank: int) -> int:
    """Rounds a rank up to a power of two that tl.dot takes."""
    return max(16, next_power_of_2(rank))  # the least that tl.dot takes


def _supports(x: Tensor, rank: int, widest: int) -> bool:
    """Whether kernels run on x for this rank, which takes at most `widest` bytes when padded."""
    # The interpreter has no bf16 products
    has_product = x.device.type != "cpu" or x.dtype in (torch.float16, torch.float32)
    return has_product and runs_triton(x) and _pad_rank(rank) * x.element_size() <= widest


def supports_product(x: Tensor, rank: int) -> bool:
    """Whether `low_rank_product` can run for parts of up to `rank` ranks."""
    return _supports(x, rank, WIDEST_PRODUCT)


def supports_gradients(x: Tensor, rank: int) -> bool:
    """Whether `low_rank_gradients` can run for parts of up to `rank` ranks."""
    return _supports(x, rank, WIDEST_GRADIENTS)


@triton.jit(do_not_specialize=["seed", "threshold", "N"])
def _low_rank_product_kernel(
    y, u, bs, bias, firsts, sizes, ranks, scales, keys, seed, threshold, N, K, u_row,
    PARTS: tl.constexpr, TRANSPOSED: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Writes one tile of y; neighboring programs walk along its rows."""
    blocks = tl.cdiv(K, COLUMNS)
    i = tl.program_id(0) // blocks
    start = (tl.program_id(0) - i * blocks) * COLUMNS
    rows = (i * ROWS + tl.arange(0, ROWS))[:, None]
    columns = (start + tl.arange(0, COLUMNS))[None, :]
    each = tl.arange(0, P)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    rank = 0
    for p in tl.static_range(PARTS):
        if (firsts[p] < start + COLUMNS) & (start < firsts[p] + sizes[p]):
            rank_mask = each < ranks[p]
            at = u + rows.to(tl.int64) * u_row + rank + each[None, :]
            values = tl.load(at, mask=(rows < N) & rank_mask[None, :], other=0.0)
            offset = columns - firsts[p]
            if TRANSPOSED:
                at = bs[p] + each[:, None] * sizes[p] + offset
            else:
                at = bs[p] + offset * ranks[p] + each[:, None]
            inside = (offset >= 0) & (offset < sizes[p]) & rank_mask[:, None]
            b = tl.load(at, mask=inside, other=0.0).to(values.dtype)
            sums += tl.dot(values, b, input_precision="ieee") * scales[p]
        rank += ranks[p]
    if bias is not None:
        sums += tl.load(bias + columns, mask=columns < K, other=0.0).to(tl.float32)
    if keys is not None:
        each_row = i * ROWS + tl.arange(0, ROWS)
        streams = tl.load(keys + each_row, mask=each_row < N, other=0) + seed
        sums = tl.where(keep_mask(streams, start, threshold, COLUMNS), sums, 0.0)
    at = y + rows.to(tl.int64) * K + columns
    tl.store(at, sums.to(y.dtype.element_ty), mask=(rows < N) & (columns < K))


def _product(u: Tensor, bs: Any, firsts: Any, scales: Any, columns: int, *_: Any) -> Tensor:
    """Allocates the low-rank terms' sum [N, columns]."""
    return u.new_empty(u.shape[0], columns)


@operator("low_rank_product", _product)
def low_rank_product(
    u: Tensor,
    bs: Sequence[Tensor],
    firsts: Sequence[int],
    scales: Sequence[float],
    columns: int,
    bias: Tensor | None,
    transposed: bool,
    keys: Tensor | None = None,
    seed: int = 0,
    threshold: int = 0,
) -> Tensor:
    """Returns [N, K] with K = `columns`: s_p u_p B_p^T in the columns of part p, plus the bias [K].

    u is [N, R], B_p [K_p, r] or, transposed, [r, K_p]. Sums are fp32 and rounded once to the dtype
    of u. With keys [N], elements that dropout with `seed` as seed and `threshold` drops are 0.
    """
    y = _product(u, bs, firsts, scales, columns)
    if y.numel():
        bs, u = [b.contiguous() for b in bs], as_rows(u)
        sizes, ranks = ([b.shape[side] for b in bs] for side in (transposed, not transposed))
        rows, block, warps = TILE
        grid = (triton.cdiv(u.shape[0], rows) * triton.cdiv(columns, block),)
        _low_rank_product_kernel[grid](
            y, u, tuple(bs), None if bias is None else bias.contiguous(),
            tuple(firsts), tuple(sizes), tuple(ranks), tuple(scales),
            None if keys is None else keys.contiguous(), seed, threshold, *y.shape, u.stride(0),
            PARTS=len(bs), TRANSPOSED=transposed, P=_pad_rank(max(ranks)),
            ROWS=rows, COLUMNS=block, num_warps=warps,
        )  # fmt: skip
    return y


@triton.jit
def _load_strip(
    bs, firsts, sizes, ranks, strip, dtype: tl.constexpr, PARTS: tl.constexpr, P: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Loads the rows of B [COLUMNS, P] of a strip, which belongs to one part.

    Also returns the strip's first column in dY, the number of columns from there to the end of the
    part, the part's first rank and its number of ranks.
    """
    local, each = tl.arange(0, COLUMNS)[:, None], tl.arange(0, P)[None, :]
    b = tl.zeros([COLUMNS, P], dtype)
    column, remaining, rank, r = 0, 0, 0, 0
    start, before = 0, 0  # strips and ranks of the parts before
    for p in tl.static_range(PARTS):
        count = tl.cdiv(sizes[p], COLUMNS)
        offset = (strip - start) * COLUMNS + local
        rank_mask = (offset >= 0) & (offset < sizes[p]) & (each < ranks[p])
        b += tl.load(bs[p] + offset * ranks[p] + each, mask=rank_mask, other=0.0).to(dtype)
        in_part = (strip >= start) & (strip < start + count)
        column = tl.where(in_part, firsts[p] + (strip - start) * COLUMNS, column)
        remaining = tl.where(in_part, sizes[p] - (strip - start) * COLUMNS, remaining)
        rank = tl.where(in_part, before, rank)
        r = tl.where(in_part, ranks[p], r)
        start += count
        before += ranks[p]
    return b, column, remaining, rank, r


@triton.jit(do_not_specialize=["N", "strips"])  # 1 would be a number without methods
def _low_rank_shares_kernel(
    dy, u, bs, u_shares, b_shares, firsts, sizes, ranks, N, strips, length, dy_row, u_row,
    PARTS: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Writes to u_shares [S, N, P] dY B of a strip, and to b_shares [L, S COLUMNS, P] dY^T u of a
    run.

    A run has `length` rows. Neighboring programs walk along the rows of dY.
    """
    run = tl.program_id(0) // strips
    strip = tl.program_id(0) - run * strips
    dtype: tl.constexpr = dy.dtype.element_ty
    b, column, remaining, rank, r = _load_strip(
        bs, firsts, sizes, ranks, strip, dtype, PARTS, P, COLUMNS
    )  # fmt: skip
    local, each = tl.arange(0, COLUMNS), tl.arange(0, P)
    total = tl.zeros([COLUMNS, P], tl.float32)
    end = tl.minimum(run * length + length, N)
    for i in tl.range(run * length, end, ROWS, num_stages=STAGES):
        rows = (i + tl.arange(0, ROWS))[:, None].to(tl.int64)
        inside = (rows < end) & (local < remaining)[None, :]
        d = tl.load(dy + rows * dy_row + column + local[None, :], mask=inside, other=0.0)
        share = tl.dot(d, b, input_precision="ieee")
        tl.store(
            u_shares + (strip * N.to(tl.int64) + rows) * P + each[None, :], share, mask=rows < end
        )
        if b_shares is not None:
            rank_mask = (rows < end) & (each < r)[None, :]
            values = tl.load(u + rows * u_row + rank + each[None, :], mask=rank_mask, other=0.0)
            total = tl.dot(tl.trans(d), values, total, input_precision="ieee")
    if b_shares is not None:
        first = (run * strips + strip).to(tl.int64) * COLUMNS
        tl.store(b_shares + (first + local)[:, None] * P + each[None, :], total)


@triton.jit
def _sum_partials(shares, first, last, stride, at, inside, SHARES: tl.constexpr):
    """Sums the shares from `first` to `last`, `stride` elements apart, at the elements `at`."""
    total = tl.zeros(at.shape, tl.float32)
    for i in range(first, last, SHARES):
        k = i + tl.arange(0, SHARES)[:, None, None]
        rank_mask = (k < last) & inside[None]
        total += tl.sum(tl.load(shares + k * stride + at[None], mask=rank_mask, other=0.0), 0)
    return total


@triton.jit(do_not_specialize=["N", "strips", "runs"])
def _low_rank_sums_kernel(
    u_shares, b_shares, du, dbs, sizes, ranks, scales, N, strips, runs,
    PARTS: tl.constexpr, R: tl.constexpr, P: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """Sums the shares: the first programs compute rows of dU, part by part, the rest rows of dB."""
    blocks = tl.cdiv(N, ROWS)
    i = tl.program_id(0)
    each = tl.arange(0, P)[None, :]
    dtype: tl.constexpr = du.dtype.element_ty
    start, rank = 0, 0  # strips and ranks of the parts before
    if i < PARTS * blocks:
        rows = ((i % blocks) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
        for p in tl.static_range(PARTS):
            count = tl.cdiv(sizes[p], COLUMNS)
            if i // blocks == p:
                inside = (rows < N) & (each < ranks[p])
                stride = N.to(tl.int64) * P
                total = _sum_partials(
                    u_shares, start, start + count, stride, rows * P + each, inside, SHARES
                )
                tl.store(du + rows * R + rank + each, (total * scales[p]).to(dtype), mask=inside)
            start += count
            rank += ranks[p]
    elif b_shares is not None:
        rows = ((i - PARTS * blocks) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
        stride = strips.to(tl.int64) * COLUMNS * P
        total = _sum_partials(b_shares, 0, runs, stride, rows * P + each, rows >= 0, SHARES)
        for p in tl.static_range(PARTS):
            offset = rows - start * COLUMNS
            inside = (offset >= 0) & (offset < sizes[p]) & (each < ranks[p])
            # Rounded to the dtype of dU first, whatever that of B is
            values = (total * scales[p]).to(dtype)
            tl.store(dbs[p] + offset * ranks[p] + each, values, mask=inside)
            start += tl.cdiv(sizes[p], COLUMNS)


def _gradients(dy: Tensor, u: Tensor, bs: Sequence[Tensor], *args: object) -> list[Tensor]:
    """Allocates the gradients of u and, unless they are frozen, of the B matrices."""
    b_shares = args[-1]
    return [dy.new_empty(u.shape), *(b.new_empty(b.shape) for b in (bs if b_shares else ()))]


@operator("low_rank_gradients", _gradients)
def low_rank_gradients(
    dy: Tensor,
    u: Tensor,
    bs: Sequence[Tensor],
    firsts: Sequence[int],
    scales: Sequence[float],
    b_shares: bool,
) -> list[Tensor]:
    """Returns dU [N, R] and, with `b_shares`, dB_p [K_p, r] of all parts, from dY [N, K].

    Sums are fp32 and rounded once to the dtype of dY; dB is then cast to the dtype of B. Every call
    gives the same bits.
    """
    du, *dbs = _gradients(dy, u, bs, b_shares)
    sizes, ranks = ([b.shape[side] for b in bs] for side in (0, 1))
    rows, block, warps, stages = STRIP
    N, strips = dy.shape[0], sum(triton.cdiv(size, block) for size in sizes)
    if not N or not strips:
        du.zero_()
        for db in dbs:
            db.zero_()
        return [du, *dbs]
    bs, dy, u, P = [b.contiguous() for b in bs], as_rows(dy), as_rows(u), _pad_rank(max(ranks))
    length = max(LEAST, next_power_of_2(N * strips // PROGRAMS + 1) // 2)
    runs = triton.cdiv(N, length)
    shares = dy.new_empty(strips, N, P, dtype=torch.float32)
    more = dy.new_empty(runs, strips * block, P, dtype=torch.float32) if b_shares else None
    _low_rank_shares_kernel[(runs * strips,)](
        dy, u, tuple(bs), shares, more, tuple(firsts), tuple(sizes), tuple(ranks),
        N, strips, length, dy.stride(0), u.stride(0), PARTS=len(bs), P=P,
        ROWS=rows, COLUMNS=block, STAGES=stages, num_warps=warps,
    )  # fmt: skip
    programs = len(bs) * triton.cdiv(N, ROWS) + (strips * block // ROWS if b_shares else 0)
    _low_rank_sums_kernel[(programs,)](
        shares, more, du, tuple(dbs or bs), tuple(sizes), tuple(ranks), tuple(scales),
        N, strips, runs, PARTS=len(bs), R=du.shape[1], P=P, COLUMNS=block,
        ROWS=ROWS, SHARES=SHARES, num_warps=2,
    )  # fmt: skip
    return [du, *dbs]


# The linear layer. x is read once for the A [R, C] of all parts, and the additions go into the
# memory of y. With a frozen base one node computes all of it: it saves u = x A^T [N, R] and, for dA
# alone, x or how to recompute it; dX = dY W + dU A. On a GPU the additions are written first and
# torch's product is added to them; another base's product, such as fp8, comes first.
#
# With dropout, A reads x with some elements 0 and the additions are multiplied by 1 / (1 - p); the
# base's product has all of x. No mask is saved: backward drops the same elements for dA and of
# dU A. All parts drop the same.


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
    if not (base.plain and supports_product(u, _max_rank(additions))):
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
    if not (base.plain and supports_product(du, a.shape[0])):
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
    if supports_gradients(dy, _max_rank(additions)):
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
    deferred: bool
    dropout: Dropout | None

    def additions(self, bs: Sequence[Tensor]) -> list[LoRATerm]:
        """Returns the terms with these B matrices, one for each adapted range of columns."""
        return [LoRATerm(f, b, s) for (f, s), b in zip(self.columns_and_scales, bs, strict=True)]


class _LoRALinear(torch.autograd.Function):
    """The layer with a frozen base. Differentiates to `gate_up` instead of x if that is given.

    x is then the gated activation of `gate_up`, and nothing else reads it. `deferred`: y is not
    computed; see `deferred_product`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_up: Tensor | None, *args: Any) -> Tensor:
        weight, bias, a, u, call, saved_x, *bs = args
        ctx.call, ctx.shape, ctx.columns = call, x.shape, weight.shape[0]
        ctx.save_for_backward(weight, a, u, *bs, *saved_x)
        if call.deferred:
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
        remote = None
        if needs_a and call.recompute_fn is not None:  # not of a gated activation
            remote = start_fetch(call.recompute_fn, saved_x)
        needs_bs = ctx.needs_input_grad[8:][: len(bs)]
        du, dbs = _low_rank_gradients(rows, u, call.additions(bs), needs_bs)
        da = dx = dgate_up = None
        if remote is not None and needs_x:
            dx = _x_gradient(call.base, rows, weight, du, a, call.dropout).view(ctx.shape)
            remote.reduce(dx)
        if needs_a and not needs_gate_up:  # first: what is computed again is gone when dX comes
            fn = call.recompute_fn
            da = _a_gradient(
                du, saved_x[0] if fn is None else run_recompute(fn, saved_x), call.dropout
            )
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
        and type(weight) is torch.nn.Parameter
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
    """Returns `linear(x, weight, bias)` for x [..., C] and weight [K, C], plus the parts'
    additions.

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
    deferred = defers_product()
    values, gate_up, recompute_fn, gated = x, None, None, None
    saved_x: tuple[Tensor | None, ...] = (x,) if a.requires_grad else ()
    recompute = find_recompute(x) if a.requires_grad else None
    if recompute is not None and recompute.gated is not None and recompute.single_reader:
        gate_up, act, node = recompute.gated
        values, saved_x, gated = x.detach(), (gate_up,), (act, node.overwrite)
    elif recompute is not None:
        recompute.keep_gate_up()
        recompute_fn, saved_x = recompute.fn, recompute.saved
    with torch.no_grad():
        u = _project_down(x, a, dropout)
    columns_and_scales = [(first, scale) for first, _, scale in additions]
    call = _LoRACall(base, columns_and_scales, recompute_fn, gated, deferred, dropout)
    bs = [b for _, b, _ in additions]
    y = _LoRALinear.apply(values, gate_up, weight, bias, a, u, call, saved_x, *bs)
    if deferred:
        y = deferred_product(y, lambda: _base_plus_low_rank(base, x, weight, bias, u, additions))
    return y
