"""Where settings come from, what None means, and what is said of those that cannot be."""

import json
import resource
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import BatchEncoding, GenerationConfig

import tigon
from tests.generation.common import Counted, blurred, padded
from tigon.generation import speculative, steps
from tigon.generation.settings import DEFAULTS, UNSUPPORTED
from tigon.models import MODELS
from tigon.utils import memory

FILE: dict[str, Any] = {
    "do_sample": True,
    "temperature": 1.5,
    "top_k": 6,
    "top_p": 0.8,
    "min_p": 0.3,
    "repetition_penalty": 1.2,
    "max_new_tokens": 11,
    "min_new_tokens": 3,
    "eos_token_id": list(range(20, 50)),
    "pad_token_id": 7,
}
IDS = torch.tensor([[5, 6], [8, 9]])


@pytest.fixture
def pair(pair: tuple[tigon.CausalLM, Any]) -> Iterator[tuple[tigon.CausalLM, Any]]:
    """A tiny Llama, ours and transformers', that both go by FILE, as transformers' object."""
    before = [model.generation_config for model in pair]
    for model in pair:
        model.generation_config = GenerationConfig(**FILE)
    yield pair
    for model, config in zip(pair, before, strict=True):
        model.generation_config = config


def prompt() -> dict[str, Tensor]:
    ids, mask = padded((6, 2, 5), 211)
    return {"input_ids": ids, "attention_mask": mask}


def agree(pair: tuple[tigon.CausalLM, Any], **given: Any) -> list[list[int]]:
    """What both say alike."""
    ours, theirs = pair
    torch.manual_seed(3)
    expected = theirs.generate(**prompt(), **given).tolist()
    torch.manual_seed(3)
    assert ours.generate(**prompt(), **given).tolist() == expected
    return expected


@pytest.mark.parametrize("name", FILE)
def test_none_is_off_as_in_transformers(pair: tuple[tigon.CausalLM, Any], name: str) -> None:
    beside: dict[str, Any] = {  # so that it matters
        "do_sample": {},
        "min_p": {"num_return_sequences": 8, "top_p": None, "top_k": None},
    }.get(name, {"num_return_sequences": 8})
    assert agree(pair, **beside, **{name: None}) != agree(pair, **beside)


def test_none_where_transformers_fails(model: tigon.Llama) -> None:
    model.generation_config = {"max_length": 9, "num_return_sequences": 2, "do_sample": True}
    assert model.generate(IDS, eos_token_id=[]).shape == (4, 9)
    tokens = model.generate(IDS, eos_token_id=[], max_length=None, num_return_sequences=None)
    assert tokens.shape == (2, 2 + 20)


def test_none_for_how_a_call_runs_is_the_default(model: tigon.Llama) -> None:
    expected = model.generate(IDS, max_new_tokens=4).tolist()
    names = [name for name in DEFAULTS if name not in FILE]
    nothing: dict[str, Any] = dict.fromkeys((*names, "streamer", "tokenizer", "assistant_model"))
    assert model.generate(IDS, **nothing | {"max_new_tokens": 4}).tolist() == expected
    model.generation_config = {"stop_strings": ["a"]}
    with pytest.raises(ValueError, match="need the model's tokenizer"):
        model.generate(IDS, max_new_tokens=4)
    tokens = model.generate(IDS, max_new_tokens=4, stop_strings=None)
    assert tokens.tolist() == expected


def test_generation_config_comes_between_call_and_model(pair: tuple[tigon.CausalLM, Any]) -> None:
    passed = {"temperature": 0.6, "top_k": 0, "max_new_tokens": 5, "eos_token_id": [9]}
    seen = [agree(pair)]
    for given in ({}, {"top_k": 2}, {"top_p": None, "max_new_tokens": 7}):
        tokens = agree(pair, generation_config=GenerationConfig(**passed), **given)
        assert tokens not in seen
        seen.append(tokens)
        torch.manual_seed(3)
        again = pair[0].generate(**prompt(), generation_config=passed, **given)
        assert again.tolist() == tokens
    # Its max_length comes before the model's max_new_tokens
    shape = pair[0].generate(**prompt(), generation_config={"max_length": 8}, eos_token_id=[]).shape
    assert shape[1] == 8


def test_the_models_files_do_not_say_how_a_call_runs(model: tigon.Llama) -> None:
    counted = Counted(model)
    how = {"cache_implementation": "hybrid", "use_cache": False}
    model.generation_config = how
    model.generate(IDS, max_new_tokens=3)
    assert counted.shapes == [(2, 2), (2, 1), (2, 1)]
    with pytest.raises(ValueError, match="'hybrid' is not one of"):
        model.generate(IDS, max_new_tokens=3, generation_config=how)
    del how["cache_implementation"]
    model.generate(IDS, max_new_tokens=3, generation_config=how)
    assert counted.shapes[-1] == (2, 4)


def test_padding_without_a_mask(pair: tuple[tigon.CausalLM, Any]) -> None:
    ours, theirs = pair
    ids, mask = padded((6, 2, 5), 211)  # with 3 as padding
    common: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "min_new_tokens": None}
    masked = ours.generate(ids, attention_mask=mask, eos_token_id=[], **common).tolist()
    seen = []
    for given in (
        {"pad_token_id": 3, "eos_token_id": None},
        {"pad_token_id": 3, "eos_token_id": [200, 3]},  # ends texts too
        {"pad_token_id": None, "eos_token_id": 200},
        {"pad_token_id": 4, "eos_token_id": 200},  # occurs nowhere
    ):
        tokens = ours.generate(ids, **given, **common).tolist()
        assert tokens == theirs.generate(ids, **given, **common).tolist()
        seen.append(tokens == masked)
    assert seen == [True, False, False, False]
    ours.generation_config = {"pad_token_id": 3, "repetition_penalty": 1.2}
    assert ours.generate(ids, max_new_tokens=8, eos_token_id=[]).tolist() == masked
    ones = ours.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8)
    assert ones.tolist() != masked
    for cut, message in (
        ([[5, 3], [3, 5]], r"row 0 of input_ids \(pad_token_id=3, no .* ends in padding"),
        ([[3, 5], [3, 3]], "row 1 of input_ids .* is all padding"),
    ):
        with pytest.raises(ValueError, match=message):
            ours.generate(torch.tensor(cut))


def test_sequences_of_a_prompt_are_transformers(pair: tuple[tigon.CausalLM, Any]) -> None:
    tokens = agree(pair, num_return_sequences=3)
    assert len(tokens) == 9
    assert len({tuple(row) for row in tokens}) > 5
    torch.manual_seed(3)
    streamed: list[Tensor] = []
    steps = pair[0].generate(
        **prompt(), num_return_sequences=3, cache_implementation="static", streamer=streamed.append
    )
    assert steps.tolist() == tokens
    assert torch.stack(streamed, 1).tolist() == steps[:, 6:].tolist()


@pytest.mark.parametrize("assisted", [False, True])
def test_a_prompt_is_read_once_for_all_its_sequences(model: tigon.Llama, assisted: bool) -> None:
    ids, mask = padded((3, 11, 7), 97)
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": True, "seed": 5}
    settings |= {"eos_token_id": [], "repetition_penalty": 1.2, "cache_implementation": "static"}
    if assisted:
        settings["assistant_model"] = blurred(model, 0.1)
    rows = ids.repeat_interleave(4, 0), mask.repeat_interleave(4, 0)
    expected = model.generate(rows[0], attention_mask=rows[1], **settings)
    counted = Counted(model)
    tokens = model.generate(ids, attention_mask=mask, num_return_sequences=4, **settings)
    assert tokens.tolist() == expected.tolist()
    assert counted.shapes[0] == (1, 21)
    assert counted.shapes[1] == (12, 6 if assisted else 1)


@pytest.mark.parametrize("way", ["dynamic", "static", "assisted", "vain"])
@pytest.mark.parametrize("sampled", [False, True])
def test_no_end_before_min_new_tokens(
    pair: tuple[tigon.CausalLM, Any], way: str, sampled: bool
) -> None:
    ours, theirs = pair
    ends = list(range(0, 211, 2))  # every other token
    common: dict[str, Any] = {"max_new_tokens": 24, "do_sample": sampled, "eos_token_id": ends}
    common |= {"pad_token_id": 0, "min_new_tokens": 6}
    torch.manual_seed(3)
    expected = theirs.generate(**prompt(), **common)
    how: dict[str, Any] = {"cache_implementation": "static"} if way == "static" else {}
    if way in ("assisted", "vain"):
        how = {"assistant_model": blurred(ours, 0.1 if way == "assisted" else 3.0)}
    torch.manual_seed(3)
    tokens = ours.generate(**prompt(), **common, **how)
    if not (sampled and "assistant_model" in how):
        assert tokens.tolist() == expected.tolist()
    assert (tokens[:, 6:12] % 2 == 1).all()
    assert (tokens[:, 12:14] % 2 == 0).any()
    free = ours.generate(**prompt(), **common | {"min_new_tokens": None}, **how)
    assert (free[:, 6:12] % 2 == 0).any()


HARMLESS = {
    "num_beams": 1,
    "penalty_alpha": None,
    "logits_processor": [],
    "output_scores": False,
    "disable_compile": True,
    "past_key_values": None,
}


CHANGING = {
    "no_repeat_ngram_size": 2,
    "bad_words_ids": [[3]],
    "penalty_alpha": 0.6,
    "typical_p": 0.9,
    "suppress_tokens": [1],
    "forced_eos_token_id": 2,
    "guidance_scale": 1.5,
    "sequence_bias": [[[3], -1.0]],
}


def test_what_is_not_followed(model: tigon.Llama) -> None:
    expected = model.generate(IDS, max_new_tokens=3).tolist()
    assert model.generate(IDS, max_new_tokens=3, **HARMLESS).tolist() == expected
    model.generation_config = {"num_beams": 4}
    with pytest.raises(ValueError, match=r"generation_config has num_beams=4.* num_beams=None"):
        model.generate(IDS)
    for given in ({"num_beams": None}, {"num_beams": 1}, {"generation_config": {"num_beams": 1}}):
        assert model.generate(IDS, max_new_tokens=3, **given).tolist() == expected
    defaults = GenerationConfig._get_default_generation_params()
    model.generation_config = GenerationConfig().to_dict() | defaults | {"chat_format": "chatml"}
    assert model.generate(IDS, max_new_tokens=3).tolist() == expected
    for key, value in CHANGING.items():
        model.generation_config = {key: value}
        with pytest.raises(ValueError, match=f"generation_config has {key}="):
            model.generate(IDS, max_new_tokens=3)


HUGE = 10**21
# Arguments of a call, and what the error names
BAD: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, r"\(1, 0\) is an empty"),
    ({"input_ids": torch.tensor([5])}, r"integers \[B, T\], not torch.int64 \(1,\)"),
    ({"input_ids": IDS > 5}, r"integers \[B, T\], not torch.bool"),
    ({"input_ids": torch.tensor([[5, 97]])}, r"\[0, 1\] is 97, outside .*\[0, 97\)"),
    ({"input_ids": torch.tensor([[-1, 5]])}, r"\[0, 0\] is -1, outside"),
    ({"input_ids": [[5, 6]]}, r"input_ids must be a tensor \[B, T\], not list"),
    ({"input_ids": BatchEncoding({"input_ids": IDS})}, r"BatchEncoding: .*\(\*\*enc"),
    ({"attention_mask": torch.ones(2, 3)}, r"\(2, 3\) does not fit input_ids \(2, 2\)"),
    ({"attention_mask": torch.tensor([[1, 1], [1, 0]])}, "row 1 .* pad on the left"),
    ({"attention_mask": torch.tensor([[0, 0], [1, 1]])}, "row 0 .* is all padding"),
    ({"attention_mask": [[1, 1]] * 2}, "attention_mask must be a tensor .* not list"),
    ({"beams": 4, "input": IDS}, "no argument 'beams', 'input'; did you mean 'input_ids'"),
    ({"input_ids": None, "inputs": IDS}, "no argument 'inputs'; did you mean 'input_ids'"),
    ({"input_ids": None}, r"input_ids must be a tensor \[B, T\], not NoneType"),
    ({"max_tokens": 4}, "no argument 'max_tokens'; did you mean 'max_new_tokens'"),
    ({"num_beams": 4}, "^num_beams=4, which generate does not support"),
    ({"generation_config": "x"}, "generation_config='x' is neither a dict nor"),
    ({"generation_config": {"eos_token_id": 97}}, "eos_token_id=97 is outside"),
    ({"generation_config": GenerationConfig(min_length=3)}, "generation_config has min_length=3"),
    ({"max_new_tokens": 2, "max_length": 9}, "give one of them"),
    ({"max_length": 2}, "max_length=2 leaves no room after a prompt of 2"),
    ({"num_return_sequences": 2, "do_sample": False}, "=2 need do_sample=True"),
    ({"stop_strings": "end"}, r"\['end'\] need .* tokenizer="),
    ({"stop_strings": ["a", ""], "tokenizer": 1}, "stop_strings has an empty string"),
    ({"stop_strings": [2]}, r"stop_strings=\[2\] is not text or a list of texts"),
    ({"assistant_model": torch.nn.Linear(2, 2)}, "assistant_model is a Linear, not a model that"),
    ({"eos_token_id": [3, -2]}, "eos_token_id=-2 is outside the vocabulary"),
    ({"eos_token_id": [True]}, r"eos_token_id=\[True\] is not a whole number or a list of"),
    ({"pad_token_id": [2]}, r"pad_token_id=\[2\] is not a whole number or null"),
    ({"cache_implementation": "paged"}, "='paged' is not one of dynamic, static, quantized"),
    ({"cache_implementation": "static", "use_cache": False}, "'static': give one of them"),
    *(
        ({name: value}, f"{name}={value!r} {fault}")
        for value, fault, *names in (
            (-1, "must be at least 0", "max_new_tokens", "min_new_tokens"),
            (0, "must be at least 1", "prefill_chunk_size", "num_assistant_tokens"),
            (HUGE, "must be at most", "max_new_tokens", "num_return_sequences", "pad_token_id"),
            (2**64, f"must be at most {2**64 - 1}", "seed"),
            ("no", "is not a whole number", "max_new_tokens", "max_length", "seed"),
            (2.5, "is not a whole number", "top_k", "max_length"),
            ("no", "is not true or false", "do_sample", "use_cache"),
            ("1", "is not a number", "temperature"),
            (0, "is not above 0, between", "temperature", "repetition_penalty"),
            (float("nan"), "is not above 0, between", "temperature"),
            (1e-320, "is not above 0, between", "temperature"),
            (float("inf"), "is not above 0, between", "temperature", "repetition_penalty"),
            (-1, "is negative", "top_k"),
            (0.0, r"is not in \(0, 1\]", "top_p"),
            (1.1, "is not in", "top_p", "min_p"),
            (float("nan"), "is not in", "top_p", "min_p"),
        )
        for name in names
    ),
]


@pytest.mark.parametrize(("given", "message"), BAD, ids=lambda x: str(x)[:40])
def test_bad_input(model: tigon.Llama, given: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        model.generate(**{"input_ids": IDS, "do_sample": True, **given})


# What a file may say: each is applied, or one error when it is read or used
OF_FILES: list[tuple[dict[str, Any], str]] = [
    ({"do_sample": True, "temperature": 0.0}, "temperature=0.0 is not above 0"),
    ({"repetition_penalty": -2.0}, "repetition_penalty=-2.0 is not above 0"),
    ({"num_return_sequences": 2}, "num_return_sequences=2 need do_sample=True"),
    (
        {"num_beams": "\x1b" * 9999},
        r"generation_config has num_beams='\\x1b.{10,400}\.\.\., which generate",
    ),
    ({"max_length": 2}, "max_length=2 leaves no room after a prompt of 2 tokens"),
    ({"stop_strings": "a"}, r"stop_strings \['a'\] need the model's tokenizer"),
    ({"stop_strings": ["a", ""]}, r"stop_strings has an empty string: \['a', ''\]"),
    ({"min_new_tokens": HUGE}, "min_new_tokens=1.* must be at most"),
    ({"eos_token_id": [2, HUGE]}, "eos_token_id=1.* must be at most"),
]


def loaded(model: tigon.Llama, path: Path, values: dict[str, Any]) -> tigon.CausalLM:
    """A model with these values in its generation_config.json."""
    model.generation_config = {}
    model.save_pretrained(path / "model")
    (path / "model" / "generation_config.json").write_text(json.dumps(values))
    return tigon.from_pretrained(path / "model")


@pytest.mark.parametrize(("values", "message"), OF_FILES, ids=lambda x: str(x)[:40])
def test_a_number_of_a_file_names_the_file(
    model: tigon.Llama, tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=rf"/model/generation_config\.json: {message}"):
        loaded(model, tmp_path, values).generate(IDS)


def test_ids_of_a_file_that_no_token_has(model: tigon.Llama, tmp_path: Path) -> None:
    expected = model.generate(IDS, eos_token_id=[], max_new_tokens=5).tolist()
    many = {"eos_token_id": [-7, *range(1000, 50_000)], "pad_token_id": -3, "min_new_tokens": 2}
    odd = loaded(model, tmp_path, many)
    assert odd.generate(IDS, max_new_tokens=5).tolist() == expected
    ended = odd.generate(IDS, max_new_tokens=5, eos_token_id=expected[0][3], min_new_tokens=None)
    assert int(ended.min()) >= 0


def test_rows_that_no_memory_has_scores_for(
    model: tigon.Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "total_memory", lambda device: 4 * 2 * 9 * 97)
    given = {"do_sample": True, "max_new_tokens": 1, "cache_implementation": "dynamic"}
    assert len(model.generate(IDS, num_return_sequences=9, **given)) == 18
    with pytest.raises(ValueError, match="=10 of 2 prompts: their scores"):
        model.generate(IDS, num_return_sequences=10, **given)
    with pytest.raises(ValueError, match=r"a cache of 256 tokens in each of 2 rows takes .* fewer"):
        model.generate(IDS, max_new_tokens=1, cache_implementation="static")


class Enough(Exception):
    """Raised by a streamer."""


@pytest.mark.parametrize("how", ["dynamic", "static", "quantized", "assisted"])
@pytest.mark.parametrize("length", [{"max_new_tokens": 10**9}, {"max_length": 2**31 - 1}], ids=str)
def test_memory_is_taken_for_what_is_generated(
    model: tigon.Llama, how: Any, length: dict[str, int]
) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    columns: list[Tensor] = []

    def three(column: Tensor) -> None:
        columns.append(column)
        if len(columns) == 3:
            raise Enough

    given = {"assistant_model": model} if how == "assisted" else {"cache_implementation": how}
    with pytest.raises(Enough), pytest.warns(UserWarning, match="max_position_embeddings"):
        model.generate(IDS, eos_token_id=None, streamer=three, **length, **given)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB


@pytest.mark.slow(first=2)
@pytest.mark.parametrize("how", ["assisted", "static", "quantized", "dynamic"])
@pytest.mark.parametrize("family", ["llama", "windows"])
def test_memory_that_grows_changes_no_token(
    how: Any, family: str, model: tigon.Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    longer: tigon.CausalLM = model
    if family == "windows":  # rings that are full before, between and after the memory grows
        kind = {"model_type": "gemma3_text", "num_hidden_layers": 2, "sliding_window_pattern": 2}
        sizes = {"head_dim": 4, "sliding_window": 290, "initializer_range": 0.5}
        sizes |= {"hidden_size": 8, "intermediate_size": 6, "num_attention_heads": 2}
        sizes |= {"vocab_size": 97, "num_key_value_heads": 1, "max_position_embeddings": 1024}
        longer = MODELS["gemma3_text"].from_config(kind | sizes).eval()
    ids, mask = padded((6, 2, 5), 97)
    given: dict[str, Any] = {"cache_implementation": how}
    if how == "assisted":
        given = {"assistant_model": blurred(longer, 0.05), "num_assistant_tokens": 3}
    given |= {"attention_mask": mask, "max_new_tokens": 340, "do_sample": True, "seed": 5}
    given |= {"eos_token_id": None, "pad_token_id": 3}
    with warnings.catch_warnings(action="ignore"):
        expected = longer.generate(ids, **given)
        for module in (steps, speculative):
            monkeypatch.setattr(module, "INITIAL_CAPACITY", 20)
        monkeypatch.setattr(steps, "DYNAMIC_CAPACITY", 20)
        assert longer.generate(ids, **given).tolist() == expected.tolist()


def test_numbers_of_numpy_and_old_ids_are_fine(model: tigon.Llama) -> None:
    given = {"max_new_tokens": 4, "do_sample": True, "seed": 3, "temperature": 0.5, "top_k": 7}
    expected = model.generate(IDS, eos_token_id=None, pad_token_id=None, **given).tolist()
    given = {k: v if k == "do_sample" else np.array(v)[()] for k, v in given.items()}
    assert isinstance(given["seed"], np.int64)
    tokens = model.generate(IDS, eos_token_id=-1, pad_token_id=-1, **given)
    assert tokens.tolist() == expected
    model.generation_config = {"eos_token_id": [5000], "pad_token_id": 5000}  # nobody says it
    assert model.generate(IDS, min_new_tokens=2, **given).tolist() == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seed": 3, "top_k": 5}, "top_k, seed has no effect without do_sample=True"),
        ({"num_assistant_tokens": 3}, "num_assistant_tokens has no effect without assistant_model"),
        ({"prefill_chunk_size": 3}, "prefill_chunk_size has no effect without a static cache"),
    ],
)
def test_arguments_without_effect(model: tigon.Llama, given: Any, message: str) -> None:
    with pytest.warns(UserWarning, match=message) as caught:
        model.generate(IDS, max_new_tokens=1, **given)
    assert [w.filename for w in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.generate(IDS, max_new_tokens=1, **dict.fromkeys(given))
        effective = given | {"assistant_model": model, "do_sample": True}
        model.generate(IDS, max_new_tokens=1, **effective)


def test_the_page_names_what_is_not_followed() -> None:
    text = (Path(__file__).parents[2] / "docs/generation.md").read_text()
    assert [key for key in UNSUPPORTED if f"`{key}`" not in text] == []
