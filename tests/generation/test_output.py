"""What generate returns beside tokens, stopping criteria, and caches over turns: transformers' own
beside it, and calls without them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import EosTokenCriteria, StoppingCriteriaList

import tigon
from tests.generation.common import Counted, blurred, padded, some_ends
from tests.models.tiny import CASES, reference
from tests.support.contract import tiny_llama
from tigon.generation import GenerationOutput
from tigon.layers import Cache, KVCache

NEW, LENGTHS = 12, (3, 11, 6)
DICT: dict[str, Any] = {"return_dict_in_generate": True}
EVERYTHING = DICT | {"output_scores": True, "output_logits": True}
CACHES: dict[str, dict[str, Any]] = {
    "default": {},
    "static": {"cache_implementation": "static"},
    "none": {"use_cache": False},
    "drafted": {"num_assistant_tokens": 3},
}


def prompts() -> dict[str, Any]:
    ids, mask = padded(LENGTHS, 97)
    return {"input_ids": ids, "attention_mask": mask, "pad_token_id": 0, "max_new_tokens": NEW}


def cache_options(model: Any, cache: str) -> dict[str, Any]:
    return CACHES[cache] | ({"assistant_model": blurred(model, 0.1)} if cache == "drafted" else {})


def assert_same(a: tuple[Tensor, ...], b: tuple[Tensor, ...], rows: Tensor) -> None:
    """Compares scores of each token in the rows [B] that have not ended before it."""
    assert len(a) == len(b)
    for x, y, alive in zip(a, b, rows.T, strict=True):
        assert x.dtype == torch.float32
        assert x.shape == y.shape
        torch.testing.assert_close(x[alive], y[alive], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("cache", CACHES)
def test_scores_and_logits_are_transformers(pair: tuple[tigon.CausalLM, Any], cache: str) -> None:
    """Also behind processors; behind the end of a row they are zeros."""
    ours, theirs = pair
    call = prompts() | {"repetition_penalty": 1.3, "min_new_tokens": 2}
    free = theirs.generate(**call, eos_token_id=None, do_sample=False)
    ends = some_ends(free, 11, (4, 9, 11))
    for given in ({"eos_token_id": ends}, {"eos_token_id": ends, "max_new_tokens": 1}):
        expected = theirs.generate(**call | given, **EVERYTHING, do_sample=False)
        out = ours.generate(**call | given, **EVERYTHING, **cache_options(ours, cache))
        assert isinstance(out, GenerationOutput)
        assert out.sequences.tolist() == expected.sequences.tolist()
        new = out.sequences[:, 11:]
        end = torch.isin(new, torch.tensor(ends)).long()
        ended = end.cumsum(1) - end
        for name in ("scores", "logits"):
            assert_same(out[name], expected[name], ended == 0)
            assert all(not x[e > 0].any() for x, e in zip(out[name], ended.T, strict=True))
        assert (
            out.keys() == [*list(expected.keys())[:3], "past_key_values"][: 4 - (cache == "none")]
        )
        assert out.cache is out.past_key_values
    assert (ours.generate(**call, **DICT).keys()) == ["sequences", "past_key_values"]


def test_sampled_scores_are_transformers(pair: tuple[tigon.CausalLM, Any]) -> None:
    ours, theirs = pair
    call = prompts() | {"do_sample": True, "top_k": 9, "temperature": 0.7, "eos_token_id": None}
    outs = []
    for model in (theirs, ours):
        torch.manual_seed(3)
        outs.append(model.generate(**call, **EVERYTHING))
    assert outs[0].sequences.tolist() == outs[1].sequences.tolist()
    for name in ("scores", "logits"):
        assert_same(outs[1][name], outs[0][name], torch.ones(3, NEW, dtype=torch.bool))
    assert outs[1].scores[0].isinf().any()
    transitions = theirs.compute_transition_scores(outs[1].sequences, outs[1].scores)
    assert transitions.shape == (3, NEW)
    assert transitions.isfinite().all()


def test_results_may_be_trained_on(model: tigon.Llama) -> None:
    for cache in CACHES:
        out = model.generate(**prompts(), **EVERYTHING, **cache_options(model, cache))
        found = [out.sequences, *out.scores, *out.logits]
        assert not any(x.is_inference() for x in found)


class Ends:
    """A criterion that ends row i after `at[i]` new tokens, and notes its calls."""

    def __init__(self, *at: int, prompt: int = 11):
        self.at, self.prompt, self.calls = torch.tensor(at), prompt, []

    def __call__(self, ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.calls.append((ids.tolist(), None if scores is None else [s.clone() for s in scores]))
        return self.at <= ids.shape[1] - self.prompt


@pytest.mark.parametrize("cache", CACHES)
def test_criteria_end_rows_as_in_transformers(pair: tuple[tigon.CausalLM, Any], cache: str) -> None:
    """After the same tokens, with the same arguments, however far the device has run ahead."""
    ours, theirs = pair
    call = prompts() | {"eos_token_id": 1}
    beside: dict[str, Any]
    for beside in ({}, EVERYTHING):
        calls = []
        for model, more in ((theirs, {"do_sample": False}), (ours, cache_options(ours, cache))):
            ends = Ends(2, 9, 5)
            criteria = StoppingCriteriaList([ends])
            seen: list[Any] = []
            more = more | ({} if model is theirs else {"streamer": seen.append})
            out = model.generate(**call, **beside, **more, stopping_criteria=criteria)
            calls.append((out.sequences if beside else out, ends.calls))
        (expected, theirs_calls), (tokens, ours_calls) = calls
        assert tokens.tolist() == expected.tolist()
        assert tokens.shape == (3, 11 + 9)
        assert torch.stack(seen, 1).tolist() == tokens[:, 11:].tolist()
        assert [ids for ids, _ in ours_calls] == [ids for ids, _ in theirs_calls]
        for (_, a), (_, b) in zip(ours_calls, theirs_calls, strict=True):
            assert (a is None) == (b is None) == (not beside)
            if a is not None and b is not None:
                assert_same(tuple(a[:1]), tuple(b[:1]), torch.ones(3, 1, dtype=torch.bool))
                assert len(a) == len(b)


def test_answers_of_criteria(model: tigon.Llama) -> None:
    call = prompts() | {"eos_token_id": []}
    free = model.generate(**call)
    stop = int(free[1, 11 + 4])
    for criteria, length in (
        ([lambda ids, scores: ids.shape[1] == 14], 3),
        ([lambda ids, scores: False, lambda ids, scores: torch.tensor(ids.shape[1] >= 15)], 4),
        ([lambda ids, scores: np.bool_(ids.shape[1] >= 15)], 4),
        ([], NEW),
    ):
        assert model.generate(**call, stopping_criteria=criteria).shape[1] == 11 + length
    expected = model.generate(**call | {"eos_token_id": stop})
    tokens = model.generate(**call, stopping_criteria=[EosTokenCriteria(stop)])
    assert tokens.tolist() == expected.tolist()
    for criteria, fault in (
        (lambda ids, scores: True, "is not a list of functions"),
        (["</s>"], "is not a list of functions"),
        (
            [lambda ids, scores: None],
            r"returned None \(NoneType\), and not a bool or a bool tensor",
        ),
        ([lambda ids, scores: 0], r"returned 0 \(int\), and not a bool"),
        ([lambda *_: torch.ones(2, 1) > 0], r"returned a torch.bool tensor \[2, 1\], and not"),
        ([lambda *_: torch.ones(3)], r"returned a torch.float32 tensor \[3\], and not"),
    ):
        with pytest.raises(TypeError, match=fault):
            model.generate(**call, stopping_criteria=criteria)
    with pytest.raises(ValueError, match="stopping_criteria for several rows need pad_token_id"):
        model.generate(**call | {"pad_token_id": None}, stopping_criteria=[lambda *_: True])


# Turns


def go_on(out: Any, lengths: tuple[int, ...], ends: list[int], seed: int) -> dict[str, Any]:
    """Prompts, padded on the left: the text of each row, without padding, and four tokens more.

    `lengths`: of the rows' prompts in the call that returned `out`.
    """
    texts, generator = [], torch.Generator().manual_seed(seed)
    width = max(lengths)
    for row, length in zip(out.sequences.tolist(), lengths, strict=True):
        new = row[width:]
        stop = next((i + 1 for i, token in enumerate(new) if token in ends), len(new))
        more = torch.randint(5, 97, (4,), generator=generator).tolist()
        texts.append(row[width - length : width + stop] + more)
    ids, mask = padded(tuple(map(len, texts)), 97)
    for row, text in enumerate(texts):
        ids[row, -len(text) :] = torch.tensor(text)
    return {"input_ids": ids, "attention_mask": mask}


FIRST_CACHES: dict[str, dict[str, Any]] = {
    "returned": {},
    "chunks": {"cache_implementation": "static", "prefill_chunk_size": 3},
    "drafted": {"num_assistant_tokens": 3},
}
FAMILIES = [
    ("llama", "grouped"),
    ("gemma3_text", "two ropes"),
    ("qwen3_5_text", "plain"),
    ("lfm2", "plain"),
    ("deepseek_v3", "plain"),
]


@pytest.mark.filterwarnings("ignore:a text of up to")
@pytest.mark.slow(first=2)
@pytest.mark.parametrize("first", FIRST_CACHES)
@pytest.mark.parametrize(("family", "case"), FAMILIES)
def test_turns_say_what_whole_texts_say(family: str, case: str, first: str, tmp_path: Path) -> None:
    """Rows end at different lengths, beyond windows, and are padded anew; only new tokens are
    read."""
    reference(family, CASES[family][case], tmp_path)
    model = tigon.from_pretrained(tmp_path)
    assistant = {"assistant_model": blurred(model, 0.1)} if first == "drafted" else {}
    lengths, cache = LENGTHS, None
    call: dict[str, Any] = prompts()
    common = {"max_new_tokens": 24, "pad_token_id": 0}
    free = model.generate(**call | common, eos_token_id=[])
    common["eos_token_id"] = ends = some_ends(free, 11, (2, 20, 9))
    counted = Counted(model)
    for seed in range(3):
        expected = model.generate(**call | common)
        counted.shapes.clear()
        more = (
            FIRST_CACHES[first]
            if cache is None
            else FIRST_CACHES[first] | {"cache_implementation": None}
        )
        out = model.generate(**call | common | more | assistant, **DICT, past_key_values=cache)
        assert out.sequences.tolist() == expected.tolist()
        lengths = tuple(call["attention_mask"].sum(1).tolist())
        if cache is not None:
            read = [shape for shape in counted.shapes if shape[0] == 1]
            assert sum(tokens for _, tokens in read) == 3 * 5  # the last token, and four new ones
            assert max(tokens for _, tokens in read) <= (3 if first == "chunks" else 5)
        cache = out.past_key_values
        call = go_on(out, lengths, ends, seed)
        assert (cache.lengths + 5).tolist() == call["attention_mask"].sum(1).tolist()


def test_turns_are_transformers(pair: tuple[tigon.CausalLM, Any]) -> None:
    """One row, whose cache grows; and one that its caller made."""
    ours, theirs = pair
    ids, _ = padded((9,), 97)
    caches: list[Any] = [None, None]
    mine = KVCache()
    for seed in range(3):
        outs = []
        for i, model in enumerate((theirs, ours)):
            given = {"past_key_values": caches[i]} if caches[i] is not None else {}
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=6,
                eos_token_id=None,
                do_sample=False,
                **EVERYTHING,
                **given,
            )
            caches[i] = out.past_key_values
            outs.append(out)
        assert outs[0].sequences.tolist() == outs[1].sequences.tolist()
        for name in ("scores", "logits"):
            assert_same(outs[1][name], outs[0][name], torch.ones(1, 6, dtype=torch.bool))
        tokens = ours.generate(ids, max_new_tokens=6, past_key_values=mine, eos_token_id=None)
        assert tokens.tolist() == outs[1].sequences.tolist()
        assert caches[0].get_seq_length() == caches[1].length == mine.length == ids.shape[1] + 5
        new = torch.randint(5, 97, (1, 3), generator=torch.Generator().manual_seed(seed))
        ids = torch.cat((outs[1].sequences, new), 1)


@pytest.mark.parametrize("masked", [True, False])
def test_growing_caches_of_several_rows_hold_padding(
    pair: tuple[tigon.CausalLM, Any], masked: bool
) -> None:
    """As in transformers: columns stay where they were, and the mask says which are real."""
    ours, theirs = pair
    call = prompts()
    free = theirs.generate(**call, eos_token_id=None, do_sample=False)
    ends = some_ends(free, 11, (2, 9, 4))
    caches: list[Any] = [None, KVCache()]
    for _ in range(2):
        outs = []
        for i, model in enumerate((theirs, ours)):
            given = {"past_key_values": caches[i]} if caches[i] is not None else {}
            more = {"eos_token_id": ends, **DICT, **given}
            outs.append(model.generate(**call, **more, do_sample=False))
            caches[i] = outs[-1].past_key_values
        ids = outs[1].sequences
        assert ids.tolist() == outs[0].sequences.tolist()
        new = torch.full((3, 2), 8)
        real = (ids[:, call["input_ids"].shape[1] :] != 0) | (not masked)
        mask = torch.cat((call["attention_mask"], real.long(), torch.ones_like(new)), 1)
        call |= {"input_ids": torch.cat((ids, new), 1), "attention_mask": mask}


def test_several_answers_to_one_conversation(model: tigon.Llama) -> None:
    ids, _ = padded((9,), 97)
    for options in ({}, {"cache_implementation": "static"}):
        out = model.generate(ids, max_new_tokens=5, **DICT, **options)
        text = torch.cat((out.sequences, ids[:, :3]), 1)
        call = {"do_sample": True, "seed": 4, "num_return_sequences": 3, "max_new_tokens": 6}
        expected = model.generate(text, **call)
        again = model.generate(text, **call, past_key_values=out.past_key_values, **DICT)
        assert again.sequences.tolist() == expected.tolist()
        counted = Counted(model)
        model.generate(again.sequences, max_new_tokens=1, past_key_values=again.past_key_values)
        assert sum(b * t for b, t in counted.shapes) == 3


def test_a_cache_may_be_too_small_and_in_int8(model: tigon.Llama) -> None:
    ids, _ = padded((9, 9), 97)
    common: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": []}
    cache = model.static_cache(2, 4)
    out = model.generate(ids, past_key_values=cache, **common, **DICT)
    assert out.past_key_values is cache
    assert cache.length == 28
    assert out.sequences.tolist() == model.generate(ids, **common).tolist()
    quantized = model.generate(ids, cache_implementation="quantized", **common, **DICT)
    assert quantized.cache.states[0].buffers.keys.dtype == torch.int8
    assert quantized.cache.length == 28


def test_no_token_leaves_the_cache(model: tigon.Llama) -> None:
    cache = KVCache()
    out = model.generate(
        torch.tensor([[5, 6]]), max_new_tokens=0, past_key_values=cache, **EVERYTHING
    )
    assert out.cache is cache
    assert out.sequences.tolist() == [[5, 6]]
    assert cache.length == 0


def held(model: tigon.CausalLM, rows: int, static: bool) -> Any:
    cache: Cache = model.static_cache(rows, 32) if static else KVCache()
    ids, _ = padded((6,) * rows, 97)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return cache


@pytest.mark.parametrize("static", [False, True])
def test_caches_that_do_not_fit(model: tigon.Llama, static: bool) -> None:
    ids, _ = padded((9, 9), 97)
    kind = "StaticCache" if static else "KVCache"
    short = ids[:, :6]
    for call, fault in (
        ({"input_ids": short}, "row 0: past_key_values holds 6 tokens and input_ids has 6: give"),
        ({"input_ids": ids[:1]}, "past_key_values holds 2 rows, but input_ids 1"),
        ({"use_cache": False}, f"use_cache=False and past_key_values={kind}: give one"),
        ({"cache_implementation": "static"}, "past_key_values and cache_implementation='static'"),
    ):
        with pytest.raises(ValueError, match=fault):
            model.generate(**{"input_ids": ids} | call, past_key_values=held(model, 2, static))
    other = tiny_llama(num_key_value_heads=1)
    with pytest.raises(ValueError, match=r"past_key_values has .* but this Llama"):
        model.generate(ids, past_key_values=held(other, 2, static))
    with pytest.raises(TypeError, match=r"past_key_values is a tuple: give a tigon.layers.KVCache"):
        model.generate(ids, past_key_values=())


def test_caches_that_a_draft_cannot_use(model: tigon.Llama, tmp_path: Path) -> None:
    ids, _ = padded((9, 9), 97)
    draft = blurred(model, 0.1)
    for cache, fault in (
        (KVCache(), "assistant_model needs a cache that can go back"),
        (model.static_cache(2, 32, chunk=4), "takes chunk=4 tokens at a time, and .* need 6"),
    ):
        with pytest.raises(ValueError, match=fault):
            model.generate(ids, past_key_values=cache, assistant_model=draft)
    reference("qwen3_5_text", CASES["qwen3_5_text"]["plain"], tmp_path)
    hybrid = tigon.from_pretrained(tmp_path)
    for rollback in (0, 2):
        cache = hybrid.static_cache(2, 32, rollback=rollback)
        with pytest.raises(ValueError, match=r"cannot drop rejected proposals: .* rollback="):
            hybrid.generate(ids, past_key_values=cache, assistant_model=blurred(hybrid, 0.1))
    one_state = hybrid.static_cache(2, 32)
    with pytest.raises(ValueError, match=r"layer 0 keeps one state .* give static_cache rollback="):
        hybrid.generate(ids, past_key_values=one_state, max_new_tokens=3)


def test_outputs_that_have_no_effect(model: tigon.Llama) -> None:
    with pytest.warns(UserWarning, match="output_scores has no effect without return_dict_in"):
        tokens = model.generate(torch.tensor([[5, 6]]), max_new_tokens=1, output_scores=True)
    assert isinstance(tokens, Tensor)
    config = {"return_dict_in_generate": True, "output_scores": True}
    model.generation_config = config
    assert isinstance(model.generate(torch.tensor([[5, 6]]), max_new_tokens=1), Tensor)
    out: Any = model.generate(torch.tensor([[5, 6]]), max_new_tokens=1, generation_config=config)
    assert len(out.scores) == 1
