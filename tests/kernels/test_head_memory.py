"""The gradient of a head takes the memory of its fp32 sum, where nobody else needs that."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tests.kernels.conftest import CUDA
from tigon.kernels import linear_cross_entropy, linear_kl, use
from tigon.kernels.loss.logits import rescale, rescale_and_join
from tigon.train.memory_tracker import Ledger, MemoryTracker

PASS = SIZES = sys.modules["tigon.kernels.loss.fused_linear_pass"]
LOGITS = sys.modules["tigon.kernels.loss.logits"]
N, C, V = 8, 2, 300


@pytest.fixture(autouse=True)
def triton(path: str) -> None:
    if path == "reference":
        pytest.skip("plain torch has no memory of its own to write to")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "others"), [(5, 5), (64, 37), (33, 1), (1, 1)])
def test_in_place_it_is_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rows: int, others: int
) -> None:
    monkeypatch.setattr(LOGITS, "IN_PLACE_START", 7)
    first, rest, factor = torch.randn(rows, C), torch.randn(others, C), torch.tensor(0.3)
    expected = torch.cat([rescale(x, factor, dtype) for x in (first, rest)])
    assert torch.equal(rescale_and_join(first, rest, factor, dtype), expected)
    # Another dtype has no room in the memory of what it is computed from
    assert torch.equal(rescale(first, factor, dtype, overwrite=True), expected[:rows])
    found = rescale_and_join(first, rest, factor, dtype, overwrite=True)
    assert torch.equal(found, expected)
    assert found.data_ptr() == first.data_ptr() and found.is_contiguous()


def learned(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda" if CUDA else "cpu").manual_seed(1)
    hidden = torch.randn(N, C, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, C, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, V, (N,), generator=generator)


def loss_of(hidden: Tensor, weight: Tensor, targets: Tensor, reduction: str = "sum") -> Tensor:
    return linear_cross_entropy(hidden, weight, targets, reduction=reduction)[0].sum() * 0.3


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_whoever_needs_the_sum_again_gets_the_same(
    monkeypatch: pytest.MonkeyPatch, reduction: str
) -> None:
    monkeypatch.setattr(SIZES, "chunk_rows", lambda *_: 4)  # two chunks
    hidden, weight, targets = learned()
    loss = loss_of(hidden, weight, targets, reduction)
    copies = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    again = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    last = torch.autograd.grad(loss, (hidden, weight))
    kept: list[tuple[Tensor, Tensor]] = []

    def pack(x: Tensor) -> Tensor:
        kept.append((x, x.clone()))
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        loss = loss_of(hidden, weight, targets, reduction)
    hooked = torch.autograd.grad(loss, (hidden, weight))
    assert kept and all(torch.equal(x, before) for x, before in kept)
    for other in (again, last, hooked):
        assert all(torch.equal(a, b) for a, b in zip(copies, other, strict=True))
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    losses = torch.nn.functional.cross_entropy(wide[0] @ wide[1].T, targets, reduction="sum")
    for a, b in zip(last, torch.autograd.grad(losses * 0.3, wide), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-2, atol=2e-2)  # of bf16 logits


def test_autograd_keeps_it_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """And adds up what several micro-batches give; nothing of the sum remains."""
    monkeypatch.setattr(SIZES, "chunk_rows", lambda *_: 4)
    sums: list[Tensor] = []
    product: Callable[..., Tensor] = PASS.add_product

    def noted(total: Tensor | None, *factors: Tensor, only: bool) -> Tensor:
        sums.append(product(total, *factors, only=only))
        return sums[-1]

    monkeypatch.setattr(PASS, "add_product", noted)
    hidden, weight, targets = learned()
    loss_of(hidden, weight, targets).backward()
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16
    rows = [len(x) for x in sums[-2:]]
    assert rows == [192, 108] and weight.grad.data_ptr() == sums[-2].data_ptr()
    assert weight.grad.untyped_storage().nbytes() == 192 * C * 4
    one = weight.grad.clone()
    loss_of(hidden, weight, targets).backward()
    assert torch.equal(weight.grad, one + one)
    weight.grad.detach_().zero_()  # as zero_grad does, which refuses views


def test_memory_at_the_sizes_of_a_large_model() -> None:
    """Chunks at their budget, the fp32 sum, and in backward nothing beside it."""
    n, c, v = 16384, 4096, 128256
    options = {"device": "meta", "dtype": torch.bfloat16, "requires_grad": True}
    hidden, weight = torch.empty(n, c, **options), torch.empty(v, c, **options)
    targets = torch.zeros(n, dtype=torch.int64, device="meta")
    ledger = Ledger()
    with use("triton"), MemoryTracker(ledger, [hidden, weight, targets]):
        loss = linear_cross_entropy(hidden, weight, targets)[0]
        assert ledger.total == pytest.approx(4 * v * c + 2 * n * c, rel=1e-3)
        forward = ledger.peak
        loss.backward()
        assert ledger.total == pytest.approx(2 * v * c + 2 * n * c, rel=1e-3)
    chunk = 2 * SIZES.CHUNK_ROWS * (v + c)  # and its hidden states, 0 where no row counts
    assert ledger.peak == forward == pytest.approx(chunk + 4 * v * c + 2 * n * c, rel=1e-3)


def sizes(
    n: int, c: int, v: int, beside: int, needs: tuple[bool, ...] = (True,) * 3, most: int = 0
) -> Any:
    hidden, weight = (torch.empty(rows, c, device="meta", dtype=torch.bfloat16) for rows in (n, v))
    return SIZES.chunk_sizes(hidden, weight, len(weight), beside, most, needs, n)


def test_rows_of_a_chunk() -> None:
    def rows(n: int, c: int, v: int, needs: tuple[bool, ...] = (True,) * 3, most: int = 0) -> int:
        return sizes(n, c, v, 0, needs, most).rows

    assert rows(16384, 2048, 128256) == 4096
    assert rows(16384, 2560, 151936) == 3072 and rows(16384, 1152, 262144) == 2048  # 1 GiB
    assert rows(16384, 576, 49152) == 5120  # 512 MiB
    assert rows(8192, 4096, 128256) == 8192  # all: a chunk of 4096 and the sum take no less
    assert rows(8193, 4096, 128256) == 4096
    assert rows(8192, 4096, 128256, (True, False, False)) == 4096  # without a sum they do
    assert rows(16384, 4096, 128256, (False,) * 3) == 4096  # 1 GiB, where nothing else is held
    assert rows(16384, 4096, 128256, most=2**28) == 1024


def test_memory_beside_a_teacher() -> None:
    """Less than one [N, V] in bf16, with what the weight's sum takes beyond its gradient."""
    n, c, v = 4096, 2048, 128256
    options = {"device": "meta", "dtype": torch.bfloat16}
    hidden, states = (torch.empty(n, c, **options) for _ in range(2))
    weight, teacher = (torch.empty(v, c, **options) for _ in range(2))
    learned = hidden.requires_grad_(), weight.requires_grad_()
    ledger = Ledger()
    with use("triton"), MemoryTracker(ledger, [*learned, states, teacher]):
        linear_kl(hidden, weight, states, teacher).backward()
    left = 2 * v * c + 2 * n * c
    assert ledger.total == pytest.approx(left, rel=1e-3)
    held = ledger.peak - left - 2 * v * c
    assert held == pytest.approx(2 * v * (1024 + 512), rel=2e-2) and held < n * v
    assert ledger.peak - left < 2 * n * v
