"""Operands of products in 8-bit floats, and whether casts and results have the same bits."""

import math

import torch
from torch import Tensor

from tigon.kernels.linear import fp8_casts
from tigon.kernels.linear.fp8_casts import ScaledMatrix

SMALL = fp8_casts.Tile(16, 16, 1)


def assert_same(found: ScaledMatrix, expected: ScaledMatrix) -> None:
    """Bit for bit, but for which NaN it is."""
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=0, atol=0, equal_nan=True)


def operands(*lead: int, K: int, N: int) -> tuple[Tensor, Tensor, Tensor]:
    x = (torch.randn(*lead, K) * torch.logspace(-2, 1, K)).bfloat16()
    weight = (torch.randn(N, K) / math.sqrt(K)).bfloat16()
    return x.requires_grad_(), weight.requires_grad_(), torch.randn(*lead, N).bfloat16()


def same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(torch.allclose(a, b, 0, 0, equal_nan=True) for a, b in pairs)
