"""The norms as modules, against float64 definitions."""

import pytest
import torch
from torch import Tensor

from tigon.layers import AddRMSNorm, RMSNorm
from tigon.layers.norm import add_normed

C = 24


def exact(norm: RMSNorm, x: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * (norm.weight + norm.offset)


def filled(norm: RMSNorm) -> RMSNorm:
    torch.nn.init.normal_(norm.weight)
    return norm


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_new_norm_scales_by_one(offset: float) -> None:
    norm, x = RMSNorm(C, 1e-3, offset=offset), torch.randn(3, C)
    norm.init_weights()
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(norm(x), expected)


def test_the_seam_between_two_branches() -> None:
    norm, x, residual = filled(AddRMSNorm(C, 1e-3)), torch.randn(2, 3, C), torch.randn(2, 3, C)
    normed, total = norm(x, residual)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed.double(), exact(norm, total), rtol=1e-5, atol=1e-6)
    normed, total = norm(x, None)
    assert total is x
    torch.testing.assert_close(normed.double(), exact(norm, x), rtol=1e-5, atol=1e-6)


def test_the_seam_with_a_norm_behind_the_branch() -> None:
    gemma = {"offset": 1.0, "cast": "after_weight"}
    norm, post = filled(AddRMSNorm(C, 1e-3, **gemma)), filled(RMSNorm(C, 0.5, **gemma))
    x, residual = torch.randn(2, 2, 3, C).requires_grad_().unbind()
    normed, total = norm(x, residual, post)
    expected = residual + exact(post, x)
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(normed.double(), exact(norm, expected), rtol=1e-5, atol=1e-6)
    up, leaves = torch.randn(2, 3, C), [x, residual, norm.weight, post.weight]
    found = torch.autograd.grad((normed * up).sum(), leaves)
    wanted = torch.autograd.grad((exact(norm, expected) * up).sum(), leaves)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_norms_that_one_pass_cannot_do_are_called_apart() -> None:
    norm, x = filled(AddRMSNorm(C, 1e-3, offset=1.0)), torch.randn(2, C)
    other, same = (filled(RMSNorm(C, 1e-5, offset=offset)) for offset in (0.0, 1.0))
    for post, residual in ((other, x), (other, None), (same, None)):
        torch.testing.assert_close(norm(x, residual, post), norm(post(x), residual))


def test_hooks_see_the_norm_behind_a_branch() -> None:
    gemma = {"offset": 1.0, "cast": "after_weight"}
    norm, post = filled(AddRMSNorm(C, 1e-3, **gemma)), filled(RMSNorm(C, 0.5, **gemma))
    x, residual = torch.randn(2, 3, C)
    expected, seen = norm(x, residual, post), []
    post.register_forward_hook(lambda module, given, output: seen.append(output))
    torch.testing.assert_close(norm(x, residual, post), expected)
    assert len(seen) == 1


def test_hooks_see_the_norm_of_a_sum() -> None:
    norm, (x, residual) = RMSNorm(8, 1e-6), torch.randn(2, 3, 8)
    norm.init_weights()
    expected, seen = add_normed(x, residual, norm), []
    norm.register_forward_hook(lambda module, given, output: seen.append(output))
    torch.testing.assert_close(add_normed(x, residual, norm), expected)
    assert len(seen) == 1
