"""Attention against a loop over queries that softmaxes the keys each may see.

Backends that need a GPU are played by plain torch here: what they are told is tested, and in
tests/gpu what they make of it.
"""

import importlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.flash import on_hopper, played
from tigon.kernels import AttentionMask, attention, attention_ref
from tigon.kernels.attention.backends import BackendChoice

__all__ = ["on_hopper", "played"]
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
                out[b, t, h] = scores.softmax(0) @ v[b, keys, h // groups]
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


def causal(b: int, q: int, k: int) -> bool:
    return k <= q


def shared(b: int, q: int, k: int, window: int = 9) -> bool:
    """As if a sequence were behind its own copy of what it goes on from."""
    q, k = 9 * b + q, 9 * b + k
    start = int(BOUNDS[q >= BOUNDS][-1])
    first, last = PREFIXES[int((q >= BOUNDS).sum()) - 1].tolist()
    seen = [*range(first, last), *range(start, q + 1)]
    return k in seen[-window:]


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
    "packed evenly": (
        {"segment_ids": torch.arange(9).expand(2, -1) // 3 + torch.tensor([[0], [3]])},
        {"window": 2},
        lambda b, q, k: q - 2 < k <= q and q // 3 == k // 3,
    ),
    "packed in threes": (
        {"segment_ids": torch.arange(9).expand(2, -1) // 3 + torch.tensor([[0], [3]])},
        {},
        lambda b, q, k: k <= q and q // 3 == k // 3,
    ),
    "prefixes": (SHARED, {}, shared),
    "prefixes with a window": (SHARED, {"window": 3}, partial(shared, window=3)),
    "padded": (
        {"key_mask": PADDING},
        {},
        lambda b, q, k: bool(k <= q and (PADDING[b, k] or k == q)),
    ),
    "both sides": ({"causal": False}, {}, lambda b, q, k: True),
    "both sides in a window": (
        {"causal": False},
        {"window": 4, "softcap": 0.5},
        lambda b, q, k: abs(q - k) < 4,
    ),
    "both sides, packed with a window": (
        {"causal": False, "segment_ids": SEGMENTS},
        {"window": 2},
        lambda b, q, k: bool(abs(q - k) < 2 and SEGMENTS[b, q] == SEGMENTS[b, k]),
    ),
    "both sides, packed": (
        {"causal": False, "segment_ids": SEGMENTS},
        {"scale": 0.3},
        lambda b, q, k: bool(SEGMENTS[b, q] == SEGMENTS[b, k]),
    ),
    "both sides, packed evenly": (
        {"causal": False, "segment_ids": torch.arange(2)[:, None].expand(2, 9)},
        {"window": 7},
        lambda b, q, k: abs(q - k) < 7,
    ),
    "both sides, padded": (
        {"causal": False, "key_mask": PADDING},
        {},
        lambda b, q, k: bool(PADDING[b, k] or k == q),
    ),
}


def assert_right(function: Any, case: str, kv_heads: int, backend: str = "auto") -> None:
    given, options, sees = CASES[case]
    q, k, v = tensors(9, kv_heads=kv_heads)
    real = torch.ones(B, 9, dtype=torch.bool)
    if backend != "auto" and "key_mask" in given:
        real = given["key_mask"]  # what padding sees is nobody's business
    out = function(q, k, v, mask=AttentionMask(9, **given, backend=backend), **options)
    limits = {name: x for name, x in options.items() if name != "window"}
    expected = loop(q, k, v, sees, **limits)
    assert out.isfinite().all() and out.shape == q.shape
    torch.testing.assert_close(out[real].double(), expected[real], rtol=1e-5, atol=1e-6)
    upstream = torch.randn_like(out) * real[:, :, None, None]
    actual = torch.autograd.grad((out * upstream).sum(), (q, k, v))
    reference = torch.autograd.grad((expected * upstream).sum(), (q, k, v))
    for a, b in zip(actual, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert q._version == k._version == v._version == 0


@FUNCTIONS
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("case", CASES)
def test_forward_and_gradients(function: Any, case: str, kv_heads: int) -> None:
    assert_right(function, case, kv_heads)


CUDNN = ("causal", "window 9", "scale", "packed in threes", "both sides")  # all it can do


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize(
    ("backend", "case"),
    [(name, case) for name in ("fa4", "flash") for case in CASES if "softcap" not in CASES[case][1]]
    + [("cudnn", case) for case in CUDNN],
)
def test_what_gpu_backends_are_told(backend: str, case: str, kv_heads: int) -> None:
    assert_right(attention, case, kv_heads, backend)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """FlexAttention serves every call; what Dynamo would have compiled for it runs as it is."""
    found: list[Any] = []

    def backend(graph: Any, example: Any) -> Any:
        found.append(graph)
        return graph.forward

    monkeypatch.setattr(implementation, "select_backend", lambda *_: BackendChoice("flex", ""))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    implementation._compiled_flex.cache_clear()
    torch._dynamo.reset()
    yield found
    implementation._compiled_flex.cache_clear()
    torch._dynamo.reset()


def flex_heads(tokens: int) -> list[Tensor]:
    return [torch.randn(B, tokens, n, 16) for n in (4, 2, 2)]


@pytest.mark.slow(first=3)
@pytest.mark.traced
@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize(
    "case",
    [
        "softcap, scale and window",
        "packed with a window",
        "prefixes",
        "prefixes with a window",
        "padded",
        "both sides",
        "both sides, packed",
        "both sides, padded",
    ],
)
def test_flex_pads_its_rows(case: str) -> None:
    given, options, _ = CASES[case]
    q, k, v = flex_heads(9)
    out = attention(q, k, v, mask=AttentionMask(9, **given), **options)
    expected = attention_ref(q, k, v, mask=AttentionMask(9, **given), **options)
    assert out.shape == q.shape
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.traced
def test_flex_stays_compiled_for_many_lengths(
    monkeypatch: pytest.MonkeyPatch, graphs: list[Any]
) -> None:
    monkeypatch.setattr(implementation, "FLEX_MULTIPLE", 8)
    for tokens in (*range(7, 80, 8), *range(6, 80, 8), 8, 16):
        q, k, v = flex_heads(tokens)
        out = attention(q, k, v, mask=AttentionMask(tokens))
        expected = attention_ref(q, k, v, mask=AttentionMask(tokens))
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    assert len(graphs) == 10  # Dynamo gives a function up after 8


@pytest.mark.usefixtures("played")
def test_determinism_is_asked_of_flash_attn_4(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run(q: Tensor, k: Tensor, v: Tensor, *, deterministic: bool, **_: Any) -> Any:
        asked.append(deterministic)
        return q, None

    monkeypatch.setattr(
        implementation, "flash_attn_4", lambda: SimpleNamespace(flash_attn_func=run)
    )
    q, k, v = tensors(9)
    for wanted in (True, False):
        torch.use_deterministic_algorithms(wanted)
        try:
            attention(q, k, v, mask=AttentionMask(9, backend="fa4"))
            if wanted:
                with pytest.raises(ValueError, match="its backward pass is not deterministic"):
                    attention(q, k, v, mask=AttentionMask(9, backend="cudnn"))
        finally:
            torch.use_deterministic_algorithms(False)
    assert asked == [True, False]


@pytest.mark.usefixtures("played")
def test_padding_inside_a_sequence_needs_a_dense_mask() -> None:
    real = torch.tensor([[1, 1, 0, 1, 1], [1, 1, 1, 1, 1]]).bool()
    q, k, v = tensors(5)
    for backend in ("fa4", "cudnn", "flash"):
        message = f"'{backend}' cannot do this: it takes no dense mask, and there is padding inside"
        with pytest.raises(ValueError, match=message):
            attention(q, k, v, mask=AttentionMask(5, key_mask=real, backend=backend))
    out = attention(q, k, v, mask=AttentionMask(5, key_mask=real))
    expected = loop(q, k, v, lambda b, i, j: bool(j <= i and (real[b, j] or i == j)))
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize("backend", ["fa4", "flash", "sdpa"])
def test_one_mask_serves_different_layers(backend: str) -> None:
    q, k, v = tensors(9)
    shared = AttentionMask(9, segment_ids=SEGMENTS, backend=backend)
    for options in ({}, {"window": 2}, {"scale": 0.4}, {"window": 3, "scale": 0.4}, {}):
        alone = AttentionMask(9, segment_ids=SEGMENTS)
        expected = attention_ref(q, k, v, mask=alone, **options)
        out = attention(q, k, v, mask=shared, **options)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


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


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize("backend", ["fa4", "flash"])
@pytest.mark.parametrize("window", [None, 3])
def test_gpu_backends_continue_from_a_cache(backend: str, window: int | None) -> None:
    q, k, v = tensors(4, past=5)
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))  # as it holds them
    out = attention(q, k, v, mask=AttentionMask(4, past=5, backend=backend), window=window)
    expected = attention_ref(q, k, v, mask=AttentionMask(4, past=5), window=window)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


@FUNCTIONS
@pytest.mark.parametrize("window", [1, 2, 6, 8, 20, 21, 30])
@pytest.mark.parametrize("tokens", [21, 1])
def test_a_window_sees_exactly_its_tokens(function: Any, window: int, tokens: int) -> None:
    q = torch.zeros(1, tokens, 2, 21)  # every visible key weighs the same
    k, v = torch.zeros(1, 21, 1, 21), torch.eye(21)[None, :, None]  # and leaves its mark
    mask = AttentionMask(tokens, past=21 - tokens)
    out = function(q, k, v, mask=mask, window=window)
    seen = (out > 0).sum(-1)
    position = torch.arange(21 - tokens, 21)
    assert torch.equal(seen, (position + 1).clamp(max=window)[None, :, None].expand(1, -1, 2))
    assert (out[0, -1, 0, 21 - min(window, 21) :] > 0).all()  # the last ones, itself among them


@FUNCTIONS
@pytest.mark.parametrize("softcap", [None, 1.0])
def test_rows_of_padding_alone_are_finite(function: Any, softcap: float | None) -> None:
    q, k, v = tensors(9)
    mask = AttentionMask(9, key_mask=torch.tensor([[False] * 9, [True] * 9]), segment_ids=SEGMENTS)
    out = function(q, k, v, mask=mask, softcap=softcap)
    assert out.isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (q, k, v)))
    torch.testing.assert_close(out[0], v[0].repeat_interleave(3, 1))  # each sees itself


def test_bf16_is_as_good_as_eager() -> None:
    q, k, v = (x.detach().bfloat16() for x in tensors(33))
    exact = loop(q, k, v, causal)
    kk, vv = k.repeat_interleave(3, 2), v.repeat_interleave(3, 2)
    scores = torch.einsum("bthd,bshd->bhts", q, kk) / math.sqrt(D)
    scores = scores.masked_fill(torch.ones(33, 33).triu(1).bool(), float("-inf"))
    eager = torch.einsum("bhts,bshd->bthd", scores.float().softmax(-1).bfloat16(), vv)
    for function in (attention, attention_ref):
        out = function(q, k, v, mask=AttentionMask(33))
        assert (out - exact).norm() <= 2 * (eager - exact).norm()


SHAPE = (1, 3, 2, 4)
BAD: list[tuple[dict[str, tuple[int, ...]], int, dict[str, Any], str]] = [
    ({"q": (1, 3, 5, 4)}, 0, {}, "5 query heads cannot share 2 key/value heads"),
    ({"q": (1, 2, 3, 4)}, 0, {}, r"q \(1, 2, 3, 4\) is not .* mask's 3 tokens"),
    ({"q": (3, 2, 4)}, 0, {}, r"q \(3, 2, 4\) is not \[B, T, H, D\]"),
    ({}, 2, {}, r"are not \[1, 5, K, 4\].* 2 tokens before its 3"),
    ({"v": (1, 2, 2, 4)}, 0, {}, r"v \(1, 2, 2, 4\) are not \[1, 3, K, 4\]"),
    ({"k": (1, 3, 2, 8)}, 0, {}, r"k \(1, 3, 2, 8\)"),
    ({"q": (2, 3, 2, 4)}, 0, {}, r"are not \[2, 3, K, 4\]"),
    ({}, 0, {"window": 0}, "window=0 is not above 0"),
    ({}, 0, {"softcap": 0.0}, "softcap=0.0 is not above 0"),
]


@pytest.mark.parametrize(("shapes", "past", "options", "message"), BAD)
def test_what_does_not_fit_together(
    shapes: dict[str, tuple[int, ...]], past: int, options: dict[str, Any], message: str
) -> None:
    given = (torch.ones(shapes.get(name, SHAPE)) for name in "qkv")
    with pytest.raises(ValueError, match=message):
        attention(*given, mask=AttentionMask(3, past=past), **options)


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("fast", "attention='fast' is not one of auto, fa4, cudnn, flash, flex, sdpa, reference"),
        ("fa4", "attention='fa4' cannot do this: it runs on CUDA GPUs, not on cpu"),
        ("flash", "attention='flash' cannot do this: it runs on CUDA GPUs, not on cpu"),
    ],
)
def test_a_backend_that_cannot(backend: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention(*tensors(3), mask=AttentionMask(3, backend=backend))


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_a_backend_that_is_demanded(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    run = implementation.BACKENDS[backend]
    monkeypatch.setitem(implementation.BACKENDS, backend, lambda *a: calls.append(1) or run(*a))
    q, k, v = tensors(5)
    out = attention(q, k, v, mask=AttentionMask(5, backend=backend))
    assert calls == [1]
    torch.testing.assert_close(out.double(), loop(q, k, v, causal), rtol=1e-5, atol=1e-6)
