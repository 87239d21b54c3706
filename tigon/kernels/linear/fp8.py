"""Linear layers whose products, forward and backward, are of 8-bit floats (e4m3).

# T tokens, K columns of x and of the weight, N rows of the weight; R rows, C columns of a matrix,
# S its rows padded to a multiple of 16, I intermediate size

y = x W^T, dX = dY W and dW = dY^T x. Both factors of a product are cast, with a scale for every row
or column that is not summed over, as in torchao's rowwise recipe: x by token for y and by column
for dW, W by row for y and by column for dX, dY by token for dX and by column for dW. Gradients are
e4m3 like the rest: with a scale per row they need precision more than e5m2's range. Scales come
from the numbers themselves and not from earlier steps, so that a recomputed block has the same
bits.

x = scale * data, where data is at most 448 and has 3 bits of mantissa. The scale is the smallest
such power of two, so dividing by it rounds nothing. An element is rounded once, to the same number
in its row as in its column, unless it is below 2^-14 of the largest there; with amax / 448, most
elements of a weight would differ between a product and its gradient. The price is at most one of
the 15 binades that e4m3 has above its subnormals. In a row with a number that is not finite, the
scale and all numbers are NaN.

Bytes per element of a bf16 matrix: `cast_rows` 3; `cast_columns` 3 if the columns' maxima are
known, as `cast_rows` finds them, else 5; `cast_both` 4 if both are known, else 6.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels.linear.linear import deferred_product, defers_product, placeholder
from tigon.kernels.mlp.gated_act import (
    BACKWARD,
    Activation,
    act_and_slope,
    check_act,
    gated_act,
    gated_gradients,
    gradient_and_product,
    gradient_memory,
    launch_columns,
    may_overwrite,
)
from tigon.kernels.norm.rms_norm import num_stages
from tigon.kernels.recompute import Note, find_note, find_recompute, run_recompute, start_fetch
from tigon.kernels.runtime import (
    as_rows,
    check_devices,
    has_values,
    next_power_of_2,
    num_sms,
    operator,
    refuse_second_derivative,
    runs_triton,
    tl,
    triton,
)

E4M3 = torch.float8_e4m3fn
ALIGN = 16  # of all sizes in torch._scaled_mm but the rows of its first factor
MAX_COLUMNS = 16384  # columns of a row that one program holds; wider ones are read twice
STEP = 4096  # columns of those that are read at a time
COLUMNS_PER_SM = 16384  # columns that a multiprocessor holds with their maxima
TILE_R, TILE_C, WARPS = 128, 64, 8  # of `_tiles_kernel`
STRIP = 512  # rows whose maxima one program of `_maxima_kernel` takes, for TILE_C columns


class ScaledMatrix(NamedTuple):
    """The matrix scale[:, None] * data."""

    data: Tensor  # e4m3 [R, C], contiguous
    scale: Tensor  # fp32 [R]

    def dequantize(self) -> Tensor:
        """Returns the matrix in fp32 [R, C]."""
        return self.data.float() * self.scale.unsqueeze(1)


class Maxima(NamedTuple):
    """The largest magnitudes of the rows and columns of a bf16 matrix [R, C], as fp32 bits."""

    rows: Tensor | None  # int32 [R]
    columns: Tensor | None  # int32 [C]


NO_MAXIMA = Maxima(None, None)


class _MaximaNote(Note):
    """Keeps a tensor's maxima beside it, for the next cast of the same numbers."""

    __slots__ = ("maxima",)

    def __init__(self, x: Tensor, maxima: Maxima):
        super().__init__(x)
        self.maxima = maxima


def note_maxima(x: Tensor, maxima: Maxima) -> None:
    """Notes the maxima of `x` [..., C] on it, for its casts; the operator that wrote x calls it."""
    if maxima is not NO_MAXIMA:
        x._maxima = _MaximaNote(x, maxima)  # type: ignore[attr-defined]


def find_maxima(x: Tensor) -> Maxima:
    """Returns the maxima noted on the matrix `x`, or NO_MAXIMA."""
    note: _MaximaNote | None = find_note(x, "_maxima")
    if note is None:
        return NO_MAXIMA
    fits = all(b is None or b.numel() == n for b, n in zip(note.maxima, x.shape, strict=True))
    return note.maxima if fits else NO_MAXIMA


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


@triton.jit
def magnitude(x):
    """Returns the bits of |x| in fp32.

    As integers they are ordered like the numbers, then inf, then NaN: maxima keep a NaN, and atomic
    maxima are the same in any order.
    """
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def atomic_max_columns(maxima, columns, top, mask):
    """Computes maxima[columns] = max(maxima[columns], top) atomically.

    Neighboring columns are in neighboring threads, whose requests are merged. `^ 0` hides from the
    compiler that columns are consecutive: it would give four to a thread, as for stores, and merge
    only two.
    """
    zero = tl.num_programs(0) >> 31
    tl.atomic_max(maxima + (columns ^ zero), top, mask=mask, sem="relaxed")


@triton.jit
def compute_scales(bits):
    """Returns scale and 1 / scale of rows whose largest magnitudes have these bits."""
    # 448 is 1.75 * 2^8: 0x1FFFFF carries into the exponent from the first mantissa above 1.75 on
    exponent = tl.maximum(((bits + 0x1FFFFF) >> 23) - 8, 1)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    finite = bits < 0x7F800000
    return tl.where(finite, scale, float("nan")), tl.where(finite, inverse, float("nan"))


@triton.jit
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


@triton.jit
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
def _tiles_kernel(
    x, row_bits, column_bits,
    data,  # None, or [R, C], and the scales of the rows
    scales,
    turned,  # [C, S], and the scales of the columns
    turned_scales, R, C, S, x_row,
    TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """Casts tiles by columns, transposed, and by rows, from known maxima."""
    blocks = tl.cdiv(C, TILE_C)
    # From the end: what was read or written last is in the cache yet
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    strip = tile // blocks
    block = tile - strip * blocks
    rows = strip * TILE_R + tl.arange(0, TILE_R)
    columns = block * TILE_C + tl.arange(0, TILE_C)
    mask = (rows < R)[:, None] & (columns < C)[None, :]
    wide_rows = rows.to(tl.int64)[:, None]
    at = x + wide_rows * x_row + columns[None, :]
    v = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if data is not None:
        scale, inverse = compute_scales(tl.load(row_bits + rows, mask=rows < R, other=0))
        out = (v * inverse[:, None]).to(tl.float8e4nv)
        tl.store(data + wide_rows * C + columns[None, :], out, mask=mask)
        if block == 0:
            tl.store(scales + rows, scale, mask=rows < R)
    scale, inverse = compute_scales(tl.load(column_bits + columns, mask=columns < C, other=0))
    out = (v * inverse[None, :]).to(tl.float8e4nv)
    at = turned + columns.to(tl.int64)[None, :] * S + rows[:, None]
    tl.store(at, out, mask=(rows < S)[:, None] & (columns < C)[None, :])
    if strip == 0:
        tl.store(turned_scales + columns, scale, mask=columns < C)


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
    """Returns data and scales of x cast by rows, and with `maxima` the columns' largest as bits.

    A few programs then update these, each once.
    """
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
    """Returns data and scales of x cast by columns, with `rows` after those cast by rows.

    Maxima that are not known are found first.
    """
    outputs, (R, C) = _tiles_output(x, rows), x.shape
    S, tile = round_up(R), {"TILE_R": TILE_R, "TILE_C": TILE_C, "num_warps": WARPS}
    maxima = Maxima(row_bits, column_bits)
    if column_bits is None or (row_bits is None and rows):
        maxima = _maxima(x, rows, tile)
    grid = (triton.cdiv(S, TILE_R) * triton.cdiv(C, TILE_C),)
    ends = outputs if rows else [None, None, *outputs]
    _tiles_kernel[grid](x, *maxima, *ends, R, C, S, x.stride(0), **tile)
    return outputs


def _maxima(x: Tensor, of_rows: bool, tile: dict[str, int]) -> Maxima:
    """Returns the maxima of the columns, and with `of_rows` of the rows."""
    R, C = x.shape
    bits = x.new_zeros(C + R if of_rows else C, dtype=torch.int32)
    maxima = Maxima(bits[C:] if of_rows else None, bits[:C])
    grid = (triton.cdiv(R, STRIP) * triton.cdiv(C, TILE_C),)
    _maxima_kernel[grid](x, *maxima, R, C, x.stride(0), STRIP=STRIP, **tile)
    return maxima


def cast_rows(x: Tensor, *, fused: bool) -> ScaledMatrix:
    """Casts x [R, C] to data [R, C] with a scale per row; `fused` uses the kernels."""
    return ScaledMatrix(*_cast_rows(as_rows(x), False)) if fused else cast_rows_ref(x)


def cast_rows_and_maxima(x: Tensor, *, fused: bool) -> tuple[ScaledMatrix, Tensor | None]:
    """`cast_rows`, and the column maxima for `cast_columns` of the same numbers, or None."""
    if not fused or next_power_of_2(x.shape[1]) > MAX_COLUMNS:
        return cast_rows(x, fused=fused), None
    data, scale, bits = _cast_rows(as_rows(x), True)
    return ScaledMatrix(data, scale), bits


def cast_columns(x: Tensor, bits: Tensor | None = None, *, fused: bool) -> ScaledMatrix:
    """Casts x [R, C] to data [C, S] with a scale per column of x; rows of data end in zeros.

    `bits`: `Maxima.columns` of x, if known, which saves a read of x.
    """
    if not fused:
        return cast_columns_ref(x)
    return ScaledMatrix(*_cast_tiles(as_rows(x), False, None, bits))


def cast_both(
    x: Tensor, maxima: Maxima = NO_MAXIMA, *, fused: bool
) -> tuple[ScaledMatrix, ScaledMatrix]:
    """Returns `cast_rows` and `cast_columns` of x, in fewer reads."""
    if not fused:
        return cast_rows_ref(x), cast_columns_ref(x)
    data, scale, *turned = _cast_tiles(as_rows(x), True, *maxima)
    return ScaledMatrix(data, scale), ScaledMatrix(*turned)


# A gated activation between two fp8 products, with gate_up [R, 2 I].
#
# Forward casts act(gate) * up by rows as it is computed, and never writes it in bf16. Backward
# computes the gradient of gate_up and the product in one pass, which finds the largest magnitudes
# of both, so that each cast reads them once. Bytes per element of the product: forward 5 (9 with
# separate passes), backward 12 (16 with separate passes).

GATED_COLUMNS_PER_SM = 32768  # columns that a multiprocessor holds in forward
ROWS = 32  # of one program in backward, which then adds its own to the columns' maxima
STAGES = 3  # of these rows in flight, and in use


@triton.jit
def _gated_rows_kernel(
    x, data, scales, R, x_row,
    size: tl.constexpr, ACT: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Computes rows of the gated product and casts them."""
    dtype: tl.constexpr = x.dtype.element_ty
    columns = tl.arange(0, BLOCK)
    mask = columns < size
    for at in tl.range(tl.program_id(0), R, tl.num_programs(0), num_stages=STAGES):
        row = tl.cast(at, tl.int64)
        source = x + row * x_row + columns
        gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(source + size, mask=mask, other=0.0).to(tl.float32)
        a, _ = act_and_slope(gate, ACT)
        y = (a.to(dtype).to(tl.float32) * up).to(dtype).to(tl.float32)
        scale, inverse = compute_scales(tl.max(magnitude(y), 0))
        tl.store(data + row * size + columns, (y * inverse).to(tl.float8e4nv), mask=mask)
        tl.store(scales + row, scale)


@triton.jit
def _gated_gradients_kernel(
    dy,  # [R, I]; becomes the product
    x,
    dx,  # [R, 2 I]; may be x
    row_bits,  # int32 [R], [2 I] and [I], which become maxima of dx and of the product
    column_bits, product_bits, R, x_row, size,
    ACT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of gate_up and the gated product, and finds the maxima of both."""
    dtype: tl.constexpr = x.dtype.element_ty
    blocks = tl.cdiv(size, BLOCK)
    first = tl.program_id(0) // blocks
    columns = (tl.program_id(0) - first * blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    gate_top = tl.zeros([BLOCK], tl.int32)
    up_top = tl.zeros([BLOCK], tl.int32)
    product_top = tl.zeros([BLOCK], tl.int32)
    first *= ROWS
    # A row is in flight while another one is written, not while it is itself
    for at in tl.range(first, tl.minimum(first + ROWS, R), num_stages=STAGES):
        row = tl.cast(at, tl.int64)
        d = tl.load(dy + row * size + columns, mask=mask, other=0.0).to(tl.float32)
        source = row * x_row + columns
        gate = tl.load(x + source, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(x + source + size, mask=mask, other=0.0).to(tl.float32)
        d_gate, d_up, product = gated_gradients(d, gate, up, dtype, ACT)
        d_gate, d_up, product = d_gate.to(dtype), d_up.to(dtype), product.to(dtype)
        target = dx + row * 2 * size + columns
        tl.store(target, d_gate, mask=mask)
        tl.store(target + size, d_up, mask=mask)
        tl.store(dy + row * size + columns, product, mask=mask)
        gate_bits, up_bits = magnitude(d_gate.to(tl.float32)), magnitude(d_up.to(tl.float32))
        tl.atomic_max(row_bits + row, tl.max(tl.maximum(gate_bits, up_bits), 0), sem="relaxed")
        gate_top = tl.maximum(gate_top, gate_bits)
        up_top = tl.maximum(up_top, up_bits)
        product_top = tl.maximum(product_top, magnitude(product.to(tl.float32)))
    atomic_max_columns(column_bits, columns, gate_top, mask)
    atomic_max_columns(column_bits + size, columns, up_top, mask)
    atomic_max_columns(product_bits, columns, product_top, mask)


def _gated_rows_output(gate_up: Tensor, *_: Any) -> list[Tensor]:
    """Allocates data and scales of `_cast_gated_rows`."""
    return _rows_output(gate_up[:, : gate_up.shape[1] // 2], False)


@operator("fp8_cast_gated_rows", _gated_rows_output)
def _cast_gated_rows(gate_up: Tensor, act: str) -> list[Tensor]:
    """Returns data e4m3 [R, I] and scales [R] of act(gate) * up, for gate_up [R, 2 I]."""
    data, scale = outputs = _gated_rows_output(gate_up)
    R, size = data.shape
    width = 2 * gate_up.element_size()
    programs, launch = row_programs(gate_up, R, next_power_of_2(size), width, GATED_COLUMNS_PER_SM)
    strides = R, gate_up.stride(0)
    _gated_rows_kernel[(programs,)](gate_up, data, scale, *strides, size, ACT=act, **launch)
    return outputs


def cast_gated_rows(gate_up: Tensor, act: Activation) -> ScaledMatrix:
    """Returns `cast_rows` of `gated_act(gate_up, act)` for gate_up [R, 2 I]."""
    return ScaledMatrix(*_cast_gated_rows(as_rows(gate_up), act))


class GatedGradients(NamedTuple):
    """The gradient of gate_up and the gated product, with the maxima of each."""

    gate_up: Tensor  # the gradient of gate_up, in its shape
    maxima: Maxima  # its own, as a matrix
    product: Tensor  # what `gated_act` returned
    product_maxima: Tensor | None  # of its columns


def gradients_and_maxima(
    dy: Tensor, gate_up: Tensor, act: Activation, overwrite: bool
) -> GatedGradients:
    """`gradient_and_product` with maxima; the product is written over `dy`."""
    if torch._C._len_torch_dispatch_stack() or not has_values(dy):
        gradient, product = gradient_and_product(dy, gate_up, act, overwrite)
        return GatedGradients(gradient, NO_MAXIMA, product, None)
    gradient = gradient_memory(gate_up, overwrite)
    with torch.cuda.device_of(gradient):
        d, x = as_rows(dy), as_rows(gate_up)
        R, size = d.shape
        rows, columns, product_columns = x.new_zeros(R + 3 * size, dtype=torch.int32).split(
            [R, 2 * size, size]
        )
        launch = launch_columns(size, BACKWARD) | {"ROWS": ROWS, "STAGES": STAGES}
        grid = (triton.cdiv(R, ROWS) * triton.cdiv(size, launch["BLOCK"]),)
        strides = R, x.stride(0), size
        bits = rows, columns, product_columns
        _gated_gradients_kernel[grid](d, x, gradient, *bits, *strides, ACT=act, **launch)
    return GatedGradients(gradient, Maxima(rows, columns), dy, product_columns)


# The linear layer. The forward casts also find the maxima of the columns of x and W, a few KiB that
# are saved, so that the casts of backward read x and W once. On a GPU the products are
# torch._scaled_mm, on a CPU the definition.

MIN_CAPABILITY = (8, 9)  # compute capability of GPUs with products of e4m3
# Whether tensor cores may add up with fewer bits than fp32 has: torchao and Transformer Engine let
# them in the forward product and not in gradients, whose sums have more terms that nearly cancel
FAST_FORWARD, FAST_BACKWARD = True, False


def supports_fp8(weight: Sequence[int]) -> bool:
    """Whether a layer with a weight of this shape [N, K] can have fp8 products."""
    return len(weight) == 2 and not any(size % ALIGN for size in weight)


def _product(a: ScaledMatrix, b: ScaledMatrix, *, fast: bool, fused: bool) -> Tensor:
    """Returns a [M, K] times b [N, K] transposed, summed in fp32 and rounded to bf16: [M, N]."""
    if not fused or a.data.device.type == "cpu":
        return (a.dequantize() @ b.dequantize().t()).bfloat16()
    scales = {"scale_a": a.scale.unsqueeze(1), "scale_b": b.scale.unsqueeze(0)}
    return torch._scaled_mm(
        a.data, b.data.t(), **scales, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


class ColumnMaxima:
    """The column maxima of x and of the weight, found by the forward casts for backward.

    Not saved by autograd: a recomputed block has to name what it saves before it computes its
    products (see `deferred_product`), and the first pass has found them.
    """

    x: Tensor | None = None
    weight: Tensor | None = None


def _cast(x: Tensor, maxima: bool, fused: bool) -> tuple[ScaledMatrix, Tensor | None]:
    """Returns `cast_rows` of x and, if `maxima` asks for them, those of its columns, else None."""
    return cast_rows_and_maxima(x, fused=fused) if maxima else (cast_rows(x, fused=fused), None)


def _forward(
    x: Tensor,
    weight: Tensor,
    needs_x: bool,
    needs_weight: bool,
    fused: bool,
    col_maxima: ColumnMaxima,
) -> Tensor:
    """Returns the product of the casts in bf16, and keeps maxima for backward in `col_maxima`.

    `needs_x`, `needs_weight`: the gradients that backward will compute.
    """
    a, col_maxima.x = _cast(x, needs_weight, fused)
    b, col_maxima.weight = _cast(weight, needs_x, fused)
    return _product(a, b, fast=FAST_FORWARD, fused=fused)


class _Fp8Linear(torch.autograd.Function):
    """y [T, N] of x [T, K] and weight [N, K]. With a `Recompute`, backward computes x again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, *args: Any) -> Tensor:
        recompute, fused, col_maxima, shape = args
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        saved_x = () if not needs_weight else (x,) if recompute is None else recompute.saved
        ctx.save_for_backward(weight if needs_x else None, *saved_x)
        ctx.recompute_fn = None if recompute is None else recompute.fn
        ctx.fused, ctx.shape = fused, shape
        ctx.col_maxima = ColumnMaxima() if col_maxima is None else col_maxima
        if col_maxima is not None:
            return placeholder(x, weight.shape[0])
        return _forward(x, weight, needs_x, needs_weight, fused, ctx.col_maxima)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("fp8_linear")
        weight, *saved_x = ctx.saved_tensors
        col_maxima: ColumnMaxima = ctx.col_maxima
        options: dict[str, Any] = {"fused": ctx.fused}
        needs_weight, remote = ctx.needs_input_grad[1], None
        if needs_weight and ctx.recompute_fn is not None:  # beside the casts and the product of dX
            remote = start_fetch(ctx.recompute_fn, saved_x)
        if not needs_weight:
            rows, columns = cast_rows(dy, **options), None
        elif weight is None:
            rows, columns = None, cast_columns(dy, find_maxima(dy).columns, **options)
        else:
            rows, columns = cast_both(dy, find_maxima(dy), **options)
        dx = dw = None
        if rows is not None:
            dx = _dx(rows, weight, col_maxima.weight, ctx.fused)
            if remote is not None:
                remote.reduce(dx.view(ctx.shape))  # beside what follows
        if columns is not None:
            x = saved_x[0] if ctx.recompute_fn is None else run_recompute(ctx.recompute_fn, saved_x)
            x_columns = cast_columns(x.view(-1, ctx.shape[-1]), col_maxima.x, **options)
            dw = _product(columns, x_columns, fast=FAST_BACKWARD, **options)
        return dx, dw, None, None, None, None


def _dx(rows: ScaledMatrix, weight: Tensor, maxima: Tensor | None, fused: bool) -> Tensor:
    """Returns the gradient of the input from the cast rows of dY."""
    columns = cast_columns(weight, maxima, fused=fused)
    return _product(rows, columns, fast=FAST_BACKWARD, fused=fused)


def fp8_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns `fp8_linear(x, weight, bias)` without a graph."""
    _check(x, weight)
    rows, fused = x.reshape(-1, x.shape[-1]), runs_triton(x)
    return _finish_output(
        _forward(rows, weight, False, False, fused, ColumnMaxima()), x.shape[:-1], bias
    )


def fp8_gradient(dy: Tensor, weight: Tensor) -> Tensor:
    """Returns the gradient [T, K] of the x of `fp8_linear`, from dY [T, N]."""
    fused = runs_triton(dy)
    return _dx(cast_rows(dy, fused=fused), weight, None, fused)


def _gated_forward(
    gate_up: Tensor, weight: Tensor, act: Activation, col_maxima: ColumnMaxima
) -> Tensor:
    """Returns [T, N] from gate_up [T, 2 K] and weight [N, K], without the maxima of the product."""
    b, col_maxima.weight = _cast(weight, True, True)
    return _product(cast_gated_rows(gate_up, act), b, fast=FAST_FORWARD, fused=True)


class _Fp8Gated(torch.autograd.Function):
    """The fp8 product [T, N] of `gated_act(gate_up)` with the weight, for gate_up [T, 2 K]."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor, *args: Any) -> Tensor:
        ctx.act, ctx.overwrite, col_maxima = args
        ctx.save_for_backward(gate_up, weight)
        ctx.col_maxima = ColumnMaxima() if col_maxima is None else col_maxima
        if col_maxima is not None:
            return placeholder(gate_up, weight.shape[0])
        return _gated_forward(gate_up, weight, ctx.act, ctx.col_maxima)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("fp8_gated_linear")
        gate_up, weight = ctx.saved_tensors
        options: dict[str, Any] = {"fused": True}
        rows, columns = cast_both(dy, find_maxima(dy), **options)
        weight_columns = cast_columns(weight, ctx.col_maxima.weight, **options)
        d = _product(rows, weight_columns, fast=FAST_BACKWARD, **options)
        del rows, weight_columns
        gradients = gradients_and_maxima(d, gate_up, ctx.act, ctx.overwrite)
        del d
        note_maxima(gradients.gate_up, gradients.maxima)
        product_columns = cast_columns(gradients.product, gradients.product_maxima, **options)
        dw = _product(columns, product_columns, fast=FAST_BACKWARD, **options)
        return gradients.gate_up, dw, None, None, None


def _check(x: Tensor, weight: Tensor, halves: int = 1) -> None:
    """Raises TypeError or ValueError unless x and weight can have fp8 products.

    x has `halves` times the weight's columns.
    """
    check_devices(x=x, weight=weight)
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        raise TypeError(
            f"fp8 products are of bfloat16 inputs and weights: x is {x.dtype}, the weight "
            f"{weight.dtype}"
        )
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        raise ValueError("fp8 products do not run under autocast: load the model in bfloat16")
    if not supports_fp8(weight.shape):
        raise ValueError(f"the sizes of the weight {tuple(weight.shape)} are not multiples of 16")
    if x.shape[-1] != halves * weight.shape[1]:
        raise ValueError(f"x has {x.shape[-1]} columns, the weight {tuple(weight.shape)}")


def _finish_output(y: Tensor, lead: torch.Size, bias: Tensor | None) -> Tensor:
    """Returns y [T, N] plus the bias, with the leading dimensions `lead` in place of T."""
    # As in F.linear: FSDP2 wants no view as a block's output
    y = torch.ops.aten._unsafe_view(y, (*lead, y.shape[-1]))
    return y if bias is None else y + bias


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, fused: bool) -> Tensor:
    """Returns `fp8_linear`, `fused` by the kernels, else by the reference."""
    recompute = find_recompute(x) if weight.requires_grad else None
    if recompute is not None:
        recompute.keep_gate_up()
    rows, col_maxima = x.reshape(-1, x.shape[-1]), ColumnMaxima() if defers_product() else None
    y = _Fp8Linear.apply(rows, weight, recompute, fused, col_maxima, x.shape)
    if col_maxima is not None:
        learns = rows.requires_grad, weight.requires_grad
        y = deferred_product(y, lambda: _forward(rows, weight, *learns, fused, col_maxima))
    return _finish_output(y, x.shape[:-1], bias)


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns `F.linear(x, weight, bias)` of x [..., K], weight [N, K] in bf16; products in e4m3.

    The bias is added to the rounded product. N and K are multiples of 16. Source: torchao's float8
    training, recipe "rowwise"; Micikevicius et al. (arXiv 2209.05433) for the format.
    """
    _check(x, weight)
    if not x.numel():
        return F.linear(x, weight, bias)
    return _linear(x, weight, bias, runs_triton(x))


def fp8_linear_ref(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns what `fp8_linear` does: its definition, casts and products in plain torch, in both
    directions."""
    return _linear(x, weight, bias, False)


def fp8_gated_linear(
    gate_up: Tensor, act: Activation, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """`fp8_linear(gated_act(gate_up, act), weight, bias)` with the same bits, in fewer passes.

    Nothing else may read gate_up [..., 2 K]: its gradient may take its memory. If both require
    gradients, one pass in each direction handles the product.
    """
    learns = torch.is_grad_enabled() and gate_up.requires_grad and weight.requires_grad
    fused = learns and not torch.compiler.is_compiling() and runs_triton(gate_up)
    fits = next_power_of_2(gate_up.shape[-1] // 2) <= MAX_COLUMNS  # a row of the product
    if not fused or not gate_up.numel() or not fits:
        return fp8_linear(gated_act(gate_up, act, overwrite=True), weight, bias)
    _check(gate_up, weight, halves=2)
    check_act(act)
    col_maxima, overwrite = ColumnMaxima() if defers_product() else None, may_overwrite(gate_up)
    rows = gate_up.reshape(-1, gate_up.shape[-1])
    y = _Fp8Gated.apply(rows, weight, act, overwrite, col_maxima)
    if col_maxima is not None:
        y = deferred_product(y, lambda: _gated_forward(rows, weight, act, col_maxima))
    return _finish_output(y, gate_up.shape[:-1], bias)
