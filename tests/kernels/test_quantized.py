"""Weights of few bits: NF4 by the paper's definition and bitsandbytes' own, block-scaled fp8 by
torch's conversion, and products with either."""

import hashlib
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tests.kernels.conftest import CUDA
from tigon.kernels.linear import quantized
from tigon.kernels.linear.lora import PLAIN_BASE, BaseLinear, make_fp8_base
from tigon.kernels.linear.quantized import (
    E4M3,
    E5M2,
    BlockFP8Tensor,
    dequantize_block_fp8,
    dequantize_block_fp8_rows,
    quantized_linear,
)

SHAPES = [(64, 64), (5, 13), (3, 7), (130, 200), (257, 64)]


def weight(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of a formula, so that they are the same everywhere, in rows of different sizes."""
    n = torch.arange(shape[0] * shape[1], dtype=torch.float64)
    rows = 0.1 + torch.arange(shape[0], dtype=torch.float64)[:, None] % 7
    return (rows * (n * 0.7312 + (n * n) % 1.37).sin().view(shape)).to(dtype)


def of(*matrices: Tensor) -> tuple[quantized.NF4Tensor, list[int]]:
    parts = [quantized.quantize_nf4(m) for m in matrices]
    sizes = [m.numel() for m in matrices]
    joined = [torch.cat(some) for some in zip(*parts, strict=True)]
    tables = torch.cat([quantized.NF4_VALUES, quantized.SCALE_VALUES])
    on = matrices[0].device
    return quantized.NF4Tensor(*joined, quantized.group_offsets(sizes).to(on), tables.to(on)), sizes


def by_definition(matrix: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Codes, block by block, and what they mean, as section 3 of the QLoRA paper has them."""
    flat = matrix.cpu().float().numpy().reshape(-1)
    book, dynamic = quantized.NF4_VALUES.numpy(), quantized.SCALE_VALUES.numpy()
    blocks = [flat[i : i + 64] for i in range(0, len(flat), 64)]
    most = np.array([np.abs(b).max() for b in blocks], np.float32)
    codes = np.concatenate(
        [
            np.abs((b * np.float32(1 / m))[:, None] - book).argmin(1)
            for b, m in zip(blocks, most, strict=True)
        ]
    )
    mean = most.mean(dtype=np.float64)
    centred = most - np.float32(mean)
    groups = [centred[i : i + 256] for i in range(0, len(centred), 256)]
    scales = []
    for g in groups:
        step = max(np.abs(g).max(), np.float32(1e-38))
        scales.append(dynamic[np.abs((g / step)[:, None] - dynamic).argmin(1)] * step + mean)
    each = np.repeat(np.concatenate(scales), 64)[: len(flat)]
    return codes, book[codes] * each, most, centred


@pytest.mark.parametrize("shape", SHAPES)
def test_definition(shape: tuple[int, int]) -> None:
    matrix = weight(*shape)
    stored, sizes = of(matrix)
    codes, values, _, _ = by_definition(matrix)
    packed = stored.codes.cpu().numpy()
    both = np.stack([packed >> 4, packed & 15], 1).reshape(-1)[: len(codes)]
    assert (both == codes).all()
    found = quantized.dequantize_nf4(stored, sizes, shape, torch.float32)
    np.testing.assert_allclose(found.cpu().numpy().reshape(-1), values, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_has_the_bits_of_the_definition(dtype: torch.dtype, path: str) -> None:
    """Of packed weights too, whose matrices end within blocks, bytes and groups."""
    for shapes in ([(130, 200)], [(70, 64), (300, 64), (2, 64)], [(5, 13), (11, 13), (3, 13)]):
        matrices = [weight(*s) for s in shapes]
        stored, sizes = of(*matrices)
        shape = sum(s[0] for s in shapes), shapes[0][1]
        found = quantized.dequantize_nf4(stored, sizes, shape, dtype)
        expected = quantized.dequantize_nf4_ref(stored, sizes, shape, dtype)
        if path == "triton" and not CUDA and dtype == torch.bfloat16:  # the interpreter truncates
            torch.testing.assert_close(found, expected, rtol=2**-7, atol=0)
        else:
            assert torch.equal(found, expected)
        alone = [quantized.dequantize_nf4(*of(m), m.shape, dtype) for m in matrices]
        assert torch.equal(found, torch.cat(alone))
        for i, m in enumerate(matrices):
            some = quantized.dequantize_nf4_slice(stored, sizes, i, 7, m.numel() - 9, dtype)
            reference = quantized.dequantize_nf4_ref(*of(m), m.shape, dtype).view(-1)
            assert torch.equal(some, reference[7:-2])


def test_slabs_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = weight(130, 200)
    whole, sizes = of(matrix)
    monkeypatch.setattr(quantized, "SLAB", 1024)
    assert all(torch.equal(a, b) for a, b in zip(of(matrix)[0], whole, strict=True))
    found = quantized.dequantize_nf4_slice(whole, sizes, 0, 100, 20000, torch.float32)
    monkeypatch.undo()
    assert torch.equal(
        found, quantized.dequantize_nf4_slice(whole, sizes, 0, 100, 20000, torch.float32)
    )


def test_a_block_of_zeros() -> None:
    matrix = weight(64, 64)
    matrix[3] = 0
    stored, sizes = of(matrix)
    found = quantized.dequantize_nf4(stored, sizes, (64, 64), torch.float32)
    assert not found[3].any() and found[4].any()


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.cpu().contiguous().numpy().tobytes()).hexdigest()[:16]


# What bitsandbytes 0.50.2 makes on a CPU of weight(130, 200) and of the numbers back from it
RECORDED = {
    "code books": "811b8d517ef9a1e4",
    "codes": "e8d5909658ffbc42",
    "largest of groups": "4d86e500fe0d7e2c",
    "mean": "0x1.a35cce0000000p+1",
    "numbers": "2690563a1825a8ca",
}


def test_bits_of_bitsandbytes() -> None:
    stored, sizes = of(weight(130, 200))
    found = {
        "code books": digest(torch.cat([quantized.NF4_VALUES, quantized.SCALE_VALUES])),
        "codes": digest(stored.codes),
        "largest of groups": digest(stored.steps),
        "mean": stored.offsets[0].item().hex(),
        "numbers": digest(quantized.dequantize_nf4_ref(stored, sizes, (130, 200), torch.float32)),
    }
    assert found == RECORDED


def test_beside_bitsandbytes() -> None:
    """Its library on a CPU rounds a few scales to the second nearest of 256, which GPUs do not."""
    peer = pytest.importorskip("bitsandbytes.functional")
    for shape in ((64, 64), (130, 200), (257, 64)):  # of others it compiles something
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            matrix = weight(*shape, dtype=dtype)
            stored, sizes = of(matrix)
            how = {"blocksize": 64, "compress_statistics": True, "quant_type": "nf4"}
            codes, state = peer.quantize_4bit(matrix, **how)
            assert torch.equal(stored.codes, codes.view(-1))
            assert torch.equal(stored.steps, state.state2.absmax)
            assert (stored.offsets == state.offset).all()
            apart = (stored.scales.int() - state.absmax.int()).abs()
            assert apart.max() <= (0 if CUDA else 1) and apart.sum() <= 1 + len(apart) // 50
            theirs = stored._replace(scales=state.absmax)
            found = quantized.dequantize_nf4_ref(theirs, sizes, shape, dtype)
            assert torch.equal(found, peer.dequantize_4bit(codes, state))


@pytest.mark.parametrize("stored", [E4M3, E5M2])
@pytest.mark.parametrize("width", [128, 40])
def test_every_code_times_its_scale(stored: torch.dtype, width: int) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(21).view(21, 256)
    owners = torch.arange(21, dtype=torch.int32) // 8
    scales = torch.rand(3, -(-256 // width))
    each = scales[owners][:, torch.arange(256) // width]
    expected = codes.view(stored).float() * each
    weight = BlockFP8Tensor(codes, scales, owners, width, stored)
    for found, wanted in (
        (dequantize_block_fp8(weight, torch.float32), expected),
        (dequantize_block_fp8_rows(weight, 5, 9, torch.float32), expected[5:14]),
        (dequantize_block_fp8(weight, torch.float16), expected.half()),
    ):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("inner", [PLAIN_BASE, make_fp8_base()])
@pytest.mark.parametrize("bias", [True, False])
def test_products(inner: BaseLinear, bias: bool) -> None:
    """As those of the dequantized weight; backward makes it again and keeps nothing of it."""
    torch.manual_seed(0)
    dtype = torch.float32 if inner is PLAIN_BASE else torch.bfloat16
    x = torch.randn(2, 3, 32).to(dtype).requires_grad_()
    b = torch.randn(48).to(dtype).requires_grad_() if bias else None
    weight, made, kept = torch.randn(48, 32).to(dtype), [], []

    def dequantize() -> Tensor:
        made.append(1)
        return weight.clone()

    def pack(saved: Tensor) -> Tensor:
        kept.append(saved)
        return saved

    with saved_tensors_hooks(pack, lambda saved: saved):
        y = quantized_linear(x, b, dequantize, inner)
    dy = torch.randn_like(y)
    assert len(made) == 1 and not kept
    wanted = [x] if b is None else [x, b]
    found = torch.autograd.grad(y, wanted, dy)
    assert len(made) == 2

    linear: Callable[..., Tensor] = F.linear if inner is PLAIN_BASE else inner.linear
    expected = linear(x, weight, b)
    assert torch.equal(y, expected)
    gradients = torch.autograd.grad(expected, wanted, dy)
    for ours, theirs in zip(found, gradients, strict=True):
        torch.testing.assert_close(ours, theirs)
    with torch.no_grad():
        assert torch.equal(quantized_linear(x, b, dequantize, inner), expected)


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
