import pytest
import torch
from torch import Tensor

from tigon.kernels import rope

B, T, H, K, D = 2, 9, 5, 3, 14


def angles(rotated: int = D, batch: int = B) -> Tensor:
    return torch.rand(batch, T, rotated // 2, dtype=torch.float64) * 6.0


def rotate(x: Tensor, theta: Tensor, interleaved: bool) -> Tensor:
    """Complex numbers turned by theta."""
    half = theta.shape[-1]
    head, rest = x[..., : 2 * half].double(), x[..., 2 * half :].double()
    re, im = (
        (head[..., 0::2], head[..., 1::2]) if interleaved else (head[..., :half], head[..., half:])
    )
    turned = torch.complex(re, im) * torch.polar(torch.ones_like(theta), theta)[:, :, None]
    out = torch.empty_like(head)
    if interleaved:
        out[..., 0::2], out[..., 1::2] = turned.real, turned.imag
    else:
        out = torch.cat((turned.real, turned.imag), -1)
    return torch.cat((out, rest), -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [D, 6])
@pytest.mark.parametrize("batch", [1, B])
def test_forward_and_gradients(interleaved: bool, rotated: int, batch: int) -> None:
    q, k = torch.randn(B, T, H, D).requires_grad_(), torch.randn(B, T, K, D).requires_grad_()
    theta = angles(rotated, batch)
    before = q.detach().clone(), k.detach().clone()
    cos, sin = theta.cos().float(), theta.sin().float()
    out = rope(q, k, cos, sin, interleaved=interleaved)
    for x, y in zip((q, k), out, strict=True):
        torch.testing.assert_close(y.double(), rotate(x, theta, interleaved), rtol=1e-5, atol=1e-6)
        upstream = torch.randn_like(y)
        (grad,) = torch.autograd.grad(y, x, upstream)
        # The gradient of a rotation is the rotation back
        expected = rotate(upstream, -theta, interleaved).float()
        torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(q, before[0]) and torch.equal(k, before[1])
    assert (q._version, k._version, cos._version) == (0, 0, 0)


def test_scores_depend_on_the_distance_alone() -> None:
    q, k = torch.randn(1, 1, 1, D).expand(1, T, 1, D), torch.randn(1, 1, 1, D).expand(1, T, 1, D)
    theta = torch.arange(T)[None, :, None] * torch.rand(D // 2)
    q, k = rope(q, k, theta.cos(), theta.sin())
    scores = torch.einsum("bqhd,bkhd->qk", q, k)
    for distance in range(1 - T, T):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert scores[0].std() > 0.1


def test_views_of_one_projection() -> None:
    packed = torch.randn(B, T, H + 2 * K, D)
    q, k, _ = packed.split((H, K, K), dim=2)
    theta = angles()
    for x, y in zip((q, k), rope(q, k, theta.cos(), theta.sin()), strict=True):
        assert not x.is_contiguous()
        expected = rotate(x, theta, False).float()
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)


def test_bf16_is_rounded_once() -> None:
    q, k = torch.randn(B, T, H, D).bfloat16(), torch.randn(B, T, K, D).bfloat16()
    theta = angles()
    cos, sin = theta.cos().bfloat16(), theta.sin().bfloat16()
    q1, q2 = q.double().chunk(2, -1)
    c, s = cos.double()[:, :, None], sin.double()[:, :, None]
    expected = torch.cat((q1 * c - q2 * s, q2 * c + q1 * s), -1).float().bfloat16()
    y, _ = rope(q, k, cos, sin)
    assert y.dtype == torch.bfloat16
    assert (y != expected).float().mean() < 1e-2


def test_more_angles_than_the_head_has() -> None:
    q = torch.randn(1, T, 1, 8)
    with pytest.raises(ValueError, match="rotates 10 dims, but heads have 8"):
        rope(q, q, torch.ones(1, T, 5), torch.ones(1, T, 5))
