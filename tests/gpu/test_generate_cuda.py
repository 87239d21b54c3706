"""Generation on a CUDA device: from graphs as step by step, without waiting, leaving nothing."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tigon
from tests.generation.common import blurred, padded, some_ends
from tigon.generation import loop, steps

pytestmark = pytest.mark.gpu

Given = dict[str, Any]
Model = tigon.CausalLM
SIZES: Given = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 5003,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,  # likely tokens, that another order of sums does not change
}
FAMILIES: Given = {
    "llama": (tigon.Llama, {}),
    "mistral": (tigon.Mistral, {"sliding_window": 24}),
    "gemma2": (
        tigon.Gemma2,
        {"sliding_window": 24, "query_pre_attn_scalar": 64, "tie_word_embeddings": False},
    ),
    "qwen3": (tigon.Qwen3, {}),
    "olmo2": (tigon.Olmo2, {}),
    "qwen3_moe": (
        tigon.Qwen3Moe,
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 128},
    ),
}
LENGTHS = (3, 40, 17, 1, 29)
NEW = 48
SAMPLED: Given = {"do_sample": True, "temperature": 1.3, "top_p": 0.95, "seed": 5}


def build(family: str = "llama", dtype: torch.dtype = torch.float32) -> tigon.CausalLM:
    torch.manual_seed(0)
    cls, overrides = FAMILIES[family]
    return cls.from_config({**SIZES, **overrides}, dtype=dtype, device="cuda").eval()


@pytest.fixture(scope="module")
def model() -> tigon.CausalLM:
    return build()


@pytest.fixture
def ragged() -> Given:
    ids, mask = padded(LENGTHS, SIZES["vocab_size"])
    return {"input_ids": ids.cuda(), "attention_mask": mask.cuda(), "pad_token_id": 0}


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many steps were left at each capture."""
    made: list[int] = []
    capture = steps.GraphedStep._capture

    def count(self: steps.GraphedStep, step: Any) -> None:
        made.append(1)
        capture(self, step)

    monkeypatch.setattr(steps.GraphedStep, "_capture", count)
    return made


@pytest.fixture
def eagerly(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    """Generates without graphs."""

    def generate(model: Model, **given: Any) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(steps, "FEW_STEPS", 10**9)
            return model.generate(**given)

    return generate


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("given", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_graph_says_what_steps_say(
    family: str, given: Given, ragged: Given, captures: list[int], eagerly: Any
) -> None:
    model = build(family)
    ragged |= {"max_new_tokens": NEW, "eos_token_id": [], **given}
    tokens = model.generate(**ragged)
    assert len(captures) == 1
    assert tokens.tolist() == eagerly(model, **ragged).tolist()
    assert len(captures) == 1
    dynamic = model.generate(**ragged, cache_implementation="dynamic")
    assert len(captures) == 1
    assert tokens.tolist() == dynamic.tolist()
    assert len({*tokens[:, -NEW:].flatten().tolist()}) > 20  # and not the same again and again


@pytest.mark.parametrize(
    "given",
    [
        {"min_new_tokens": 20},
        {"min_new_tokens": 20, "num_return_sequences": 3, **SAMPLED},
        {"num_return_sequences": 2, **SAMPLED},
    ],
    ids=["greedy", "sampled", "several"],
)
def test_settings_in_a_graph(
    given: Given, model: Model, ragged: Given, captures: list[int], eagerly: Any
) -> None:
    ragged |= {"max_new_tokens": NEW}
    ends = model.generate(**ragged, eos_token_id=[])[:, -NEW:][:, :3].flatten().tolist()
    ragged |= {"eos_token_id": ends, **given}
    captures.clear()
    tokens = model.generate(**ragged)
    assert len(captures) >= 1
    assert len(tokens) == len(LENGTHS) * given.get("num_return_sequences", 1)
    assert tokens.tolist() == eagerly(model, **ragged).tolist()
    assert tokens.tolist() == model.generate(**ragged, cache_implementation="dynamic").tolist()
    new = tokens[:, max(LENGTHS) :]
    if "min_new_tokens" in given:
        assert not torch.isin(new[:, :20], torch.tensor(ends, device="cuda")).any()
    if "do_sample" not in given:
        drafted = model.generate(**ragged, assistant_model=model)
        assert tokens.tolist() == drafted.tolist()
    else:
        assert len({*map(tuple, new.tolist())}) > len(LENGTHS)


def test_a_graph_under_autocast(
    model: Model, ragged: Given, captures: list[int], eagerly: Any
) -> None:
    ragged |= {"max_new_tokens": NEW, "eos_token_id": []}
    with torch.autocast("cuda", torch.bfloat16):
        tokens = model.generate(**ragged)
        assert len(captures) == 1
        assert tokens.tolist() == eagerly(model, **ragged).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache", ["static", "quantized"])
def test_half_precision(
    dtype: torch.dtype, cache: Any, ragged: Given, captures: list[int], eagerly: Any
) -> None:
    model = build("gemma2", dtype)
    ragged |= {"max_new_tokens": NEW, "eos_token_id": [], "cache_implementation": cache}
    for given in ({}, SAMPLED, {"repetition_penalty": 1.3}):
        tokens = model.generate(**ragged, **given)
        assert tokens.tolist() == eagerly(model, **ragged, **given).tolist()
    assert len(captures) == 3


def test_one_row_and_many(model: Model, captures: list[int]) -> None:
    for rows in (1, 2, 33):
        ids = torch.randint(0, 5003, (rows, 19), device="cuda")
        tokens = model.generate(ids, max_new_tokens=NEW, eos_token_id=[])
        dynamic = model.generate(
            ids, max_new_tokens=NEW, eos_token_id=[], cache_implementation="dynamic"
        )
        assert tokens.tolist() == dynamic.tolist()
    assert len(captures) == 3
    model.generate(ids, max_new_tokens=loop.FEW_STEPS, eos_token_id=[])
    assert len(captures) == 3  # too few to pay


@pytest.mark.parametrize("given", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("assisted", [False, True])
def test_rows_leave_and_graphs_are_made_anew(
    model: Model, given: Given, assisted: bool, ragged: Given, captures: list[int], eagerly: Any
) -> None:
    assistant = blurred(model, 0.02) if assisted else None
    ragged |= {"max_new_tokens": 120, "assistant_model": assistant, **given}
    free = model.generate(**ragged, eos_token_id=[])
    ragged["eos_token_id"] = some_ends(free, 40, (4, 100, 12, 30, 7))
    captures.clear()
    seen: list[Tensor] = []
    tokens = model.generate(**ragged, streamer=seen.append)
    assert len(captures) > 1
    assert torch.stack(seen, 1).tolist() == tokens[:, 40:].tolist()
    assert tokens.tolist() == eagerly(model, **ragged).tolist()
    if not (assisted and given):  # else a seed draws others
        plain = ragged | {"assistant_model": None, "cache_implementation": "dynamic"}
        assert tokens.tolist() == model.generate(**plain).tolist()


def test_the_global_random_state(model: Model, ragged: Given) -> None:
    ragged |= {"max_new_tokens": NEW, "do_sample": True, "eos_token_id": []}
    said = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        said.append(model.generate(**ragged).tolist())
    assert said[0] == said[1] != said[2]
    assert model.generate(**ragged).tolist() != model.generate(**ragged).tolist()
    before = torch.cuda.get_rng_state()
    model.generate(**ragged, seed=3)
    assert torch.equal(torch.cuda.get_rng_state(), before)


@pytest.mark.parametrize("way", ["greedy", "sampled", "assisted"])
def test_scores_criteria_and_turns(
    model: Model, way: str, ragged: Given, captures: list[int]
) -> None:
    """From graphs and from steps with a growing cache alike, though rows end at different times."""
    ragged |= SAMPLED if way == "sampled" else {}
    free = model.generate(**ragged, max_new_tokens=NEW, eos_token_id=[])
    ends = some_ends(free, 40, (2, 30, 9, 20, 40))
    ragged |= {"max_new_tokens": NEW, "eos_token_id": ends, "return_dict_in_generate": True}
    ragged |= {"output_scores": True, "output_logits": True}
    ragged["stopping_criteria"] = [lambda ids, scores: ids[:, -1] == int(free[1, 40 + 25])]
    assistant = {"assistant_model": blurred(model, 0.1)} if way == "assisted" else {}
    out = model.generate(**ragged, **assistant)
    captured = len(captures)
    assert captured
    plain = model.generate(**ragged, cache_implementation="dynamic")
    assert out.sequences.tolist() == plain.sequences.tolist()
    for name in ("scores", "logits"):
        for a, b in zip(out[name], plain[name], strict=True):
            torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)
    ids = torch.cat((out.sequences, free[:, :4]), 1)
    mask = torch.ones_like(ids)
    mask[:, :40], mask[:, 40:-4] = ragged["attention_mask"], out.sequences[:, 40:] != 0
    ragged |= {"input_ids": ids, "attention_mask": mask}
    again = model.generate(**ragged, **assistant, past_key_values=out.past_key_values)
    plain = model.generate(**ragged, cache_implementation="dynamic")
    assert again.sequences.tolist() == plain.sequences.tolist()


@pytest.mark.parametrize("assisted", [False, True])
def test_nobody_waits_between_steps(model: Model, assisted: bool, ragged: Given) -> None:
    draft = blurred(model, 0.0) if assisted else None  # so that rows keep pace, and none leaves
    ragged |= {"max_new_tokens": 200, "assistant_model": draft, "eos_token_id": []}
    ragged |= {"do_sample": True, "repetition_penalty": 1.1, "top_p": 0.9, "seed": 1}
    expected = model.generate(**ragged)
    columns: list[Tensor] = []

    def watch(column: Tensor) -> None:
        columns.append(column)
        # All rounds of 1 to 6 tokens that come before the capture are over by then
        if len(columns) == 60:
            torch.cuda.set_sync_debug_mode("error")
        if len(columns) == 150:
            torch.cuda.set_sync_debug_mode("default")

    try:
        tokens = model.generate(**ragged, streamer=watch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert tokens.tolist() == expected.tolist()
    assert torch.stack(columns, 1).tolist() == tokens[:, 40:].tolist()


def test_eager_steps_do_not_wait_either(model: Model, ragged: Given, eagerly: Any) -> None:
    columns: list[Tensor] = []

    def watch(column: Tensor) -> None:
        columns.append(column)
        if len(columns) in (10, 40):
            torch.cuda.set_sync_debug_mode("error" if len(columns) == 10 else "default")

    try:
        eagerly(model, **ragged, max_new_tokens=NEW, eos_token_id=[], streamer=watch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(columns) == NEW


def test_the_host_runs_ahead(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that come late are surplus only behind the end, of which there are LAG at most."""
    ids = torch.randint(0, 5003, (1, 19), device="cuda")
    free = model.generate(ids, max_new_tokens=80, eos_token_id=[])[0, 19:].tolist()
    end = next(i for i in range(30, 80) if free[i] not in free[:i])
    for late in (True, False):
        with monkeypatch.context() as patch:
            if late:
                patch.setattr(loop.HostCopies, "finished", lambda *_: False)
            seen: list[int] = []
            tokens = model.generate(
                ids,
                max_new_tokens=80,
                eos_token_id=free[end],
                streamer=lambda new, seen=seen: seen.append(int(new)),
            )
        assert tokens[0, 19:].tolist() == seen == free[: end + 1]


@pytest.fixture
def no_garbage() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_nothing_is_kept(
    model: Model, ragged: Given, captures: list[int], no_garbage: None
) -> None:
    draft = blurred(model, 0.02)
    ragged |= {"max_new_tokens": NEW, "eos_token_id": []}
    held, reserved = [], []
    for _ in range(6):
        for given in ({}, SAMPLED, {"assistant_model": draft}):
            model.generate(**ragged, **given)
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
        reserved.append(torch.cuda.memory_reserved())
    assert len(captures) >= 18
    assert held[-1] == held[1]
    assert reserved[-1] <= max(reserved[:3])


def test_a_graph_of_the_caller_draws_too(model: Model, ragged: Given) -> None:
    """Both register the device's own generator, ours first, and in inference mode."""
    own, numbers, columns = torch.cuda.CUDAGraph(), torch.empty(8, device="cuda"), []

    def capture(column: Tensor) -> None:
        columns.append(column)
        if len(columns) == 20:
            with torch.inference_mode(False), torch.cuda.graph(own):
                numbers.uniform_()

    ragged |= {"max_new_tokens": NEW, "do_sample": True, "eos_token_id": []}
    model.generate(**ragged, streamer=capture)
    own.replay()
    first = numbers.clone()
    model.generate(**ragged)
    own.replay()
    assert not torch.equal(first, numbers)


def test_caller_in_inference_mode_or_other_stream(model: Model, ragged: Given) -> None:
    ragged |= {"max_new_tokens": NEW, "eos_token_id": []}
    expected = model.generate(**ragged)
    with torch.inference_mode():
        assert model.generate(**ragged).tolist() == expected.tolist()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert model.generate(**ragged).tolist() == expected.tolist()


def test_plain_torch_is_never_captured(model: Model, ragged: Given, captures: list[int]) -> None:
    ragged |= {"max_new_tokens": NEW, "eos_token_id": []}
    with tigon.kernels.use("reference"):
        tokens = model.generate(**ragged)
    assert not captures
    assert tokens.tolist() == model.generate(**ragged).tolist()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_a_device_that_is_not_the_current_one(ragged: Given) -> None:
    first, second = build(), build().to("cuda:1")
    ragged |= {"max_new_tokens": NEW, "eos_token_id": [], **SAMPLED}
    assert second.generate(**ragged).tolist() == first.generate(**ragged).tolist()


def test_random_numbers_after_a_capture_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model, capture = build(), steps.GraphedStep._capture

    def ask(self: steps.GraphedStep, step: Any) -> None:
        capture(self, lambda: step() + float(step().sum()))

    monkeypatch.setattr(steps.GraphedStep, "_capture", ask)
    with pytest.raises(RuntimeError):
        model.generate(torch.ones(2, 8, dtype=torch.long, device="cuda"), max_new_tokens=64)
    assert torch.rand(4, device="cuda").isfinite().all()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
