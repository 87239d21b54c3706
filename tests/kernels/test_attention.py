"""Attention against a loop over queries that softmaxes the keys each may see.

Backends that need a GPU are played by plain torch here: what they are told is tested, and in
tests/gpu what they make of it.
"""

import gc
import importlib
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.test_attention_backends import assert_same_mask
from tests.support.flash import on_hopper, played
from tigon.kernels import AttentionMask, attention, attention_ref
from tigon.kernels.attention.backends import BackendChoice
from tigon.kernels.attention.mask import BLOCK

__all__ = ["on_hopper", "played"]
implementation = importlib.import_module("tigon.kernels.attention.api")
MASKS = importlib.import_module("tigon.kernels.attention.mask")
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


@FUNCTIONS
@pytest.mark.parametrize(("case", "kv_heads"), with_heads(CASES))
def test_forward_and_gradients(function: Any, case: str, kv_heads: int) -> None:
    assert_right(function, case, kv_heads)


CUDNN = ("causal", "window 9", "scale", "packed in threes", "both sides")  # all it can do


WITHOUT_SOFTCAP = [case for case, (_, options) in CASES.items() if "softcap" not in options]
TOLD = {"fa4": WITHOUT_SOFTCAP, "flash": WITHOUT_SOFTCAP, "cudnn": CUDNN}
TOLD["triton"] = [case for case in WITHOUT_SOFTCAP if "sinks" not in CASES[case][1]]  # interpreted


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize(
    ("backend", "case", "kv_heads"),
    [(name, *pair) for name, cases in TOLD.items() for pair in with_heads(cases)],
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
        "sinks, packed with a window",
    ],
)
def test_flex_pads_its_rows(case: str) -> None:
    given, options = CASES[case]
    q, k, v = flex_heads(9)
    if "sinks" in options:
        options = options | {"sinks": torch.randn(4)}
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
    for backend in ("fa4", "cudnn", "flash", "triton"):
        message = f"'{backend}' cannot do this: it takes no dense mask, and there is padding inside"
        with pytest.raises(ValueError, match=message):
            attention(q, k, v, mask=AttentionMask(5, key_mask=real, backend=backend))
    out = attention(q, k, v, mask=AttentionMask(5, key_mask=real))
    expected = loop(q, k, v, visible({"key_mask": real}, None))
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
    given = {"key_mask": PADDING if padded else None}
    out = function(q, k, v, mask=AttentionMask(tokens, past=9 - tokens, **given), window=window)
    expected = loop(q, k, v, visible(given, window))
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)


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
    exact = loop(q, k, v, visible({}, None))
    kk, vv = k.repeat_interleave(3, 2), v.repeat_interleave(3, 2)
    scores = torch.einsum("bthd,bshd->bhts", q, kk) / math.sqrt(D)
    scores = scores.masked_fill(torch.ones(33, 33).triu(1).bool(), float("-inf"))
    eager = torch.einsum("bhts,bshd->bthd", scores.float().softmax(-1).bfloat16(), vv)
    for function in (attention, attention_ref):
        out = function(q, k, v, mask=AttentionMask(33))
        assert (out - exact).norm() <= 2 * (eager - exact).norm()


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("fast", "attention='fast' is not one of auto, fa4, cudnn, flash, triton, flex, sdpa, ref"),
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
    torch.testing.assert_close(out.double(), loop(q, k, v, visible({}, None)), rtol=1e-5, atol=1e-6)


# Some queries of each row, as ranks compute them that divide the queries of a head

SPLIT = (0, 4), (4, 9)
SPANS = (0, 3, 4, 9)  # of 9 tokens: some end inside a sequence, and one is a single token
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


def divided(function: Any, spans: Any = SPANS) -> Any:
    return lambda q, k, v, *, mask, **how: in_parts(function, q, k, v, mask, spans, **how)


@FUNCTIONS
@pytest.mark.parametrize("case", CASES)
def test_parts_add_up_to_the_whole(function: Any, case: str) -> None:
    assert_right(divided(function), case, 2)


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize("backend", ["fa4", "flash"])
@pytest.mark.parametrize(("case", "kv_heads"), with_heads(WITHOUT_SOFTCAP))
def test_what_gpu_backends_are_told_of_parts(backend: str, case: str, kv_heads: int) -> None:
    if case not in TURNED:
        assert_right(divided(attention), case, kv_heads, backend)
        return
    message = f"'{backend}' cannot do this: it takes no dense mask, and a window ends before"
    with pytest.raises(ValueError, match=message):
        assert_right(divided(attention), case, kv_heads, backend)
    assert_right(divided(attention), case, kv_heads)


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize("backend", ["fa4", "flash", "sdpa"])
def test_prefixes_of_a_part_that_ends_early(backend: str) -> None:
    """Their tokens are elsewhere in its keys than in whole rows."""
    for spans in ((0, 8, 9), (0, 3, 7, 9)):
        assert_right(divided(attention, spans), "prefixes with a window", 2, backend)


@pytest.mark.usefixtures("played")
def test_cudnn_is_refused_parts() -> None:
    q, k, v = tensors(9)
    for spans in ((0, 4), (4, 9)):
        mask = AttentionMask(9, backend="cudnn")
        with pytest.raises(ValueError, match="cannot do this: it has no queries of parts of rows"):
            in_parts(attention, q, k, v, mask, spans)


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize("backend", ["fa4", "flash"])
def test_parts_of_bounds_that_were_given(backend: str) -> None:
    """With empty sequences behind, and a longest that is longer than any."""
    cu = torch.tensor([0, 3, 4, 9, 16, 18, 18, 18]).int()
    given: dict[str, Any] = {"segment_ids": SEGMENTS, "cu_seq_lens": cu, "longest": 8}
    q, k, v = tensors(9)
    expected = attention_ref(q, k, v, mask=AttentionMask(9, segment_ids=SEGMENTS), window=2)
    mask = AttentionMask(9, **given, backend=backend)
    found = in_parts(attention, q, k, v, mask, (0, 2, 5, 9), window=2)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells of the CPU's path")
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("saved", [1, 162 - 88, 162 - 87])
def test_packed_rows_on_a_cpu(
    saved: int, causal: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one, without a mask of all tokens, if that saves so many scores."""
    monkeypatch.setattr(MASKS, "WORTH_SPLITTING", saved)
    cu = torch.tensor([0, 3, 4, 9, 9, 16, 18]).int()
    given: dict[str, Any] = {"segment_ids": SEGMENTS, "cu_seq_lens": cu, "causal": causal}
    mask, heads, upstream = (
        AttentionMask(9, **given, longest=7),
        tensors(9),
        torch.randn(B, 9, H, D),
    )
    found = attention(*heads, mask=mask, window=window)
    expected = attention_ref(*heads, mask=AttentionMask(9, **given), window=window)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    pairs = (torch.autograd.grad(out, heads, upstream) for out in (found, expected))
    for a, b in zip(*pairs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    # 9 + 1 + 25 + 49 + 4 of 2 times 81
    assert any(key[0] == "bias" for key in mask._derived) == (saved > 162 - 88)


@pytest.mark.slow(first=2)
@pytest.mark.traced
@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize(
    "case",
    [
        "softcap, scale and window",
        "packed with a window",
        "prefixes with a window",
        "padded",
        *TURNED,
    ],
)
def test_flex_of_parts(case: str) -> None:
    given, options = CASES[case]
    q, k, v = flex_heads(9)
    out = in_parts(attention, q, k, v, AttentionMask(9, **given), (0, 4, 9), **options)
    expected = attention_ref(q, k, v, mask=AttentionMask(9, **given), **options)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.traced
def test_flex_compiles_few_graphs_for_all_parts(
    monkeypatch: pytest.MonkeyPatch, graphs: list[Any]
) -> None:
    monkeypatch.setitem(attention.__globals__, "FLEX_MULTIPLE", 16)
    for t in (25, 27, 29, 31):
        q, k, v = flex_heads(t)
        for given in ({"causal": False}, {"segment_ids": torch.arange(t).expand(B, -1) // 9}):
            how: dict[str, Any] = given
            spans = (0, t // 4, 3 * t // 4, t)
            out = in_parts(attention, q, k, v, AttentionMask(t, **how), spans)
            expected = attention_ref(q, k, v, mask=AttentionMask(t, **how))
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    # Of either kind: from the first query on, and from later ones on with 32 and 48 keys
    assert len(graphs) == 6


@pytest.mark.parametrize("window", [None, 3, 130])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("given", ["rows", "packed", "padded", "prefixes"])
def test_blocks_of_parts_are_the_dense_mask(given: str, causal: bool, window: int | None) -> None:
    """Of a part that begins inside a block of keys and ends inside another."""
    t, first, end = 5 * BLOCK + 9, BLOCK + 5, 4 * BLOCK + 1
    options: dict[str, Any] = {}
    if given == "packed":
        options = {"segment_ids": torch.arange(t).expand(B, -1) // 150}
    elif given == "padded":
        options = {"key_mask": torch.arange(t) % 400 < torch.tensor([[250], [400]])}
    elif given == "prefixes":
        if not causal:
            return
        # Of the second row's, one begins where the part ends, and goes on from tokens behind it
        cu = torch.tensor([0, 200, 330, 450, t, t + 300, t + end, t + end + 9, 2 * t]).int()
        options = {"segment_ids": torch.arange(8).repeat_interleave(cu.diff()).view(B, t)}
        places = [[0, 0], [0, 180], [140, 141], [330, 440], [0, 0], [t + 1, t + 300], [0, 0]]
        places.append([t + end, t + end + 9])
        options |= {"cu_seq_lens": cu, "longest": 349, "prefixes": torch.tensor(places)}
    mask = AttentionMask(t, causal=causal, **options).slice_queries(first, end)
    dense = mask.dense(window, torch.device("cpu"))
    blocks = mask.blocks(window, torch.device("cpu"))
    assert blocks.seq_lengths == (end - first, mask.keys) == tuple(dense.shape[2:])
    _, partial, _, _ = assert_same_mask(blocks, dense[:, 0])
    assert partial.float().mean() < 0.9


def test_parts_of_padding_inside_a_sequence() -> None:
    real = PADDING.clone()
    real[1, 3] = False
    q, k, v = tensors(9)
    expected = attention_ref(q, k, v, mask=AttentionMask(9, key_mask=real))
    out = in_parts(attention, q, k, v, AttentionMask(9, key_mask=real), SPANS)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["flex", "flash", "sdpa"])
def test_layers_derive_once_and_nothing_stays(backend: str) -> None:
    """What later layers read is what the first has derived, and goes with the mask, which is no
    part of a cycle."""
    segments = torch.arange(9).expand(B, -1) // 4
    mask = AttentionMask(9, segment_ids=segments)
    device = torch.device("cpu")
    derive = {
        "flex": lambda part: part.blocks(None, device),
        "flash": lambda part: part.sequences(),
        "sdpa": lambda part: part.bias(None, torch.float32, device),
    }[backend]
    derived = [derive(mask.slice_queries(first, end)) for _ in range(2) for first, end in SPLIT]
    assert derived[0] is derived[2] is not derived[1] is derived[3]
    kept = weakref.ref(mask.segment_ids)
    gc.disable()
    try:
        del mask, segments, derived
        assert kept() is None
    finally:
        gc.enable()
