"""resize_token_embeddings against transformers'."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as TheirConfig
from peft import get_peft_model
from transformers import AutoModelForCausalLM

from tests.models.adapters import near, randomise, trained
from tests.models.test_parity import tokens
from tests.models.tiny import CASES, FIRST, reference
from tigon import from_pretrained
from tigon.utils import memory

KINDS = [
    (kind, case) for kind, case in FIRST if kind in ("llama", "gemma2", "gemma4_text", "granite")
]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("model_type", "case"), KINDS)
def test_equals_transformers(model_type: str, case: str, tied: bool, tmp_path: Path) -> None:
    overrides = CASES[model_type][case] | {"tie_word_embeddings": tied}
    theirs = reference(model_type, overrides, tmp_path / "base")
    ours = from_pretrained(tmp_path / "base")
    old = ours.model.embed_tokens.weight.detach().clone()
    embedding = ours.resize_token_embeddings(217, pad_to_multiple_of=8)
    theirs.resize_token_embeddings(217, pad_to_multiple_of=8)
    assert ours.config.vocab_size == theirs.config.vocab_size == 224
    assert embedding is ours.model.embed_tokens and embedding.num_embeddings == 224
    assert (ours.lm_head.weight is embedding.weight) == tied
    assert torch.equal(embedding.weight[:211], old)
    for own, other in (
        (embedding.weight, theirs.get_input_embeddings().weight),
        (ours.lm_head.weight, theirs.get_output_embeddings().weight),
    ):
        near(own[211:], own[:211].mean(0).expand(13, -1))
        # transformers draws them around the mean
        torch.testing.assert_close(own[211:], other[211:], rtol=0, atol=1e-4)
    near(ours(tokens()).logits[..., :211], theirs(tokens()).logits[..., :211])
    ours.save_pretrained(tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    near(loaded(tokens()).logits, ours(tokens()).logits)
    ours.resize_token_embeddings(100)
    assert ours(tokens() % 100).logits.shape[-1] == 100
    assert torch.equal(ours.model.embed_tokens.weight, old[:100])


@pytest.fixture
def model(tmp_path: Path) -> Any:
    reference("llama", CASES["llama"]["pad row"], tmp_path / "base")
    return from_pretrained(tmp_path / "base")


def test_the_present_number_changes_nothing(model: Any) -> None:
    weight = model.model.embed_tokens.weight
    assert model.resize_token_embeddings() is model.model.embed_tokens
    assert model.resize_token_embeddings(211).weight is weight
    assert model.config.vocab_size == 211


def test_new_rows_are_drawn_as_in_a_new_model(model: Any) -> None:
    model.resize_token_embeddings(2000, mean_resizing=False)
    for weight in (model.model.embed_tokens.weight, model.lm_head.weight):
        expected = pytest.approx(model.config.initializer_range, rel=0.02)
        assert weight[211:].std().item() == expected


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("saved", [["embed_tokens", "lm_head"], ["lm_head"]])
def test_adapters_of_a_resized_base(saved: list[str], tied: bool, tmp_path: Path) -> None:
    """PEFT writes each trained weight twice, and the base's beside it."""
    overrides = CASES["llama"]["grouped"] | {"tie_word_embeddings": tied}
    reference("llama", overrides, tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    base.resize_token_embeddings(215)
    own = TheirConfig(target_modules=["q_proj"], modules_to_save=saved)
    theirs = get_peft_model(base, own).eval()
    randomise(trained(theirs))
    theirs.save_pretrained(tmp_path / "it")
    ours = from_pretrained(tmp_path / "base")
    ours.resize_token_embeddings(215)
    ours.load_adapter(tmp_path / "it")
    ids = tokens() + 4
    near(ours(ids).logits, theirs(ids).logits)
    ours.merge_adapter()
    near(ours(ids).logits, theirs(ids).logits)


def test_refusals(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = model.model.embed_tokens.weight
    for wrong in (0, -1, 2.5, True, "8"):
        with pytest.raises(ValueError, match=r"new_num_tokens=.* is not a positive integer"):
            model.resize_token_embeddings(wrong)
    with pytest.raises(ValueError, match="pad_to_multiple_of=0"):
        model.resize_token_embeddings(8, 0)
    with pytest.raises(ValueError, match=r"pad_token_id=.* outside the vocabulary"):
        model.resize_token_embeddings(1)
    with pytest.raises(ValueError, match="vocab_size=10000000000 must be at most 2147483647"):
        model.resize_token_embeddings(10**10)
    monkeypatch.setattr(memory, "total_memory", lambda device: 96 * 4 * 2 * 10**6)
    with pytest.raises(ValueError, match=r"of 1000001 rows take 0.715 GiB, and cpu has 0.715"):
        model.resize_token_embeddings(10**6 + 1)
    model.add_adapter()
    with pytest.raises(ValueError, match="resize its embeddings before"):
        model.resize_token_embeddings(300)
    assert model.model.embed_tokens.weight is weight and model.config.vocab_size == 211
