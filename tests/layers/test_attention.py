"""Attention with and without normed heads, against its parts in float64."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tigon.kernels
from tigon.kernels import AttentionMask, attention, rms_norm_ref, rope_ref
from tigon.layers import Attention, BlockInputs, KVCache, Rotation

CUDA = torch.cuda.is_available()
B, T, C, H, K, D = 2, 5, 12, 4, 2, 6
EPS = 1e-2
NORMS: dict[str, dict[str, Any]] = {
    "none": {},
    "qwen3": {"qk_norm_eps": EPS},
    "gemma3": {"qk_norm_eps": EPS, "offset": 1.0, "cast": "after_weight"},
    "olmo2": {"qk_norm_eps": EPS, "flat_qk_norm": True, "cast": "after_weight"},
    "glm4": {"interleaved": True},
    "both": {"qk_norm_eps": EPS, "flat_qk_norm": True, "interleaved": True},
}
norms = pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)


@pytest.fixture(
    autouse=True, params=["reference", pytest.param("triton", marks=pytest.mark.kernel)]
)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    torch.set_default_device("cuda" if CUDA else "cpu")
    with tigon.kernels.use(request.param):
        yield request.param
    torch.set_default_device(None)


def make(norm: dict[str, Any]) -> Attention:
    layer = Attention(C, H, K, D, bias=True, **norm)
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return layer


def whole_row() -> BlockInputs:
    return BlockInputs(torch.arange(T)[None], AttentionMask(T))


def exact(
    layer: Attention,
    x: Tensor,
    theta: Tensor,
    *,
    offset: float = 0.0,
    interleaved: bool = False,
    query_scale: Tensor | None = None,
    **_: Any,
) -> Tensor:
    p = {name: t.double() for name, t in layer.named_parameters()}
    qkv = x.double() @ p["qkv_proj.weight"].T + p["qkv_proj.bias"]
    q, k, v = qkv.view(B, -1, H + 2 * K, D).split((H, K, K), 2)
    if "q_norm.weight" in p:
        q, k = (
            (z / (z.square().mean(-1, keepdim=True) + EPS).sqrt() * (w + offset)).view(B, -1, n, D)
            for z, w, n in (
                (q.reshape(B, T, -1, len(p["q_norm.weight"])), p["q_norm.weight"], H),
                (k.reshape(B, T, -1, len(p["k_norm.weight"])), p["k_norm.weight"], K),
            )
        )
    turn = torch.polar(torch.ones_like(theta), theta)[:, None]

    def rotate(z: Tensor) -> Tensor:
        if interleaved:
            return torch.view_as_real(torch.complex(z[..., ::2], z[..., 1::2]) * turn).flatten(-2)
        turned = torch.complex(*z.chunk(2, -1)) * turn
        return torch.cat((turned.real, turned.imag), -1)

    q, k = rotate(q), rotate(k)
    q = q if query_scale is None else q * query_scale
    k, v = k.repeat_interleave(H // K, 2), v.repeat_interleave(H // K, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / D**0.5
    scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
    return out.reshape(B, -1, H * D) @ p["o_proj.weight"].T


@pytest.mark.parametrize("scaled", [False, True])
@norms
def test_forward_and_gradients(norm: dict[str, Any], scaled: bool) -> None:
    layer, x = make(norm), torch.randn(B, T, C, requires_grad=True)
    theta = torch.rand(T, D // 2, dtype=torch.float64) * 6
    scale = torch.rand(1, T, 1, 1) * 9 if scaled else None
    rotation = Rotation(theta.cos().float()[None], theta.sin().float()[None], scale)
    wanted = (x, *layer.parameters())
    y = layer(x, rotation, None, whole_row())
    expected = exact(layer, x, theta, query_scale=scale, **norm)
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-5)
    upstream = torch.randn_like(y)
    actual = torch.autograd.grad(y, wanted, upstream)
    for a, e in zip(actual, torch.autograd.grad(expected, wanted, upstream.double()), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-3, atol=1e-4)


@norms
def test_decoding_equals_one_pass(norm: dict[str, Any]) -> None:
    layer, x = make(norm), torch.randn(B, T, C)
    theta = torch.rand(1, T, D // 2) * 6
    whole = layer(x, Rotation(theta.cos(), theta.sin()), None, whole_row())
    cache, steps = KVCache(), []
    with torch.no_grad():
        for i in range(T):
            now = theta[:, i : i + 1]
            mask = AttentionMask(1, past=cache.begin(B, 1))
            (state,) = cache.open(lambda spec: [layer.make_state(spec)], x, mask)
            ctx = BlockInputs(torch.tensor([[i]]), mask, append=cache.append)
            steps.append(layer(x[:, i : i + 1], Rotation(now.cos(), now.sin()), state, ctx))
            cache.end(mask)
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cast", ["before_weight", "after_weight"])
def test_cast(cast: Any, path: str) -> None:
    if path == "triton":
        return  # where its kernel rounds is tested there
    layer = make({"qk_norm_eps": EPS, "cast": cast}).bfloat16()
    x, theta = torch.randn(B, T, C).bfloat16(), torch.rand(1, T, D // 2).bfloat16()
    q, k, v = layer.qkv_proj(x).view(B, T, -1, D).split((H, K, K), 2)
    q = rms_norm_ref(q, layer.q_norm.weight, EPS, cast=cast)
    k = rms_norm_ref(k, layer.k_norm.weight, EPS, cast=cast)
    q, k = rope_ref(q, k, theta.cos(), theta.sin())
    out = attention(q, k, v, mask=AttentionMask(T))
    expected = layer.o_proj(out.reshape(B, T, -1))
    assert torch.equal(layer(x, Rotation(theta.cos(), theta.sin()), None, whole_row()), expected)


def test_names_and_first_values() -> None:
    assert not any("norm" in name for name in make({}).state_dict())
    for name, first in (("qwen3", 1.0), ("gemma3", 0.0)):
        layer = Attention(C, H, K, D, **NORMS[name])
        for norm in (layer.q_norm, layer.k_norm):
            norm.init_weights()
        state = layer.state_dict()
        for part in ("q_norm.weight", "k_norm.weight"):
            assert torch.equal(state[part], torch.full((D,), first))
    flat = Attention(C, H, K, D, **NORMS["olmo2"]).state_dict()
    assert flat["q_norm.weight"].shape == (H * D,)
    assert flat["k_norm.weight"].shape == (K * D,)
