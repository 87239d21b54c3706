"""Products of low rank that join those of packed matrices, and their gradients, by parts.

# N rows of u, K columns of y, K_p those of part p, r rank of a part, R ranks of all parts,
# P rank of a tile (r padded to a power of 2), S strips of columns, L runs of rows

Part p has the columns of y from `firsts[p]` on, as many as its B_p [K_p, r] has rows, and the
columns of u [N, R] after those of the parts before it. Columns may belong to no part.

`low_rank_product` writes 2 N K bytes in bf16, of s_p u_p B_p^T. cuBLAS, asked to add a product to
it, reads it while it computes, which takes less time than an addition to a finished product.

`low_rank_gradients` reads the 2 N K bytes of dY once for dU_p = s_p dY_p B_p and dB_p = s_p dY_p^T
u_p. A program has a strip of columns and a run of rows and writes its share of dU and dB in fp32; a
second kernel adds the shares in a fixed order: 4 N S P and 4 L K P bytes, written and read.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tigon.kernels.linear.dropout import keep_mask
from tigon.kernels.runtime import (
    INTERPRETED,
    as_rows,
    next_power_of_2,
    operator,
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


def supports_rank(x: Tensor, rank: int, widest: int) -> bool:
    """Whether kernels run on x for parts of up to `rank` ranks, which take at most `widest` bytes
    when padded: WIDEST_PRODUCT or WIDEST_GRADIENTS."""
    # The interpreter has no bf16 products
    has_product = x.device.type != "cpu" or x.dtype in (torch.float16, torch.float32)
    return has_product and runs_triton(x) and _pad_rank(rank) * x.element_size() <= widest


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


@operator(
    "low_rank_product", lambda u, bs, firsts, scales, columns, *_: u.new_empty(u.shape[0], columns)
)
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
    y = u.new_empty(u.shape[0], columns)
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
