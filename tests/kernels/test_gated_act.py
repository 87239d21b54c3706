import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tigon.kernels import gated_act, gated_act_ref
from tigon.kernels.mlp.gated_act import _backward, _forward

CUDA = torch.cuda.is_available()
HALF = [torch.float16, torch.bfloat16]


def exact(gate: Tensor, act: str) -> Tensor:
    x = gate.double()
    if act == "silu":
        return x / (1 + (-x).exp())
    if act == "gelu":
        return x * (1 + torch.erf(x / math.sqrt(2))) / 2
    return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def product(x: Tensor, act: str) -> Tensor:
    gate, up = x.chunk(2, -1)
    return exact(gate, act) * up.double()


acts = pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh"])
halves = pytest.mark.parametrize("dtype", HALF, ids=str)


@acts
@pytest.mark.parametrize("shape", [(1, 2), (3, 14), (2, 5, 202), (2, 2200)], ids=str)
@pytest.mark.parametrize("overwrite", [False, True])
def test_forward_and_gradients(act: str, shape: tuple[int, ...], overwrite: bool) -> None:
    x = (3 * torch.randn(shape)).requires_grad_()
    y = gated_act(x, act, overwrite=overwrite)  # nothing is written over a leaf
    expected = product(x, act)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    upstream = torch.randn_like(y)
    (grad,) = torch.autograd.grad((y * upstream).sum(), x, retain_graph=True)
    kept = grad.clone()
    grad.zero_()
    (again,) = torch.autograd.grad((y * upstream).sum(), x)
    (reference,) = torch.autograd.grad((expected * upstream).sum(), x)
    torch.testing.assert_close(kept, reference, rtol=1e-4, atol=1e-5)
    assert torch.equal(kept, again)
    assert x._version == 0


@acts
def test_gradcheck(act: str) -> None:
    x = torch.randn(3, 10, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: gated_act(x, act), x)


@acts
def test_large_values(act: str) -> None:
    far = torch.tensor([-1e4, -80.0, -20.0, 20.0, 80.0, 1e4])
    x = torch.stack((far, torch.ones(6)), 1).requires_grad_()
    y = gated_act(x, act)
    torch.testing.assert_close(y.flatten(), far.clamp(min=0), rtol=1e-6, atol=1e-6)
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(grad[:, 0], (far > 0).float(), rtol=1e-6, atol=1e-6)


@acts
def test_strided_input_and_upstream(act: str) -> None:
    wide = torch.randn(4, 3, 40)
    upstreams = (
        torch.ones(()).expand(4, 3, 5),
        torch.randn(3, 4, 5).transpose(0, 1),
        torch.randn(4, 3, 10)[..., ::2],
        torch.randn(4, 3, 8)[..., 1:6],
    )
    inputs = (
        torch.randn(10, 3, 4).permute(2, 1, 0),
        wide[..., 3:13],
        wide[..., ::4],
        wide[:, 1:2, :10].expand(4, 3, 10),
    )
    for x, upstream in zip(inputs, upstreams, strict=True):
        x = x.detach().requires_grad_()
        y, expected = gated_act(x, act), product(x, act)
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6)
        (grad,) = torch.autograd.grad(y, x, upstream)
        (reference,) = torch.autograd.grad(expected, x, upstream.double())
        torch.testing.assert_close(grad, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 6), (3, 0), (2, 0, 4)], ids=str)
def test_empty(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, requires_grad=True)
    y = gated_act(x, "silu")
    assert y.shape == (*shape[:-1], shape[-1] // 2)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert grad.shape == shape


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


@acts
def test_bf16_to_an_ulp(act: str) -> None:
    x = torch.randn(16, 200).bfloat16().requires_grad_()
    y, expected = gated_act(x, act), product(x, act)
    torch.testing.assert_close(y.double(), expected, rtol=2**-6, atol=1e-6)
    upstream = torch.randn_like(y)
    (grad,) = torch.autograd.grad(y, x, upstream)
    (reference,) = torch.autograd.grad((expected * upstream).sum(), x)
    torch.testing.assert_close(grad.float(), reference.float(), rtol=2**-5, atol=2**-9)


def test_without_gradients() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    with torch.no_grad():
        assert gated_act(x, "silu").grad_fn is None
    assert gated_act(x.detach(), "silu", overwrite=True).grad_fn is None


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


def test_another_saved_use_raises(path: str) -> None:
    if path == "reference":
        return  # nothing is overwritten
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


def test_second_derivative_raises(path: str) -> None:
    if path == "reference":
        return  # plain torch has it
    for overwrite in (False, True):
        own = Gradients(lambda leaf: leaf * 1.5, "silu", overwrite)
        with pytest.raises(RuntimeError, match="gated_act has no second derivative"):
            torch.autograd.grad(own.y.sum(), own.leaf, create_graph=True)


def test_registered_ops(path: str) -> None:
    if path == "triton":
        torch.library.opcheck(_forward.op, (torch.randn(3, 10), "silu"))
        torch.library.opcheck(_backward.op, (torch.randn(3, 5), torch.randn(3, 10), "silu"))


def test_fake_tensors() -> None:
    with FakeTensorMode():
        x = torch.randn(3, 10, requires_grad=True) * 2
        x.retain_grad()
        gated_act(x, "silu", overwrite=True).sum().backward()
        assert x.grad is not None and x.grad.shape == (3, 10)


def test_compiled_equals_eager(path: str) -> None:
    if path == "reference":
        return  # plain torch

    def step(x: Tensor) -> Tensor:
        return gated_act(x * 1.5, "silu", overwrite=True)

    compiled = torch.compile(
        step, fullgraph=True, dynamic=True, backend="inductor" if CUDA else "aot_eager"
    )
    for rows in (3, 5):
        x = torch.randn(rows, 28, requires_grad=True)
        upstream = torch.randn(rows, 14)
        results: list[Any] = []
        for f in (step, compiled):
            y = f(x)
            results.append((y, *torch.autograd.grad(y, x, upstream)))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@acts
@pytest.mark.parametrize("rows", [63, 1000, 2047])
@pytest.mark.parametrize("size", [96, 1152, 2880, 6912, 11008, 18944])
def test_bf16_errors_are_those_of_eager_torch(act: str, rows: int, size: int) -> None:
    x = torch.randn(rows, 2 * size).bfloat16().requires_grad_()
    upstream = torch.randn(rows, size).bfloat16()
    x64 = x.detach().double().requires_grad_()
    expected = product(x64, act)
    results = []
    for f in (gated_act, gated_act_ref):
        y = f(x, act)
        results.append((y, *torch.autograd.grad(y, x, upstream)))
    exactly = (expected, *torch.autograd.grad(expected, x64, upstream.double()))
    for ours, eager, right in zip(*results, exactly, strict=True):
        assert (ours - right).norm() <= 1.1 * (eager - right).norm()
        assert (ours - right).abs().max() <= 2 * (eager - right).abs().max()


@pytest.mark.gpu
def test_graph_replay_equals_eager() -> None:
    x = torch.randn(63, 2880, dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn(63, 1440, dtype=torch.bfloat16)

    def step() -> tuple[Tensor, Tensor]:
        y = gated_act(x * 1.5, "silu", overwrite=True)
        return y, *torch.autograd.grad(y, x, upstream)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    for replayed, eager in zip(outputs, step(), strict=True):
        assert torch.equal(replayed, eager)


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


def test_unknown_activation() -> None:
    with pytest.raises(ValueError, match="act='relu' is not one of"):
        gated_act(torch.ones(2, 4), "relu")


def test_an_odd_end() -> None:
    with pytest.raises(ValueError, match=r"gate_up \(2, 5\) has no two halves"):
        gated_act(torch.ones(2, 5), "silu")


def test_the_reference_is_torch() -> None:
    x = torch.randn(3, 8)
    assert torch.equal(gated_act_ref(x, "silu"), F.silu(x[:, :4]) * x[:, 4:])
