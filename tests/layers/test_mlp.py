"""The MLP's gradients when its gate_up is overwritten, and who keeps it from being so."""

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint

import tigon.kernels
import tigon.layers.mlp
from tigon.kernels import row_linear
from tigon.layers import FusedLinear, GatedMLP

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


def test_a_second_backward_raises() -> None:
    mlp, x = make(), inputs()
    y = mlp(x)
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward pass"):
        torch.autograd.grad(y.sum(), x)


@pytest.mark.parametrize("everywhere", [False, True])
def test_what_a_forward_hook_keeps_stays_as_it_is(everywhere: bool) -> None:
    mlp, x = make(), inputs()
    kept: list[Tensor] = []

    def hook(module: nn.Module, _: Any, output: Tensor) -> None:
        if module is mlp.gate_up_proj:
            kept.append(output)

    register = register_module_forward_hook if everywhere else None
    handle = register(hook) if register else mlp.gate_up_proj.register_forward_hook(hook)
    try:
        actual = gradients(mlp, x)
    finally:
        handle.remove()
    assert torch.equal(kept[0], mlp.gate_up_proj(x))
    for a, e in zip(actual, gradients(mlp, x), strict=True):
        assert torch.equal(a, e)


def test_a_backward_hook_sees_the_gradient() -> None:
    mlp, x = make(), inputs()
    expected: list[Tensor] = []
    gate_up = mlp.gate_up_proj(x).detach().requires_grad_()
    with tigon.kernels.use("reference"):
        y = mlp.down_proj(tigon.kernels.gated_act(gate_up, "silu"))
    expected = list(torch.autograd.grad(y.sum(), gate_up))
    seen: list[Tensor] = []
    mlp.gate_up_proj.register_full_backward_hook(lambda _, __, g: seen.append(g[0].clone()))
    mlp(x).sum().backward()
    torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-5)


class Squashed(FusedLinear):
    """A stand-in whose last operation saves its output."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


def test_a_projection_that_saves_its_output() -> None:
    mlp, x = make(), inputs()
    mlp.gate_up_proj = Squashed(C, (I, I))
    actual = gradients(mlp, x)
    with tigon.kernels.use("reference"):
        expected = gradients(mlp, x)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)


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
        return row_linear(x, weight, bias, act)

    for module in (tigon.layers.mlp, importlib.import_module("tigon.kernels.row_linear")):
        monkeypatch.setattr(module, "row_linear", spy)
    mlp = make(bias=True)
    x = torch.randn(1, 1, C)
    y = mlp(x)
    assert rows == [(2 * I, "silu"), (C, None)]
    torch.testing.assert_close(y, mlp(torch.cat((x, x)))[:1], rtol=1e-5, atol=1e-5)
    assert len(rows) == 2
    # Who listens to the projection hears it
    heard: list[Tensor] = []
    mlp.gate_up_proj.register_forward_hook(lambda *a: heard.append(a[2]))
    torch.testing.assert_close(mlp(x), y, rtol=1e-5, atol=1e-5)
    assert heard[0].shape == (1, 1, 2 * I)
    assert rows[2:] == [(2 * I, None), (C, None)]
