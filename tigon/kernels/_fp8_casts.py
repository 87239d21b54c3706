"""Matrices as 8-bit floats (e4m3), with a scale for each row, or turned, with one for each column.

# R rows, C columns, S the rows padded to a multiple of 16

x = scale * data, where data is at most 448 and has 3 bits of mantissa. A scale is a power of two,
the smallest that makes it so, as in torchao's rowwise recipe: dividing by it rounds nothing. An
element is then rounded once, and to the same number in its row as in its column, unless it is
below 2^-14 of the largest there; with amax / 448, most elements of a weight would differ between
a product and its gradient. The price is at most one of the 15 binades that e4m3 has above its
subnormals. In a row with a number that is not finite, the scale and all numbers are NaN.

Bytes per element of a bf16 matrix: `cast_rows` 3, `cast_columns` 3 where the columns' maxima are
known, as `cast_rows` finds them, else 5; `cast_both` 4 where both are known, else 6.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels._norm import stages
from tigon.kernels._notes import Note, note_of
from tigon.kernels._triton import as_rows, num_sms, operator, power_of_2, tl, triton

E4M3 = torch.float8_e4m3fn
ALIGN = 16  # of all sizes in torch._scaled_mm but the rows of its first factor
WIDEST = 16384  # columns of a row that one program holds; wider ones are read twice
STEP = 4096  # columns of those that are read at a time
HELD = 16384  # columns that a multiprocessor holds with their maxima
TILE_R, TILE_C, WARPS = 128, 64, 8  # of `_tiles_kernel`
STRIP = 512  # rows whose maxima one program of `_maxima_kernel` takes, for TILE_C columns


class Scaled(NamedTuple):
    """The matrix scale[:, None] * data."""

    data: Tensor  # e4m3 [R, C], contiguous
    scale: Tensor  # fp32 [R]

    def dequantised(self) -> Tensor:  # fp32 [R, C]
        return self.data.float() * self.scale.unsqueeze(1)


class Maxima(NamedTuple):
    """The largest magnitudes of a bf16 matrix [R, C], as the bits of fp32 numbers."""

    rows: Tensor | None  # int32 [R]
    columns: Tensor | None  # int32 [C]


UNKNOWN = Maxima(None, None)


class _MaximaNote(Note):
    __slots__ = ("maxima",)

    def __init__(self, x: Tensor, maxima: Maxima):
        super().__init__(x)
        self.maxima = maxima


def note_maxima(x: Tensor, maxima: Maxima) -> None:
    """An operator found them of `x` [..., C], which it wrote whole, for whoever casts it."""
    if maxima is not UNKNOWN:
        x._maxima = _MaximaNote(x, maxima)  # type: ignore[attr-defined]


def maxima_of(x: Tensor) -> Maxima:
    """Of the matrix `x`, if who wrote it has noted them."""
    note: _MaximaNote | None = note_of(x, "_maxima")
    if note is None:
        return UNKNOWN
    fits = all(b is None or b.numel() == n for b, n in zip(note.maxima, x.shape, strict=True))
    return note.maxima if fits else UNKNOWN


def padded(rows: int) -> int:
    return -(-rows // ALIGN) * ALIGN


def scales_ref(largest: Tensor) -> Tensor:
    """The smallest powers of two from 2^-126 on with `largest` <= 448 * scale, both fp32 [R]."""
    mantissa, exponent = torch.frexp(largest.clamp(min=448 * 2.0**-126) / 448)  # in [0.5, 1)
    exponent = torch.where(mantissa > 0.5, exponent, exponent - 1)
    scale = ((exponent + 127) << 23).view(torch.float32)
    return scale.masked_fill(largest.isfinite().logical_not(), torch.nan)


def cast_rows_ref(x: Tensor) -> Scaled:
    scale = scales_ref(x.float().abs().amax(1))
    return Scaled((x.float() / scale.unsqueeze(1)).to(E4M3), scale)


def cast_columns_ref(x: Tensor) -> Scaled:
    return cast_rows_ref(F.pad(x.t(), (0, padded(x.shape[0]) - x.shape[0])))


def cast_both_ref(x: Tensor) -> tuple[Scaled, Scaled]:
    return cast_rows_ref(x), cast_columns_ref(x)


@triton.jit
def magnitude(x):
    """The bits of |x| in fp32. As integers they have the order of the numbers, then inf, then NaN,
    so that maxima keep a NaN, and atomic ones are the same in any order."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def raise_maxima(maxima, columns, top, mask):
    """maxima[columns] = max(maxima[columns], top), atomically, with neighbours in neighbouring
    threads, whose requests then are one. A thread would have four columns, as where it stores, and
    a request be of two, if the compiler knew that these follow each other: `^ 0` hides it."""
    zero = tl.num_programs(0) >> 31
    tl.atomic_max(maxima + (columns ^ zero), top, mask=mask, sem="relaxed")


@triton.jit
def scales_of(bits):
    """Scale and 1 / scale of rows whose largest magnitudes have these bits."""
    # 448 is 1.75 * 2^8: 0x1FFFFF carries into the exponent from the first mantissa above 1.75 on
    exponent = tl.maximum(((bits + 0x1FFFFF) >> 23) - 8, 1)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    finite = bits < 0x7F800000
    return tl.where(finite, scale, float("nan")), tl.where(finite, inverse, float("nan"))


@triton.jit
def _rows_kernel(
    x,
    data,
    scales,
    column_bits,  # None, or int32 [C], which become the columns' maxima
    R,
    x_row,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    mask = columns < C
    if column_bits is not None:
        top = tl.zeros([BLOCK], tl.int32)
    for at in tl.range(tl.program_id(0), R, tl.num_programs(0), num_stages=STAGES):
        row = tl.cast(at, tl.int64)
        v = tl.load(x + row * x_row + columns, mask=mask, other=0.0).to(tl.float32)
        bits = magnitude(v)
        scale, inverse = scales_of(tl.max(bits, 0))
        tl.store(data + row * C + columns, (v * inverse).to(tl.float8e4nv), mask=mask)
        tl.store(scales + row, scale)
        if column_bits is not None:
            top = tl.maximum(top, bits)
    if column_bits is not None:
        raise_maxima(column_bits, columns, top, mask)


@triton.jit
def _wide_rows_kernel(x, data, scales, x_row, C: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    top = tl.zeros([BLOCK], tl.int32)
    for start in range(0, C, BLOCK):
        at = start + columns
        v = tl.load(x + row * x_row + at, mask=at < C, other=0.0).to(tl.float32)
        top = tl.maximum(top, magnitude(v))
    scale, inverse = scales_of(tl.max(top, 0))
    for start in range(0, C, BLOCK):
        at = start + columns
        v = tl.load(x + row * x_row + at, mask=at < C, other=0.0).to(tl.float32)
        tl.store(data + row * C + at, (v * inverse).to(tl.float8e4nv), mask=at < C)
    tl.store(scales + row, scale)


@triton.jit
def _maxima_kernel(
    x,
    row_bits,  # None, or int32 [R]: the largest magnitude of each row
    column_bits,  # int32 [C]
    R,
    C,
    x_row,
    STRIP: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
):
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
def _tiles_kernel(
    x,
    row_bits,
    column_bits,
    data,  # None, or [R, C], and the scales of the rows
    scales,
    turned,  # [C, S], and the scales of the columns
    turned_scales,
    R,
    C,
    S,
    x_row,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
):
    blocks = tl.cdiv(C, TILE_C)
    # From the end: what was read or written last is in the cache yet
    place = tl.num_programs(0) - 1 - tl.program_id(0)
    strip = place // blocks
    block = place - strip * blocks
    rows = strip * TILE_R + tl.arange(0, TILE_R)
    columns = block * TILE_C + tl.arange(0, TILE_C)
    mask = (rows < R)[:, None] & (columns < C)[None, :]
    wide_rows = rows.to(tl.int64)[:, None]
    at = x + wide_rows * x_row + columns[None, :]
    v = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if data is not None:
        scale, inverse = scales_of(tl.load(row_bits + rows, mask=rows < R, other=0))
        out = (v * inverse[:, None]).to(tl.float8e4nv)
        tl.store(data + wide_rows * C + columns[None, :], out, mask=mask)
        if block == 0:
            tl.store(scales + rows, scale, mask=rows < R)
    scale, inverse = scales_of(tl.load(column_bits + columns, mask=columns < C, other=0))
    out = (v * inverse[None, :]).to(tl.float8e4nv)
    at = turned + columns.to(tl.int64)[None, :] * S + rows[:, None]
    tl.store(at, out, mask=(rows < S)[:, None] & (columns < C)[None, :])
    if strip == 0:
        tl.store(turned_scales + columns, scale, mask=columns < C)


def _rows_output(x: Tensor, *_: Any) -> list[Tensor]:
    (R, C), fp32 = x.shape, torch.float32
    return [x.new_empty(R, C, dtype=E4M3), x.new_empty(R, dtype=fp32)]


def _columns_output(x: Tensor, *_: Any) -> list[Tensor]:
    (R, C), fp32 = x.shape, torch.float32
    return [x.new_empty(C, padded(R), dtype=E4M3), x.new_empty(C, dtype=fp32)]


def _both_output(x: Tensor, *_: Any) -> list[Tensor]:
    return [*_rows_output(x), *_columns_output(x)]


def _rows_and_maxima_output(x: Tensor) -> list[Tensor]:
    return [*_rows_output(x), x.new_empty(x.shape[1], dtype=torch.int32)]


@operator("fp8_cast_rows", _rows_output)
def _cast_rows(x: Tensor) -> list[Tensor]:
    data, scale = outputs = _rows_output(x)
    (R, C), block = x.shape, power_of_2(x.shape[1])
    if block > WIDEST:
        _wide_rows_kernel[(R,)](x, data, scale, x.stride(0), C=C, BLOCK=STEP, num_warps=4)
        return outputs
    launch = {"BLOCK": block, "STAGES": 1, "num_warps": min(max(block // 1024, 1), 16)}
    _rows_kernel[(R,)](x, data, scale, None, R, x.stride(0), C=C, **launch)
    return outputs


def row_programs(
    x: Tensor, R: int, block: int, width: int, held: int
) -> tuple[int, dict[str, int]]:
    """How many programs walk over R rows of `block` columns, and how each does it; `width`: bytes
    per column that wait in shared memory, `held`: columns that a multiprocessor has room for."""
    programs = min(R, max(held // block, 1) * num_sms(x))
    warps = min(max(block // 512, 1), 16)
    return programs, {"BLOCK": block, "STAGES": stages(block * width), "num_warps": warps}


@operator("fp8_cast_rows_and_maxima", _rows_and_maxima_output)
def _cast_rows_and_maxima(x: Tensor) -> list[Tensor]:
    """With few programs, each of which adds its own to the columns' maxima."""
    (data, scale), (R, C) = _rows_output(x), x.shape
    bits = x.new_zeros(C, dtype=torch.int32)
    programs, launch = row_programs(x, R, power_of_2(C), x.element_size(), HELD)
    _rows_kernel[(programs,)](x, data, scale, bits, R, x.stride(0), C=C, **launch)
    return [data, scale, bits]


@operator("fp8_cast_columns", _columns_output)
def _cast_columns(x: Tensor, column_bits: Tensor | None) -> list[Tensor]:
    outputs = _columns_output(x)
    _cast_tiles(x, Maxima(None, column_bits), None, None, *outputs)
    return outputs


@operator("fp8_cast_both", _both_output)
def _cast_both(x: Tensor, row_bits: Tensor | None, column_bits: Tensor | None) -> list[Tensor]:
    outputs = _both_output(x)
    _cast_tiles(x, Maxima(row_bits, column_bits), *outputs)
    return outputs


def _cast_tiles(
    x: Tensor,
    known: Maxima,
    data: Tensor | None,
    scale: Tensor | None,
    turned: Tensor,
    turned_scale: Tensor,
) -> None:
    """Maxima first where they are not known, then the casts."""
    R, C = x.shape
    S, tile = turned.shape[1], {"TILE_R": TILE_R, "TILE_C": TILE_C, "num_warps": WARPS}
    if known.columns is None or (known.rows is None and data is not None):
        known = _maxima(x, data is not None, tile)
    grid = (triton.cdiv(S, TILE_R) * triton.cdiv(C, TILE_C),)
    ends = data, scale, turned, turned_scale
    _tiles_kernel[grid](x, *known, *ends, R, C, S, x.stride(0), **tile)


def _maxima(x: Tensor, of_rows: bool, tile: dict[str, int]) -> Maxima:
    R, C = x.shape
    bits = x.new_zeros(C + R if of_rows else C, dtype=torch.int32)
    maxima = Maxima(bits[C:] if of_rows else None, bits[:C])
    grid = (triton.cdiv(R, STRIP) * triton.cdiv(C, TILE_C),)
    _maxima_kernel[grid](x, *maxima, R, C, x.stride(0), STRIP=STRIP, **tile)
    return maxima


def cast_rows(x: Tensor, *, fused: bool) -> Scaled:
    """x [R, C] -> data [R, C] with a scale per row; `fused`: by the kernels."""
    return Scaled(*_cast_rows(as_rows(x))) if fused else cast_rows_ref(x)


def cast_rows_and_maxima(x: Tensor, *, fused: bool) -> tuple[Scaled, Tensor | None]:
    """`cast_rows`, and what `cast_columns` of the same numbers takes; None: nothing is known."""
    if not fused or power_of_2(x.shape[1]) > WIDEST:
        return cast_rows(x, fused=fused), None
    data, scale, bits = _cast_rows_and_maxima(as_rows(x))
    return Scaled(data, scale), bits


def cast_columns(x: Tensor, bits: Tensor | None = None, *, fused: bool) -> Scaled:
    """x [R, C] -> data [C, S], whose rows end in zeros, with a scale per column of x.

    `bits`: `Maxima.columns` of x, if they are known, which saves a read of x.
    """
    return Scaled(*_cast_columns(as_rows(x), bits)) if fused else cast_columns_ref(x)


def cast_both(x: Tensor, known: Maxima = UNKNOWN, *, fused: bool) -> tuple[Scaled, Scaled]:
    """`cast_rows` and `cast_columns`, in fewer reads."""
    if not fused:
        return cast_both_ref(x)
    data, scale, *turned = _cast_both(as_rows(x), *known)
    return Scaled(data, scale), Scaled(*turned)
