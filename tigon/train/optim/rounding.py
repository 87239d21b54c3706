"""Stochastic rounding to bfloat16, with draws that are a function of where and when.

A value between two neighbours becomes the upper one with the probability of its distance from the
lower one, so that the mean over many steps is the value: updates smaller than half the spacing of
bfloat16 are lost when rounding to nearest, and count here.
"""

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15  # odd, near 2**64 divided by the golden ratio
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
WORD = (1 << 64) - 1


def draws(seed: int, step: int, first: int, count: int, device: torch.device) -> Tensor:
    """64 random bits, int64 [count], for the elements from position `first` of the model on.

    SplitMix64 (Steele, Lea and Flood, 2014), whose n-th output can be had without those before:
    each step of each seed has its own stream, each element its place there. So the bits depend
    neither on the number of ranks nor on where a run was interrupted.
    """
    bits = torch.arange(first + 1, first + 1 + count, device=device)
    bits.mul_(_signed(GOLDEN)).add_(stream(seed, step))
    for shift, factor in zip(SHIFTS, FACTORS, strict=False):
        bits ^= _shifted(bits, shift)
        bits *= _signed(factor)
    bits ^= _shifted(bits, SHIFTS[-1])
    return bits


def stream(seed: int, step: int) -> int:
    """What a step's positions are counted from, as an int64."""
    return _signed(_mixed(_mixed(seed & WORD) + step))


def sixteen(bits: Tensor, index: int) -> Tensor:
    """The index-th 16 of 64 bits, as int32 from 0 to 65535; index from 0 to 3."""
    return (bits >> (16 * index)).bitwise_and_(0xFFFF).int()


def round_stochastically(value: Tensor, bits: Tensor) -> Tensor:
    """bfloat16, from float32 and int32 in 0...65535 of the same shape.

    Values that bfloat16 has stay, NaN and infinities too. Adding the bits below the mantissa's last
    one carries into it as often as they say; the sign is apart, so that this is away from zero.
    """
    raised = (value.contiguous().view(torch.int32) + bits).bitwise_and_(-1 << 16)
    rounded = raised.view(torch.float32)
    # A NaN's bits may carry into the sign
    return torch.where(value.isnan(), value, rounded).bfloat16()


def _shifted(bits: Tensor, count: int) -> Tensor:
    """To the right, with zeros from the left."""
    return (bits >> count).bitwise_and_((1 << (64 - count)) - 1)


def _mixed(value: int) -> int:
    value = (value + GOLDEN) & WORD
    for shift, factor in zip(SHIFTS, FACTORS, strict=False):
        value = ((value ^ (value >> shift)) * factor) & WORD
    return value ^ (value >> SHIFTS[-1])


def _signed(value: int) -> int:
    """The int64 of the same bits."""
    return value - (1 << 64) if value >> 63 else value
