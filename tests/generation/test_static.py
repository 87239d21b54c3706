"""Static caches say what dynamic ones say: every family, ragged prompts, ends, seeds, chunks."""

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tigon
from tests.generation.common import Counted, Letters, blurred, padded, some_ends
from tests.models.tiny import CASES, EVERY, FIRST, reference
from tests.support.contract import V, tiny_llama
from tigon.generation import steps
from tigon.models import from_pretrained
from tigon.utils import graph_capture
from tigon.utils.memory import split_by_size

NEW = 24  # past the windows of 7
CAUSAL = [(m, c) for m, c in EVERY if "use_bidirectional_attention" not in CASES[m][c]]
TURNING = [
    ("llama", "rope dynamic"),
    ("llama", "rope longrope long"),
    ("llama", "rope longrope attention_factor"),
    ("phi3", "longrope"),
]
# Of most families more cases differ in what a cache does not see
STRAIGHT = [case for case in CAUSAL if case in FIRST and case not in TURNING]
FAMILIES = len(STRAIGHT)
STRAIGHT += [
    (m, c) for m, c in CAUSAL if (m, c) not in TURNING + FIRST and CASES[m][c].get("sliding_window")
]


@pytest.fixture(autouse=True)
def _long_texts() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="a text of up to .* tokens exceeds")
        yield


@pytest.fixture
def ragged() -> dict[str, Tensor]:
    ids, mask = padded((3, 11, 1, 7, 11), 97)
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_capture_has_the_mode_of_its_call(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever keeps a cache generates outside of inference mode, and without gradients."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", lambda *args, **kwargs: nullcontext())
    monkeypatch.setattr(graph_capture, "capture_stream", lambda device: None)
    found = []

    def step() -> Tensor:
        found.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return torch.zeros(1)

    with mode():
        steps.GraphedStep(torch.nn.Linear(1, 1), None)._capture(step)
    assert found == [(False, mode is torch.inference_mode)]


@pytest.mark.slow(first=FAMILIES)
@pytest.mark.parametrize(("model_type", "case"), STRAIGHT)
def test_every_family(model_type: str, case: str, tmp_path: Path) -> None:
    reference(model_type, CASES[model_type][case], tmp_path)
    model = from_pretrained(tmp_path)
    ids, mask = padded((3, 11, 8, 6), 211)
    common: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": NEW, "pad_token_id": 0}
    free = model.generate(ids, eos_token_id=[], **common)
    ends = some_ends(free, 11, (2, 3, 20, 4))
    for given in (
        {"eos_token_id": [], "do_sample": True, "seed": 5, "repetition_penalty": 1.2},
        {"eos_token_id": ends},
    ):
        expected = model.generate(ids, **given, **common)
        steps = model.generate(
            ids, cache_implementation="static", prefill_chunk_size=10, **given, **common
        )
        assert steps.tolist() == expected.tolist(), given
    drafted = model.generate(ids, **given, assistant_model=blurred(model, 0.1), **common)
    assert drafted.tolist() == expected.tolist()


@pytest.mark.parametrize(("model_type", "case"), TURNING)
def test_ropes_that_turn_take_a_dynamic_cache(model_type: str, case: str, tmp_path: Path) -> None:
    reference(model_type, CASES[model_type][case], tmp_path)
    model = from_pretrained(tmp_path)
    ids, _ = padded((11, 11), 211)
    for asked in ("static", "quantized"):
        with pytest.raises(ValueError, match=rf"'{asked}': \w+ RoPE rotates .* up to 35 passes"):
            model.generate(ids, max_new_tokens=NEW, cache_implementation=asked)
    with pytest.raises(ValueError, match=r"assistant_model: \w+ RoPE rotates"):
        model.generate(ids, max_new_tokens=NEW, assistant_model=model)
    short = {"max_new_tokens": 5, "eos_token_id": []}  # within all their lengths
    expected = model.generate(ids, **short)
    steps = model.generate(ids, cache_implementation="static", **short)
    assert steps.tolist() == expected.tolist()


def test_proposals_stay_before_the_turn(tmp_path: Path) -> None:
    """A pass reads so many tokens more than its text will have."""
    reference("phi3", CASES["phi3"]["longrope"], tmp_path)  # turns behind 16
    model = from_pretrained(tmp_path)
    ids, mask = padded((9, 4), 211)
    common: dict[str, Any] = {"attention_mask": mask, "eos_token_id": [], "max_new_tokens": 4}
    plain = tiny_llama(vocab_size=211).eval()
    for draft in (model, plain):
        tokens = model.generate(ids, assistant_model=draft, num_assistant_tokens=3, **common)
        assert tokens.tolist() == model.generate(ids, **common).tolist()
        for given in (
            {"num_assistant_tokens": 4},
            {"max_new_tokens": 5, "num_assistant_tokens": 3},
        ):
            with pytest.raises(ValueError, match=r"longrope RoPE .* up to 17 passes 16; proposals"):
                model.generate(ids, assistant_model=draft, **{**common, **given})
    with pytest.raises(ValueError, match="assistant_model: longrope RoPE"):
        plain.generate(ids, assistant_model=model, num_assistant_tokens=4, **common)


@pytest.mark.parametrize("chunk", [1, 4, 9, 10, 12, 8192])
def test_prompts_in_chunks(model: tigon.Llama, ragged: dict[str, Tensor], chunk: int) -> None:
    expected = model.generate(**ragged, max_new_tokens=NEW)
    counted = Counted(model)
    tokens = model.generate(
        **ragged, max_new_tokens=NEW, cache_implementation="static", prefill_chunk_size=chunk
    )
    assert tokens.tolist() == expected.tolist()
    prompts = counted.shapes[: 1 - NEW]
    assert counted.shapes[1 - NEW :] == [(5, 1)] * (NEW - 1)
    assert max(b * t for b, t in prompts) <= chunk
    assert sum(b * t for b, t in prompts) == 33
    if chunk == 8192:
        assert prompts == [(1, 33)]  # flat, without padding


def test_padding_inside_a_prompt(model: tigon.Llama, ragged: dict[str, Tensor]) -> None:
    ragged["attention_mask"][1, 4:6] = 0
    expected = model.generate(**ragged, max_new_tokens=9)
    tokens = model.generate(**ragged, max_new_tokens=9, cache_implementation="static")
    assert tokens.tolist() == expected.tolist()


def test_packs() -> None:
    assert [*split_by_size([3, 4, 5, 20, 1, 1], int, 8)] == [[3, 4], [5], [20], [1, 1]]
    assert [*split_by_size([9], int, 8)] == [[9]]
    assert [*split_by_size([4, 4], int, 8)] == [[4, 4]]
    assert [*split_by_size([1, 1, 1], int, 1)] == [[1], [1], [1]]


@pytest.mark.parametrize("sampled", [False, True])
def test_rows_leave_and_nobody_notices(
    model: tigon.Llama, ragged: dict[str, Tensor], sampled: bool
) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 40, "do_sample": sampled, "pad_token_id": 0}
    settings |= {"repetition_penalty": 1.1, "seed": 3, "min_new_tokens": 3}
    free = model.generate(**ragged, eos_token_id=[], **settings)
    settings["eos_token_id"] = some_ends(free, 11, (1, 2, 30, 5, 9))
    expected = model.generate(**ragged, **settings)
    counted = Counted(model)
    tokens = model.generate(**ragged, cache_implementation="static", **settings)
    assert tokens.tolist() == expected.tolist()
    rows = [b for b, t in counted.shapes if t == 1]
    assert rows[0] == 5
    assert rows[-1] < 3
    assert rows == sorted(rows, reverse=True)


def test_quantized_means_int8(model: tigon.Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    make = steps.Call.make_cache
    monkeypatch.setattr(
        steps.Call, "make_cache", lambda *a, **k: made.append(make(*a, **k)) or made[-1]
    )
    ids = torch.randint(0, V, (2, 9))
    for asked, dtype in (("quantized", torch.int8), ("static", torch.float32)):
        model.generate(ids, max_new_tokens=250, cache_implementation=asked, eos_token_id=[])
        assert made[-1].states[0].buffers.keys.dtype == dtype
        assert made[-1].capacity == 512
    model.generate(ids, max_new_tokens=2)
    assert len(made) == 2  # on a CPU the dynamic one


def test_stop_strings_and_streams(model: tigon.Llama, ragged: dict[str, Tensor]) -> None:
    free = model.generate(**ragged, max_new_tokens=NEW, eos_token_id=[])[:, 11:].tolist()
    spanning = [int(ragged["input_ids"][4, -1]), *free[4][:2]]  # from the prompt on
    strings = [Letters().decode(ids) for ids in (free[0][4:7], free[3][9:12], spanning)]
    settings: dict[str, Any] = {"stop_strings": strings, "tokenizer": Letters(), "pad_token_id": 0}
    settings |= {"max_new_tokens": NEW, "eos_token_id": []}
    expected = model.generate(**ragged, **settings)
    for row, end in ((0, 7), (3, 12), (4, 2)):
        assert expected[row, 11:].tolist() == free[row][:end] + [0] * (NEW - end)
    seen: list[Tensor] = []
    tokens = model.generate(
        **ragged, cache_implementation="static", streamer=seen.append, **settings
    )
    assert tokens.tolist() == expected.tolist()
    assert torch.stack(seen, 1).tolist() == tokens[:, 11:].tolist()


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_scores_that_are_not_finite(model: tigon.Llama, cache: Any, sampled: bool) -> None:
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    ids = torch.tensor([[5, 6], [7, 8]])
    with pytest.raises(ValueError, match=r"row 0: the scores of token 0 after .* are not finite"):
        model.generate(ids, do_sample=sampled, cache_implementation=cache)


def test_a_text_past_the_context_is_said_once_and_before(model: tigon.Llama) -> None:
    model = tiny_llama(max_position_embeddings=12)
    ids = torch.randint(0, V, (2, 9))
    short = torch.ones_like(ids)
    short[:, :6] = 0
    for cache in ("dynamic", "static"):
        counted = Counted(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.generate(ids, max_new_tokens=3, cache_implementation=cache)
            given = {"attention_mask": short, "cache_implementation": cache}
            model.generate(ids, max_new_tokens=9, **given)
            assert not caught
            model.generate(ids, max_new_tokens=9, cache_implementation=cache)
        assert [str(w.message)[:35] for w in caught] == ["a text of up to 18 tokens exceeds m"]
        assert caught[0].filename == __file__
        counted.shapes.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning, match="exceeds max_position_embeddings=12"):
                model.generate(ids, max_new_tokens=9, cache_implementation=cache)
        assert not counted.shapes
