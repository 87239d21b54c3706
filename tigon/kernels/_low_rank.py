"""Products of low-rank additions, with factors of few columns: a wide matrix moves once.

# N rows, K columns of the wide matrix, K_p those of a part, r rank of a part, R ranks of all parts,
# P rank of a tile (r, padded to a power of two), S strips of columns, L runs of rows

Part p has the columns `firsts[p]`... of the wide matrix, as many as its B_p [K_p, r] has rows, and
the columns of u [N, R] behind those of the parts before it. Columns of no part are allowed.

`low_rank_product` writes 2 N K bytes in bf16, of s_p u_p B_p^T. cuBLAS, asked to add a product to
it, reads it while it computes: less time than an addition to a finished product takes.

`low_rank_gradients` reads dY, 2 N K bytes, once for dU_p = s_p dY_p B_p and dB_p = s_p dY_p^T u_p.
A program has a strip of columns and a run of rows; its share of dU, of this strip alone, and of dB,
of this run alone, are in fp32, and a second kernel adds the shares in fixed order: 4 N S P and
4 L K P bytes, written and read.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tigon.kernels._triton import (
    INTERPRETED,
    as_rows,
    operator,
    power_of_2,
    runs_triton,
    tl,
    triton,
)
from tigon.kernels.dropout import kept

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


def _padded(rank: int) -> int:
    return max(16, power_of_2(rank))  # the least that tl.dot takes


def _serves(x: Tensor, rank: int, widest: int) -> bool:
    # The interpreter has no bf16 products
    known = x.device.type != "cpu" or x.dtype in (torch.float16, torch.float32)
    return known and runs_triton(x) and _padded(rank) * x.element_size() <= widest


def serves_product(x: Tensor, rank: int) -> bool:
    """Whether `low_rank_product` is for parts of up to `rank` ranks."""
    return _serves(x, rank, WIDEST_PRODUCT)


def serves_gradients(x: Tensor, rank: int) -> bool:
    """Whether `low_rank_gradients` is for parts of up to `rank` ranks."""
    return _serves(x, rank, WIDEST_GRADIENTS)


@triton.jit(do_not_specialize=["place", "threshold"])
def _low_rank_product_kernel(
    y, u, bs, bias, firsts, sizes, ranks, scales, keys, place, threshold, N, K, u_row,
    PARTS: tl.constexpr, TRANSPOSED: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Neighbours walk along the rows of y."""
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
            known = each < ranks[p]
            at = u + rows.to(tl.int64) * u_row + rank + each[None, :]
            own = tl.load(at, mask=(rows < N) & known[None, :], other=0.0)
            of_part = columns - firsts[p]
            if TRANSPOSED:
                at = bs[p] + each[:, None] * sizes[p] + of_part
            else:
                at = bs[p] + of_part * ranks[p] + each[:, None]
            inside = (of_part >= 0) & (of_part < sizes[p]) & known[:, None]
            b = tl.load(at, mask=inside, other=0.0).to(own.dtype)
            sums += tl.dot(own, b, input_precision="ieee") * scales[p]
        rank += ranks[p]
    if bias is not None:
        sums += tl.load(bias + columns, mask=columns < K, other=0.0).to(tl.float32)
    if keys is not None:
        each_row = i * ROWS + tl.arange(0, ROWS)
        streams = tl.load(keys + each_row, mask=each_row < N, other=0) + place
        sums = tl.where(kept(streams, start, threshold, COLUMNS), sums, 0.0)
    at = y + rows.to(tl.int64) * K + columns
    tl.store(at, sums.to(y.dtype.element_ty), mask=(rows < N) & (columns < K))


def _product(u: Tensor, *given: object) -> Tensor:
    columns = given[3]
    assert isinstance(columns, int)
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
    place: int = 0,
    threshold: int = 0,
) -> Tensor:
    """[N, K], K `columns`: s_p u_p B_p^T in those of part p, and in all the bias [K].

    u [N, R], B_p [K_p, r] or, transposed, [r, K_p]. Sums in fp32, rounded once to the dtype of u.
    With keys [N], what dropout of these, `place` and `threshold` drops is 0.
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
            None if keys is None else keys.contiguous(), place, threshold, *y.shape, u.stride(0),
            PARTS=len(bs), TRANSPOSED=transposed, P=_padded(max(ranks)),
            ROWS=rows, COLUMNS=block, num_warps=warps,
        )  # fmt: skip
    return y


@triton.jit
def _of_strip(
    bs, firsts, sizes, ranks, strip, dtype: tl.constexpr, PARTS: tl.constexpr, P: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of a strip, which is of one part: its rows of B [COLUMNS, P], its first column in dY, how
    many columns its part has from there on, and the part's first rank and how many it has."""
    local, each = tl.arange(0, COLUMNS)[:, None], tl.arange(0, P)[None, :]
    b = tl.zeros([COLUMNS, P], dtype)
    column, left, rank, r = 0, 0, 0, 0
    start, before = 0, 0  # strips and ranks of the parts before
    for p in tl.static_range(PARTS):
        count = tl.cdiv(sizes[p], COLUMNS)
        of_part = (strip - start) * COLUMNS + local
        known = (of_part >= 0) & (of_part < sizes[p]) & (each < ranks[p])
        b += tl.load(bs[p] + of_part * ranks[p] + each, mask=known, other=0.0).to(dtype)
        own = (strip >= start) & (strip < start + count)
        column = tl.where(own, firsts[p] + (strip - start) * COLUMNS, column)
        left = tl.where(own, sizes[p] - (strip - start) * COLUMNS, left)
        rank = tl.where(own, before, rank)
        r = tl.where(own, ranks[p], r)
        start += count
        before += ranks[p]
    return b, column, left, rank, r


@triton.jit(do_not_specialize=["N", "strips"])  # 1 would be a number without methods
def _low_rank_shares_kernel(
    dy, u, bs, of_u, of_bs, firsts, sizes, ranks, N, strips, length, dy_row, u_row,
    PARTS: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """of_u [S, N, P]: dY B of a strip. of_bs [L, S COLUMNS, P]: dY^T u of a run of `length` rows.

    Neighbours walk along the rows of dY.
    """
    run = tl.program_id(0) // strips
    strip = tl.program_id(0) - run * strips
    dtype: tl.constexpr = dy.dtype.element_ty
    b, column, left, rank, r = _of_strip(
        bs, firsts, sizes, ranks, strip, dtype, PARTS, P, COLUMNS
    )  # fmt: skip
    local, each = tl.arange(0, COLUMNS), tl.arange(0, P)
    total = tl.zeros([COLUMNS, P], tl.float32)
    end = tl.minimum(run * length + length, N)
    for i in tl.range(run * length, end, ROWS, num_stages=STAGES):
        rows = (i + tl.arange(0, ROWS))[:, None].to(tl.int64)
        inside = (rows < end) & (local < left)[None, :]
        d = tl.load(dy + rows * dy_row + column + local[None, :], mask=inside, other=0.0)
        share = tl.dot(d, b, input_precision="ieee")
        tl.store(of_u + (strip * N.to(tl.int64) + rows) * P + each[None, :], share, mask=rows < end)
        if of_bs is not None:
            known = (rows < end) & (each < r)[None, :]
            own = tl.load(u + rows * u_row + rank + each[None, :], mask=known, other=0.0)
            total = tl.dot(tl.trans(d), own, total, input_precision="ieee")
    if of_bs is not None:
        first = (run * strips + strip).to(tl.int64) * COLUMNS
        tl.store(of_bs + (first + local)[:, None] * P + each[None, :], total)


@triton.jit
def _sum(shares, first, last, stride, at, inside, SHARES: tl.constexpr):
    """Of the shares from `first` on, `stride` elements apart, at the elements `at`."""
    total = tl.zeros(at.shape, tl.float32)
    for i in range(first, last, SHARES):
        k = i + tl.arange(0, SHARES)[:, None, None]
        known = (k < last) & inside[None]
        total += tl.sum(tl.load(shares + k * stride + at[None], mask=known, other=0.0), 0)
    return total


@triton.jit(do_not_specialize=["N", "strips"])
def _low_rank_sums_kernel(
    of_u, of_bs, du, dbs, sizes, ranks, scales, N, strips, runs,
    PARTS: tl.constexpr, R: tl.constexpr, P: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """The first programs have rows of dU, part by part; the others rows of dB."""
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
                total = _sum(of_u, start, start + count, stride, rows * P + each, inside, SHARES)
                tl.store(du + rows * R + rank + each, (total * scales[p]).to(dtype), mask=inside)
            start += count
            rank += ranks[p]
    elif of_bs is not None:
        rows = ((i - PARTS * blocks) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
        stride = strips.to(tl.int64) * COLUMNS * P
        total = _sum(of_bs, 0, runs, stride, rows * P + each, rows >= 0, SHARES)
        for p in tl.static_range(PARTS):
            of_part = rows - start * COLUMNS
            inside = (of_part >= 0) & (of_part < sizes[p]) & (each < ranks[p])
            # Rounded to the dtype of dU first, whatever that of B is
            own = (total * scales[p]).to(dtype)
            tl.store(dbs[p] + of_part * ranks[p] + each, own, mask=inside)
            start += tl.cdiv(sizes[p], COLUMNS)


def _gradients(dy: Tensor, u: Tensor, bs: Sequence[Tensor], *given: object) -> list[Tensor]:
    of_bs = given[-1]
    return [dy.new_empty(u.shape), *(b.new_empty(b.shape) for b in (bs if of_bs else ()))]


@operator("low_rank_gradients", _gradients)
def low_rank_gradients(
    dy: Tensor,
    u: Tensor,
    bs: Sequence[Tensor],
    firsts: Sequence[int],
    scales: Sequence[float],
    of_bs: bool,
) -> list[Tensor]:
    """dU [N, R] and, with `of_bs`, dB_p [K_p, r] of all parts, from dY [N, K].

    Sums in fp32, rounded once to the dtype of dY; dB is then cast to the dtype of B. The same bits
    at every call.
    """
    du, *dbs = _gradients(dy, u, bs, of_bs)
    sizes, ranks = ([b.shape[side] for b in bs] for side in (0, 1))
    rows, block, warps, stages = STRIP
    N, strips = dy.shape[0], sum(triton.cdiv(size, block) for size in sizes)
    if not N or not strips:
        du.zero_()
        for db in dbs:
            db.zero_()
        return [du, *dbs]
    bs, dy, u, P = [b.contiguous() for b in bs], as_rows(dy), as_rows(u), _padded(max(ranks))
    length = max(LEAST, power_of_2(N * strips // PROGRAMS + 1) // 2)
    runs = triton.cdiv(N, length)
    shares = dy.new_empty(strips, N, P, dtype=torch.float32)
    more = dy.new_empty(runs, strips * block, P, dtype=torch.float32) if of_bs else None
    _low_rank_shares_kernel[(runs * strips,)](
        dy, u, tuple(bs), shares, more, tuple(firsts), tuple(sizes), tuple(ranks),
        N, strips, length, dy.stride(0), u.stride(0), PARTS=len(bs), P=P,
        ROWS=rows, COLUMNS=block, STAGES=stages, num_warps=warps,
    )  # fmt: skip
    programs = len(bs) * triton.cdiv(N, ROWS) + (strips * block // ROWS if of_bs else 0)
    _low_rank_sums_kernel[(programs,)](
        shares, more, du, tuple(dbs or bs), tuple(sizes), tuple(ranks), tuple(scales),
        N, strips, runs, PARTS=len(bs), R=du.shape[1], P=P, COLUMNS=block,
        ROWS=ROWS, SHARES=SHARES, num_warps=2,
    )  # fmt: skip
    return [du, *dbs]
