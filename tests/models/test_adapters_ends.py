"""Adapters of embeddings and heads against PEFT's: files both ways, logits and gradients."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as TheirConfig
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from tests.models.adapters import (
    adapted,
    check_generation,
    check_ours_there,
    check_reloaded,
    check_removal,
    near,
    randomise,
    theirs_of,
    trained,
)
from tests.models.test_parity import tokens
from tests.models.tiny import CASES, FIRST, reference
from tests.train.ranks import Ranks
from tigon import LoraConfig, from_pretrained
from tigon.models import CausalLM
from tigon.train import start

ENDS = ["embed_tokens", "lm_head"]
# Families whose embedding or head is more than a table and a product, and one that is no more.
# Tied models: PEFT adds to each alone, and so do we
KINDS = ("llama", "gemma2", "gemma3_text", "granite", "qwen2_moe")
FIRST_OF = dict(FIRST)
EVERY = [(kind, case, False, False) for kind, case in FIRST if kind in KINDS]
EVERY += [(kind, case, True, False) for kind, case in FIRST if kind in KINDS[:2]]
EVERY += [(kind, case, False, True) for kind, case in FIRST if kind in KINDS]


def base_of(directory: Path, model_type: str, case: str, tied: bool) -> Any:
    overrides = CASES[model_type][case] | {"tie_word_embeddings": tied}
    return reference(model_type, overrides, directory)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize(("model_type", "case", "tied", "dora"), EVERY)
def test_both_ways(model_type: str, case: str, tied: bool, dora: bool, tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", model_type, case, tied)
    plain = from_pretrained(tmp_path / "base")(tokens()).logits
    options: Any = {"targets": (*ENDS, "o_proj"), "rank_pattern": {"lm_head": 2}, "dora": dora}
    ours, theirs = check_ours_there(base, LoraConfig(rank=3, alpha=5, **options), tmp_path)
    theirs.save_pretrained(tmp_path / "theirs")  # with the base's own weights beside it
    check_removal(check_reloaded(ours, tmp_path, "theirs"), plain, tmp_path)


@pytest.fixture
def model(tmp_path: Path) -> CausalLM:
    reference("llama", CASES["llama"]["pad row"], tmp_path / "base")
    return from_pretrained(tmp_path / "base")


def test_generation_loss_and_log_probabilities(model: CausalLM, tmp_path: Path) -> None:
    adapted(model, targets=(*ENDS, "q_proj")).save_adapter(tmp_path / "it")
    merged = from_pretrained(tmp_path / "base")
    merged.load_adapter(tmp_path / "it")
    merged.merge_adapter()
    ids = tokens()[:, :9]
    check_generation(model, merged)
    near(model(ids, labels=ids).loss, merged(ids, labels=ids).loss)
    near(model(ids, labels=ids, logits_bytes=1).loss, merged(ids, labels=ids).loss)


def test_what_is_saved_of_the_base_has_to_be_its_own(model: CausalLM, tmp_path: Path) -> None:
    theirs = theirs_of(tmp_path / "other", "llama", "grouped", target_modules=["embed_tokens"])
    theirs.save_pretrained(tmp_path / "it")
    path = tmp_path / "it" / "adapter_model.safetensors"
    tensors = load_file(path)
    own = "base_model.model.model.embed_tokens.base_layer.weight"
    ours = from_pretrained(tmp_path / "other")
    plain = ours(tokens()).logits
    for wrong, message in (
        (tensors[own] + 1e-3, "is not the model's own"),
        (tensors[own][:-1].clone(), r"is \[210, 96\], the model's \[211, 96\]"),
    ):
        save_file(tensors | {own: wrong}, path)
        with pytest.raises(ValueError, match=rf"embed_tokens\.base_layer\.weight {message}"):
            ours.load_adapter(tmp_path / "it")
        assert not ours.adapter_names
        assert torch.equal(ours(tokens()).logits, plain)
    part = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"
    save_file(tensors | {part: torch.ones(96, 96)}, path)
    with pytest.raises(ValueError, match=rf"1 unexpected: {part}"):
        ours.load_adapter(tmp_path / "it")


# What an adapter of a tied model has for the embedding and the head
OF_TIED: dict[str, dict[str, Any]] = {
    "embedding saved": {"modules_to_save": ["embed_tokens"]},
    "head saved": {"modules_to_save": ["lm_head"]},
    "both saved": {"modules_to_save": ENDS},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
}


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings", "ignore:Setting `save_embedding")
@pytest.mark.parametrize("ensure", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
@pytest.mark.parametrize("of_tied", OF_TIED)
def test_merging_unties(of_tied: str, model_type: str, ensure: bool, tmp_path: Path) -> None:
    """Logits stay those of PEFT's unmerged model, also in transformers."""
    base = base_of(tmp_path / "base", model_type, FIRST_OF[model_type], True)
    options = {"target_modules": ["q_proj"], "r": 4, "task_type": "CAUSAL_LM"}
    options |= copy.deepcopy(OF_TIED[of_tied])  # PEFT adds to the lists
    theirs = get_peft_model(base, TheirConfig(ensure_weight_tying=ensure, **options)).eval()
    randomise(trained(theirs))
    theirs.save_pretrained(tmp_path / "it")
    expected = theirs(tokens()).logits
    ours = from_pretrained(tmp_path / "base")
    ours.load_adapter(tmp_path / "it")
    near(ours(tokens()).logits, expected)
    ours.merge_adapter()
    near(ours(tokens()).logits, expected)
    ours.save_pretrained(tmp_path / "merged")
    near(from_pretrained(tmp_path / "merged")(tokens()).logits, expected)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    near(loaded(tokens()).logits, expected)
    assert loaded.config.tie_word_embeddings == ensure
    names = load_file(tmp_path / "merged" / "model.safetensors").keys()
    assert ("lm_head.weight" in names) == (not ensure)


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings", "ignore:Setting `save_embedding")
def test_tied_adapters_do_not_train_on(tmp_path: Path) -> None:
    theirs = theirs_of(
        tmp_path / "base", "llama", "tied", target_modules=ENDS, ensure_weight_tying=True
    )
    theirs.save_pretrained(tmp_path / "it")
    ours = from_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match="ensure_weight_tying=True keeps embedding and head equal"):
        ours.load_adapter(tmp_path / "it", trainable=True)
    assert not ours.adapter_names


def merge_sharded(directory: Path) -> None:
    """On two ranks: a tied model whose adapter has the embedding whole."""
    with start("cpu"):
        model = from_pretrained(directory / "base")
        model.load_adapter(directory / "it")
        fully_shard(model)
        model(tokens())
        model.reshard()  # type: ignore[operator]
        model.merge_adapter()
        model.save_pretrained(directory / "merged")
        with pytest.raises(RuntimeError, match="can only be saved"):
            model(tokens())


@pytest.mark.slow
def test_a_sharded_tied_model_can_only_be_saved(tmp_path: Path) -> None:
    base_of(tmp_path / "base", "llama", FIRST_OF["llama"], True)
    model = from_pretrained(tmp_path / "base")
    adapted(model, targets="q_proj", modules_to_save=("embed_tokens",))
    model.save_adapter(tmp_path / "it")
    Ranks(2, merge_sharded, tmp_path).finish()
    near(from_pretrained(tmp_path / "merged")(tokens()).logits, model(tokens()).logits)
