"""From logits to tokens: transformers' processors, and its sampling."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import tigon
from tigon.generation import Sampling

V = 211
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
PROCESSORS: dict[str, tuple[Any, float]] = {
    "repetition_penalty": (RepetitionPenaltyLogitsProcessor, 1.3),
    "temperature": (TemperatureLogitsWarper, 0.6),
    "top_k": (TopKLogitsWarper, 7),
    "top_p": (TopPLogitsWarper, 0.8),
    "min_p": (MinPLogitsWarper, 0.05),
}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"top_k": 0},
    {"temperature": 0.6, "top_p": 0.9},
    {"top_k": 5, "repetition_penalty": 1.5},
    {"top_k": 0, "min_p": 0.1},
    {"temperature": 1.7, "top_k": 40, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 0.8},
]


def prompt() -> tuple[Tensor, Tensor]:
    ids = torch.randint(5, V, (3, 6), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    return ids, mask


@pytest.mark.parametrize("names", [*[[n] for n in PROCESSORS], list(PROCESSORS)], ids="+".join)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # bf16 has ties
def test_processors(names: list[str], dtype: torch.dtype) -> None:
    values = {name: PROCESSORS[name][1] for name in names}
    theirs = LogitsProcessorList(PROCESSORS[name][0](PROCESSORS[name][1]) for name in names)
    ours = Sampling(do_sample=True, **{**OFF, **values})
    changed = False
    for spread in (0.1, 1.0, 10.0):
        logits = (spread * torch.randn(16, V)).to(dtype)
        ids = torch.randint(0, V, (16, 9))
        seen = torch.zeros(16, V, dtype=torch.bool).scatter_(1, ids, True)
        expected = theirs(ids, logits.float())
        scores = ours.scores(logits, seen if "repetition_penalty" in names else None)
        assert torch.equal(scores, expected)
        changed |= not torch.equal(scores, logits.float())
    assert changed


def test_thresholds_are_met_exactly() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    for name, value in (("top_p", 0.5), ("top_p", 0.75), ("min_p", 1.0), ("top_k", 1)):
        ours = Sampling(do_sample=True, **{**OFF, name: value}).scores(logits, None)
        expected = PROCESSORS[name][0](value)(None, logits)
        assert torch.equal(ours, expected)
        assert expected.isinf().any()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_sampled_tokens_are_transformers(
    pair: tuple[tigon.CausalLM, Any], settings: dict[str, Any]
) -> None:
    ours, theirs = pair
    ids, mask = prompt()
    common = {"attention_mask": mask, "max_new_tokens": 16, "do_sample": True, "pad_token_id": 0}
    torch.manual_seed(11)
    expected = theirs.generate(ids, **common, **settings)
    tokens = ours.generate(ids, seed=11, **common, **settings)
    assert tokens.tolist() == expected.tolist()
    torch.manual_seed(11)
    assert ours.generate(ids, **common, **settings).tolist() == expected.tolist()


def test_repetition_penalty_without_sampling(pair: tuple[tigon.CausalLM, Any]) -> None:
    ours, theirs = pair
    ids, mask = prompt()
    common: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 24, "pad_token_id": 0}
    tokens = ours.generate(ids, repetition_penalty=1.8, **common)
    assert tokens.tolist() == theirs.generate(ids, repetition_penalty=1.8, **common).tolist()
    assert tokens.tolist() != ours.generate(ids, **common).tolist()
    # What stands under the padding was not said
    other = ids.masked_fill(mask == 0, int(tokens[1, 6]))
    again = ours.generate(other, repetition_penalty=1.8, **common)
    assert again[:, 6:].tolist() == tokens[:, 6:].tolist()


def test_a_seed_decides_alone(pair: tuple[tigon.CausalLM, Any]) -> None:
    ours, _ = pair
    ids, _ = prompt()

    def sample(**kwargs: Any) -> list[list[int]]:
        return ours.generate(ids, do_sample=True, max_new_tokens=12, **kwargs).tolist()

    before = torch.get_rng_state()
    first = sample(seed=4)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert sample(seed=4) == first
    assert sample(seed=5) != first
    assert sample() != sample()


def test_length(pair: tuple[tigon.CausalLM, Any]) -> None:
    ours, theirs = pair
    ids = prompt()[0][:, 3:]
    for given in ({}, {"max_length": 9}, {"max_new_tokens": 4}):
        tokens = ours.generate(ids, eos_token_id=[], **given)
        expected = theirs.generate(ids, eos_token_id=-1, pad_token_id=0, **given)
        assert tokens.tolist() == expected.tolist()
    assert ours.generate(ids, max_new_tokens=0).tolist() == ids.tolist()
    ours.generation_config = {"max_length": 10}
    assert ours.generate(ids, eos_token_id=[]).shape[1] == 10
    ours.generation_config = {}
