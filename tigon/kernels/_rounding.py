"""Stochastic rounding to bfloat16 inside of kernels: SplitMix64's bits, by position and step.

The definitions, tigon/train/optim/rounding.py and tigon/utils/random.py, give the same bits.
"""

from tigon.kernels._triton import tl, triton

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
FACTOR = tl.constexpr(0xBF58476D1CE4E5B9)
FACTOR2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def draw(first, at, stream):
    """64 random bits, uint64, for each of the positions `first + at`; `at`: int32, not negative."""
    return _mixed(_states(first, at, stream))


@triton.jit
def draw_in_lines(position, first, at, width, pitch, stream):
    """As `draw`, for elements i = `first + at` whose positions are lines of the whole:
    `position + i // width * pitch + i % width`. `at` and `width`: less than 2**30."""
    line = first.to(tl.int64) // width  # one division of 64 bits for all elements
    begin = first - line * width
    after = (begin.to(tl.int32) + at) // width.to(tl.int32)
    z = _states(position + line * pitch + begin, at, stream)
    gap = (pitch - width).to(tl.int64).to(tl.uint64, bitcast=True) * GOLDEN
    return _mixed(z + after.to(tl.uint64) * gap)


@triton.jit
def _states(first, at, stream):
    z = (first.to(tl.int64) + 1).to(tl.uint64, bitcast=True) * GOLDEN
    z += stream.to(tl.int64).to(tl.uint64, bitcast=True)
    z += at.to(tl.uint64) * GOLDEN  # 32 bits times 64: fewer instructions than of their sum
    return z


@triton.jit
def _mixed(z):
    z = (z ^ (z >> 30)) * FACTOR
    z = (z ^ (z >> 27)) * FACTOR2
    return z ^ (z >> 31)


@triton.jit
def sixteen(bits, INDEX: tl.constexpr):
    """The INDEX-th 16 of 64 bits, as int32."""
    return ((bits >> (16 * INDEX)) & 0xFFFF).to(tl.int32)


@triton.jit
def round_stochastically(x, bits):
    """float32 to bfloat16, by int32 in 0...65535."""
    raised = (x.to(tl.int32, bitcast=True) + bits) & -65536
    # A NaN's bits may carry into the sign
    return tl.where(x == x, raised.to(tl.float32, bitcast=True), float("nan")).to(tl.bfloat16)


@triton.jit
def round_to_nearest(x):
    """float32 to bfloat16, ties to even; Triton's interpreter would cut bits off."""
    odd = (x.to(tl.int32, bitcast=True) >> 16) & 1
    return round_stochastically(x, odd + 0x7FFF)
