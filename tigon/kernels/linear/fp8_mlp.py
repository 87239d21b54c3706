"""A gated MLP of fp8 products as one operator: y = (act(x Wg^T) * x Wu^T) Wd^T.

# T tokens, C model dim, I intermediate size; R rows of a matrix, S these rounded up to 16

Its numbers are those of `fp8_linear`, `gated_act` and `fp8_linear`, bit for bit, in fewer passes.
Forward casts act(gate) * up by rows as it is computed. Backward reads gate_up and the gradient d of
that product twice: one pass finds the largest magnitudes of the gradient of gate_up and of the
product, and the next computes them again and writes nothing but their casts. Bytes per element of
the product: forward 5 (9 with separate passes), backward 17 (29 with separate passes).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.kernels.linear import fp8_casts
from tigon.kernels.linear.fp8 import (
    FAST_BACKWARD,
    FAST_FORWARD,
    ColumnMaxima,
    cast_gradient,
    cast_product,
    check_product,
    finish_output,
    fp8_linear,
    scaled_product,
)
from tigon.kernels.linear.fp8_casts import (
    E4M3,
    ScaledMatrix,
    Tile,
    cast_both,
    cast_input,
    cast_rows_and_maxima,
    compute_scales,
    launch_tiles,
    round_up,
    row_programs,
    store_column_cast,
    store_row_cast,
    tile_of_program,
)
from tigon.kernels.linear.linear import deferred_product, defers_product, placeholder
from tigon.kernels.linear.maxima import atomic_max_columns, find_maxima, magnitude
from tigon.kernels.mlp.gated_act import (
    BACKWARD,
    Activation,
    act_and_slope,
    check_act,
    gated_act,
    gated_gradients,
    launch_columns,
)
from tigon.kernels.recompute import find_recompute, save_input, start_fetch
from tigon.kernels.runtime import (
    as_rows,
    next_power_of_2,
    operator,
    refuse_second_derivative,
    runs_triton,
    tl,
    triton,
)

GATED_COLUMNS_PER_SM = 32768  # columns that a multiprocessor holds in forward
ROWS = 32  # of one program that finds maxima, which then adds its own to the columns'
STAGES = 3  # of these rows in flight, and in use
BACKWARD_TILE = Tile(128, 64, 8)


@triton.jit(do_not_specialize=["R"])
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
def _rounded_gradients(d, gate, up, dtype: tl.constexpr, ACT: tl.constexpr):
    """Returns the gradients of gate and up, and the product, rounded to dtype, in fp32."""
    d_gate, d_up, product = gated_gradients(d, gate, up, dtype, ACT)
    d_gate, d_up = d_gate.to(dtype).to(tl.float32), d_up.to(dtype).to(tl.float32)
    return d_gate, d_up, product.to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["R"])
def _gated_maxima_kernel(
    dy,  # [R, I]
    x,  # [R, 2 I]
    row_bits,  # int32 [R], [2 I] and [I], which become maxima of the gradient of x, and of the
    column_bits, product_bits,  # product's columns
    R, x_row, size,
    ACT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Finds the maxima of the gradient of gate_up and of the gated product."""
    dtype: tl.constexpr = x.dtype.element_ty
    blocks = tl.cdiv(size, BLOCK)
    first = tl.program_id(0) // blocks
    columns = (tl.program_id(0) - first * blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    gate_top = tl.zeros([BLOCK], tl.int32)
    up_top = tl.zeros([BLOCK], tl.int32)
    product_top = tl.zeros([BLOCK], tl.int32)
    first *= ROWS
    for at in tl.range(first, tl.minimum(first + ROWS, R), num_stages=STAGES):
        row = tl.cast(at, tl.int64)
        d = tl.load(dy + row * size + columns, mask=mask, other=0.0).to(tl.float32)
        source = x + row * x_row + columns
        gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(source + size, mask=mask, other=0.0).to(tl.float32)
        d_gate, d_up, product = _rounded_gradients(d, gate, up, dtype, ACT)
        gate_bits, up_bits = magnitude(d_gate), magnitude(d_up)
        tl.atomic_max(row_bits + row, tl.max(tl.maximum(gate_bits, up_bits), 0), sem="relaxed")
        gate_top = tl.maximum(gate_top, gate_bits)
        up_top = tl.maximum(up_top, up_bits)
        product_top = tl.maximum(product_top, magnitude(product))
    atomic_max_columns(column_bits, columns, gate_top, mask)
    atomic_max_columns(column_bits + size, columns, up_top, mask)
    atomic_max_columns(product_bits, columns, product_top, mask)


@triton.jit(do_not_specialize=["R"])
def _gated_tiles_kernel(
    dy, x, row_bits, column_bits, product_bits,
    data,  # [R, 2 I], and the scales of the rows
    scales,
    turned,  # [2 I, S], and the scales of the columns
    turned_scales,
    product,  # [I, S], and the scales of the columns
    product_scales, R, size, S, x_row,
    ACT: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """Casts the gradient of gate_up by rows and by columns, and the gated product by columns."""
    dtype: tl.constexpr = x.dtype.element_ty
    strip, block, rows, columns = tile_of_program(size, TILE_R, TILE_C)
    mask = (rows < R)[:, None] & (columns < size)[None, :]
    wide_rows = rows.to(tl.int64)[:, None]
    at = dy + wide_rows * size + columns[None, :]
    d = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    at = x + wide_rows * x_row + columns[None, :]
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + size, mask=mask, other=0.0).to(tl.float32)
    d_gate, d_up, y = _rounded_gradients(d, gate, up, dtype, ACT)
    top, left = strip == 0, block == 0
    store_row_cast(data, scales, d_gate, row_bits, rows, columns, R, size, 2 * size, left)
    store_row_cast(data + size, scales, d_up, row_bits, rows, columns, R, size, 2 * size, False)
    store_column_cast(turned, turned_scales, d_gate, column_bits, rows, columns, size, S, top)
    store_column_cast(product, product_scales, y, product_bits, rows, columns, size, S, top)
    column_bits += size
    turned += size.to(tl.int64) * S
    turned_scales += size
    store_column_cast(turned, turned_scales, d_up, column_bits, rows, columns, size, S, top)


def _gated_rows_output(gate_up: Tensor, *_: Any) -> list[Tensor]:
    """Allocates data and scales of `_cast_gated_rows`."""
    R, size = len(gate_up), gate_up.shape[1] // 2
    fp32 = torch.float32
    return [gate_up.new_empty(R, size, dtype=E4M3), gate_up.new_empty(R, dtype=fp32)]


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
    return ScaledMatrix(*_cast_gated_rows(as_rows(gate_up), act))


class GatedCasts(NamedTuple):
    """Holds the casts of the gradient of gate_up [R, 2 I], and of the gated product [R, I]."""

    rows: ScaledMatrix
    columns: ScaledMatrix
    product: ScaledMatrix  # by columns


def _gated_casts_output(dy: Tensor, *_: Any) -> list[Tensor]:
    """Allocates the tensors of `GatedCasts`."""
    (R, size), S = dy.shape, round_up(len(dy))
    shapes = (R, 2 * size), (2 * size, S), (size, S)
    pairs = [(dy.new_empty(s, dtype=E4M3), dy.new_empty(s[0], dtype=torch.float32)) for s in shapes]
    return [t for pair in pairs for t in pair]


@operator("fp8_cast_gated_gradients", _gated_casts_output)
def _cast_gated_gradients(dy: Tensor, gate_up: Tensor, act: str) -> list[Tensor]:
    """Returns data and scales of each of `GatedCasts`."""
    outputs, (R, size) = _gated_casts_output(dy), dy.shape
    lengths = R, 2 * size, size
    bits = dy.new_zeros(sum(lengths), dtype=torch.int32).split(lengths)
    launch = launch_columns(size, BACKWARD) | {"ROWS": ROWS, "STAGES": STAGES}
    programs = (triton.cdiv(R, ROWS) * triton.cdiv(size, launch["BLOCK"]),)
    step = gate_up.stride(0)
    _gated_maxima_kernel[programs](dy, gate_up, *bits, R, step, size, ACT=act, **launch)
    grid, S, options = launch_tiles(dy, size, BACKWARD_TILE)
    _gated_tiles_kernel[grid](dy, gate_up, *bits, *outputs, R, size, S, step, ACT=act, **options)
    return outputs


def cast_gated_gradients(dy: Tensor, gate_up: Tensor, act: Activation) -> GatedCasts:
    """Returns what backward reads, from the gradient dy [R, I] of the gated product."""
    a, b, c, d, e, f = _cast_gated_gradients(dy.contiguous(), as_rows(gate_up), act)
    return GatedCasts(ScaledMatrix(a, b), ScaledMatrix(c, d), ScaledMatrix(e, f))


class MLPState:
    """Holds what the nodes of one pass share: maxima of columns, and gate_up for a late product."""

    def __init__(self) -> None:
        self.up, self.down = ColumnMaxima(), ColumnMaxima()
        self.gate_up: Tensor | None = None


def _down_product(gate_up: Tensor, weight: Tensor, act: Activation, state: MLPState) -> Tensor:
    """Returns the last product [T, C] from gate_up [T, 2 I]."""
    state.gate_up = None
    b, state.down.weight = cast_rows_and_maxima(weight)
    return scaled_product(cast_gated_rows(gate_up, act), b, fast=FAST_FORWARD)


class _Fp8MLP(torch.autograd.Function):
    """Computes y [T, C] of x [T, C] and the weights [2 I, C] and [C, I]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor, down: Tensor, *args: Any) -> Tensor:
        ctx.act, recompute, ctx.state, ctx.shape, deferred = args
        # A pass in backward only saves: the maxima are those of the first one
        gate_up = cast_product(x, up, not deferred, not deferred, ctx.state.up)
        ctx.recompute_fn, saved_x = save_input(x, recompute)
        ctx.save_for_backward(gate_up, up, down, *saved_x)
        if deferred:
            ctx.state.gate_up = gate_up
            return placeholder(x, len(down))
        return _down_product(gate_up, down, ctx.act, ctx.state)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("fp8_mlp")
        gate_up, up, down, *saved_x = ctx.saved_tensors
        state: MLPState = ctx.state
        remote = start_fetch(ctx.recompute_fn, saved_x)
        rows, columns = cast_both(dy, find_maxima(dy))
        d = cast_gradient(rows, down, state.down.weight)
        casts = cast_gated_gradients(d, gate_up, ctx.act)
        del d, gate_up, rows
        d_down = scaled_product(columns, casts.product, fast=FAST_BACKWARD)
        del columns
        dx = cast_gradient(casts.rows, up, state.up.weight)
        if remote is not None:
            remote.reduce(dx.view(ctx.shape))  # beside what follows
        x = cast_input(ctx.recompute_fn, saved_x, ctx.shape[-1], state.up.x)
        d_up = scaled_product(casts.columns, x, fast=FAST_BACKWARD)
        return dx, d_up, d_down, *5 * (None,)


def fp8_mlp(
    x: Tensor, up: Tensor, act: Activation, down: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Returns `fp8_linear(gated_act(fp8_linear(x, up), act), down, bias)` with the same bits, in
    fewer passes where x [..., C] and both weights, [2 I, C] and [C, I], require gradients."""
    check_act(act)
    learns = torch.is_grad_enabled() and all(t.requires_grad for t in (x, up, down))
    fused = learns and not torch.compiler.is_compiling() and runs_triton(x)
    fits = next_power_of_2(down.shape[1]) <= fp8_casts.MAX_COLUMNS  # a row of the product
    if not fused or not x.numel() or not fits:
        gate_up = fp8_linear(x, up)
        return fp8_linear(gated_act(gate_up, act, overwrite=True), down, bias)
    check_product(x, up)
    check_product(x.new_empty(0, len(up) // 2), down)
    deferred, state = defers_product(), MLPState()
    rows = x.reshape(-1, x.shape[-1])
    y = _Fp8MLP.apply(rows, up, down, act, find_recompute(x), state, x.shape, deferred)
    if (saved := state.gate_up) is not None:
        y = deferred_product(y, lambda: _down_product(saved, down, act, state))
    return finish_output(y, x.shape[:-1], bias)
