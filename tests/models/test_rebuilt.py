"""Whole models that keep less for backward: no bit changes, and the bytes are as said."""

import gc
import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.dense_cases import SIZES
from tests.models.tiny import CASES, FIRST
from tests.support.contract import gradients
from tests.support.recompute import recompute_above
from tigon.kernels import qk_norm_rope, rms_norm, runtime, use
from tigon.layers import GatedMLP, activation_offload
from tigon.models import MODELS, CausalLM
from tigon.models.config import FULL, SLIDING
from tigon.train.memory_tracker import Ledger, MemoryTracker

CHOSEN = ("llama", "qwen2", "gemma3_text", "qwen3_moe", "qwen3_5_text")
FAMILIES = [f for f in FIRST if f[0] in CHOSEN]
KINDS = {"num_hidden_layers": 3, "layer_types": [SLIDING, FULL, FULL]}
interpreted = pytest.mark.skipif(not runtime.INTERPRETED, reason="the interpreter is not on")


def make(model_type: str, case: str, device: str = "cpu", **changes: Any) -> CausalLM:
    values = {"model_type": model_type} | SIZES | CASES[model_type][case]
    values |= {"num_hidden_layers": 1, "layer_types": None}
    return MODELS[model_type].from_config(values | changes, device=device).train()


def step(
    model: CausalLM, least: float, recompute: int = 0, away: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    model.activation_checkpointing, model.activation_offload = recompute, away
    ids = torch.arange(3)[None]
    with recompute_above(least), use("triton"):
        loss = model(ids, labels=ids).loss
        return loss.detach(), gradients(loss, model)


def assert_same(found: Any, expected: Any) -> None:
    assert torch.equal(found[0], expected[0]) and found[1].keys() == expected[1].keys()
    assert [n for n, g in expected[1].items() if not torch.equal(g, found[1][n])] == []


@interpreted
@pytest.mark.kernel
@pytest.mark.parametrize(
    ("model_type", "case", "changes"),
    [
        *((*family, {}) for family in FAMILIES),
        ("qwen3", "plain", {}),
        ("qwen3_5_text", "plain", {"layer_types": [FULL]}),
        ("olmo2", "plain", {}),
        ("gemma4_text", "shared", KINDS | {"num_kv_shared_layers": 1}),
        ("gemma4_text", "keys are values", KINDS),
    ],
)
def test_no_bit_changes(
    model_type: str, case: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where blocks are computed again, and in a second backward of one graph."""
    monkeypatch.setattr(activation_offload, "MIN_BYTES", 0)
    model = make(model_type, case, **changes)
    expected = step(model, math.inf)
    assert expected[1] and float(expected[0]) > 0
    for way in ((0, False), (1, False), (1, True)):
        assert_same(step(model, 0, *way), expected)
    model.activation_checkpointing = model.activation_offload = False
    ids = torch.arange(3)[None]
    with recompute_above(0), use("triton"):
        loss = model(ids, labels=ids).loss
        loss.backward(retain_graph=True)
        model.zero_grad()
        assert_same((loss.detach(), gradients(loss, model)), expected)


@interpreted
@pytest.mark.kernel
@pytest.mark.parametrize(("model_type", "case"), FAMILIES)
def test_inference_mode(model_type: str, case: str) -> None:
    """Its tensors have no version that a note could compare."""
    model, ids = make(model_type, case).eval(), torch.arange(3)[None]
    expected = model(ids).logits
    with torch.inference_mode(), recompute_above(0), use("triton"):
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)


@interpreted
@pytest.mark.kernel
@pytest.mark.parametrize(("model_type", "case"), FAMILIES)
def test_weights_of_inference_mode(model_type: str, case: str) -> None:
    """Outside of it: the versions of its weights could not be compared, either."""
    with torch.inference_mode():
        model = make(model_type, case).eval()
    ids = torch.arange(3)[None]
    with torch.no_grad(), use("triton"):
        expected = model(ids).logits
        with recompute_above(0):
            assert torch.equal(model(ids).logits, expected)


# One with each kind of block, and one that scales branches
STREAMS = ("llama", "gemma3_text", "olmo2", "granite", "qwen3_moe")


@pytest.mark.slow(first=2)
@interpreted
@pytest.mark.kernel
@pytest.mark.parametrize(("model_type", "case"), [f for f in FIRST if f[0] in STREAMS])
def test_recomputed_blocks_in_16_bits(model_type: str, case: str) -> None:
    """Where a block begins with the sum that its norm would have made, gradients of the stream are
    rounded as often: in 32 bits it would not show."""
    model = make(model_type, case, num_hidden_layers=3).half()
    expected = step(model, math.inf)
    assert expected[0].isfinite()
    for every in (1, 2):
        assert_same(step(model, 0, every), expected)


def test_nothing_is_left_to_the_garbage_collector() -> None:
    """What is noted on a tensor leads to what it is made of; nothing leads back. On meta, since the
    interpreter of kernels leaves cycles of its own."""
    shapes: Any = (1, 3, 24), (24,)
    x, w = (torch.randn(shape, device="meta", requires_grad=True) for shape in shapes)
    mlp = GatedMLP(24, 40, "silu").to("meta")

    def left() -> list[Any]:
        refs = []
        with recompute_above(0), use("triton"):
            y, total = rms_norm(x * 1.0, w, 1e-6, residual=x * 2.0)
            z = mlp.gate_up_proj(y)
            refs = [weakref.ref(t.untyped_storage()) for t in (y, total, z)]
            out = mlp(y) + mlp.down_proj(z) + total
            assert out.requires_grad
        return refs

    left()  # what a first call imports is not of interest
    gc.collect()
    gc.disable()
    try:
        assert [ref for ref in left() if ref() is not None] == []
    finally:
        gc.enable()


def test_what_is_rotated_is_never_there_twice() -> None:
    ledger = Ledger()
    with MemoryTracker(ledger, []), use("triton"):
        x = torch.ones(1, 256, 6 * 32, device="meta", requires_grad=True)
        cos = torch.ones(1, 256, 16, device="meta")
        qk_norm_rope(x * 2, cos, cos, heads=4, kv_heads=1, overwrite=True)
    assert ledger.peak == 2 * x.nbytes + cos.nbytes
