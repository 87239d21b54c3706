"""The loop of examples/grpo.py: it generates, rewards and learns."""

import runpy
from pathlib import Path

import pytest
import torch

import tigon
from tests.support.small import write_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo.py"


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(EXAMPLE))


@pytest.mark.slow(first=1)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("beta", [0.0, 0.01])
def test_rewards_rise(example, tmp_path, beta):
    path = write_model(tmp_path / "model")
    model, tokenizer = tigon.from_pretrained(path), tigon.Tokenizer.from_pretrained(path)

    def reward(prompt: str, text: str) -> float:
        return sum(letter in "aeiou" for letter in text) / max(1, len(text))

    settings = example["Settings"](
        rounds=25, prompts=4, group=8, max_new_tokens=8, lr=5e-3, beta=beta
    )
    means = example["learn"](model, tokenizer, ["the model", "says"] * 2, reward, settings)
    assert sum(means[-5:]) / 5 > 2 * sum(means[:5]) / 5 > 0


def test_answers_end_where_they_say(example, tmp_path):
    path = write_model(tmp_path / "model")
    model, tokenizer = tigon.from_pretrained(path), tigon.Tokenizer.from_pretrained(path)
    settings = example["Settings"](group=6, max_new_tokens=200)
    found = example["sample"](model, tokenizer, ["the model", "a few words"], settings, seed=1)
    assert found.ids.shape == found.mask.shape == found.answered.shape and len(found.texts) == 12
    lengths = found.answered.sum(1)
    assert lengths.min() < 200  # one of them ends
    for ids, answered, length in zip(found.ids, found.answered, lengths, strict=True):
        said = ids[answered]
        ends = (said == tokenizer.eos_token_id).nonzero().flatten().tolist()
        assert ends in ([], [length - 1])
    logprobs = example["logprobs"](model, found)
    alone = []
    for ids, mask, answered in zip(found.ids, found.mask, found.answered, strict=True):
        with torch.no_grad():
            logits = model(ids[mask][None]).logits[0].log_softmax(-1)
        own = ids[mask]
        first = int((mask & ~answered).sum())
        alone.append(sum(logits[t - 1, own[t]] for t in range(first, len(own))))
    torch.testing.assert_close(logprobs.sum(1), torch.stack(alone), rtol=1e-4, atol=1e-3)
