"""8-bit states and stochastic rounding inside of kernels, bit for bit as their definitions.

The definitions are in tigon/train/optim/adamw.py and tigon/utils/random.py. 8-bit numbers have a
code each and a scale for each block.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tigon.kernels.runtime import tl, triton

# Shares of a block's largest number, by the bits of float32: cells of 128 to each power of two,
# from 2**-23, below which all is in the first, to 1. At most one bound between codes is in a cell
_BEGIN, _STEP, _COUNT = 0x34000000, 16, 2945
BEGIN, STEP, COUNT = tl.constexpr(_BEGIN), tl.constexpr(_STEP), tl.constexpr(_COUNT)
ONE = tl.constexpr(0x3F800000)


class CodeTables(NamedTuple):
    """The lookup tables of kernels, on the device."""

    shares: Tensor  # float32 [256], the value of each code
    bounds: Tensor  # float32 [256], between each code and the next, then infinity
    cells: Tensor  # uint8 [2 * COUNT], the least code in each cell, then in those below 0
    positive_shares: Tensor  # the same for numbers that are not negative; [COUNT]
    positive_bounds: Tensor
    positive_cells: Tensor

    @classmethod
    def build(cls, signed: tuple[Tensor, Tensor], positive: tuple[Tensor, Tensor]) -> "CodeTables":
        """Builds tables from the ascending codes [256] and the bounds between two [255]."""
        tables = []
        for (shares, bounds), below in ((signed, True), (positive, False)):
            end = bounds.new_full((1,), torch.inf)
            tables += [shares, torch.cat([bounds, end]), _cells(bounds, below)]
        return cls(*tables)


def _cells(bounds: Tensor, signed: bool) -> Tensor:
    """Maps cells of float32 to the first code in each, from which a kernel's search begins."""
    first = torch.arange(_COUNT, dtype=torch.int32, device=bounds.device)
    low = ((first << _STEP) + _BEGIN).view(torch.float32)
    high = (((first + 1) << _STEP) + (_BEGIN - 1)).view(torch.float32)
    low[0] = 0.0
    least = torch.cat([low, -high]) if signed else low
    return torch.bucketize(least, bounds, right=True).to(torch.uint8)


@triton.jit
def dequantize(codes, scale, shares):
    """Returns float32 [K, B] from codes [K, B], scales [K, 1] and the value of each code."""
    return tl.load(shares + codes.to(tl.int32)) * scale


@triton.jit
def quantize(x, bounds, cells, SIGNED: tl.constexpr):
    """Returns codes uint8 [K, B] and scales float32 [K, 1] of float32 [K, B]."""
    # Bits of what is not negative are in the order of the numbers, and NaN is the largest
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1, keep_dims=True)
    scale = largest.to(tl.float32, bitcast=True)
    positive = scale > 0
    share = tl.where(positive, tl.div_rn(x, tl.where(positive, scale, 1.0)), 0.0)
    size = share.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    cell = (tl.minimum(tl.maximum(size, BEGIN), ONE) - BEGIN) >> STEP
    if SIGNED:
        cell += tl.where(share < 0, COUNT, 0)
    code = tl.load(cells + cell).to(tl.int32)
    code += (tl.load(bounds + code) <= share).to(tl.int32)
    if not SIGNED:
        code = tl.where(share > 0, tl.maximum(code, 1), code)
    return code.to(tl.uint8), scale


# Stochastic rounding to bfloat16 by SplitMix64's bits at a position and step

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
FACTOR = tl.constexpr(0xBF58476D1CE4E5B9)
FACTOR2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def draw_bits(first, at, stream):
    """Returns 64 random bits for each position `first + at`; `at` is int32, not negative."""
    return _mix(_states(first, at, stream))


@triton.jit
def draw_bits_strided(position, first, at, width, pitch, stream):
    """`draw_bits` for elements i = `first + at` at `position + i // width * pitch + i % width`.

    `at` and `width` are less than 2**30.
    """
    line = first.to(tl.int64) // width  # one division of 64 bits for all elements
    begin = first - line * width
    after = (begin.to(tl.int32) + at) // width.to(tl.int32)
    z = _states(position + line * pitch + begin, at, stream)
    gap = (pitch - width).to(tl.int64).to(tl.uint64, bitcast=True) * GOLDEN
    return _mix(z + after.to(tl.uint64) * gap)


@triton.jit
def _states(first, at, stream):
    """Returns SplitMix64's states, uint64, at the positions `first + at` of a stream."""
    z = (first.to(tl.int64) + 1).to(tl.uint64, bitcast=True) * GOLDEN
    z += stream.to(tl.int64).to(tl.uint64, bitcast=True)
    z += at.to(tl.uint64) * GOLDEN  # 32 bits times 64: fewer instructions than of their sum
    return z


@triton.jit
def _mix(z):
    """Returns the 64 bits that SplitMix64 makes of a state."""
    z = (z ^ (z >> 30)) * FACTOR
    z = (z ^ (z >> 27)) * FACTOR2
    return z ^ (z >> 31)


@triton.jit
def extract_16_bits(bits, INDEX: tl.constexpr):
    """Returns the INDEX-th 16 of 64 bits, as int32."""
    return ((bits >> (16 * INDEX)) & 0xFFFF).to(tl.int32)


@triton.jit
def round_stochastically(x, bits):
    """Rounds float32 to bfloat16, with random int32 in 0...65535."""
    raised = (x.to(tl.int32, bitcast=True) + bits) & -65536
    # A NaN's bits may carry into the sign
    return tl.where(x == x, raised.to(tl.float32, bitcast=True), float("nan")).to(tl.bfloat16)


@triton.jit
def round_to_nearest(x):
    """Rounds float32 to bfloat16, ties to even; Triton's interpreter would truncate."""
    odd = (x.to(tl.int32, bitcast=True) >> 16) & 1
    return round_stochastically(x, odd + 0x7FFF)
