"""Short convolutions: what the tests of all families do not ask. B batch, T tokens."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.models.tiny import CASES, load_case
from tests.support.contract import assert_same_gradients, gradients
from tigon.models.lfm2 import Lfm2Config
from tigon.utils.config import ConfigError

B, T = 2, 13


def tokens() -> torch.Tensor:
    return torch.randint(4, 211, (B, T), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("first", [1, 2, 5])
@pytest.mark.parametrize("case", CASES["lfm2"])
def test_padding_is_as_if_absent(case: str, first: int, tmp_path: Path) -> None:
    """Also with biases, which transformers does not mask."""
    model, ids = load_case("lfm2", case, tmp_path), tokens()
    mask = (torch.arange(T) >= first).long().expand(B, -1)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits[:, first:]
        alone = model(ids[:, first:]).logits
    torch.testing.assert_close(logits, alone, rtol=1e-5, atol=1e-5)


def test_right_padding_is_forgotten(tmp_path: Path) -> None:
    model, ids = load_case("lfm2", "biases", tmp_path), tokens()
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
    model, ids = load_case("lfm2", "plain", tmp_path), tokens()
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
