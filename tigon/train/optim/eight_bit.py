"""Optimizer states of 8 bits: a code for each element, and a scale for each block.

Block-wise dynamic quantisation (Dettmers et al., 8-bit Optimizers via Block-wise Quantization,
2022), with the table of bitsandbytes and torchao. A block lies within a row, so that states are the
same however rows are divided among ranks. Unlike theirs, a positive second moment never becomes 0:
beside a momentum that is not 0, the next update without a gradient would be divided by eps alone.

R rows, C columns, K blocks in a row.
"""

from functools import cache

import torch
from torch import Tensor

BLOCK = 256  # elements at most
LEAST = 32  # with shorter blocks, scales would take as much as they save


def block_size(columns: int) -> int:
    """The largest power of two, up to BLOCK, that divides a row."""
    return min(BLOCK, columns & -columns)


def quantize(value: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """float32 [R, C] to codes uint8 [R, C] and scales float32 [R, K]; without `signed`, of values
    that are not negative. A block's scale is its largest absolute value."""
    blocks = value.view(len(value), -1, block_size(value.shape[1]))
    scale = blocks.abs().amax(-1)
    share = blocks / scale.unsqueeze(-1)
    share = torch.where(scale.unsqueeze(-1) > 0, share, 0.0)
    codes = torch.bucketize(share, _bounds(signed, value.device), right=True, out_int32=True)
    if not signed:
        codes = torch.where(share > 0, codes.clamp(min=1), codes)
    return codes.to(torch.uint8).view_as(value), scale


def dequantize(codes: Tensor, scale: Tensor, signed: bool) -> Tensor:
    """float32 [R, C]"""
    share = _table(signed, codes.device)[codes.int()]
    return (share.view(*scale.shape, -1) * scale.unsqueeze(-1)).view(codes.shape)


def tables(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """float32: the value of each code [256], and the bounds between each two [255]."""
    return _table(signed, device), _bounds(signed, device)


@cache
def _table(signed: bool, device: torch.device) -> Tensor:
    """The value of each code, of a block whose largest is 1; ascending.

    Seven decades, each of twice as many values as the one below it.
    """
    found = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade if signed else decade + 1) + 1)
        values = (10 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2).tolist()
        found += values + [-value for value in values if signed]
    return torch.tensor(sorted(found), device=device)


@cache
def _bounds(signed: bool, device: torch.device) -> Tensor:
    """Between each two codes."""
    table = _table(signed, device)
    return (table[:-1] + table[1:]) / 2
