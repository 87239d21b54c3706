from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels import definitions
from tests.kernels.definitions import EPS
from tigon.kernels.rope.rope import qk_norm_rope

HALF = [torch.float16, torch.bfloat16]
B, T, H, K, D = 2, 3, 6, 3, 14
ROW = (H + 2 * K) * D


NORMS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma": {"offset": 1.0, "cast": "after_weight"},
    "both": {"offset": 1.0},
}
norms = pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)


def angles(rotated: int = D, batch: int = 1, tokens: int = T) -> Tensor:
    return torch.rand(batch, tokens, rotated // 2, dtype=torch.float64) * 6.0


def call(
    qkv: Tensor, theta: Tensor, weights: tuple[Tensor, ...], f: Any = qk_norm_rope, **options: Any
) -> tuple[Tensor, ...]:
    given = dict(zip(("q_weight", "k_weight"), weights, strict=False))
    options = {"heads": H, "kv_heads": K, "eps": EPS} | given | options
    dtype = torch.float32 if qkv.dtype == torch.float64 else qkv.dtype
    return f(qkv, theta.cos().to(dtype), theta.sin().to(dtype), **options)


def weights(d: int = D) -> tuple[Tensor, Tensor]:
    return torch.randn(d), torch.randn(d)


def test_v_is_a_view_with_its_own_gradient() -> None:
    for w in ((), weights()):
        qkv = torch.randn(B, T, ROW, requires_grad=True)
        out = call(qkv * 1.0, angles(), w)
        packed = out[2].untyped_storage().nbytes()
        assert packed == qkv.untyped_storage().nbytes()
        for i, part in enumerate(((0, H), (H, H + K), (H + K, H + 2 * K))):
            (grad,) = torch.autograd.grad(out[i].sum(), qkv, retain_graph=True)
            heads = grad.view(B, T, H + 2 * K, D).abs().sum((0, 1, 3))
            inside = torch.zeros(H + 2 * K, dtype=torch.bool)
            inside[slice(*part)] = True
            assert (heads[inside] > 0).all() and (heads[~inside] == 0).all()


def rounded(
    qkv: Tensor, theta: Tensor, w: tuple[Tensor, ...], *, cast: str = "before_weight", offset: float
) -> list[Tensor]:
    """q and k in fp64, rounded where the definition says."""
    dtype = qkv.dtype
    cos, sin = (x.to(dtype).double()[:, :, None] for x in (theta.cos(), theta.sin()))
    packed = qkv.double().unflatten(-1, (H + 2 * K, D))
    out = []
    for x, weight in zip(packed.split((H, K, K), 2), w, strict=False):
        h = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
        if cast == "before_weight":
            n = h.to(dtype).double() * (weight + offset).double()
        else:
            n = h * (weight.double() + offset)
        n1, n2 = n.to(dtype).double().chunk(2, -1)
        out.append(torch.cat((n1 * cos - n2 * sin, n2 * cos + n1 * sin), -1).to(dtype))
    return out


@norms
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("wide", [False, True], ids=["same", "fp32 weight"])
def test_where_it_is_rounded(norm: dict[str, Any], dtype: torch.dtype, wide: bool) -> None:
    norm = {"offset": 0.0, "cast": "before_weight"} | norm
    qkv, theta = torch.randn(B, T, ROW).to(dtype), angles()
    w = tuple(x if wide else x.to(dtype) for x in weights())
    expected = rounded(qkv, theta, w, **norm)
    other = {"before_weight": "after_weight", "after_weight": "before_weight"}[norm["cast"]]
    wrong = rounded(qkv, theta, w, cast=other, offset=norm["offset"])
    for y, e, bad in zip(call(qkv, theta, w, **norm)[:2], expected, wrong, strict=True):
        assert y.dtype == dtype
        assert (bad != e).float().mean() > 0.1
        assert (y != e).float().mean() < 1e-2


def test_what_is_saved(kernels_only: None) -> None:
    qkv, theta = torch.randn(B, T, ROW, requires_grad=True), angles()
    for w, saves_qkv in (((), False), (weights(), True)):
        saved: list[int] = []

        def pack(t: Tensor, saved: list[int] = saved) -> Tensor:
            saved.append(t.numel())
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            call(qkv, theta, w)
        assert (max(saved) >= qkv.numel()) == saves_qkv
        assert sum(saved) <= saves_qkv * qkv.numel() + 2 * T * D + 2 * D
        with torch.no_grad():
            assert all(y.grad_fn is None for y in call(qkv, theta, w))


def test_angles_that_learn() -> None:
    qkv, theta = torch.randn(B, T, ROW), angles().requires_grad_()
    w = weights()
    (grad,) = torch.autograd.grad(call(qkv, theta, w)[0].sum(), theta)
    (expected,) = torch.autograd.grad(call(qkv, theta, w, definitions.qk_norm_rope)[0].sum(), theta)
    torch.testing.assert_close(grad, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements(kernels_only: None) -> None:
    t, h, k, d = 140_000, 96, 16, 128
    qkv = torch.zeros(1, t, (h + 2 * k) * d, dtype=torch.bfloat16)
    qkv[:, -2:].normal_()
    last = qkv[:, -2:].clone().requires_grad_()
    w = tuple(x.bfloat16() for x in weights(d))
    theta = angles(d, 1, t)
    out = call(qkv.requires_grad_(), theta, w, heads=h, kv_heads=k)
    (grad,) = torch.autograd.grad(out, qkv, tuple(torch.ones_like(y) for y in out))
    expected = call(last, theta[:, -2:], w, heads=h, kv_heads=k)
    for y, e in zip(out, expected, strict=True):
        assert torch.equal(y[:, -2:], e)
    (right,) = torch.autograd.grad(expected, last, tuple(torch.ones_like(y) for y in expected))
    assert torch.equal(grad[:, -2:], right)


@pytest.mark.parametrize(
    ("columns", "theta", "w", "options", "message"),
    [
        (ROW - 1, angles(), (), {}, rf"qkv \(2, 3, {ROW - 1}\) is not \[B, T, \(6 \+ 2 \* 3"),
        (ROW, angles(), (D, D - 1), {}, r"k_weight \(13,\) does not fit heads of 14 dims"),
        (ROW, angles(), (D,), {}, "give q_weight and k_weight, or neither"),
        (ROW, angles(16), (), {}, "rotates 16 dims, but heads have 14"),
        (ROW, angles(D, 1, T + 1), (), {}, r"not \[B or 1, T, R/2\]"),
        (ROW, angles(), (D, D), {"cast": "never"}, r"cast='never' is not one of \('before_weight'"),
        (ROW, angles(), (D, D), {"eps": -1.0}, "eps=-1.0 and offset=0.0 must not be negative"),
    ],
)
def test_bad_input(
    columns: int, theta: Tensor, w: tuple[int, ...], options: dict[str, Any], message: str
) -> None:
    qkv = torch.randn(B, T, columns)
    with pytest.raises(ValueError, match=message):
        call(qkv, theta.to(qkv.device), tuple(torch.ones(n) for n in w), **options)


def test_what_is_not_packed_on_one_device() -> None:
    with pytest.raises(ValueError, match="qkv"):
        call(torch.randn(T, ROW), angles(), ())
    with pytest.raises(ValueError, match="q_weight is on meta"):
        call(torch.randn(B, T, ROW), angles(), tuple(w.to("meta") for w in weights()))
