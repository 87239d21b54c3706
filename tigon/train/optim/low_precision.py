"""States and weights in bfloat16, rounded stochastically, and states in 8 bits.

A value between two neighbors in bfloat16 becomes the upper one with the probability of its distance
from the lower one, so that the mean over many steps is the value. Rounding to nearest would lose
updates below half the spacing of bfloat16.

States of 8 bits are a code for each element and a scale for each block: block-wise dynamic
quantization (Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022), with the table
of bitsandbytes and torchao. A block lies within a row, so that states do not depend on how ranks
divide the rows. Unlike theirs, a positive second moment never becomes 0: beside a momentum that is
not 0, the next update without a gradient would be divided by eps alone.

# R rows, C columns of a rank's part of a parameter as a matrix, K blocks in a row
"""

from collections.abc import Mapping
from functools import cache
from typing import TypeAlias

import torch
from torch import Tensor

from tigon.utils.random import WORD, as_int64, mix, take_16_bits

BLOCK = 256  # elements of a block of 8-bit states, at most
MIN_BLOCK = 32  # with shorter blocks, scales would take as much as they save

States: TypeAlias = Mapping[str, Tensor]  # of one parameter, by name


def stream_seed(seed: int, step: int) -> int:
    """Returns the seed of a step's stream of random bits, as an int64.

    A bit's place in the stream is the position of its element in the whole model. So the bits
    depend neither on how ranks divide the model nor on where a run was interrupted.
    """
    return as_int64(mix(mix(seed & WORD) + step))


def round_stochastically(value: Tensor, bits: Tensor) -> Tensor:
    """Returns float32 values rounded to bfloat16 by random bits, int32 in 0...65535 of their shape.

    Values that bfloat16 has stay, NaN and infinities too. The sum of the bits and those below the
    mantissa carries into it; the sign is not part of the sum, so that a carry is away from zero.
    """
    raised = (value.contiguous().view(torch.int32) + bits).bitwise_and_(-1 << 16)
    rounded = raised.view(torch.float32)
    # A NaN's bits may carry into the sign
    return torch.where(value.isnan(), value, rounded).bfloat16()


def block_size(columns: int) -> int:
    """Returns the largest power of two, up to BLOCK, that divides a row."""
    return min(BLOCK, columns & -columns)


def quantize(value: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Returns codes uint8 [R, C] and scales float32 [R, K] of float32 values [R, C].

    A block's scale is its largest absolute value. Without `signed`, no value is negative.
    """
    blocks = value.view(len(value), -1, block_size(value.shape[1]))
    scale = blocks.abs().amax(-1)
    share = blocks / scale.unsqueeze(-1)
    share = torch.where(scale.unsqueeze(-1) > 0, share, 0.0)
    codes = torch.bucketize(share, tables(signed, value.device)[1], right=True, out_int32=True)
    if not signed:
        codes = torch.where(share > 0, codes.clamp(min=1), codes)
    return codes.to(torch.uint8).view_as(value), scale


def dequantize(codes: Tensor, scale: Tensor, signed: bool) -> Tensor:
    """Returns float32 values [R, C] from codes [R, C] and scales [R, K]."""
    share = tables(signed, codes.device)[0][codes.int()]
    return (share.view(*scale.shape, -1) * scale.unsqueeze(-1)).view(codes.shape)


@cache
def _code_values(signed: bool) -> list[float]:
    """Returns the ascending value [256] of each code, for a block whose largest is 1: seven
    decades, each of twice as many values as the one below it."""
    values = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade if signed else decade + 1) + 1, device="cpu")
        positive = (10 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2).tolist()
        values += positive + [-value for value in positive if signed]
    return sorted(values)


VALUES = {signed: _code_values(signed) for signed in (True, False)}  # here, for FakeTensorMode


def tables(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the value of each code [256] and the bounds between them [255], in float32."""
    table = torch.tensor(VALUES[signed], device="cpu").to(device)
    return table, (table[:-1] + table[1:]) / 2


def read_state(states: States, kind: str) -> Tensor:
    """Returns the state `kind` as float32 [R, C]: the stored tensor itself if it is float32."""
    if kind in states:
        return states[kind].float()
    return dequantize(states[f"{kind}_codes"], states[f"{kind}_scale"], kind == "exp_avg")


def write_state(states: States, kind: str, value: Tensor, drawn: Tensor, index: int) -> None:
    """Stores a float32 value [R, C] of the state `kind` as codes and scales, or as bfloat16, which
    the index-th 16 drawn bits round; leaves a float32 state, which is the value itself."""
    if kind not in states:
        codes, scale = quantize(value, kind == "exp_avg")
        states[f"{kind}_codes"].copy_(codes)
        states[f"{kind}_scale"].copy_(scale)
    elif states[kind].dtype == torch.bfloat16:
        states[kind].copy_(round_stochastically(value, take_16_bits(drawn, index)))
