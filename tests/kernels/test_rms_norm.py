"""`rms_norm` and `sandwich_norm`: where they round, what they save, and what they refuse."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels import definitions
from tests.kernels.definitions import EPS
from tigon.kernels import rms_norm, sandwich_norm
from tigon.kernels.norm import rms_norm_kernels as KERNELS

MODULE = sys.modules["tigon.kernels.norm.rms_norm"]
ORDERS = pytest.mark.parametrize(
    ("offset", "cast"), [(0.0, "before_weight"), (1.0, "after_weight")]
)


def exact(x: Tensor, weight: Any) -> Tensor:
    return definitions.rms_norm(x, weight)[0]


def assert_gradients(found: Any, expected: Any, inputs: list[Tensor], up: Any = None) -> None:
    ups = [None if up is None else up.to(y.dtype) for y in (found, expected)]
    grads = (torch.autograd.grad(y, inputs, u) for y, u in zip((found, expected), ups, strict=True))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def sandwich_inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The branch, the stream and both weights."""
    shapes = (shape, shape, shape[-1:], shape[-1:])
    return [(0.3 * torch.randn(s)).to(dtype).requires_grad_() for s in shapes]


def test_a_tensor_is_its_own_residual() -> None:
    x, weight, up = torch.randn(5, 33, requires_grad=True), torch.randn(33), torch.randn(5, 33)
    normed, total = rms_norm(x, weight, EPS, residual=x)
    expected = (exact(2 * x, weight) * up + 2 * x).sum()
    assert_gradients((normed * up + total).sum(), expected, [x])


@pytest.mark.parametrize("first", [0, 6])
def test_gates_inside_a_projection_are_not_copied(
    kernels_only: None, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """As the heads of a token, beside what else the projection has."""
    x, weight = torch.randn(2, 5, 3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    packed, up = torch.randn(2, 5, 6 + 24, requires_grad=True), torch.randn(2, 5, 3, 8)
    gate = packed[..., first : first + 24].unflatten(-1, (3, 8))
    seen = []
    gates_of = MODULE._gates_of
    monkeypatch.setattr(MODULE, "_gates_of", lambda *args: seen.append(gates_of(*args)) or seen[-1])
    inputs = [x, weight, packed]
    found = torch.autograd.grad(rms_norm(x, weight, EPS, gate=gate), inputs, up)
    assert [(z.data_ptr(), step, run) for z, step, run in seen] == [(gate.data_ptr(), 30, 3)] * 2
    expected = MODULE.rms_norm_ref(x, weight, EPS, gate=gate)
    for a, b in zip(found, torch.autograd.grad(expected, inputs, up), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@ORDERS
def test_it_does_not_matter_who_makes_the_sum(kernels_only: None, offset: float, cast: str) -> None:
    x, residual, up, side = torch.randn(4, 33, 80).half()
    weight = torch.randn(80).half()
    options = {"offset": offset, "cast": cast}

    def results(norm: Callable[..., Any]) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (x, residual, weight)]
        out = norm(*leaves)
        return [*out, *torch.autograd.grad(out, leaves, [up, side])]

    expected = results(lambda x, r, w: rms_norm(x, w, EPS, residual=r, **options))
    found = results(lambda x, r, w: MODULE.rms_norm_with_input(x + r, w, EPS, **options))
    assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True] * 5
    with pytest.raises(ValueError, match=r"eps=-1"):
        MODULE.rms_norm_with_input(x.clone().requires_grad_(), weight, -1.0)
    only = x.clone().requires_grad_()
    (MODULE.rms_norm_with_input(only, weight, EPS)[1] * side).sum().backward()  # no norm is used
    assert torch.equal(only.grad, side)


@ORDERS
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_backward_adds_up_the_sum_of_forward(
    kernels_only: None, dtype: torch.dtype, offset: float, cast: str
) -> None:
    leaves, options = sandwich_inputs((64, 96), dtype), {"offset": offset, "cast": cast}
    x, residual, post, weight = leaves
    ups = [torch.randn(64, 96).to(dtype) for _ in range(2)]
    (found,) = torch.autograd.grad(sandwich_norm(*leaves, EPS, **options), residual, ups)
    branch = rms_norm(x, post, EPS, **options)
    out = rms_norm(branch, weight, EPS, residual=residual, **options)
    assert torch.equal(found, torch.autograd.grad(out, residual, ups)[0])


def test_what_the_kernels_leave_to_torch() -> None:
    x, residual = torch.randn(4, 16).bfloat16(), torch.randn(4, 16)
    normed, total = rms_norm(x, torch.ones(16), EPS, residual=residual)
    assert total.dtype == normed.dtype == torch.float32
    expected = exact(x + residual, torch.ones(16)).float()
    torch.testing.assert_close(normed, expected, rtol=1e-5, atol=1e-6)
    x, weight = residual.double(), torch.rand(16).double()
    torch.testing.assert_close(rms_norm(x, weight, EPS), exact(x, weight), rtol=1e-5, atol=1e-6)
    x, residual, *weights = (t.detach() for t in sandwich_inputs((6, 40)))
    expected = definitions.sandwich_norm(x, residual, *weights)
    for dtype in (torch.float16, torch.float64):
        found = sandwich_norm(x.to(dtype), residual.to(dtype), *weights, EPS)
        assert found[0].dtype == found[1].dtype == dtype
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-2, atol=5e-3)
    assert sandwich_norm(x.half(), residual, *weights, EPS)[1].dtype == torch.float32


@pytest.fixture
def work(kernels_only: None, monkeypatch: pytest.MonkeyPatch) -> tuple[list[bool], list[Tensor]]:
    """Whether each forward pass saved something, and the weights' gradients that were summed."""
    saved: list[bool] = []
    summed: list[Tensor] = []
    forward, sums = MODULE._forward, MODULE.sum_partials
    monkeypatch.setattr(MODULE, "_forward", lambda *a: saved.append(a[2]) or forward(*a))
    monkeypatch.setattr(MODULE, "sum_partials", lambda *a: summed.append(a[3]) or sums(*a))
    return saved, summed


def test_only_what_is_needed(work: tuple[list[bool], list[Tensor]]) -> None:
    x, weight = torch.randn(40, 33), torch.randn(33, requires_grad=True)
    saved, summed = work
    with torch.no_grad():
        rms_norm(x.requires_grad_(), weight, EPS)
    rms_norm(x.detach(), weight.detach(), EPS)
    assert saved == [False, False]
    rms_norm(x, weight.detach(), EPS).sum().backward()
    assert not summed and weight.grad is None
    y = rms_norm(x.detach(), weight, EPS)
    kept = [t.numel() for t in y.grad_fn.saved_tensors if t is not None]
    assert kept == [40 * 33, 33, 40]  # x, the weight, 1 / rms of each row
    # A residual alone wants a gradient
    r = torch.randn(40, 33, requires_grad=True)
    normed, _ = rms_norm(x.detach(), weight.detach(), EPS, residual=r)
    assert_gradients(normed.sum(), exact(x.detach() + r, weight.detach()).sum(), [r])


def test_only_what_is_needed_of_a_sandwich(work: tuple[list[bool], list[Tensor]]) -> None:
    leaves, up = sandwich_inputs((7, 33)), torch.randn(7, 33)
    saved, summed = work
    with torch.no_grad():
        sandwich_norm(*leaves, EPS)
    sandwich_norm(*(t.detach() for t in leaves), EPS)
    assert saved == [False, False]
    for wanted in ([0, 1], [0], [1], [2, 3], [2], [3]):
        given = [t if i in wanted else t.detach() for i, t in enumerate(leaves)]
        learned = [leaves[i] for i in wanted]
        expected = definitions.sandwich_norm(*leaves)[0]
        assert_gradients(sandwich_norm(*given, EPS)[0], expected, learned, up)
    assert len(summed) == 3  # none for frozen weights


@pytest.mark.gpu
def test_offsets_past_32_bits(kernels_only: None) -> None:
    far = torch.empty(2**31 + 64, dtype=torch.bfloat16).as_strided((3, 64), (2**30, 1))
    x = far.copy_(torch.randn(3, 64)).requires_grad_()
    near, weight, up = x.detach().clone().requires_grad_(), torch.randn(64), torch.randn(3, 64)
    y, expected = rms_norm(x, weight, EPS), rms_norm(near, weight, EPS)
    assert torch.equal(y, expected)
    (grad,) = torch.autograd.grad(y, x, up.bfloat16())
    assert torch.equal(grad, torch.autograd.grad(expected, near, up.bfloat16())[0])


@pytest.mark.gpu
def test_another_number_of_rows_compiles_nothing(kernels_only: None) -> None:
    weight = torch.randn(96, requires_grad=True)
    kernels = KERNELS.norm_forward_kernel, KERNELS.norm_backward_kernel, KERNELS._sum_kernel
    counts = []
    for rows in (18001, 18003, 36005):  # more than are resident, or launched with PDL
        rms_norm(torch.randn(rows, 96, requires_grad=True), weight, EPS).sum().backward()
        counts.append([len(k.device_caches[torch.cuda.current_device()][0]) for k in kernels])
    assert counts[0] == counts[1] == counts[2]
