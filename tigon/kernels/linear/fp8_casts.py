"""Casts of matrices to 8-bit floats (e4m3) with a scale for every row or column.

# R rows, C columns of a matrix, S its rows padded to a multiple of 16

x = scale * data, where data is at most 448 and has 3 bits of mantissa. The scale is the smallest
such power of two, so dividing by it rounds nothing. An element is rounded once, to the same number
in its row as in its column, unless it is below 2^-14 of the largest there; with amax / 448, most
elements of a weight would differ between a product and its gradient. The price is at most one of
the 15 binades that e4m3 has above its subnormals. In a row with a number that is not finite, the
scale and all numbers are NaN.

Bytes per element of a bf16 matrix: `cast_rows` 3; `cast_columns` 3 if the columns' maxima are
known, as `cast_rows` finds them, else 5; `cast_both` 4 if both are known, else 6. `cast_normed` has
the 3 of `cast_columns`, where computing the norm again first would add 4.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels.linear.maxima import NO_MAXIMA, Maxima, atomic_max_columns, magnitude
from tigon.kernels.norm.rms_norm import recompute_norm
from tigon.kernels.norm.rms_norm_kernels import apply_scale, load_scale
from tigon.kernels.recompute import RecomputeFn, run_recompute
from tigon.kernels.runtime import (
    as_rows,
    next_power_of_2,
    num_sms,
    num_stages,
    operator,
    runs_triton,
    tl,
    triton,
)

E4M3 = torch.float8_e4m3fn
ALIGN = 16  # of all sizes in torch._scaled_mm but the rows of its first factor
MAX_COLUMNS = 16384  # columns of a row that one program holds; wider ones are read twice
STEP = 4096  # columns of those that are read at a time
COLUMNS_PER_SM = 16384  # columns that a multiprocessor holds with their maxima
STRIP = 512  # rows whose maxima one program of `_maxima_kernel` takes


class Tile(NamedTuple):
    """What one program casts by columns."""

    rows: int
    columns: int
    warps: int


TILE = Tile(128, 64, 8)


class ScaledMatrix(NamedTuple):
    """The matrix scale[:, None] * data."""

    data: Tensor  # e4m3 [R, C], contiguous
    scale: Tensor  # fp32 [R]

    def dequantize(self) -> Tensor:
        """Returns the matrix in fp32 [R, C]."""
        return self.data.float() * self.scale.unsqueeze(1)


def round_up(rows: int) -> int:
    """Rounds a number of rows up to a multiple of 16, which scaled products need."""
    return -(-rows // ALIGN) * ALIGN


def compute_scales_ref(largest: Tensor) -> Tensor:
    """Returns the least powers of two, from 2^-126, with `largest` <= 448 * scale: fp32 [R]."""
    mantissa, exponent = torch.frexp(largest.clamp(min=448 * 2.0**-126) / 448)  # in [0.5, 1)
    exponent = torch.where(mantissa > 0.5, exponent, exponent - 1)
    scale = ((exponent + 127) << 23).view(torch.float32)
    return scale.masked_fill(largest.isfinite().logical_not(), torch.nan)


def cast_rows_ref(x: Tensor) -> ScaledMatrix:
    """Casts x [R, C] to e4m3 with a scale per row: the definition."""
    scale = compute_scales_ref(x.float().abs().amax(1))
    return ScaledMatrix((x.float() / scale.unsqueeze(1)).to(E4M3), scale)


def cast_columns_ref(x: Tensor) -> ScaledMatrix:
    """Casts x [R, C] by columns, transposed to [C, R] with a scale per column: the definition."""
    return cast_rows_ref(F.pad(x.t(), (0, round_up(x.shape[0]) - x.shape[0])))


def scaled_product_ref(a: ScaledMatrix, b: ScaledMatrix) -> Tensor:
    """Returns a [M, K] times b [N, K] transposed, in fp32 and rounded to bf16: the definition."""
    return (a.dequantize() @ b.dequantize().t()).bfloat16()


@triton.jit
def compute_scales(bits):
    """Returns scale and 1 / scale of rows whose largest magnitudes have these bits."""
    # 448 is 1.75 * 2^8: 0x1FFFFF carries into the exponent from the first mantissa above 1.75 on
    exponent = tl.maximum(((bits + 0x1FFFFF) >> 23) - 8, 1)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    finite = bits < 0x7F800000
    return tl.where(finite, scale, float("nan")), tl.where(finite, inverse, float("nan"))


@triton.jit(do_not_specialize=["R"])
def _rows_kernel(
    x, data, scales,
    column_bits,  # None, or int32 [C], which become the columns' maxima
    R, x_row,
    C: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Casts rows that fit into one program, and updates the maxima of the columns if asked to."""
    columns = tl.arange(0, BLOCK)
    mask = columns < C
    if column_bits is not None:
        top = tl.zeros([BLOCK], tl.int32)
    for at in tl.range(tl.program_id(0), R, tl.num_programs(0), num_stages=STAGES):
        row = tl.cast(at, tl.int64)
        v = tl.load(x + row * x_row + columns, mask=mask, other=0.0).to(tl.float32)
        bits = magnitude(v)
        scale, inverse = compute_scales(tl.max(bits, 0))
        tl.store(data + row * C + columns, (v * inverse).to(tl.float8e4nv), mask=mask)
        tl.store(scales + row, scale)
        if column_bits is not None:
            top = tl.maximum(top, bits)
    if column_bits is not None:
        atomic_max_columns(column_bits, columns, top, mask)


@triton.jit
def _wide_rows_kernel(x, data, scales, x_row, C: tl.constexpr, BLOCK: tl.constexpr):
    """Casts rows wider than a program holds, in two passes."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    top = tl.zeros([BLOCK], tl.int32)
    for start in range(0, C, BLOCK):
        at = start + columns
        v = tl.load(x + row * x_row + at, mask=at < C, other=0.0).to(tl.float32)
        top = tl.maximum(top, magnitude(v))
    scale, inverse = compute_scales(tl.max(top, 0))
    for start in range(0, C, BLOCK):
        at = start + columns
        v = tl.load(x + row * x_row + at, mask=at < C, other=0.0).to(tl.float32)
        tl.store(data + row * C + at, (v * inverse).to(tl.float8e4nv), mask=at < C)
    tl.store(scales + row, scale)


@triton.jit(do_not_specialize=["R"])
def _maxima_kernel(
    x,
    row_bits,  # None, or int32 [R]: the largest magnitude of each row
    column_bits,  # int32 [C]
    R, C, x_row,
    STRIP: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """Finds the largest magnitude of each row and column."""
    blocks = tl.cdiv(C, TILE_C)
    strip = tl.program_id(0) // blocks
    columns = (tl.program_id(0) - strip * blocks) * TILE_C + tl.arange(0, TILE_C)
    top = tl.zeros([TILE_R, TILE_C], tl.int32)
    for start in range(0, STRIP, TILE_R):
        rows = strip * STRIP + start + tl.arange(0, TILE_R)
        mask = (rows < R)[:, None] & (columns < C)[None, :]
        at = x + rows.to(tl.int64)[:, None] * x_row + columns[None, :]
        bits = magnitude(tl.load(at, mask=mask, other=0.0).to(tl.float32))
        top = tl.maximum(top, bits)
        if row_bits is not None:
            tl.atomic_max(row_bits + rows, tl.max(bits, 1), mask=rows < R, sem="relaxed")
    tl.atomic_max(column_bits + columns, tl.max(top, 0), mask=columns < C, sem="relaxed")


@triton.jit
def store_row_cast(data, scales, v, bits, rows, columns, R, C, step, first):
    """Stores a tile v cast by rows to data, whose rows are `step` apart; `first`: with scales."""
    scale, inverse = compute_scales(tl.load(bits + rows, mask=rows < R, other=0))
    at = data + rows.to(tl.int64)[:, None] * step + columns[None, :]
    mask = (rows < R)[:, None] & (columns < C)[None, :]
    tl.store(at, (v * inverse[:, None]).to(tl.float8e4nv), mask=mask)
    if first:
        tl.store(scales + rows, scale, mask=rows < R)


@triton.jit
def store_column_cast(turned, scales, v, bits, rows, columns, C, S, first):
    """Stores a tile v, zeros outside the matrix, cast by columns to turned [C, S]."""
    scale, inverse = compute_scales(tl.load(bits + columns, mask=columns < C, other=0))
    at = turned + columns.to(tl.int64)[None, :] * S + rows[:, None]
    mask = (rows < S)[:, None] & (columns < C)[None, :]
    tl.store(at, (v * inverse[None, :]).to(tl.float8e4nv), mask=mask)
    if first:
        tl.store(scales + columns, scale, mask=columns < C)


@triton.jit
def tile_of_program(C, TILE_R: tl.constexpr, TILE_C: tl.constexpr):
    """Returns strip, block, rows and columns of a tile. Tiles go from the end, which is still in
    the cache."""
    blocks = tl.cdiv(C, TILE_C)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    strip = tile // blocks
    block = tile - strip * blocks
    rows = strip * TILE_R + tl.arange(0, TILE_R)
    return strip, block, rows, block * TILE_C + tl.arange(0, TILE_C)


@triton.jit(do_not_specialize=["R"])
def _tiles_kernel(
    x, row_bits, column_bits,
    data,  # None, or [R, C], and the scales of the rows
    scales,
    turned,  # [C, S], and the scales of the columns
    turned_scales,
    rstd,  # None, or [R]: the norm of x is cast
    weight,  # of the norm, [C]
    R, C, S, x_row,
    OFFSET: tl.constexpr, BEFORE: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """Casts tiles by columns, transposed, and by rows, from known maxima."""
    strip, block, rows, columns = tile_of_program(C, TILE_R, TILE_C)
    mask = (rows < R)[:, None] & (columns < C)[None, :]
    at = x + rows.to(tl.int64)[:, None] * x_row + columns[None, :]
    v = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if rstd is not None:
        dtype: tl.constexpr = x.dtype.element_ty
        v *= tl.load(rstd + rows, mask=rows < R, other=0.0)[:, None]
        first = block * TILE_C
        scale = load_scale(weight + first, C - first, OFFSET, BEFORE, TILE_C, TILE_R)
        v = apply_scale(v, weight, scale, dtype, BEFORE, False).to(dtype).to(tl.float32)
    if data is not None:
        store_row_cast(data, scales, v, row_bits, rows, columns, R, C, C, block == 0)
    store_column_cast(turned, turned_scales, v, column_bits, rows, columns, C, S, strip == 0)


def row_programs(
    x: Tensor, R: int, block: int, width: int, resident_columns: int
) -> tuple[int, dict[str, int]]:
    """Returns the number of programs for R rows of `block` columns, and their launch options.

    `width`: bytes per column that wait in shared memory; `resident_columns`: columns that fit on a
    multiprocessor.
    """
    programs = min(R, max(resident_columns // block, 1) * num_sms(x))
    warps = min(max(block // 512, 1), 16)
    return programs, {"BLOCK": block, "STAGES": num_stages(block * width), "num_warps": warps}


def _rows_output(x: Tensor, maxima: bool) -> list[Tensor]:
    """Allocates data, scales and maxima of `_cast_rows`."""
    (R, C), fp32 = x.shape, torch.float32
    outputs = [x.new_empty(R, C, dtype=E4M3), x.new_empty(R, dtype=fp32)]
    return [*outputs, x.new_empty(C, dtype=torch.int32)] if maxima else outputs


@operator("fp8_cast_rows", _rows_output)
def _cast_rows(x: Tensor, maxima: bool) -> list[Tensor]:
    """Returns data and scales of x cast by rows, and with `maxima` columns' largest as bits."""
    data, scale, *bits = outputs = _rows_output(x, maxima)
    (R, C), block = x.shape, next_power_of_2(x.shape[1])
    if block > MAX_COLUMNS:
        _wide_rows_kernel[(R,)](x, data, scale, x.stride(0), C=C, BLOCK=STEP, num_warps=4)
        return outputs
    programs, launch = R, {"BLOCK": block, "STAGES": 1, "num_warps": min(max(block // 1024, 1), 16)}
    if maxima:
        bits[0].zero_()
        programs, launch = row_programs(x, R, block, x.element_size(), COLUMNS_PER_SM)
    column_bits = bits[0] if maxima else None
    _rows_kernel[(programs,)](x, data, scale, column_bits, R, x.stride(0), C=C, **launch)
    return outputs


def _tiles_output(x: Tensor, rows: bool, *_: Any) -> list[Tensor]:
    """Allocates the results of `_cast_tiles`."""
    (R, C), fp32 = x.shape, torch.float32
    turned = [x.new_empty(C, round_up(R), dtype=E4M3), x.new_empty(C, dtype=fp32)]
    return [*_rows_output(x, False), *turned] if rows else turned


@operator("fp8_cast_tiles", _tiles_output)
def _cast_tiles(
    x: Tensor, rows: bool, row_bits: Tensor | None, column_bits: Tensor | None
) -> list[Tensor]:
    """Returns x cast by columns, with `rows` by rows too; finds maxima that are not known."""
    outputs, (R, C) = _tiles_output(x, rows), x.shape
    maxima = Maxima(row_bits, column_bits)
    if column_bits is None or (row_bits is None and rows):
        maxima = _maxima(x, rows)
    ends = outputs if rows else [None, None, *outputs]
    grid, S, options = launch_tiles(x, C, TILE)
    _tiles_kernel[grid](x, *maxima, *ends, None, None, R, C, S, x.stride(0), 0.0, False, **options)
    return outputs


@operator("fp8_cast_normed", lambda x, *_: _tiles_output(x, False))
def _cast_normed(
    x: Tensor, bits: Tensor, rstd: Tensor, weight: Tensor, offset: float, before: bool
) -> list[Tensor]:
    """Returns data and scales of the norm of x cast by columns; `bits` are its columns' maxima."""
    outputs, (R, C) = _tiles_output(x, False), x.shape
    grid, S, options = launch_tiles(x, C, TILE)
    ends = None, bits, None, None, *outputs, rstd, weight
    _tiles_kernel[grid](x, *ends, R, C, S, x.stride(0), offset, before, **options)
    return outputs


def launch_tiles(x: Tensor, C: int, tile: Tile) -> tuple[tuple[int], int, dict[str, int]]:
    """Returns the grid for tiles of C columns and the rows of x, these rounded up, and options."""
    S, (rows, columns, warps) = round_up(x.shape[0]), tile
    options = {"TILE_R": rows, "TILE_C": columns, "num_warps": warps}
    return (triton.cdiv(S, rows) * triton.cdiv(C, columns),), S, options


def _maxima(x: Tensor, of_rows: bool) -> Maxima:
    """Returns the maxima of the columns, and with `of_rows` of the rows."""
    R, C = x.shape
    bits = x.new_zeros(C + R if of_rows else C, dtype=torch.int32)
    maxima = Maxima(bits[C:] if of_rows else None, bits[:C])
    grid = (triton.cdiv(R, STRIP) * triton.cdiv(C, TILE.columns),)
    options = {"STRIP": STRIP, "TILE_R": TILE.rows, "TILE_C": TILE.columns}
    _maxima_kernel[grid](x, *maxima, R, C, x.stride(0), **options, num_warps=TILE.warps)
    return maxima


def cast_rows(x: Tensor) -> ScaledMatrix:
    """Casts x [R, C] to data [R, C] with a scale per row."""
    return ScaledMatrix(*_cast_rows(as_rows(x), False)) if runs_triton(x) else cast_rows_ref(x)


def cast_rows_and_maxima(x: Tensor) -> tuple[ScaledMatrix, Tensor | None]:
    """`cast_rows`, and the column maxima for `cast_columns` of the same numbers, or None."""
    if next_power_of_2(x.shape[1]) > MAX_COLUMNS or not runs_triton(x):
        return cast_rows(x), None
    data, scale, bits = _cast_rows(as_rows(x), True)
    return ScaledMatrix(data, scale), bits


def cast_columns(x: Tensor, bits: Tensor | None = None) -> ScaledMatrix:
    """Casts x [R, C] to data [C, S] with a scale per column of x; rows of data end in zeros.

    `bits`: `Maxima.columns` of x, if known, which saves a read of x.
    """
    if not runs_triton(x):
        return cast_columns_ref(x)
    return ScaledMatrix(*_cast_tiles(as_rows(x), False, None, bits))


def cast_both(x: Tensor, maxima: Maxima = NO_MAXIMA) -> tuple[ScaledMatrix, ScaledMatrix]:
    """Returns `cast_rows` and `cast_columns` of x, in fewer reads."""
    if not runs_triton(x):
        return cast_rows_ref(x), cast_columns_ref(x)
    data, scale, *turned = _cast_tiles(as_rows(x), True, *maxima)
    return ScaledMatrix(data, scale), ScaledMatrix(*turned)


def cast_input(
    fn: RecomputeFn | None, saved: Sequence[Tensor], columns: int, bits: Tensor | None
) -> ScaledMatrix:
    """`cast_columns` of a product's input with so many columns, which `saved` has or gives again.

    Of a norm without a gate only the cast is written.
    """
    if fn is not None and fn.compute is recompute_norm and bits is not None:
        x, rstd, gate, weight = saved
        if gate is None and weight is not None:
            cast = _cast_normed(as_rows(x), bits, rstd, weight.contiguous(), *fn.constants)
            return ScaledMatrix(*cast)
    return cast_columns(run_recompute(fn, saved).view(-1, columns), bits)
