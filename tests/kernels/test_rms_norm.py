import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels import definitions
from tests.kernels.definitions import EPS
from tigon.kernels import rms_norm
from tigon.kernels.norm import common

OWN = sys.modules["tigon.kernels.norm.rms_norm"]
DTYPES = [torch.float16, torch.bfloat16]


def exact(x: Tensor, weight: Any, offset: float = 0.0, gate: Any = None) -> Tensor:
    return definitions.rms_norm(x, weight, gate=gate, offset=offset)[0]


def assert_close(actual: Tensor, expected: Tensor, *, rtol: float = 1e-5, atol: float = 1e-6):
    torch.testing.assert_close(actual.double(), expected.double(), rtol=rtol, atol=atol)


def assert_gradients(actual: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    """`actual` and `expected` are scalars of the same inputs."""
    found = torch.autograd.grad(actual, inputs, retain_graph=True)
    for a, b in zip(found, torch.autograd.grad(expected, inputs), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def kernels_only(path: str) -> None:
    if path != "triton":
        pytest.skip("about the kernels")


def test_sum_alone_passes_its_gradient_on() -> None:
    shape = (5, 33)
    inputs = [torch.randn(shape, requires_grad=True) for _ in range(2)]
    weight, up = torch.randn(33, requires_grad=True), torch.randn(shape)
    _, total = rms_norm(inputs[0], weight, EPS, residual=inputs[1])
    assert torch.equal(total, inputs[0] + inputs[1])
    (total * up).sum().backward()
    assert torch.equal(inputs[0].grad, up) and torch.equal(inputs[1].grad, up)
    assert weight.grad is None


def test_a_tensor_is_its_own_residual() -> None:
    x, weight, up = torch.randn(5, 33, requires_grad=True), torch.randn(33), torch.randn(5, 33)
    normed, total = rms_norm(x, weight, EPS, residual=x)
    expected = (exact(2 * x, weight) * up + 2 * x).sum()
    assert_gradients((normed * up + total).sum(), expected, [x])


def test_the_first_backward_leaves_the_second_branch_alone() -> None:
    x, r = torch.randn(5, 33, requires_grad=True), torch.randn(5, 33, requires_grad=True)
    weight, upstream = torch.randn(33), torch.randn(5, 33)
    y = rms_norm(x, weight, EPS) + r
    y.backward(upstream)
    assert torch.equal(r.grad, upstream)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight_dtype", [None, torch.float32], ids=str)
def test_where_it_is_rounded(dtype: torch.dtype, weight_dtype: torch.dtype | None) -> None:
    x, residual, z = torch.randn(3, 64, 256).to(dtype).unbind()
    weight = torch.randn(256).to(weight_dtype or dtype)
    t = x.float() + residual.float()
    h = t.to(dtype).float()
    h = h / (h.square().mean(-1, keepdim=True) + EPS).sqrt()
    silu = z.float() * z.float().sigmoid()
    before = weight.float() * h.to(dtype).float()  # Llama's two roundings
    gated = (before.to(weight.dtype).float() * silu).to(dtype)
    after = weight.float() * h
    offset = (1.0 + weight).float() * h.to(dtype).float()
    assert (before.to(dtype) != after.to(dtype)).float().mean() > 0.1
    # rsqrt and 1 / sqrt differ by an ulp of fp32, which now and then moves a rounding
    for kwargs, expected in (
        ({}, before.to(dtype)),
        ({"offset": 1.0}, offset.to(dtype)),
        ({"cast": "after_weight"}, after.to(dtype)),
        ({"gate": z}, gated),
    ):
        y, total = rms_norm(x, weight, EPS, residual=residual, **kwargs)
        assert y.dtype == total.dtype == dtype
        assert torch.equal(total, t.to(dtype))
        assert (y != expected).float().mean() < 2e-3


@pytest.mark.parametrize(("offset", "cast"), [(0.0, "before_weight"), (1.0, "after_weight")])
def test_it_does_not_matter_who_makes_the_sum(path: str, offset: float, cast: str) -> None:
    kernels_only(path)
    x, residual, up, side = torch.randn(4, 33, 80).half()
    weight = torch.randn(80).half()
    options = {"offset": offset, "cast": cast}

    def results(norm: Callable[..., Any]) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (x, residual, weight)]
        out = norm(*leaves)
        return [*out, *torch.autograd.grad(out, leaves, [up, side])]

    expected = results(lambda x, r, w: rms_norm(x, w, EPS, residual=r, **options))
    found = results(lambda x, r, w: OWN.rms_norm_with_input(x + r, w, EPS, **options))
    assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True] * 5
    with pytest.raises(ValueError, match=r"eps=-1"):
        OWN.rms_norm_with_input(x.clone().requires_grad_(), weight, -1.0)
    only = x.clone().requires_grad_()
    (OWN.rms_norm_with_input(only, weight, EPS)[1] * side).sum().backward()  # the norm is not used
    assert torch.equal(only.grad, side)


def test_dtypes_that_the_kernels_leave_to_torch() -> None:
    x, residual = torch.randn(4, 16).bfloat16(), torch.randn(4, 16)
    normed, total = rms_norm(x, torch.ones(16), EPS, residual=residual)
    assert total.dtype == normed.dtype == torch.float32
    assert_close(normed, exact(x + residual, torch.ones(16)))
    x, weight = residual.double(), torch.rand(16).double()
    torch.testing.assert_close(rms_norm(x, weight, EPS), exact(x, weight), rtol=1e-5, atol=1e-6)


def test_rows_wider_than_a_program_holds() -> None:
    x, weight = (
        torch.randn(2, OWN.MAX_COLUMNS + 1, requires_grad=True),
        torch.randn(OWN.MAX_COLUMNS + 1),
    )
    y, up = rms_norm(x, weight, EPS), torch.randn(2, OWN.MAX_COLUMNS + 1)
    assert_close(y, exact(x, weight))
    assert_gradients((y * up).sum(), (exact(x, weight) * up).sum(), [x])


def test_only_what_is_needed(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_only(path)
    x, weight = torch.randn(40, 33), torch.randn(33, requires_grad=True)
    saved: list[bool] = []
    forward, sums = OWN._forward, OWN.sum_partials
    monkeypatch.setattr(OWN, "_forward", lambda *a: saved.append(a[2]) or forward(*a))
    summed: list[Tensor] = []
    monkeypatch.setattr(OWN, "sum_partials", lambda *a: summed.append(a[3]) or sums(*a))
    with torch.no_grad():
        rms_norm(x.requires_grad_(), weight, EPS)
    rms_norm(x.detach(), weight.detach(), EPS)
    assert saved == [False, False]
    rms_norm(x, weight.detach(), EPS).sum().backward()
    assert not summed and weight.grad is None
    y, up = rms_norm(x.detach(), weight, EPS), torch.randn(40, 33)
    kept = [t.numel() for t in y.grad_fn.saved_tensors if t is not None]
    assert kept == [40 * 33, 33, 40]  # x, the weight, 1 / rms of each row
    (y * up).sum().backward()
    (expected,) = torch.autograd.grad((exact(x, weight) * up).sum(), weight)
    torch.testing.assert_close(weight.grad, expected, rtol=1e-4, atol=1e-5)
    # a residual alone wants a gradient
    r = torch.randn(40, 33, requires_grad=True)
    normed, _ = rms_norm(x.detach(), weight.detach(), EPS, residual=r)
    assert_gradients(normed.sum(), exact(x.detach() + r, weight.detach()).sum(), [r])


@pytest.mark.gpu
def test_offsets_past_32_bits(path: str) -> None:
    kernels_only(path)
    far = torch.empty(2**31 + 64, dtype=torch.bfloat16).as_strided((3, 64), (2**30, 1))
    x = far.copy_(torch.randn(3, 64)).requires_grad_()
    near, weight, up = x.detach().clone().requires_grad_(), torch.randn(64), torch.randn(3, 64)
    y, expected = rms_norm(x, weight, EPS), rms_norm(near, weight, EPS)
    assert torch.equal(y, expected)
    (grad,) = torch.autograd.grad(y, x, up.bfloat16())
    assert torch.equal(grad, torch.autograd.grad(expected, near, up.bfloat16())[0])


@pytest.mark.gpu
def test_another_number_of_rows_compiles_nothing(path: str) -> None:
    kernels_only(path)
    weight = torch.randn(96, requires_grad=True)
    kernels = OWN._forward_kernel, OWN._backward_kernel, common._sum_kernel
    counts = []
    for rows in (18001, 18003, 36005):  # more than are resident, or launched with PDL
        rms_norm(torch.randn(rows, 96, requires_grad=True), weight, EPS).sum().backward()
        counts.append([len(k.device_caches[torch.cuda.current_device()][0]) for k in kernels])
    assert counts[0] == counts[1] == counts[2]


def test_weight_of_another_width() -> None:
    with pytest.raises(ValueError, match=r"weight \(7,\) does not fit x \(2, 8\)"):
        rms_norm(torch.ones(2, 8), torch.ones(7), EPS)


def test_other_bad_inputs() -> None:
    x, weight = torch.ones(2, 8), torch.ones(8)
    with pytest.raises(ValueError, match=r"residual \(8,\) does not fit x \(2, 8\)"):
        rms_norm(x, weight, EPS, residual=torch.ones(8))
    with pytest.raises(ValueError, match=r"gate \(1, 8\) does not fit x \(2, 8\)"):
        rms_norm(x, weight, EPS, gate=torch.ones(1, 8))
    with pytest.raises(ValueError, match=r"cast='never' is not one of \('before_weight'"):
        rms_norm(x, weight, EPS, cast="never")
    with pytest.raises(ValueError, match=r"eps=-1.0 and offset=0.0 must not be negative"):
        rms_norm(x, weight, -1.0)
    with pytest.raises(ValueError, match=f"x is on {x.device}; weight is on meta"):
        rms_norm(x, weight.to("meta"), EPS)
    with pytest.raises(ValueError, match="residual is on meta"):
        rms_norm(x, None, EPS, residual=x.to("meta"))
