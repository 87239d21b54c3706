from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.kernels.definitions import activation as exact
from tests.kernels.definitions import gated_act as product
from tigon.kernels import gated_act

HALF = [torch.float16, torch.bfloat16]


acts = pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh"])
halves = pytest.mark.parametrize("dtype", HALF, ids=str)


@acts
def test_large_values(act: str) -> None:
    far = torch.tensor([-1e4, -80.0, -20.0, 20.0, 80.0, 1e4])
    x = torch.stack((far, torch.ones(6)), 1).requires_grad_()
    y = gated_act(x, act)
    torch.testing.assert_close(y.flatten(), far.clamp(min=0), rtol=1e-6, atol=1e-6)
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(grad[:, 0], (far > 0).float(), rtol=1e-6, atol=1e-6)


@acts
@halves
def test_the_activation_is_rounded_as_transformers_does(act: str, dtype: torch.dtype) -> None:
    x = torch.randn(64, 200).to(dtype)
    rounded = exact(x[:, :100], act).to(dtype).double()
    expected = (rounded * x[:, 100:].double()).to(dtype)
    once = product(x, act).to(dtype)
    y = gated_act(x, act)
    assert y.dtype == dtype
    assert (once != expected).float().mean() > 0.1
    assert (y != expected).float().mean() < 1e-2


class Gradients:
    """gate_up from a leaf, and the gradient that reaches it."""

    def __init__(self, make: Callable[[Tensor], Tensor], act: str, overwrite: bool):
        torch.manual_seed(1)
        self.leaf = torch.randn(5, 48, requires_grad=True)
        self.gate_up = make(self.leaf)
        self.before = self.gate_up.detach().clone()
        self.arrived: list[Tensor] = []
        self.gate_up.register_hook(self.arrived.append)
        self.y = gated_act(self.gate_up, act, overwrite=overwrite)
        self.upstream = torch.randn_like(self.y)

    def run(self, retain_graph: bool = False) -> Tensor:
        (grad,) = torch.autograd.grad(self.y, self.leaf, self.upstream, retain_graph=retain_graph)
        return grad

    @property
    def reused(self) -> bool:
        there = self.gate_up.untyped_storage().data_ptr()
        return self.arrived[-1].untyped_storage().data_ptr() == there


@acts
def test_overwrite_reuses_the_memory_once(act: str, path: str) -> None:
    def project(leaf: Tensor) -> Tensor:
        return leaf * 1.5

    plain, own = Gradients(project, act, False), Gradients(project, act, True)
    expected = plain.run()
    assert torch.equal(own.run(), expected)
    assert not plain.reused and own.reused == (path == "triton")
    assert torch.equal(plain.gate_up, plain.before) and plain.gate_up._version == 0
    if path == "triton":
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            own.run()


@acts
def test_a_retained_graph_can_be_run_again(act: str, path: str) -> None:
    own = Gradients(lambda leaf: leaf * 1.5, act, True)
    expected = own.run(retain_graph=True)
    assert torch.equal(own.gate_up, own.before) and not own.reused
    assert torch.equal(own.run(retain_graph=True), expected)
    assert torch.equal(own.run(), expected)
    assert own.reused == (path == "triton")


NOT_ALONE: dict[str, Callable[[Tensor], Tensor]] = {
    "leaf": lambda leaf: leaf,
    "view of a leaf": lambda leaf: leaf.view(1, 5, 48),
    "part of a tensor": lambda leaf: (leaf * 1.5)[:3],
    "end of a tensor": lambda leaf: (leaf * 1.5)[1:],
    "columns": lambda leaf: (leaf * 1.5)[:, 8:40],
    "transposed": lambda leaf: (leaf[:4] * 1.5).t(),
    "expanded": lambda leaf: (leaf[:1] * 1.5).expand(5, 48),
}


@pytest.mark.parametrize("case", NOT_ALONE)
def test_memory_of_others_is_not_overwritten(case: str) -> None:
    plain, own = (Gradients(NOT_ALONE[case], "silu", o) for o in (False, True))
    assert torch.equal(own.run(), plain.run())
    assert torch.equal(own.gate_up, own.before) and own.gate_up._version == 0


def test_another_saved_use_raises(kernels_only: None) -> None:
    own = Gradients(lambda leaf: leaf * 1.5, "silu", True)
    other = own.gate_up.square()
    own.run()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(other.sum(), own.leaf)


def test_hooks_on_saved_tensors(path: str) -> None:
    # Autograd compares no versions of what a hook packed
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        own = Gradients(lambda leaf: leaf * 1.5, "silu", True)
    first = own.run(retain_graph=True)
    assert torch.equal(first, Gradients(lambda leaf: leaf * 1.5, "silu", False).run())
    assert torch.equal(first, own.run())
    if path == "triton":
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            own.run()
    with torch.autograd.graph.save_on_cpu():
        assert torch.equal(first, Gradients(lambda leaf: leaf * 1.5, "silu", True).run())


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements() -> None:
    x = torch.empty(40_000, 2 * 28_672, dtype=torch.bfloat16)
    x[-2:].normal_()
    x[:-2] = 0
    last = x[-2:].clone().requires_grad_()
    y = gated_act(x.requires_grad_(), "silu")
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    expected = gated_act(last, "silu")
    assert torch.equal(y[-2:], expected)
    assert torch.equal(grad[-2:], torch.autograd.grad(expected.sum(), last)[0])


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="act='relu' is not one of"):
        gated_act(torch.ones(2, 4), "relu")
    with pytest.raises(ValueError, match=r"gate_up \(2, 5\) has no two halves"):
        gated_act(torch.ones(2, 5), "silu")
