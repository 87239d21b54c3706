"""Stochastic rounding to bfloat16, with draws that are a function of where and when.

A value between two neighbours becomes the upper one with the probability of its distance from the
lower one, so that the mean over many steps is the value: updates smaller than half the spacing of
bfloat16 are lost when rounding to nearest, and count here.
"""

import torch
from torch import Tensor

from tigon.utils.random import GOLDEN, WORD, as_int64, mix, mix_


def draws(seed: int, step: int, positions: Tensor) -> Tensor:
    """64 random bits, int64, for elements by their positions in the whole model, int64.

    SplitMix64 (Steele, Lea and Flood, 2014), whose n-th output can be had without those before:
    each step of each seed has its own stream, each element its place there. So the bits depend
    neither on how ranks divide the model (positions.py) nor on where a run was interrupted.
    """
    bits = positions * as_int64(GOLDEN)
    return mix_(bits.add_(as_int64((stream(seed, step) + GOLDEN) & WORD)))


def stream(seed: int, step: int) -> int:
    """What a step's positions are counted from, as an int64."""
    return as_int64(mix(mix(seed & WORD) + step))


def round_stochastically(value: Tensor, bits: Tensor) -> Tensor:
    """bfloat16, from float32 and int32 in 0...65535 of the same shape.

    Values that bfloat16 has stay, NaN and infinities too. Adding the bits below the mantissa's last
    one carries into it as often as they say; the sign is apart, so that this is away from zero.
    """
    raised = (value.contiguous().view(torch.int32) + bits).bitwise_and_(-1 << 16)
    rounded = raised.view(torch.float32)
    # A NaN's bits may carry into the sign
    return torch.where(value.isnan(), value, rounded).bfloat16()
