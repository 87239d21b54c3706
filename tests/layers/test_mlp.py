"""The MLP's gradients where its gate_up is overwritten, and its path for one row."""

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tigon.kernels
import tigon.layers.linear
from tigon.kernels import gated_act, gemv
from tigon.layers import Adapters, GatedMLP, LoRAPart, LowRank

CUDA = torch.cuda.is_available()
C, I = 12, 20  # noqa: E741


@pytest.fixture(autouse=True)
def triton() -> Iterator[None]:
    torch.set_default_device("cuda" if CUDA else "cpu")
    with tigon.kernels.use("triton"):
        yield
    torch.set_default_device(None)


def make(bias: bool = False) -> GatedMLP:
    mlp = GatedMLP(C, I, "silu", bias=bias)
    for p in mlp.parameters():
        nn.init.normal_(p)
    return mlp


def gradients(mlp: GatedMLP, x: Tensor, run: Any = None, **options: Any) -> tuple[Tensor, ...]:
    y = (run or mlp)(x)
    upstream = torch.linspace(-1, 1, y.numel()).view(y.shape)
    return torch.autograd.grad(y, (x, *mlp.parameters()), upstream, **options)


def inputs() -> Tensor:
    return torch.randn(2, 3, C, requires_grad=True)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("recomputed", [False, True])
def test_gradients_are_those_of_plain_torch(bias: bool, recomputed: bool) -> None:
    mlp, x = make(bias), inputs()

    def run(x: Tensor) -> Tensor:
        return checkpoint(mlp, x, use_reentrant=False)

    actual = gradients(mlp, x, run if recomputed else None)
    with tigon.kernels.use("reference"):
        expected = gradients(mlp, x)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)


def test_two_losses_over_one_graph() -> None:
    """A backward pass through what follows the MLP, and one through something else."""
    mlp, x = make(), inputs()
    y = mlp(x)
    torch.autograd.backward(y.square().sum(), retain_graph=True)
    torch.autograd.backward(y.sin().sum())
    assert x.grad is not None
    actual, x.grad = x.grad, None
    with tigon.kernels.use("reference"):
        y = mlp(x)
        (y.square().sum() + y.sin().sum()).backward()
    torch.testing.assert_close(actual, x.grad, rtol=1e-4, atol=1e-3)


@pytest.mark.gpu
def test_the_gradient_takes_the_memory_of_gate_up() -> None:
    mlp = GatedMLP(256, 8192, "silu").bfloat16()
    x = torch.randn(8192, 256, dtype=torch.bfloat16, requires_grad=True)
    size = 8192 * 8192 * 2  # bytes of one [rows, I]
    for _ in range(2):
        y = mlp(x)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        y.backward(torch.ones_like(y))
        peak = torch.cuda.max_memory_allocated() - before
    # The gradient of the activation's output, and small ones of x and the weights
    assert peak < 1.5 * size


@torch.no_grad()
def test_one_row_takes_a_path_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[tuple[int, str | None]] = []

    def spy(x: Tensor, weight: Tensor, bias: Tensor | None, act: Any = None) -> Tensor:
        rows.append((weight.shape[0], act))
        return gemv(x, weight, bias, act)

    for module in (tigon.layers.linear, importlib.import_module("tigon.kernels.linear.linear")):
        monkeypatch.setattr(module, "gemv", spy)
    mlp = make(bias=True)
    x = torch.randn(1, 1, C)
    y = mlp(x)
    assert rows == [(2 * I, "silu"), (C, None)]
    torch.testing.assert_close(y, mlp(torch.cat((x, x)))[:1], rtol=1e-5, atol=1e-5)
    assert len(rows) == 2


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("adapted", ["gate_up_proj", "down_proj"])
@pytest.mark.parametrize("frozen", [False, True])
def test_fp8_with_an_adapter(adapted: str, frozen: bool) -> None:
    """As its two projections one by one, which nobody takes for one operator."""
    mlp = GatedMLP(64, 32, "silu").bfloat16().train().requires_grad_(not frozen)
    mlp.gate_up_proj.fp8 = mlp.down_proj.fp8 = True
    layer = mlp.get_submodule(adapted)
    parts = [LoRAPart("some", 16, 32, 4, 2.0)]
    low = LowRank(layer.in_features, parts, dtype=torch.bfloat16, device=layer.weight.device)
    for p in low.parameters():
        nn.init.normal_(p)
    layer.lora = Adapters()
    layer.lora.add_module("one", low)
    layer.lora.chosen = "one"
    x = torch.randn(16, 64, dtype=torch.bfloat16, requires_grad=True)
    learned = [x, *(p for p in mlp.parameters() if p.requires_grad)]

    def apart(x: Tensor) -> Tensor:
        return mlp.down_proj.product(gated_act(mlp.gate_up_proj.product(x), "silu").clone())

    upstream = torch.linspace(-1, 1, 16 * 64).view(16, 64).bfloat16()
    found, expected = ((y, *torch.autograd.grad(y, learned, upstream)) for y in (mlp(x), apart(x)))
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    layer.lora.chosen = None
    assert not torch.equal(mlp(x), found[0])
