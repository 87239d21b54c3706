"""Triton products by tensor descriptors, persistent, with a gated activation in the epilogue.

# T tokens, C model dim, I intermediate size
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tigon.kernels.mlp.gated_act import act_and_slope, gated_gradients
from tigon.kernels.runtime import num_sms

ROWS, COLUMNS, STEP, GROUP = 128, 128, 64, 8  # of a tile, for gate and up each


@triton.jit
def _tile(at, row_tiles, column_tiles, GROUP: tl.constexpr):
    """Returns row and column of a tile; neighbors share rows and columns in the cache."""
    wide = GROUP * column_tiles
    first = at // wide * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    return first + at % wide % height, at % wide // height


@triton.jit
def _gated_kernel(
    x, weight, gate_up, product, T, size, dim,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Writes x W^T for tiles of gate and the same of up, and act(gate) * up."""
    dtype: tl.constexpr = product.dtype
    row_tiles, column_tiles = tl.cdiv(T, ROWS), tl.cdiv(size, COLUMNS)
    for at in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        row, column = _tile(at, row_tiles, column_tiles, GROUP)
        row, column = row * ROWS, column * COLUMNS
        gate = tl.zeros([ROWS, COLUMNS], tl.float32)
        up = tl.zeros([ROWS, COLUMNS], tl.float32)
        for k in range(0, dim, STEP):
            a = x.load([row, k])
            gate = tl.dot(a, weight.load([column, k]).T, gate)
            up = tl.dot(a, weight.load([size + column, k]).T, up)
        gate, up = gate.to(dtype), up.to(dtype)
        gate_up.store([row, column], gate)
        gate_up.store([row, size + column], up)
        y, _ = act_and_slope(gate.to(tl.float32), "silu")
        y = y.to(dtype).to(tl.float32) * up.to(tl.float32)
        product.store([row, column], y.to(dtype))


@triton.jit
def _gradient_kernel(
    dy, weight, gate_up, gradient, product, T, size, dim,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Writes the gradients of gate and up from d = dY W, and act(gate) * up."""
    dtype: tl.constexpr = product.dtype
    row_tiles, column_tiles = tl.cdiv(T, ROWS), tl.cdiv(size, 2 * COLUMNS)
    for at in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        row, column = _tile(at, row_tiles, column_tiles, GROUP)
        row, column = row * ROWS, column * 2 * COLUMNS
        d = tl.zeros([ROWS, 2 * COLUMNS], tl.float32)
        for k in range(0, dim, STEP):
            d = tl.dot(dy.load([row, k]), weight.load([k, column]), d)
        # A quarter at a time: there are not enough registers for all of it
        halves = d.reshape(ROWS, 2, COLUMNS).permute(0, 2, 1).split()
        for i in tl.static_range(4):
            quarter = halves[i // 2].reshape(ROWS, 2, COLUMNS // 2).permute(0, 2, 1).split()[i % 2]
            first = column + i * (COLUMNS // 2)
            gate = gate_up.load([row, first]).to(tl.float32)
            up = gate_up.load([row, size + first]).to(tl.float32)
            rounded = quarter.to(dtype).to(tl.float32)
            d_gate, d_up, y = gated_gradients(rounded, gate, up, dtype, "silu")
            gradient.store([row, first], d_gate.to(dtype))
            gradient.store([row, size + first], d_up.to(dtype))
            product.store([row, first], y.to(dtype))


def _describe(x: Tensor, rows: int, columns: int) -> Any:
    return TensorDescriptor.from_tensor(x, [rows, columns])


def _launch(kernel: Any, x: Tensor, tensors: list[Any], size: int, tiles: int) -> None:
    """Starts a program on each multiprocessor, at most one for each tile."""
    tile = {"ROWS": ROWS, "COLUMNS": COLUMNS, "STEP": STEP, "GROUP": GROUP}
    sizes = len(x), size, x.shape[1]
    kernel[(min(num_sms(x), tiles),)](*tensors, *sizes, **tile, num_warps=8, num_stages=3)


def gated_product(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns x W^T [T, 2 I] and act(gate) * up [T, I], for x [T, C] and weight [2 I, C]."""
    size = len(weight) // 2
    gate_up, product = x.new_empty(len(x), 2 * size), x.new_empty(len(x), size)
    out = [_describe(y, ROWS, COLUMNS) for y in (gate_up, product)]
    tensors = [_describe(x, ROWS, STEP), _describe(weight, COLUMNS, STEP), *out]
    tiles = triton.cdiv(len(x), ROWS) * triton.cdiv(size, COLUMNS)
    _launch(_gated_kernel, x, tensors, size, tiles)
    return gate_up, product


def gradient_product(dy: Tensor, weight: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradient of gate_up [T, 2 I], and act(gate) * up, from dY [T, C] and the weight
    [C, I] of down_proj."""
    size = weight.shape[1]
    gradient, product = torch.empty_like(gate_up), dy.new_empty(len(dy), size)
    ends = [_describe(y, ROWS, COLUMNS // 2) for y in (gate_up, gradient, product)]
    tensors = [_describe(dy, ROWS, STEP), _describe(weight, STEP, 2 * COLUMNS), *ends]
    tiles = triton.cdiv(len(dy), ROWS) * triton.cdiv(size, 2 * COLUMNS)
    _launch(_gradient_kernel, dy, tensors, size, tiles)
    return gradient, product
