"""`rope` and `qk_norm_rope`: angles of any kind, views of the packed projection, what is saved."""

import sys

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import CASES
from tests.kernels.definitions import qk_norm_rope as exact
from tests.kernels.definitions import rotate
from tests.kernels.layer_cases import angles, heads
from tigon.kernels import qk_norm_rope, rope

B, T, H, K, D = 2, 3, 6, 3, 14


def given(weights: bool) -> dict[str, Tensor]:
    made = CASES["qk_norm_rope" if weights else "qk_norm_rope, no norm"]
    return made.make((B, T, H, K, D, D, 1)) | {"eps": made.options["eps"]}


def test_angles_of_different_strides() -> None:
    q, k, cos, sin = heads(B, T, H, K, D, D, 1).values()
    expected = rope(q, k, cos, sin)
    table = torch.stack((cos, sin), -1)
    for turn in (
        (table[..., 0], table[..., 1].contiguous()),
        (table[..., 0].expand(B, T, D // 2), table[..., 1].contiguous().expand(B, T, D // 2)),
        (cos.double(), sin.double()),
    ):
        for a, b in zip(rope(q, k, *turn), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_angles_that_learn() -> None:
    theta = (6 * torch.rand(B, T, D // 2, dtype=torch.float64)).requires_grad_()
    turn = theta.cos().float(), theta.sin().float()
    q, k, *_ = heads(B, T, H, K, D, D, B).values()
    y = rope(q, k, *turn)[0]
    (grad,) = torch.autograd.grad(y.square().sum() + y.sum(), theta, retain_graph=True)
    expected = torch.autograd.grad(rotate(q, *turn).sum(), theta, retain_graph=True)[0]
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-4)
    normed = given(True) | {"cos": turn[0], "sin": turn[1]}
    (grad,) = torch.autograd.grad(qk_norm_rope(**normed)[0].sum(), theta, retain_graph=True)
    (expected,) = torch.autograd.grad(exact(**normed)[0].sum(), theta)
    torch.testing.assert_close(grad, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("weights", [False, True])
def test_v_is_a_view_with_its_own_gradient(weights: bool) -> None:
    inputs = given(weights)
    qkv = inputs["qkv"]
    out = qk_norm_rope(**inputs | {"qkv": qkv * 1.0})
    assert out[2].untyped_storage().nbytes() == qkv.untyped_storage().nbytes()
    for i, part in enumerate(((0, H), (H, H + K), (H + K, H + 2 * K))):
        (grad,) = torch.autograd.grad(out[i].sum(), qkv, retain_graph=True)
        own = grad.view(B, T, H + 2 * K, D).abs().sum((0, 1, 3))
        inside = torch.zeros(H + 2 * K, dtype=torch.bool)
        inside[slice(*part)] = True
        assert (own[inside] > 0).all() and (own[~inside] == 0).all()


@pytest.mark.parametrize("weights", [False, True])
def test_norms_alone_save_their_input(weights: bool, kernels_only: None) -> None:
    inputs, saved = given(weights), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()), lambda t: t):
        qk_norm_rope(**inputs)
    size = inputs["qkv"].numel()
    assert (max(saved) >= size) == weights
    assert sum(saved) <= weights * size + 2 * T * D + 2 * D


@pytest.mark.gpu
def test_a_new_batch_size_compiles_nothing(kernels_only: None) -> None:
    kernel = sys.modules["tigon.kernels.rope.rope"]._rope_kernel

    def run(batch: int, tokens: int) -> int:
        turn = angles(tokens, 64)
        rope(torch.randn(batch, tokens, 4, 64), torch.randn(batch, tokens, 2, 64), **turn)
        return sum(len(caches[0]) for caches in kernel.device_caches.values())

    before = run(2, 48)
    assert run(3, 48) == run(7, 48) == run(5, 80) == before
