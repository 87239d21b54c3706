"""Attention against a loop over queries that softmaxes the keys each may see."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tigon.kernels import AttentionMask, attention, attention_ref

B, H, K, D = 2, 6, 2, 10


@pytest.fixture(autouse=True)
def path() -> None:
    """There are no kernels of ours behind it: one path, on the CPU."""


FUNCTIONS = pytest.mark.parametrize("function", [attention, attention_ref])


def loop(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sees: Callable[[int, int, int], bool],  # batch, query, key (positions among all keys)
    softcap: float | None = None,
    scale: float | None = None,
) -> Tensor:
    q, k, v = q.double(), k.double(), v.double()
    past = k.shape[2] - q.shape[2]
    rows = []
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            kv = h // (q.shape[1] // k.shape[1])
            for t in range(q.shape[2]):
                keys = [s for s in range(k.shape[2]) if sees(b, t + past, s)]
                scores = k[b, kv, keys] @ q[b, h, t] * (scale or 1 / math.sqrt(q.shape[-1]))
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                rows.append(scores.softmax(0) @ v[b, kv, keys])
    return torch.stack(rows).view(q.shape)


def tensors(tokens: int, past: int = 0, kv_heads: int = K) -> tuple[Tensor, Tensor, Tensor]:
    keys = (B, kv_heads, past + tokens, D)
    return (
        torch.randn(B, H, tokens, D, requires_grad=True),
        torch.randn(keys, requires_grad=True),
        torch.randn(keys, requires_grad=True),
    )


SEGMENTS = torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2, 2], [3, 3, 3, 3, 3, 3, 3, 4, 4]])
PADDING = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1, 0]]).bool()


def causal(b: int, q: int, k: int) -> bool:
    return k <= q


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[int, int, int], bool]]] = {
    "causal": ({}, {}, causal),
    "window 1": ({}, {"window": 1}, lambda b, q, k: k == q),
    "window 4": ({}, {"window": 4}, lambda b, q, k: q - 4 < k <= q),
    "window 9": ({}, {"window": 9}, causal),
    "scale": ({}, {"scale": 0.9}, causal),
    "softcap": ({}, {"softcap": 0.5}, causal),
    "softcap, scale and window": (
        {},
        {"softcap": 0.5, "scale": 0.7, "window": 3},
        lambda b, q, k: q - 3 < k <= q,
    ),
    "packed": (
        {"segment_ids": SEGMENTS},
        {},
        lambda b, q, k: bool(k <= q and SEGMENTS[b, q] == SEGMENTS[b, k]),
    ),
    "packed with a window": (
        {"segment_ids": SEGMENTS},
        {"window": 2},
        lambda b, q, k: bool(q - 2 < k <= q and SEGMENTS[b, q] == SEGMENTS[b, k]),
    ),
    "padded": (
        {"key_mask": PADDING},
        {},
        lambda b, q, k: bool(k <= q and (PADDING[b, k] or k == q)),
    ),
}


@FUNCTIONS
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("case", CASES)
def test_forward_and_gradients(function: Any, case: str, kv_heads: int) -> None:
    given, options, sees = CASES[case]
    q, k, v = tensors(9, kv_heads=kv_heads)
    out = function(q, k, v, mask=AttentionMask(9, **given), **options)
    limits = {name: x for name, x in options.items() if name != "window"}
    expected = loop(q, k, v, sees, **limits)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    upstream = torch.randn_like(out)
    actual = torch.autograd.grad((out * upstream).sum(), (q, k, v))
    reference = torch.autograd.grad((expected * upstream).sum(), (q, k, v))
    for a, b in zip(actual, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert q._version == k._version == v._version == 0


@FUNCTIONS
@pytest.mark.parametrize("window", [None, 3, 6])
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("padded", [False, True])
def test_continuing_from_a_cache(
    function: Any, tokens: int, window: int | None, padded: bool
) -> None:
    q, k, v = tensors(tokens, past=9 - tokens)
    mask = AttentionMask(tokens, past=9 - tokens, key_mask=PADDING if padded else None)

    def sees(b: int, query: int, key: int) -> bool:
        near = window is None or query - window < key
        return near and key <= query and (not padded or bool(PADDING[b, key]) or key == query)

    out = function(q, k, v, mask=mask, window=window)
    torch.testing.assert_close(out.double(), loop(q, k, v, sees), rtol=1e-5, atol=1e-6)


@FUNCTIONS
@pytest.mark.parametrize("window", [1, 2, 6, 8, 20, 21, 30])
@pytest.mark.parametrize("tokens", [21, 1])
def test_a_window_sees_exactly_its_tokens(function: Any, window: int, tokens: int) -> None:
    q = torch.zeros(1, 2, tokens, 21)  # every visible key weighs the same
    k, v = torch.zeros(1, 1, 21, 21), torch.eye(21)[None, None]  # and leaves its mark
    mask = AttentionMask(tokens, past=21 - tokens)
    out = function(q, k, v, mask=mask, window=window)
    seen = (out > 0).sum(-1)
    position = torch.arange(21 - tokens, 21)
    assert torch.equal(seen, (position + 1).clamp(max=window).expand(1, 2, -1))
    assert (out[0, 0, -1, 21 - min(window, 21) :] > 0).all()  # the last ones, itself among them


@FUNCTIONS
@pytest.mark.parametrize("tokens", [1, 5])
def test_neighbouring_heads_share_a_kv_head(function: Any, tokens: int) -> None:
    q, k, _ = tensors(tokens)
    v = torch.arange(K).view(1, K, 1, 1).expand(B, K, tokens, D).float()
    out = function(q, k, v, mask=AttentionMask(tokens))
    owner = torch.tensor([0, 0, 0, 1, 1, 1]).view(1, H, 1, 1).expand_as(out).float()
    torch.testing.assert_close(out, owner)


@FUNCTIONS
@pytest.mark.parametrize("softcap", [None, 1.0])
def test_rows_of_padding_alone_are_finite(function: Any, softcap: float | None) -> None:
    q, k, v = tensors(9)
    mask = AttentionMask(9, key_mask=torch.tensor([[False] * 9, [True] * 9]), segment_ids=SEGMENTS)
    out = function(q, k, v, mask=mask, softcap=softcap)
    assert out.isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (q, k, v)))
    torch.testing.assert_close(out[0], v[0].repeat_interleave(3, 0))  # each sees itself


def test_strided_heads() -> None:
    packed = torch.randn(B, 9, H + 2 * K, D)
    q, k, v = (x.transpose(1, 2) for x in packed.split((H, K, K), dim=2))
    out = attention(q, k, v, mask=AttentionMask(9))
    torch.testing.assert_close(out.double(), loop(q, k, v, causal), rtol=1e-5, atol=1e-6)


def test_gradcheck() -> None:
    q, k, v = (x.detach().double().requires_grad_() for x in tensors(4))

    def function(*tensors: Tensor) -> Tensor:
        return attention(*tensors, mask=AttentionMask(4, segment_ids=SEGMENTS[:, 2:6]), window=2)

    assert torch.autograd.gradcheck(function, (q, k, v), fast_mode=True)


def test_bf16_is_at_most_twice_as_wrong_as_eager() -> None:
    q, k, v = (x.detach().bfloat16() for x in tensors(33))
    exact = loop(q, k, v, causal)
    kk, vv = k.repeat_interleave(3, 1), v.repeat_interleave(3, 1)
    scores = (q @ kk.transpose(-1, -2) / math.sqrt(D)).masked_fill(
        torch.ones(33, 33).triu(1).bool(), float("-inf")
    )
    eager = scores.float().softmax(-1).bfloat16() @ vv
    for function in (attention, attention_ref):
        out = function(q, k, v, mask=AttentionMask(33))
        assert (out - exact).norm() <= 2 * (eager - exact).norm()


def test_heads_that_cannot_share() -> None:
    q, k = torch.ones(1, 5, 3, 4), torch.ones(1, 2, 3, 4)
    with pytest.raises(ValueError, match="5 query heads cannot share 2 key/value heads"):
        attention(q, k, k, mask=AttentionMask(3))
