"""A gated activation between two products of 8-bit floats: what its passes can do for the casts.

# R rows, I intermediate size; gate_up [R, 2 I] has the gate first

Forward, the product of activation and `up` is cast by rows as it is made, and never written in
bf16. Backward, the pass that makes the gradient of gate_up and the product again finds the largest
magnitudes of both, so that each cast reads them once. Bytes per element of the product: forward 5
(alone and with a cast 9), backward 12 (alone 10, and 6 for the product).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.kernels._check import has_values
from tigon.kernels._fp8_casts import (
    E4M3,
    UNKNOWN,
    Maxima,
    Scaled,
    magnitude,
    raise_maxima,
    row_programs,
    scales_of,
)
from tigon.kernels._triton import as_rows, operator, power_of_2, tl, triton
from tigon.kernels.gated_act import (
    BACKWARD,
    Activation,
    act_and_slope,
    gated_gradients,
    gradient_and_product,
    launch_columns,
    place_of_gradient,
)

WIDEST = 16384  # columns of a row that one program holds
HELD = 32768  # columns that a multiprocessor holds in forward
ROWS = 32  # of one program in backward, which then adds its own to the columns' maxima
STAGES = 3  # of these rows in flight, and in use


@triton.jit
def _gated_rows_kernel(
    x,
    data,
    scales,
    R,
    x_row,
    size: tl.constexpr,
    ACT: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    dtype: tl.constexpr = x.dtype.element_ty
    columns = tl.arange(0, BLOCK)
    mask = columns < size
    for at in tl.range(tl.program_id(0), R, tl.num_programs(0), num_stages=STAGES):
        row = tl.cast(at, tl.int64)
        here = x + row * x_row + columns
        gate = tl.load(here, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(here + size, mask=mask, other=0.0).to(tl.float32)
        a, _ = act_and_slope(gate, ACT)
        y = (a.to(dtype).to(tl.float32) * up).to(dtype).to(tl.float32)
        scale, inverse = scales_of(tl.max(magnitude(y), 0))
        tl.store(data + row * size + columns, (y * inverse).to(tl.float8e4nv), mask=mask)
        tl.store(scales + row, scale)


@triton.jit
def _gated_gradients_kernel(
    dy,  # [R, I]; becomes the product
    x,
    dx,  # [R, 2 I]; may be x
    row_bits,  # int32 [R], [2 I] and [I], which become maxima of dx and of the product
    column_bits,
    product_bits,
    R,
    x_row,
    size,
    ACT: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
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
        here = row * x_row + columns
        gate = tl.load(x + here, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(x + here + size, mask=mask, other=0.0).to(tl.float32)
        of_gate, of_up, product = gated_gradients(d, gate, up, dtype, ACT)
        of_gate, of_up, product = of_gate.to(dtype), of_up.to(dtype), product.to(dtype)
        there = dx + row * 2 * size + columns
        tl.store(there, of_gate, mask=mask)
        tl.store(there + size, of_up, mask=mask)
        tl.store(dy + row * size + columns, product, mask=mask)
        gate_bits, up_bits = magnitude(of_gate.to(tl.float32)), magnitude(of_up.to(tl.float32))
        tl.atomic_max(row_bits + row, tl.max(tl.maximum(gate_bits, up_bits), 0), sem="relaxed")
        gate_top = tl.maximum(gate_top, gate_bits)
        up_top = tl.maximum(up_top, up_bits)
        product_top = tl.maximum(product_top, magnitude(product.to(tl.float32)))
    raise_maxima(column_bits, columns, gate_top, mask)
    raise_maxima(column_bits + size, columns, up_top, mask)
    raise_maxima(product_bits, columns, product_top, mask)


def holds_rows(gate_up: Tensor) -> bool:
    """Whether a program can hold a row of the product, as `cast_gated_rows` must."""
    return power_of_2(gate_up.shape[-1] // 2) <= WIDEST


def _rows_output(gate_up: Tensor, *_: Any) -> list[Tensor]:
    R, both = gate_up.shape
    data = gate_up.new_empty(R, both // 2, dtype=E4M3)
    return [data, gate_up.new_empty(R, dtype=torch.float32)]


@operator("fp8_cast_gated_rows", _rows_output)
def _cast_gated_rows(gate_up: Tensor, act: str) -> list[Tensor]:
    data, scale = outputs = _rows_output(gate_up)
    R, size = data.shape
    width = 2 * gate_up.element_size()
    programs, launch = row_programs(gate_up, R, power_of_2(size), width, HELD)
    strides = R, gate_up.stride(0)
    _gated_rows_kernel[(programs,)](gate_up, data, scale, *strides, size, ACT=act, **launch)
    return outputs


def cast_gated_rows(gate_up: Tensor, act: Activation) -> Scaled:
    """`cast_rows` of what `gated_act` returns for gate_up [R, 2 I]."""
    return Scaled(*_cast_gated_rows(as_rows(gate_up), act))


class Gradients(NamedTuple):
    gate_up: Tensor  # the gradient of gate_up, in its shape
    maxima: Maxima  # its own, as a matrix
    product: Tensor  # what `gated_act` returned
    product_maxima: Tensor | None  # of its columns


def gradients_and_maxima(
    dy: Tensor, gate_up: Tensor, act: Activation, overwrite: bool
) -> Gradients:
    """As `gradient_and_product`: the product is written over `dy`, which is the caller's."""
    if torch._C._len_torch_dispatch_stack() or not has_values(dy):
        gradient, product = gradient_and_product(dy, gate_up, act, overwrite)
        return Gradients(gradient, UNKNOWN, product, None)
    gradient = place_of_gradient(gate_up, overwrite)
    with torch.cuda.device_of(gradient):
        d, x = as_rows(dy), as_rows(gate_up)
        R, size = d.shape
        rows, columns, of_product = x.new_zeros(R + 3 * size, dtype=torch.int32).split(
            [R, 2 * size, size]
        )
        launch = launch_columns(size, BACKWARD) | {"ROWS": ROWS, "STAGES": STAGES}
        grid = (triton.cdiv(R, ROWS) * triton.cdiv(size, launch["BLOCK"]),)
        strides = R, x.stride(0), size
        bits = rows, columns, of_product
        _gated_gradients_kernel[grid](d, x, gradient, *bits, *strides, ACT=act, **launch)
    return Gradients(gradient, Maxima(rows, columns), dy, of_product)
