"""Weights in fp8 with a scale for every block of them, as checkpoints have them.

# N, K of a weight; R rows of scales, S of them in a row

A number is its fp8 number times the scale of its block, in fp32, rounded once. Source: DeepSeek-V3
(arXiv 2412.19437, section 3.3). A packed weight has matrices of several tensors one below the
other, whose blocks begin anew with each, so that every row of it says which row of scales it has.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tigon.kernels._triton import operator, runs_triton, tl, triton

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROWS, COLUMNS = 16, 256  # of a program's tile
SLAB = 1 << 22  # numbers that the definition makes at a time


class BlockFp8(NamedTuple):
    """A weight of one or several matrices."""

    codes: Tensor  # uint8 [N, K]
    scales: Tensor  # fp32 [R, S]
    owners: Tensor  # int32 [N], the row of scales of each row


def block_fp8_rows(
    weight: BlockFp8, first: int, count: int, *, width: int, stored: torch.dtype, dtype: torch.dtype
) -> Tensor:
    """Rows [first, first + count), in plain torch: the definition. `width`: columns of a block."""
    columns = weight.codes.shape[1]
    out = torch.empty(count, columns, dtype=dtype, device=weight.codes.device)
    of_column = torch.arange(columns, device=out.device) // width
    step = max(1, SLAB // max(1, columns))
    for begin in range(0, count, step):
        rows = slice(first + begin, first + min(begin + step, count))
        values = weight.codes[rows].view(stored).float()
        out[begin : begin + step] = values.mul_(weight.scales[weight.owners[rows]][:, of_column])
    return out


@triton.jit
def number_of(code, E4M3: tl.constexpr):
    """fp32 of fp8 codes, int32. GPUs before sm_89 have no conversion.

    Both forms are fp16's but for their number of bits: e5m2 without the last eight of the mantissa,
    e4m3 with a bias of 7 in place of 15.
    """
    if E4M3:
        bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
        x = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where((code & 0x7F) == 0x7F, float("nan"), x)
    return (code << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _block_fp8_kernel(
    codes, scales, owners, y, N, K, S, width,
    E4M3: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = (rows < N)[:, None] & (columns < K)[None, :]
    owner = tl.load(owners + rows, mask=rows < N, other=0)
    of_block = owner[:, None] * S + (columns // width)[None, :]
    scale = tl.load(scales + of_block, mask=there, other=0.0)
    at = rows.to(tl.int64)[:, None] * K + columns[None, :]
    code = tl.load(codes + at, mask=there, other=0).to(tl.int32)
    tl.store(y + at, (number_of(code, E4M3) * scale).to(y.dtype.element_ty), mask=there)


def _output(
    codes: Tensor, scales: Tensor, owners: Tensor, width: int, e4m3: bool, dtype: torch.dtype
) -> Tensor:
    return codes.new_empty(codes.shape, dtype=dtype)


@operator("block_fp8_dequantise", _output)
def _dequantise(
    codes: Tensor, scales: Tensor, owners: Tensor, width: int, e4m3: bool, dtype: torch.dtype
) -> Tensor:
    y = _output(codes, scales, owners, width, e4m3, dtype)
    N, K = y.shape
    grid = triton.cdiv(N, ROWS), triton.cdiv(K, COLUMNS)
    _block_fp8_kernel[grid](
        codes, scales, owners, y, N, K, scales.shape[1], width,
        E4M3=e4m3, ROWS=ROWS, COLUMNS=COLUMNS,
    )  # fmt: skip
    return y


def block_fp8_dequantise(
    weight: BlockFp8, *, width: int, stored: torch.dtype, dtype: torch.dtype
) -> Tensor:
    """The weight [N, K] in `dtype`, in new memory.

    `width`: columns of a block; `stored`: which of the two forms of fp8 the codes are of.
    """
    if not runs_triton(weight.scales):
        return block_fp8_rows(weight, 0, len(weight.codes), width=width, stored=stored, dtype=dtype)
    return _dequantise(*weight, width, stored == E4M3, dtype)
