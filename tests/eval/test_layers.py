"""Layers beside those of transformers: none departs, and one that is altered is named."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tigon
from tests.models.tiny import CASES, reference
from tests.support.small import write_model
from tigon.eval import LayerError, compare_layers, parity, report

DEFECTS = {
    "embed_tokens": "embed_tokens.weight",
    "layers.0": "layers.0.self_attn.o_proj.weight",
    "layers.1": "layers.1.post_attention_layernorm.weight",
    "norm": "norm.weight",
}


def names(errors: list[LayerError]) -> list[str]:
    return [e.name for e in errors if e.departs]


@pytest.mark.slow(first=3)
@pytest.mark.parametrize("family", CASES)
def test_no_layer_departs(family: str, tmp_path: Path) -> None:
    theirs = reference(family, next(iter(CASES[family].values())), tmp_path)
    ours = tigon.from_pretrained(str(tmp_path), dtype=torch.float32)
    ids = torch.randint(ours.config.vocab_size, (1, 14))
    errors = compare_layers(ours, theirs, ids)
    blocks = [f"layers.{i}" for i in range(len(ours.model.layers))]
    assert [e.name for e in errors] == ["embed_tokens", *blocks, "norm", "lm_head"]
    assert names(errors) == []
    assert ours(ids).logits.shape == theirs(ids).logits.shape  # no hook is left


@pytest.mark.parametrize("layer", DEFECTS)
def test_a_layer_that_departs_is_named(layer: str, tmp_path: Path) -> None:
    """And those after it are not."""
    theirs = reference("llama", CASES["llama"]["grouped"], tmp_path)
    ours = tigon.from_pretrained(str(tmp_path), dtype=torch.float32)
    with torch.no_grad():
        ours.model.get_parameter(DEFECTS[layer]).mul_(1.01)
    errors = compare_layers(ours, theirs, torch.randint(200, (1, 14)))
    expected = [layer, "lm_head"] if layer == "norm" else [layer]
    assert names(errors) == expected
    (error,) = (e.error for e in errors if e.name == layer)
    assert 1e-5 < error < 0.02


def test_one_large_token_hides_no_error(tmp_path: Path) -> None:
    """Values of a single token are thousands of times those of the others, as in large models."""
    theirs = reference("llama", CASES["llama"]["grouped"], tmp_path)
    with torch.no_grad():
        theirs.model.embed_tokens.weight[7] *= 1e5
    theirs.save_pretrained(tmp_path)
    ours = tigon.from_pretrained(str(tmp_path), dtype=torch.float32)
    ids = torch.tensor([[7, *range(20, 40)]])
    assert names(compare_layers(ours, theirs, ids)) == []
    with torch.no_grad():
        ours.model.layers[1].mlp.down_proj.weight.mul_(1.01)
    assert names(compare_layers(ours, theirs, ids)) == ["layers.1"]


def test_parity_with_layers(tmp_path: Path, monkeypatch: Any) -> None:
    directory = write_model(tmp_path / "model")
    result = parity(str(directory), new_tokens=2, layers=True)
    assert len(result.layers) == 5 and result.failures == []
    assert "\nno layer departs from transformers\nparity" in report(result)

    def altered(path: str, **options: Any) -> tigon.CausalLM:
        model = tigon.from_pretrained(path, **options)
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight.mul_(1.2)
        return model

    monkeypatch.setattr(sys.modules["tigon.eval.parity"], "from_pretrained", altered)
    result = parity(str(directory), new_tokens=2, layers=True)
    assert result.failures[-1] == "layers.1"
    (error,) = (layer.error for layer in result.layers if layer.name == "layers.1")
    assert 0.1 < error < 0.4
    assert f"\nlayers.1 is the first to depart, by {error:.3g} of" in report(result)
