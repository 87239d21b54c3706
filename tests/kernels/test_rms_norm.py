import pytest
import torch
from torch import Tensor

from tigon.kernels import rms_norm

SHAPES = [(1, 1), (3, 7), (2, 5, 123), (4, 1, 1000)]
EPS = 1e-2


def exact(x: Tensor, weight: Tensor, offset: float = 0.0) -> Tensor:
    x = x.double()
    return x / ((x * x).sum(-1, keepdim=True) / x.shape[-1] + EPS) ** 0.5 * (weight + offset)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("cast", ["before_weight", "after_weight"])
def test_forward_and_gradients(shape: tuple[int, ...], offset: float, cast: str) -> None:
    x = (0.2 * torch.randn(shape)).requires_grad_()  # small, so that eps counts
    weight = torch.randn(shape[-1], requires_grad=True)
    upstream = torch.randn(shape)
    y = rms_norm(x, weight, EPS, offset=offset, cast=cast)
    expected = exact(x, weight, offset)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6)
    actual = torch.autograd.grad((y * upstream).sum(), (x, weight))
    for a, b in zip(
        actual, torch.autograd.grad((expected * upstream).sum(), (x, weight)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_first_backward_leaves_the_second_branch_alone() -> None:
    x, r = torch.randn(5, 33, requires_grad=True), torch.randn(5, 33, requires_grad=True)
    weight, upstream = torch.randn(33), torch.randn(5, 33)
    y = rms_norm(x, weight, EPS) + r
    y.backward(upstream)
    assert torch.equal(r.grad, upstream)


def test_residual() -> None:
    x, residual = torch.randn(2, 5, 123), torch.randn(2, 5, 123)
    weight = torch.randn(123)
    tensors = [x.requires_grad_(), residual.requires_grad_(), weight.requires_grad_()]
    before = [t.detach().clone() for t in tensors]
    normed, total = rms_norm(x, weight, EPS, residual=residual)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed.double(), exact(x + residual, weight), rtol=1e-5, atol=1e-6)
    up, side = torch.randn(2, 5, 123), torch.randn(2, 5, 123)
    actual = torch.autograd.grad((normed * up + total * side).sum(), tensors)
    reference = (exact(x + residual, weight) * up + (x + residual) * side).sum()
    for a, b in zip(actual, torch.autograd.grad(reference, tensors), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    rms_norm(x.detach(), weight, EPS, residual=residual.detach())
    assert all(torch.equal(t, b) and t._version == 0 for t, b in zip(tensors, before, strict=True))


def test_strided_input() -> None:
    x, weight = torch.randn(7, 3, 10), torch.randn(10)
    for strided in (x.transpose(0, 1), x[::2], x.expand(7, 3, 10)):
        expected = exact(strided, weight).float()
        torch.testing.assert_close(rms_norm(strided, weight, EPS), expected, rtol=1e-5, atol=1e-6)
    wide = torch.randn(4, 40)
    strided = wide[:, ::4]
    torch.testing.assert_close(
        rms_norm(strided, weight, EPS), exact(strided, weight).float(), rtol=1e-5, atol=1e-6
    )


def test_where_bf16_is_rounded() -> None:
    x, weight = torch.randn(64, 256).bfloat16(), torch.randn(256).bfloat16()
    h = x.float() / (x.float().square().mean(-1, keepdim=True) + EPS).sqrt()
    before = (weight.float() * h.bfloat16().float()).bfloat16()  # Llama's two roundings
    after = (weight.float() * h).bfloat16()
    assert (before != after).float().mean() > 0.1
    # rsqrt and 1 / sqrt differ by an ulp of fp32, which now and then moves a rounding
    for cast, expected in (("before_weight", before), ("after_weight", after)):
        y = rms_norm(x, weight, EPS, cast=cast)
        assert y.dtype == torch.bfloat16
        assert (y != expected).float().mean() < 1e-3


def test_weight_of_another_width() -> None:
    with pytest.raises(ValueError, match=r"weight \(7,\) does not fit x \(2, 8\)"):
        rms_norm(torch.ones(2, 8), torch.ones(7), EPS)
