import sys

import pytest
import torch
from torch import Tensor

from tests.kernels.definitions import rotate
from tigon.kernels import rope

HALF = [torch.float16, torch.bfloat16]
B, T, H, K, D = 2, 3, 6, 3, 14


def angles(rotated: int = D, batch: int = B, tokens: int = T) -> Tensor:
    return torch.rand(batch, tokens, rotated // 2, dtype=torch.float64) * 6.0


def test_angles_of_different_strides() -> None:
    q, k, theta = torch.randn(B, T, H, D), torch.randn(B, T, K, D), angles(D, 1)
    expected = rope(q, k, theta.cos().float(), theta.sin().float())
    table = torch.stack((theta.cos(), theta.sin()), -1).float()
    for cos, sin in (
        (table[..., 0], table[..., 1].contiguous()),
        (table[..., 0].expand(B, T, D // 2), table[..., 1].contiguous().expand(B, T, D // 2)),
        (theta.cos(), theta.sin()),
    ):
        for a, b in zip(rope(q, k, cos, sin), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("table", [torch.float32, None], ids=["fp32 angles", "same"])
def test_rounded_once(dtype: torch.dtype, table: torch.dtype | None) -> None:
    q, k = torch.randn(B, T, H, D).to(dtype), torch.randn(B, T, K, D).to(dtype).requires_grad_()
    theta = angles()
    cos, sin = theta.cos().to(table or dtype), theta.sin().to(table or dtype)
    q1, q2 = q.double().chunk(2, -1)
    c, s = cos.double()[:, :, None], sin.double()[:, :, None]
    expected = torch.cat((q1 * c - q2 * s, q2 * c + q1 * s), -1).to(dtype)
    y, yk = rope(q, k, cos, sin)
    assert y.dtype == yk.dtype == dtype
    assert (y != expected).float().mean() < 1e-2
    upstream = torch.randn_like(yk)
    (grad,) = torch.autograd.grad(yk, k, upstream)
    u1, u2 = upstream.double().chunk(2, -1)
    expected = torch.cat((u1 * c + u2 * s, u2 * c - u1 * s), -1).to(dtype)
    assert grad.dtype == dtype
    assert (grad != expected).float().mean() < 1e-2


def test_angles_that_learn() -> None:
    q, k, theta = torch.randn(B, T, H, D), torch.randn(B, T, K, D), angles().requires_grad_()
    y, _ = rope(q, k, theta.cos(), theta.sin())
    (grad,) = torch.autograd.grad(y.square().sum() + y.sum(), theta)
    (expected,) = torch.autograd.grad(rotate(q, theta.cos(), theta.sin()).sum(), theta)
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements(kernels_only: None) -> None:
    t = 140_000
    q = torch.empty(1, t, 128, 128, dtype=torch.bfloat16)
    q[:, :-2] = 0
    q[:, -2:].normal_()
    k = torch.randn(1, t, 1, 128, dtype=torch.bfloat16)
    theta = angles(128, 1, t)
    cos, sin = theta.cos().bfloat16(), theta.sin().bfloat16()
    y, _ = rope(q, k, cos, sin)
    expected, _ = rope(q[:, -2:], k[:, -2:], cos[:, -2:], sin[:, -2:])
    assert torch.equal(y[:, -2:], expected)


@pytest.mark.gpu
def test_a_new_batch_size_compiles_nothing(kernels_only: None) -> None:
    kernel = sys.modules["tigon.kernels.rope.rope"]._rope_kernel

    def run(batch: int, tokens: int) -> int:
        theta = angles(64, 1, tokens)
        rope(torch.randn(batch, tokens, 4, 64), torch.randn(batch, tokens, 2, 64), theta, theta)
        return sum(len(caches[0]) for caches in kernel.device_caches.values())

    before = run(2, 48)
    assert run(3, 48) == run(7, 48) == run(5, 80) == before


def ones(*shape: int, device: str | None = None) -> Tensor:
    return torch.ones(shape, device=device)


ANGLES = rf"not \[B or 1, T, R/2\] with B={B} and T={T}"
BAD: list[tuple[dict[str, Tensor], str]] = [
    ({"cos": ones(1, T, 8)}, f"rotates 16 dims, but heads have {D}"),
    *(({"cos": ones(*shape)}, ANGLES) for shape in ((1, T - 1, 7), (B + 1, T, 7), (T, 7))),
    ({"sin": ones(1, T, 6)}, r"sin \(1, 3, 6\)"),
    ({"k": ones(B, T, K, D + 2)}, "with the same B, T and D"),
    ({"k": ones(B, T - 1, K, D)}, "with the same B, T and D"),
    ({"k": ones(T, K, D)}, "with the same B, T and D"),
    ({"cos": ones(1, T, 7, device="meta")}, "cos is on meta"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_input(change: dict[str, Tensor], message: str) -> None:
    given = {"q": ones(B, T, H, D), "k": ones(B, T, K, D), "cos": ones(1, T, 7)}
    given |= {"sin": ones(1, T, 7)}
    moved = {n: x if x.is_meta else x.to(given["q"].device) for n, x in (given | change).items()}
    with pytest.raises(ValueError, match=message):
        rope(**moved)
