"""FlexAttention, which compiles: rows are padded for it, and few graphs serve many lengths."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.attention_cases import CASES, TURNED, B, implementation, in_parts, path
from tigon.kernels import AttentionMask, attention, attention_ref
from tigon.kernels.attention.backends import BackendChoice

__all__ = ["path"]


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
