"""Attention as a loop over queries that softmaxes the keys each may see, and the masks and
options that it is asked of.
"""

import importlib
import itertools
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tigon.kernels import AttentionMask, attention, attention_ref

implementation = importlib.import_module("tigon.kernels.attention.api")
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
    sinks: Tensor | None = None,
) -> Tensor:
    q, k, v = q.double(), k.double(), v.double()
    past, groups = k.shape[1] - q.shape[1], q.shape[2] // k.shape[2]
    out = torch.zeros_like(q)
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            keys = [s for s in range(k.shape[1]) if sees(b, t + past, s)]
            for h in range(q.shape[2]):
                scores = k[b, keys, h // groups] @ q[b, t, h] * (scale or 1 / math.sqrt(D))
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                weights = scores.exp()
                sink = 0.0 if sinks is None else sinks[h].double().exp()
                out[b, t, h] = weights @ v[b, keys, h // groups] / (weights.sum() + sink)
    return out


def tensors(tokens: int, past: int = 0, kv_heads: int = K) -> tuple[Tensor, Tensor, Tensor]:
    keys = (B, past + tokens, kv_heads, D)
    return (
        torch.randn(B, tokens, H, D, requires_grad=True),
        torch.randn(keys, requires_grad=True),
        torch.randn(keys, requires_grad=True),
    )


SEGMENTS = torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2, 2], [3, 3, 3, 3, 3, 3, 3, 4, 4]])
PADDING = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1, 0]]).bool()
# Three answers to the tokens 0 to 2 of the first row, and two to the tokens 2 and 3 of the second
BOUNDS = torch.tensor([0, 5, 7, 9, 11, 15, 18], dtype=torch.int32)
PREFIXES = torch.tensor([[0, 0], [0, 3], [0, 3], [0, 0], [9, 9], [11, 13]])
SHARED = {
    "segment_ids": torch.arange(6).repeat_interleave(BOUNDS.diff()).view(2, 9),
    "cu_seq_lens": BOUNDS,
    "longest": 5,
    "prefixes": PREFIXES,
}
EVEN = torch.arange(9).expand(2, -1) // 3 + torch.tensor([[0], [3]])
# What a mask is made of, and a layer's options
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal": ({}, {}),
    "window 1": ({}, {"window": 1}),
    "window 4": ({}, {"window": 4}),
    "window 9": ({}, {"window": 9}),
    "scale": ({}, {"scale": 0.9}),
    "softcap": ({}, {"softcap": 0.5}),
    "softcap, scale and window": ({}, {"softcap": 0.5, "scale": 0.7, "window": 3}),
    "packed": ({"segment_ids": SEGMENTS}, {}),
    "packed with a window": ({"segment_ids": SEGMENTS}, {"window": 2}),
    "packed evenly": ({"segment_ids": EVEN}, {"window": 2}),
    "packed in threes": ({"segment_ids": EVEN}, {}),
    "prefixes": (SHARED, {}),
    "prefixes with a window": (SHARED, {"window": 3}),
    "padded": ({"key_mask": PADDING}, {}),
    "sinks": ({}, {"sinks": True}),
    "sinks and a window": ({}, {"sinks": True, "window": 3, "scale": 0.7}),
    "sinks, packed with a window": ({"segment_ids": SEGMENTS}, {"sinks": True, "window": 2}),
    "sinks, packed evenly": ({"segment_ids": EVEN}, {"sinks": True}),
    "sinks, prefixes": (SHARED, {"sinks": True}),
    "sinks, padded": ({"key_mask": PADDING}, {"sinks": True}),
    "sinks and softcap": ({}, {"sinks": True, "softcap": 0.5}),
    "both sides": ({"causal": False}, {}),
    "both sides in a window": ({"causal": False}, {"window": 4, "softcap": 0.5}),
    "both sides, packed with a window": ({"causal": False, "segment_ids": SEGMENTS}, {"window": 2}),
    "both sides, packed": ({"causal": False, "segment_ids": SEGMENTS}, {"scale": 0.3}),
    "both sides, packed evenly": (
        {"causal": False, "segment_ids": torch.arange(2)[:, None].expand(2, 9)},
        {"window": 7},
    ),
    "both sides, padded": ({"causal": False, "key_mask": PADDING}, {}),
}


def shared(b: int, q: int, k: int, window: int | None) -> bool:
    """As if a sequence were behind its own copy of what it goes on from."""
    q, k = 9 * b + q, 9 * b + k
    start = int(BOUNDS[q >= BOUNDS][-1])
    first, last = PREFIXES[int((q >= BOUNDS).sum()) - 1].tolist()
    seen = [*range(first, last), *range(start, q + 1)]
    return k in seen[-(window or 9) :]


def visible(given: dict[str, Any], window: int | None) -> Callable[[int, int, int], bool]:
    """Whether a query of a row sees a key, by the definition."""
    segments, padding = given.get("segment_ids"), given.get("key_mask")
    if "prefixes" in given:
        return partial(shared, window=window)

    def sees(b: int, q: int, k: int) -> bool:
        near = window is None or abs(q - k) < window
        behind = k <= q or not given.get("causal", True)
        same = segments is None or bool(segments[b, q] == segments[b, k])
        return near and behind and same and (padding is None or bool(padding[b, k]) or k == q)

    return sees


def assert_right(function: Any, case: str, kv_heads: int, backend: str = "auto") -> None:
    given, options = CASES[case]
    leaves = q, k, v = tensors(9, kv_heads=kv_heads)
    if "sinks" in options:
        sinks = (torch.randn(H) + 1).requires_grad_()
        options, leaves = options | {"sinks": sinks}, (*leaves, sinks)
    real = torch.ones(B, 9, dtype=torch.bool)
    if backend != "auto" and "key_mask" in given:
        real = given["key_mask"]  # what padding sees is nobody's business
    out = function(q, k, v, mask=AttentionMask(9, **given, backend=backend), **options)
    limits = {name: x for name, x in options.items() if name != "window"}
    expected = loop(q, k, v, visible(given, options.get("window")), **limits)
    assert out.isfinite().all() and out.shape == q.shape
    torch.testing.assert_close(out[real].double(), expected[real], rtol=1e-5, atol=1e-6)
    upstream = torch.randn_like(out) * real[:, :, None, None]
    actual = torch.autograd.grad((out * upstream).sum(), leaves)
    reference = torch.autograd.grad((expected * upstream).sum(), leaves)
    for a, b in zip(actual, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert q._version == k._version == v._version == 0


GROUPED = ("causal", "packed with a window", "sinks, packed evenly", "both sides")


def with_heads(cases: Iterable[str]) -> list[tuple[str, int]]:
    """Cases and numbers of kv heads: others than 2 where a few cases show what becomes of them."""
    return [(case, n) for case in cases for n in (1, 2, 6) if n == 2 or case in GROUPED]


WITHOUT_SOFTCAP = [case for case, (_, options) in CASES.items() if "softcap" not in options]
# Windows to both sides are counted from the last key, which is not that of the last query
TURNED = [n for n in CASES if n.startswith("both sides") and "window" in CASES[n][1]]


def in_parts(
    function: Any, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, spans: Any, **how: Any
) -> Tensor:
    parts = []
    for first, end in itertools.pairwise(spans):
        part = mask.slice_queries(first, end)
        keys = (x[:, : part.keys] for x in (k, v))
        parts.append(function(q[:, first:end], *keys, mask=part, **how))
    return torch.cat(parts, 1)
