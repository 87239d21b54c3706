"""LFM2 and its mixtures: what the tests of all families do not ask. B batch, T tokens."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from tests.models.tiny import CASES, load_case, load_reference, random_ids, reference
from tests.support.contract import assert_same_gradients, gradients
from tigon import from_pretrained
from tigon.integrations.transformers import as_transformers
from tigon.models.lfm2 import Lfm2Config
from tigon.models.lfm2_moe import Lfm2MoeConfig
from tigon.utils.config import ConfigError

B, T = 2, 13


@pytest.mark.parametrize("first", [1, 2, 5])
@pytest.mark.parametrize("case", CASES["lfm2"])
def test_padding_is_as_if_absent(case: str, first: int, tmp_path: Path) -> None:
    """Also with biases, which transformers does not mask."""
    model, ids = load_case("lfm2", case, tmp_path), random_ids(B, T)
    mask = (torch.arange(T) >= first).long().expand(B, -1)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits[:, first:]
        alone = model(ids[:, first:]).logits
    torch.testing.assert_close(logits, alone, rtol=1e-5, atol=1e-5)


def test_right_padding_is_forgotten(tmp_path: Path) -> None:
    model, ids = load_case("lfm2", "biases", tmp_path), random_ids(B, T)
    mask = torch.ones(B, T).long()
    mask[0, 10:] = 0  # a row that ends early, and goes on
    more = ids[:, :3]
    with torch.no_grad():
        out = model(ids, attention_mask=mask, use_cache=True)
        longer = torch.cat((mask, torch.ones(B, 3).long()), 1)
        at = mask.sum(1, keepdim=True) + torch.arange(3)
        found = model(
            more, attention_mask=longer, position_ids=at, past_key_values=out.past_key_values
        ).logits
        alone = model(torch.cat((ids[:1, :10], more[:1]), 1)).logits[:, 10:]
    torch.testing.assert_close(found[:1], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", [(6, 7), (1, 1, 1, 10), (12, 1)], ids=str)
def test_gradients_through_a_growing_cache(sizes: tuple[int, ...], tmp_path: Path) -> None:
    model, ids = load_case("lfm2", "plain", tmp_path), random_ids(B, T)
    expected = gradients(model(ids).logits.square().mean(), model)
    cache, parts = None, []
    for part in ids.split(sizes, 1):
        out = model(part, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        parts.append(out.logits)
    found = gradients(torch.cat(parts, 1).square().mean(), model)
    assert_same_gradients(found, expected)


def test_a_layer_of_another_kind_is_refused() -> None:
    for types in (["conv"], ["conv", "linear_attention"]):
        with pytest.raises(ConfigError, match=r"layer_types=.* is not 'conv' or 'full_attention'"):
            Lfm2Config(num_hidden_layers=2, layer_types=types)


def test_sizes_of_mlps() -> None:
    """Those of LFM2-1.2B and 350M, and as given."""
    sizes = {"block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256}
    given = ((12288, True, 8192), (6656, True, 4608), (6656, False, 6656))
    for size, adjusted, expected in given:
        config = Lfm2Config.from_dict(
            sizes | {"block_ff_dim": size, "block_auto_adjust_ff_dim": adjusted}
        )
        assert config.mlp_size == expected and config.to_dict()["block_ff_dim"] == size


def test_keys_of_old_configs() -> None:
    """They win, and are written back."""
    old = {"tie_embedding": False, "block_ff_dim": 300, "norm_eps": 1e-3, "rms_norm_eps": 1.0}
    config = Lfm2Config.from_dict({"intermediate_size": 200, "tie_word_embeddings": True} | old)
    assert config.intermediate_size == 300 and config.rms_norm_eps == 1e-3
    assert not config.tie_word_embeddings
    written = replace(config, tie_word_embeddings=True).to_dict()
    assert written["tie_embedding"] and written["tie_word_embeddings"]
    assert written["block_ff_dim"] == 300 and written["norm_eps"] == 1e-3
    assert "rms_norm_eps" not in written


# Mixtures

BIAS = "model.layers.1.feed_forward.expert_bias"


def test_an_expert_bias_stays_exact(tmp_path: Path) -> None:
    """In conversions, in exports and in transformers' tree, where it is outside of the router."""
    model, stored = (
        load_case("lfm2_moe", "plain", tmp_path),
        load_file(tmp_path / "model.safetensors"),
    )
    assert not torch.equal(stored[BIAS], stored[BIAS].bfloat16().float())
    model.bfloat16().save_pretrained(tmp_path / "saved")
    written = load_file(tmp_path / "saved/model.safetensors")
    assert written.keys() == stored.keys() and torch.equal(written[BIAS], stored[BIAS])
    assert torch.equal(load_reference(tmp_path / "saved").get_buffer(BIAS), stored[BIAS])
    native = from_pretrained(tmp_path / "saved").train()
    expected = native(random_ids(B, T)).logits
    split = as_transformers(native)
    assert torch.equal(split.state_dict()[BIAS], stored[BIAS])
    assert torch.equal(split(random_ids(B, T)).logits, expected)
    with torch.no_grad():
        split.get_buffer(BIAS).neg_()  # which the router reads
    assert not torch.equal(split(random_ids(B, T)).logits, expected)
    split.get_buffer(BIAS).neg_()
    split.save_pretrained(tmp_path / "split")
    assert load_file(tmp_path / "split/model.safetensors").keys() == stored.keys()


def test_state_dicts_of_files_load_in_transformers_tree(tmp_path: Path) -> None:
    """Experts that a file has one by one are stacked in the tree."""
    split = as_transformers(load_case("lfm2_moe", "one of many, untied", tmp_path)).train()
    expected = split(random_ids(B, T)).logits
    with torch.no_grad():
        for p in split.parameters():
            p.zero_()
    split.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(split(random_ids(B, T)).logits, expected)


def test_stacked_experts(tmp_path: Path) -> None:
    """As transformers has them in memory; an export keeps the form."""
    theirs = reference("lfm2_moe", CASES["lfm2_moe"]["plain"], tmp_path, save_original_format=False)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "model.layers.1.feed_forward.experts.gate_up_proj" in names
    model = from_pretrained(tmp_path)
    with torch.no_grad():
        found, expected = (m(random_ids(B, T)).logits for m in (model, theirs))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    model.save_pretrained(tmp_path / "saved")
    assert load_file(tmp_path / "saved/model.safetensors").keys() == names


def test_configs_of_mixtures() -> None:
    """transformers builds no model without layer_types, and reads no sizes of blocks."""
    for types in ({}, {"layer_types": None}):
        with pytest.raises(ConfigError, match="layer_types"):
            Lfm2MoeConfig.from_dict({"num_hidden_layers": 2, **types})
    values = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    config = Lfm2MoeConfig.from_dict(values | {"tie_embedding": False, "norm_eps": 1e-3})
    assert config.mlp_size == config.intermediate_size == 7168
    written = config.to_dict()
    assert not {"block_dim", "conv_dim", "rms_norm_eps", "hidden_act"} & written.keys()
    theirs = AutoConfig.for_model(**written)
    assert not theirs.tie_word_embeddings and theirs.norm_eps == 1e-3
