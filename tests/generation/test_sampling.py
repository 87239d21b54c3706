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
from tigon.generation import Sampling, row_sampling
from tigon.generation.row_sampling import RowSampling, SamplingNeeds
from tigon.generation.settings import DEFAULTS, GenerationSettings
from tigon.kernels.loss.argmax import NOT_FINITE

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


def sampling_by(**values: Any) -> Sampling:
    settings = GenerationSettings(do_sample=True, **{**OFF, **values})
    return Sampling(settings, V, torch.device("cpu"))


@pytest.mark.parametrize("names", [*[[n] for n in PROCESSORS], list(PROCESSORS)], ids="+".join)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # bf16 has ties
def test_processors(names: list[str], dtype: torch.dtype) -> None:
    values = {name: PROCESSORS[name][1] for name in names}
    theirs = LogitsProcessorList(PROCESSORS[name][0](PROCESSORS[name][1]) for name in names)
    ours = sampling_by(**values)
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
        ours = sampling_by(**{name: value}).scores(logits, None)
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


def test_padding_is_not_penalized_as_repeated(pair: tuple[tigon.CausalLM, Any]) -> None:
    ours, _ = pair
    ids, mask = prompt()
    common: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 24, "pad_token_id": 0}
    tokens = ours.generate(ids, repetition_penalty=1.8, **common)
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


ROW_SETTINGS = [
    {},
    {"do_sample": True, "top_k": 0},
    {"do_sample": True, "top_k": 7, "temperature": 0.6},
    {"do_sample": True, "top_k": 0, "top_p": 0.6, "repetition_penalty": 1.4},
    {"do_sample": True, "top_k": 9, "top_p": 0.8, "min_p": 0.5, "temperature": 1.8},
    {"do_sample": True, "top_k": 150, "top_p": 0.95, "temperature": 3.0},
    {"repetition_penalty": 3.0, "temperature": 0.1},
    {"min_new_tokens": 3},
]


def sampled_rows(order: list[int], logits: Tensor, most: int, seed: int) -> list[list[int]]:
    """Tokens of the settings, which sit in rows of this order, from the same logits each time."""
    columns, rows = logits.shape[1], RowSampling(len(order), V, most, torch.device("cpu"))
    work = SamplingNeeds()
    for row, i in enumerate(order):
        values = DEFAULTS | {"eos_token_id": (3,), "seed": seed} | ROW_SETTINGS[i]
        work |= rows.set(row, GenerationSettings(**values), torch.tensor([1, 2]), most)
    tokens = [rows(logits[order], work).tolist() for _ in range(most)]
    assert columns == V
    by_row = list(zip(*tokens, strict=True))
    return [list(by_row[order.index(i)]) if i in order else [] for i in range(len(ROW_SETTINGS))]


@pytest.mark.parametrize("block", [1024, 16])
def test_rows_sample_by_settings_of_their_own(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a row may choose is what `Sampling` leaves of its scores, as often as it says."""
    monkeypatch.setattr(row_sampling, "BLOCK", block)
    logits, most = 2 * torch.randn(len(ROW_SETTINGS), V), 1500
    logits[7, 3] = 20  # eos
    tokens = sampled_rows(list(range(len(ROW_SETTINGS))), logits, most, seed=5)
    for row, values in enumerate(ROW_SETTINGS):
        settings = GenerationSettings(**DEFAULTS | {"eos_token_id": (3,)} | values)
        ours = Sampling(settings, V, torch.device("cpu"))
        seen = torch.zeros(1, V, dtype=torch.bool)
        seen[0, [1, 2]] = True
        found, counts = [], torch.zeros(V)
        kept = torch.zeros(V)
        for i, token in enumerate(tokens[row]):
            penalty = seen if settings.repetition_penalty != 1 else None
            if i == 0 or penalty is not None or settings.min_new_tokens >= i:
                scores = ours.scores(logits[row : row + 1], penalty, torch.tensor([i]))[0]
            if not settings.do_sample:
                found.append(int(scores.argmax()))
            else:
                counts[token] += 1
                kept += scores.softmax(-1)
            seen[0, token] = True
        if not settings.do_sample:
            assert tokens[row] == found
            continue
        assert not (counts * (kept == 0)).any()  # none that a filter has removed
        # By chi-square, of which one sample in a million is above mean + 6 deviations
        often = kept > 5
        chi = ((counts - kept)[often] ** 2 / kept[often]).sum()
        free = float(often.sum())
        assert chi < free + 6 * (2 * free) ** 0.5, (values, chi, free)


def test_rows_draw_alone() -> None:
    """Other rows, other work and another place change no row's tokens."""
    logits = 2 * torch.randn(len(ROW_SETTINGS), V)
    together = sampled_rows([6, 4, 2, 0, 7, 1, 3, 5], logits, 30, seed=-7)
    for i in range(len(ROW_SETTINGS)):
        assert sampled_rows([i], logits, 30, seed=-7)[i] == together[i]
    assert sampled_rows([1], logits, 30, seed=8)[1] != together[1]


def test_few_columns_are_drawn_from_as_all_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that all have a small top_k draw from its columns alone, and get the same tokens."""
    monkeypatch.setattr(row_sampling, "FEW", 12)
    logits = 2 * torch.randn(len(ROW_SETTINGS), V)
    with_all = sampled_rows([1, 2, 4], logits, 40, seed=9)
    alone = sampled_rows([2, 4], logits, 40, seed=9)
    assert [alone[2], alone[4]] == [with_all[2], with_all[4]]
    assert sampled_rows([1], logits, 40, seed=9)[1] == with_all[1]
    assert len({*alone[2]}) > 2


def test_rows_without_finite_scores() -> None:
    for values in ROW_SETTINGS:
        rows = RowSampling(3, V, 4, torch.device("cpu"))
        settings = GenerationSettings(**DEFAULTS | values)
        work, *_ = (rows.set(i, settings, torch.tensor([1]), 4) for i in range(3))
        logits = torch.randn(3, V)
        logits[0, 5], logits[1] = float("nan"), float("-inf")
        tokens = rows(logits, work).tolist()
        assert tokens[:2] == [NOT_FINITE] * 2 and 0 <= tokens[2] < V


def test_length(pair: tuple[tigon.CausalLM, Any]) -> None:
    ours, theirs = pair
    ids = prompt()[0][:, 3:]
    for given in ({}, {"max_length": 9}, {"max_new_tokens": 4}):
        tokens = ours.generate(ids, eos_token_id=[], **given)
        expected = theirs.generate(ids, eos_token_id=-1, pad_token_id=0, **given)
        assert tokens.tolist() == expected.tolist()
    for given in ({}, {"cache_implementation": "static"}, {"assistant_model": ours}):
        assert ours.generate(ids, max_new_tokens=0, **given).tolist() == ids.tolist()
    ours.generation_config = {"max_length": 10}
    assert ours.generate(ids, eos_token_id=[]).shape[1] == 10
    ours.generation_config = {}
