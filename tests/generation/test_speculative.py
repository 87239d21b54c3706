"""A draft changes how fast tokens come, and not which, nor how likely."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import tigon
from tests.generation.common import Counted, blurred, padded, some_ends
from tests.support.contract import tiny_llama
from tigon.generation import Sampling, loop, steps
from tigon.generation.sampling import Draws
from tigon.generation.settings import GenerationSettings
from tigon.generation.speculative import accept_proposals, count_leading

LENGTHS = (3, 11, 1, 7, 11)


@pytest.mark.slow(first=3)
@pytest.mark.parametrize("k", [1, 3, 5, 17])
@pytest.mark.parametrize("noise", [0.1, 0.0, 3.0])
def test_greedy_tokens_are_those_of_the_model_alone(
    model: tigon.Llama, k: int, noise: float
) -> None:
    ids, mask = padded(LENGTHS, 97)
    common: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 22, "pad_token_id": 0}
    draft = blurred(model, noise)
    proposing = {"assistant_model": draft, "num_assistant_tokens": k}
    for settings in ({}, {"repetition_penalty": 1.3}):
        free = model.generate(ids, eos_token_id=[], **settings, **common)
        for ends in ([], some_ends(free, 11, (3, 15, 12, 6, 5))):
            call = common | settings | {"eos_token_id": ends}
            expected = model.generate(ids, **call)
            assert model.generate(ids, **call, **proposing).tolist() == expected.tolist()


@pytest.mark.parametrize("sampled", [False, True])
def test_a_model_accepts_all_that_it_proposes_itself(model: tigon.Llama, sampled: bool) -> None:
    ids, mask = padded(LENGTHS, 97)
    counted = Counted(model)
    draft = blurred(model, 0.0)
    drafted = Counted(draft)
    model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=13,
        do_sample=sampled,
        seed=2,
        eos_token_id=[],
        assistant_model=draft,
        num_assistant_tokens=3,
    )
    # 1 token of the prompt, then 4 a round; the draft reads two tokens first
    assert counted.shapes == [(1, 33)] + [(5, 4)] * 3
    assert drafted.shapes[-9:] == [(5, 2), (5, 1), (5, 1)] * 3


def exact(
    model: tigon.CausalLM, prompt: Tensor, sampling: Sampling, tokens: int
) -> dict[tuple[int, ...], float]:
    """The probability of each continuation of so many tokens, from full forward passes."""
    likely: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(tokens):
        texts = torch.tensor([prompt[0].tolist() + list(text) for text in likely])
        with torch.no_grad():
            logits = model(texts, logits_to_keep=1).logits[:, -1]
        seen = sampling.seen(texts, None, logits.shape[1])
        p = sampling.scores(logits, seen).softmax(-1).tolist()
        likely = {
            (*text, token): mass * p[row][token]
            for row, (text, mass) in enumerate(likely.items())
            for token in range(len(p[row]))
        }
    return likely


SAMPLERS: list[dict[str, Any]] = [
    {"top_k": 0},
    {"top_k": 6, "temperature": 1.4, "repetition_penalty": 1.5},
    {"top_k": 0, "top_p": 0.9},
]


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("settings", "draft"),
    [
        *zip(SAMPLERS, (2.0, 0.5, 0.5), strict=True),
        (SAMPLERS[0], "5 rows"),
        (SAMPLERS[0], "9 rows"),
    ],
    ids=str,
)
def test_samples_are_distributed_as_those_of_the_model(
    settings: dict[str, Any], draft: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "FILL", 1)
    rows, vocab, tokens = 6_000, 7, 4
    model = tiny_llama(vocab_size=vocab).eval()
    if isinstance(draft, str):
        draft = tiny_llama(vocab_size=int(draft[0])).eval()
    else:
        draft = blurred(model, draft)  # by so much noise
    prompt = torch.tensor([[1, 5, 2]])
    values = GenerationSettings(do_sample=True, **settings)
    sampling = Sampling(values, vocab, torch.device("cpu"))
    likely = exact(model, prompt, sampling, tokens)
    said = model.generate(
        prompt.expand(rows, -1),
        max_new_tokens=tokens,
        do_sample=True,
        eos_token_id=[],
        seed=1,
        assistant_model=draft,
        num_assistant_tokens=2,
        **settings,
    )[:, 3:].tolist()
    # Pairs of neighbours, of which the last is from a second round unless all was accepted
    for first in range(tokens - 1):
        expected = torch.zeros(vocab, vocab, dtype=torch.float64)
        for text, mass in likely.items():
            expected[text[first], text[first + 1]] += mass * rows
        counts = torch.zeros_like(expected)
        for text in said:
            counts[text[first], text[first + 1]] += 1
        assert counts[expected < 1e-9].sum() == 0
        common = expected >= 5
        chi2 = ((counts - expected) ** 2 / expected)[common].sum()
        freedom = int(common.sum())
        assert chi2 < freedom + 4 * (2 * freedom) ** 0.5, (first, float(chi2), freedom)


def test_accepting_proposals_is_rejection_sampling() -> None:
    """One proposal: what is said first is distributed as p, whatever q is."""
    p, q = torch.tensor([0.5, 0.2, 0.3, 0.0]), torch.tensor([0.1, 0.6, 0.05, 0.25])
    n = 40_000
    draws = Draws(n, p.device, torch.Generator().manual_seed(0))
    proposed = torch.multinomial(q.expand(n, -1), 1, generator=draws.generator)
    after = torch.tensor([0.0, 0.0, 0.0, 1.0])
    kept, token = accept_proposals(
        torch.stack((p, after)).expand(n, -1, -1), q.expand(n, 1, -1), proposed, draws
    )
    assert (token[kept == 1] == 3).all()
    first = torch.where(kept == 1, proposed[:, 0], token)
    share = torch.bincount(first, minlength=4) / n
    assert (share - p).abs().max() < 4 * 0.5 / n**0.5
    # sum of min(p, q) is how many are kept
    assert abs(kept.float().mean() - 0.35) < 4 * 0.5 / n**0.5


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("drafted", [64, 128])
def test_a_draft_with_another_number_of_rows(drafted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that fill up an embedding are no tokens; greedily nothing depends on them."""
    monkeypatch.setattr(steps, "FILL", 1)
    model, draft = tiny_llama().eval(), tiny_llama(vocab_size=drafted).eval()
    ids, mask = padded(LENGTHS, 97)
    assert (ids.max() >= drafted) == (drafted < 97)
    common: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 22, "eos_token_id": []}
    for given in ({}, {"repetition_penalty": 1.3}):
        expected = model.generate(ids, **given, **common)
        tokens = model.generate(ids, assistant_model=draft, **given, **common)
        assert tokens.tolist() == expected.tolist()


def test_count_leading() -> None:
    fits = torch.tensor(list(itertools.product((False, True), repeat=3)))
    assert count_leading(fits).tolist() == [0, 0, 0, 0, 1, 1, 2, 3]


@pytest.mark.parametrize("noise", [0.0, 3.0])  # all is kept, nothing is
def test_the_caches_are_large_enough(
    model: tigon.Llama, monkeypatch: pytest.MonkeyPatch, noise: float
) -> None:
    monkeypatch.setattr(steps, "ROUND", 1)
    ids, mask = padded(LENGTHS, 97)
    common: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 12, "eos_token_id": []}
    expected = model.generate(ids, **common)
    for given in (
        {"cache_implementation": "static"},
        {"assistant_model": blurred(model, noise), "num_assistant_tokens": 7},
    ):
        assert model.generate(ids, **given, **common).tolist() == expected.tolist()


def test_a_seed_decides(model: tigon.Llama) -> None:
    ids, mask = padded(LENGTHS, 97)
    draft = blurred(model, 0.1)

    def say(seed: int) -> list[list[int]]:
        return model.generate(
            ids, attention_mask=mask, do_sample=True, seed=seed, assistant_model=draft
        ).tolist()

    before = torch.get_rng_state()
    assert say(3) == say(3) != say(4)
    assert torch.equal(torch.get_rng_state(), before)


def test_removing_finished_rows_changes_no_sample(
    model: tigon.Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, mask = padded(LENGTHS, 97)
    common: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 40, "pad_token_id": 0}
    common |= {"do_sample": True, "seed": 3, "assistant_model": blurred(model, 0.1)}
    common |= {"repetition_penalty": 1.1, "min_new_tokens": 3}
    counted = Counted(model)
    free = model.generate(ids, eos_token_id=[], **common)
    ends = some_ends(free, 11, (1, 2, 30, 5, 9))
    counted.shapes.clear()
    tokens = model.generate(ids, eos_token_id=ends, **common)
    assert counted.shapes[-1][0] < 3
    counted.shapes.clear()
    monkeypatch.setattr(loop, "FEW_STEPS", 10**9)
    assert model.generate(ids, eos_token_id=ends, **common).tolist() == tokens.tolist()
    assert counted.shapes[-1][0] == 5


def test_scores_of_the_draft_that_are_not_finite(model: tigon.Llama) -> None:
    draft = blurred(model, 0.0)
    with torch.no_grad():
        draft.model.norm.weight[3] = float("nan")
    with pytest.raises(ValueError, match=r"row 0: the scores of token 1 after .* not finite"):
        model.generate(torch.tensor([[5, 6]]), do_sample=True, assistant_model=draft)


def test_scores_of_a_later_token_that_are_not_finite(model: tigon.Llama) -> None:
    """The likeliest tokens, of a step that checks what the draft proposes."""
    ids, draft = torch.tensor([[5, 6]]), blurred(model, 0.0)
    free = model.generate(ids, max_new_tokens=4, eos_token_id=[])[0, 2:].tolist()
    with torch.no_grad():
        model.model.embed_tokens.weight[free[1]] = float("nan")
    with pytest.raises(ValueError, match=r"row 0: the scores of token 1 after .* not finite"):
        model.generate(ids, assistant_model=draft, max_new_tokens=4, eos_token_id=[])


def test_bad_input(model: tigon.Llama) -> None:
    ids = torch.tensor([[5, 6]])
    for vocab in (98, 640):  # not filled up, too far
        with pytest.raises(ValueError, match=f"vocabulary of {vocab} tokens, but the model one of"):
            model.generate(ids, assistant_model=tiny_llama(vocab_size=vocab))
    with pytest.raises(ValueError, match="assistant_model needs a cache that can go back"):
        model.generate(ids, assistant_model=model, cache_implementation="dynamic")
    with pytest.raises(ValueError, match="assistant_model needs a cache that can go back"):
        model.generate(ids, assistant_model=model, use_cache=False)
    elsewhere = tiny_llama().to("meta")
    with pytest.raises(ValueError, match="assistant_model is on meta, but the model on cpu"):
        model.generate(ids, assistant_model=elsewhere)
