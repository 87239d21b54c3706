"""Attention of some queries of each row, as ranks compute it that divide the queries of a head."""

import gc
import weakref
from typing import Any

import pytest
import torch

from tests.kernels.attention_cases import (
    CASES,
    FUNCTIONS,
    PADDING,
    SEGMENTS,
    TURNED,
    WITHOUT_SOFTCAP,
    B,
    assert_right,
    in_parts,
    path,
    tensors,
    with_heads,
)
from tests.kernels.test_attention_backends import assert_same_mask
from tests.support.flash import on_hopper, played
from tigon.kernels import AttentionMask, attention, attention_ref
from tigon.kernels.attention.mask import BLOCK

__all__ = ["on_hopper", "path", "played"]
SPLIT = (0, 4), (4, 9)
SPANS = (0, 3, 4, 9)  # of 9 tokens: some end inside a sequence, and one is a single token


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
