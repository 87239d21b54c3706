"""generate of transformers' models and of Tigon's in their place: the same tokens and scores, by
whichever loop; caches of either library in the other."""

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StaticCache,
    StoppingCriteriaList,
    TextIteratorStreamer,
    pipeline,
)

from tests.generation.common import padded
from tests.integrations.transformers.peers import MODELS, pair
from tests.integrations.transformers.words import make_tokenizer
from tigon.integrations.transformers import as_transformers, from_pretrained, generation
from tigon.integrations.transformers.cache import TigonCache
from tigon.layers import KVCache

HYBRIDS = {"qwen3_5_text": "plain", "lfm2": "plain"}
FAMILIES = MODELS | HYBRIDS | {"deepseek_v3": "plain", "phi3": "longrope", "gemma3n_text": "shared"}
NEW, LENGTHS = 12, (4, 7)


def prefer_others(ids: Tensor, scores: Tensor) -> Tensor:
    """A logits processor: no token twice in a row."""
    return scores.scatter(1, ids[:, -1:], float("-inf"))


def end_of_rows(ids: Tensor, scores: Any) -> Tensor:
    return ids[:, -1] % 7 == 0


class Loops(list[str]):
    """The loops that have run: "own", "theirs"."""


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loops]:
    found, own = Loops(), generation.own_arguments

    def noted(*args: Any) -> Any:
        arguments = own(*args)
        found.append("theirs" if arguments is None else "own")
        return arguments

    monkeypatch.setattr(generation, "own_arguments", noted)
    yield found


SCORES: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True}
OWN: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_p": 0.9, "temperature": 1.3},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "penalized": {"repetition_penalty": 1.3, "min_new_tokens": 3, "eos_token_id": list(range(90))},
    "ends": {"eos_token_id": list(range(40))},
    "criteria": {"stopping_criteria": StoppingCriteriaList([end_of_rows]), "eos_token_id": 1},
    "length": {"max_length": 15, "min_length": 12, "eos_token_id": [3, *range(60, 211)]},
    "no cache": {"use_cache": False},
    "config": {"generation_config": GenerationConfig(max_new_tokens=4, eos_token_id=None)},
    "scores": SCORES | {"output_logits": True, "repetition_penalty": 1.1},
}
THEIRS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3},
    "best beams": SCORES | {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.5},
    "sampled beams": {"num_beams": 2, "do_sample": True},
    "beams without a cache": {"num_beams": 2, "use_cache": False},
    "processor": {"logits_processor": LogitsProcessorList([prefer_others])},
    "no repeats": {"no_repeat_ngram_size": 2},
    "beams with a tokenizer": {"num_beams": 2, "tokenizer": make_tokenizer()},
    "bad words": {"bad_words_ids": [[7], [8, 9]], "suppress_tokens": [10, 11, 12]},
    "prefixes": {"prefix_allowed_tokens_fn": lambda row, ids: list(range(20 + row, 120))},
    "typical": {"do_sample": True, "typical_p": 0.7},
    "static": {"num_beams": 2, "cache_implementation": "static"},
}
LOOKUP: dict[str, Any] = {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1}


def call(model: Any, given: dict[str, Any]) -> Any:
    ids, mask = padded(LENGTHS, 200)
    common: dict[str, Any] = {"max_new_tokens": NEW, "pad_token_id": 0, "eos_token_id": None}
    if "max_length" in given or "generation_config" in given:
        common = {"pad_token_id": 0}
    torch.manual_seed(3)
    return model.generate(ids, attention_mask=mask, **{"do_sample": False} | common | given)


def assert_same(ours: Any, theirs: Any) -> None:
    """Compares tokens, and the scores of both where there are any."""
    if isinstance(theirs, Tensor):
        assert ours.tolist() == theirs.tolist()
        return
    assert type(ours) is type(theirs)
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    for name in ("scores", "logits", "sequences_scores"):
        found, expected = getattr(ours, name, None), getattr(theirs, name, None)
        assert (found is None) == (expected is None), name
        pairs = () if expected is None else zip(found, expected, strict=True)
        for a, b in pairs:
            torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


# The first family in all ways, and each other one in every third, in turn
WAYS = [
    (family, how)
    for i, family in enumerate(FAMILIES)
    for j, how in enumerate(OWN | THEIRS)
    if i == 0 or (i + j) % 3 == 0
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.slow(first=len(OWN) + len(THEIRS))
@pytest.mark.parametrize(("family", "how"), WAYS)
def test_tokens_are_transformers(family: str, how: str, loops: Loops) -> None:
    theirs, ours = pair(family, FAMILIES[family])
    given = (OWN | THEIRS)[how]
    assert_same(call(ours, given), call(theirs, given))
    assert loops == ["own" if how in OWN else "theirs"]


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_lookup(family: str, loops: Loops) -> None:
    """A state for all tokens cannot forget rejected ones, which is said."""
    theirs, ours = pair(family, FAMILIES[family])
    ids = padded((5,), 200)[0].repeat(1, 2)
    given = {"max_new_tokens": 8, "eos_token_id": None, "do_sample": False} | LOOKUP
    if family in HYBRIDS:
        with pytest.raises(ValueError, match="Assisted decoding requires a cache that can be crop"):
            ours.generate(ids, **given)
    else:
        assert ours.generate(ids, **given).tolist() == theirs.generate(ids, **given).tolist()
    assert loops == ["theirs"]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5_text"])
def test_drafts_of_either_library(family: str, loops: Loops) -> None:
    theirs, ours = pair(family, FAMILIES[family])
    ids, mask = padded((9,), 200)
    given = {"attention_mask": mask, "max_new_tokens": NEW, "eos_token_id": None}
    given |= {"do_sample": False, "pad_token_id": 0}
    expected = theirs.generate(ids, **given)
    draft = as_transformers(copy.deepcopy(ours.native))
    with torch.no_grad():
        draft.lm_head.weight.add_(0.05 * torch.randn_like(draft.lm_head.weight))
    assert ours.generate(ids, **given, assistant_model=draft).tolist() == expected.tolist()
    assert loops == ["own"]
    if family not in HYBRIDS:
        tokens = ours.generate(ids, **given, assistant_model=theirs)
        assert tokens.tolist() == expected.tolist()
        tokens = theirs.generate(ids, **given, assistant_model=draft)
        assert tokens.tolist() == expected.tolist()


# Caches


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.parametrize("beams", [1, 2])
def test_turns_with_a_cache_of_the_caller(beams: int, name: str) -> None:
    """A DynamicCache sees what is added to it, and either loop goes on from it."""
    theirs, ours = pair("llama")
    ids, _ = padded((6,), 200)
    caches = [DynamicCache(), DynamicCache()]
    for _ in range(2):
        outs = []
        for model, cache in zip((theirs, ours), caches, strict=True):
            given: dict[str, Any] = {name: cache, "eos_token_id": None, "num_beams": beams}
            given |= {"attention_mask": torch.ones_like(ids), "pad_token_id": 0}
            outs.append(model.generate(ids, max_new_tokens=4, do_sample=False, **given))
        assert outs[0].tolist() == outs[1].tolist()
        if beams > 1:
            break  # the caches hold beams
        assert caches[0].get_seq_length() == caches[1].get_seq_length() == ids.shape[1] + 3
        ids = torch.cat((outs[1], ids[:, :3]), 1)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_first_name_of_a_cache_is_the_one_taken() -> None:
    """As in a forward pass, where `cache` stands before its older name."""
    _, ours = pair("llama")
    ids = padded((6,), 200)[0]
    for other in (None, DynamicCache()):
        cache = DynamicCache()
        ours.generate(ids, cache=cache, past_key_values=other, max_new_tokens=3, eos_token_id=None)
        assert cache.get_seq_length() == 8
        assert other is None or other.get_seq_length() == 0


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe"])
def test_forward_passes_with_caches(family: str) -> None:
    """What one call returns goes on in the next, as in transformers; also what its model has
    filled."""
    theirs, ours = pair(family)
    ids = padded((14,), 200)[0].repeat(2, 1)
    for first, more in ((theirs, {}), (ours, {"use_cache": True})):
        with torch.no_grad():
            filled = first(ids[:, :9], **more).cache
            copied = copy.deepcopy(filled)
            expected = theirs(ids).logits
            out = ours(ids[:, 9:12], cache=filled)
            assert out.cache is filled
            assert isinstance(filled, TigonCache)
            assert filled.get_seq_length() == 12
            torch.testing.assert_close(out.logits, expected[:, 9:12], atol=2e-5, rtol=1e-4)
            again = ours(ids[:, 9:], past_key_values=copied).logits
            torch.testing.assert_close(again, expected[:, 9:], atol=2e-5, rtol=1e-4)
    assert ours.train()(ids).cache is None
    ours.eval()


def test_what_searches_ask_of_a_cache() -> None:
    _, ours = pair("llama")
    ids = torch.cat([padded((8,), 200, seed)[0] for seed in (1, 2)])
    with torch.no_grad():
        cache = ours(ids[:, :6]).cache
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([3, 0, 1, 2]))
        cache.batch_select_indices(torch.tensor([0, 1]))
        assert (cache.batch_size, len(cache), cache.is_croppable) == (2, 3, True)
        cache.crop(-2)
        assert cache.get_seq_length() == 4
        rows = ids[[1, 0]]
        out = ours(rows[:, 4:], cache=cache)
        torch.testing.assert_close(out.logits, ours(rows).logits[:, 4:], atol=2e-5, rtol=1e-4)
        cache.crop(3)
        assert cache.get_seq_length() == 3
        cache.reset()
        assert cache.get_seq_length() == 0
        assert ours(ids[:, :2], cache=cache).cache.get_seq_length() == 2


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", *HYBRIDS])
def test_reset(family: str) -> None:
    """Also of a layer that could not drop its last tokens, and of rows of different lengths."""
    _, ours = pair(family, FAMILIES[family])
    ids = padded((6,), 200)[0].repeat(2, 1)
    for native in (KVCache(), ours.native.static_cache(2, 16)):
        cache = TigonCache(native)
        expected = ours(ids, cache=cache).logits
        if not isinstance(native, KVCache):
            ours(ids[:1, :3], cache=TigonCache(native.rows(0, 1)))
        cache.reset()
        assert cache.get_seq_length() == 0
        assert torch.equal(ours(ids, cache=cache).logits, expected)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_caches_that_are_none_of_ours() -> None:
    theirs, ours = pair("llama")
    ids = padded((6,), 200)[0]
    static = StaticCache(config=theirs.config, max_cache_len=16)
    for cache, fault in (
        (static, "the cache is a StaticCache: Tigon's models take over a DynamicCache alone"),
        (EncoderDecoderCache(DynamicCache(), DynamicCache()), "the cache is a EncoderDecoderCache"),
        (((ids, ids),), "the cache is a tuple"),
    ):
        with pytest.raises(TypeError, match=fault):
            ours(ids, cache=cache)
    for family, case in (("deepseek_v3", "plain"), ("lfm2", "plain")):
        other = pair(family, case)[0](ids).cache
        with pytest.raises(ValueError, match=r"layer \d of the cache does not hold 6 tokens of"):
            ours(ids, cache=other)
    with pytest.raises(ValueError, match=r"cache_implementation='offloaded' with what"):
        ours.generate(ids, num_beams=2, cache_implementation="offloaded")
    with pytest.raises(ValueError, match="seed=3 with what transformers' loop alone follows"):
        ours.generate(ids, num_beams=2, seed=3)
    with pytest.raises(NotImplementedError, match=r"generate_batch.* call generate, or serve the"):
        ours.generate_batch([[5, 6]])
    with pytest.raises(NotImplementedError, match="come from the model"):
        TigonCache().update(ids, ids, 0)


@torch.no_grad()
def test_a_cache_of_another_model() -> None:
    """Its keys and values would be taken for this one's, if the shapes are the same."""
    ids = padded((6,), 200)[0]
    one, other = (pair("llama")[1] for _ in range(2))
    options: dict[str, Any] = {"max_new_tokens": 3, "return_dict_in_generate": True}
    for out in (one(ids), one.generate(ids, **options), one.generate(ids, num_beams=2, **options)):
        for call in (other, other.generate):
            with pytest.raises(ValueError, match="the cache holds tokens of another model"):
                call(torch.cat((ids, ids), 1), cache=out.cache)
    cache, copied = one(ids).cache, copy.deepcopy(one(ids).cache)
    expected = one(ids[:, :2], cache=pickle.loads(pickle.dumps(cache))).logits
    assert torch.equal(other(ids[:, :2], cache=copied).logits, expected)
    assert torch.equal(as_transformers(one.native)(ids[:, :2], cache=cache).logits, expected)
    cache.reset()
    assert torch.equal(other(ids, cache=cache).logits, one(ids).logits)


# Who calls it


def test_a_seed_is_of_the_call_alone() -> None:
    _, ours = pair("llama")
    ids = padded((6,), 200)[0]
    before = torch.get_rng_state()
    tokens = [ours.generate(ids, do_sample=True, seed=5, max_new_tokens=6) for _ in range(2)]
    assert tokens[0].tolist() == tokens[1].tolist()
    assert torch.equal(torch.get_rng_state(), before)


def test_hooks_run_in_each_pass(loops: Loops) -> None:
    """Those of accelerate and PEFT too, which put a forward or prepared inputs in place."""
    _, ours = pair("llama")
    ids = padded((6,), 200)[0]
    expected = ours.generate(ids, max_new_tokens=4, eos_token_id=None)
    counts = {"hook": 0, "forward": 0, "inputs": 0}

    def count(name: str, function: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return counted

    handle = ours.register_forward_pre_hook(count("hook", lambda *args: None))
    assert ours.generate(ids, max_new_tokens=4, eos_token_id=None).tolist() == expected.tolist()
    handle.remove()
    ours.forward = count("forward", ours.forward)
    ours.generate(ids, max_new_tokens=4, eos_token_id=None)
    del ours.forward
    ours.prepare_inputs_for_generation = count("inputs", ours.prepare_inputs_for_generation)
    ours.generate(ids, max_new_tokens=4, eos_token_id=None)
    del ours.prepare_inputs_for_generation
    assert counts == {"hook": 4, "forward": 4, "inputs": 4}
    assert loops == ["own", *["theirs"] * 3]


def test_padding_on_the_right_and_only_new_tokens(loops: Loops) -> None:
    """What the native generate refuses is transformers' to do."""
    theirs, ours = pair("llama")
    ids, mask = padded(LENGTHS, 200)
    given: dict[str, Any] = {"max_new_tokens": 5, "eos_token_id": None, "do_sample": False}
    masks: list[dict[str, Any]] = [{"attention_mask": mask.flip(1)}, {}, {"eos_token_id": [5, 3]}]
    for case in masks:
        options = given | case | {"pad_token_id": 3}
        outs = [model.generate(ids.flip(1), **options).tolist() for model in (theirs, ours)]
        assert outs[0] == outs[1]
    outs = []
    for model in (theirs, ours):
        cache = DynamicCache()
        with torch.no_grad():
            model(ids[1:, :5], cache=cache)
        whole = torch.ones(1, 7)
        tokens = model.generate(ids[1:, 5:], attention_mask=whole, cache=cache, **given)
        outs.append(tokens.tolist())
    assert outs[0] == outs[1]
    assert loops == ["theirs", "theirs", "own", "theirs"]


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_embeddings_of_a_prompt(family: str, beside: bool, beams: int, loops: Loops) -> None:
    """Alone, when the output is the new tokens, or with ids beside them, which they replace."""
    ids, mask = padded(LENGTHS, 200)
    given: dict[str, Any] = {"attention_mask": mask, "pad_token_id": 0, "eos_token_id": None}
    given |= {"max_new_tokens": NEW, "do_sample": False, "num_beams": beams}
    given |= {"input_ids": ids} if beside else {}
    models = pair(family)
    with torch.no_grad():
        embeds = models[0].get_input_embeddings()(ids.flip(0))
    theirs, ours = (m.generate(inputs_embeds=embeds, **given).tolist() for m in models)
    assert ours == theirs
    assert loops == ["theirs"]


@pytest.mark.parametrize("kind", [PrefixTuningConfig, PromptTuningConfig])
@pytest.mark.parametrize("beams", [1, 2])
def test_virtual_tokens_of_peft(kind: Any, beams: int) -> None:
    """Greedy tokens are those of the whole text again and again."""
    _, ours = pair("llama", "grouped")
    model = get_peft_model(ours, kind(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "prompt" in name:
                p.copy_(0.5 * torch.randn(p.shape, generator=torch.Generator().manual_seed(2)))
    ids, mask = padded((7, 7), 200)
    mask[1, 2] = 0
    given = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 5, "eos_token_id": None}
    tokens = model.generate(**given, num_beams=beams, do_sample=False, pad_token_id=0)
    assert tokens.shape == (2, 12)
    if beams == 1:
        for _ in range(5):
            with torch.no_grad():
                last = model(input_ids=ids, attention_mask=mask).logits[:, -1:]
            ids = torch.cat((ids, last.argmax(-1)), 1)
            mask = torch.cat((mask, torch.ones(2, 1)), 1)
        assert tokens.tolist() == ids.tolist()


@pytest.mark.slow
def test_pipelines_and_streamers(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    theirs = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    ours = from_pretrained(str(smollm2), dtype=torch.float32)
    chat = [{"role": "user", "content": "Name a color."}]
    texts, prompts = [], ["The sky is", "Once upon a time"]
    tokenizer.padding_side = "left"
    for model in (theirs, ours):
        write = pipeline("text-generation", model=model, tokenizer=tokenizer)
        given = {"max_new_tokens": 8, "do_sample": False}
        texts.append([write(prompts, batch_size=2, **given), write(chat, **given)])
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
        model.generate(**tokenizer("The sky is", return_tensors="pt"), streamer=streamer, **given)
        texts[-1].append("".join(streamer))
    assert texts[0] == texts[1]
    stopped = ours.generate(
        **tokenizer("The sky is", return_tensors="pt"),
        max_new_tokens=20,
        stop_strings=[" the"],
        tokenizer=tokenizer,
        stopping_criteria=[MaxLengthCriteria(12)],
        do_sample=False,
    )
    assert stopped.shape[1] <= 12


def test_models_of_both_libraries_share_what_is_returned() -> None:
    _, ours = pair("llama")
    ids = padded((6,), 200)[0]
    out = ours.generate(ids, max_new_tokens=3, return_dict_in_generate=True, eos_token_id=None)
    assert isinstance(out.cache.native, KVCache)
    text = torch.cat((out.sequences, ids[:, :2]), 1)
    expected = ours.native.generate(text, max_new_tokens=3, eos_token_id=[])
    cache = out.cache.native
    again = ours.native.generate(text, max_new_tokens=3, eos_token_id=[], past_key_values=cache)
    assert again.tolist() == expected.tolist()
