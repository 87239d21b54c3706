"""Attention against a loop over queries that softmaxes the keys each may see.

Backends that need a GPU are played by plain torch here: what they are told is tested, and in
tests/gpu what they make of it.
"""

import importlib
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.attention_cases import (
    CASES,
    FUNCTIONS,
    PADDING,
    SEGMENTS,
    WITHOUT_SOFTCAP,
    B,
    D,
    H,
    assert_right,
    implementation,
    loop,
    path,
    tensors,
    visible,
    with_heads,
)
from tests.support.flash import on_hopper, played
from tigon.kernels import AttentionMask, attention, attention_ref

__all__ = ["on_hopper", "path", "played"]
MASKS = importlib.import_module("tigon.kernels.attention.mask")


@FUNCTIONS
@pytest.mark.parametrize(("case", "kv_heads"), with_heads(CASES))
def test_forward_and_gradients(function: Any, case: str, kv_heads: int) -> None:
    assert_right(function, case, kv_heads)


CUDNN = ("causal", "window 9", "scale", "packed in threes", "both sides")  # all it can do
TOLD = {"fa4": WITHOUT_SOFTCAP, "flash": WITHOUT_SOFTCAP, "cudnn": CUDNN}
TOLD["triton"] = [case for case in WITHOUT_SOFTCAP if "sinks" not in CASES[case][1]]  # interpreted


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize(
    ("backend", "case", "kv_heads"),
    [(name, *pair) for name, cases in TOLD.items() for pair in with_heads(cases)],
)
def test_what_gpu_backends_are_told(backend: str, case: str, kv_heads: int) -> None:
    assert_right(attention, case, kv_heads, backend)


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
