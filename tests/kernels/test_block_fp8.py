"""Block-scaled fp8 against torch's own conversion, and products with quantised weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tests.kernels.conftest import CUDA
from tigon.kernels.linear.lora import FP8_BASE, PLAIN_BASE, BaseLinear
from tigon.kernels.linear.quantized import (
    E4M3,
    E5M2,
    BlockFP8Tensor,
    dequantize_block_fp8,
    dequantize_block_fp8_rows,
    quantized_linear,
)


@pytest.mark.parametrize("stored", [E4M3, E5M2])
@pytest.mark.parametrize("width", [128, 40])
def test_every_code_times_its_scale(stored: torch.dtype, width: int) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(21).view(21, 256)
    owners = torch.arange(21, dtype=torch.int32) // 8
    scales = torch.rand(3, -(-256 // width))
    each = scales[owners][:, torch.arange(256) // width]
    expected = codes.view(stored).float() * each
    weight = BlockFP8Tensor(codes, scales, owners)
    how: dict[str, Any] = {"width": width, "stored": stored, "dtype": torch.float32}
    found = dequantize_block_fp8(weight, **how)
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.equal(found.isnan(), expected.isnan())
    some = dequantize_block_fp8_rows(weight, 5, 9, **how)
    assert torch.equal(some.nan_to_num(7.0), expected[5:14].nan_to_num(7.0))
    rounded = dequantize_block_fp8(weight, **how | {"dtype": torch.float16})
    assert torch.equal(rounded.nan_to_num(7.0), expected.half().nan_to_num(7.0))


@pytest.mark.parametrize("inner", [PLAIN_BASE, FP8_BASE])
@pytest.mark.parametrize("bias", [True, False])
def test_products(inner: BaseLinear, bias: bool) -> None:
    """As those of the dequantised weight; backward makes it again and keeps nothing of it."""
    torch.manual_seed(0)
    dtype = torch.float32 if inner is PLAIN_BASE else torch.bfloat16
    x = torch.randn(2, 3, 32).to(dtype).requires_grad_()
    b = torch.randn(48).to(dtype).requires_grad_() if bias else None
    weight, made, kept = torch.randn(48, 32).to(dtype), [], []

    def dequantise() -> Tensor:
        made.append(1)
        return weight.clone()

    def pack(saved: Tensor) -> Tensor:
        kept.append(saved)
        return saved

    with saved_tensors_hooks(pack, lambda saved: saved):
        y = quantized_linear(x, b, dequantise, inner)
    dy = torch.randn_like(y)
    assert len(made) == 1 and not kept
    wanted = [x] if b is None else [x, b]
    found = torch.autograd.grad(y, wanted, dy)
    assert len(made) == 2

    linear: Callable[..., Tensor] = F.linear if inner is PLAIN_BASE else FP8_BASE.linear
    expected = linear(x, weight, b)
    assert torch.equal(y, expected)
    gradients = torch.autograd.grad(expected, wanted, dy)
    for ours, theirs in zip(found, gradients, strict=True):
        torch.testing.assert_close(ours, theirs)
    with torch.no_grad():
        assert torch.equal(quantized_linear(x, b, dequantise, inner), expected)


@pytest.mark.skipif(CUDA, reason="of the CPU's autocast")
def test_autocast() -> None:
    x, weight = torch.randn(3, 32, requires_grad=True), torch.randn(48, 32)
    with torch.autocast("cpu", torch.bfloat16):
        y = quantized_linear(x, None, weight.clone, PLAIN_BASE)
        expected = F.linear(x, weight)
    assert y.dtype == torch.bfloat16 and torch.equal(y, expected)
    found, theirs = (torch.autograd.grad(out.sum(), x)[0] for out in (y, expected))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, theirs)
