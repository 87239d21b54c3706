"""SplitMix64 in plain torch: random bits that are a function of a stream and a place in it.

Source: Steele, Lea and Flood (2014). The n-th output can be had without those before. In kernels it
is `draw` of tigon/kernels/optim/low_bits.py; the bits are the same.
"""

from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15  # odd, near 2**64 divided by the golden ratio
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
WORD = (1 << 64) - 1


def random_bits(streams: Tensor | int, at: Tensor) -> Tensor:
    """Returns 64 random bits, int64, of the streams at the indices `at` (int64), broadcast."""
    return mix_((at + 1) * as_int64(GOLDEN) + streams)


def mix_(bits: Tensor) -> Tensor:
    """Turns states of streams, int64, into outputs, in place, and returns them."""
    for shift, factor in zip(SHIFTS, FACTORS, strict=False):
        bits ^= _shifted(bits, shift)
        bits *= as_int64(factor)
    bits ^= _shifted(bits, SHIFTS[-1])
    return bits


def mix(value: int) -> int:
    """Returns the first output of the stream `value`, from 0 to 2**64 - 1."""
    value = (value + GOLDEN) & WORD
    for shift, factor in zip(SHIFTS, FACTORS, strict=False):
        value = ((value ^ (value >> shift)) * factor) & WORD
    return value ^ (value >> SHIFTS[-1])


def as_int64(value: int) -> int:
    """Converts a number from 0 to 2**64 - 1 to the int64 of the same bits."""
    return value - (1 << 64) if value >> 63 else value


def take_16_bits(bits: Tensor, index: int) -> Tensor:
    """Returns the index-th 16 of 64 bits, as int32 from 0 to 65535; index from 0 to 3."""
    return (bits >> (16 * index)).bitwise_and_(0xFFFF).int()


def _shifted(bits: Tensor, count: int) -> Tensor:
    """Shifts to the right, with zeros from the left."""
    return (bits >> count).bitwise_and_((1 << (64 - count)) - 1)
