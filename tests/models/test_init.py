"""Random weights: the same from any number of threads, and module by module, as ranks that share a
model draw them."""

import itertools
from typing import Any

import pytest
import torch

from tests.parallel.test_tensor import MOE, SIZES, TWO
from tigon.models import MODELS, init, materialize
from tigon.models.init import init_sharded_weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", TWO)
def test_parts_of_one_rank_are_the_whole(name: str, dtype: torch.dtype) -> None:
    kind, changes = TWO[name]
    values: dict[str, Any] = SIZES | {"model_type": kind} | changes

    def made(device: str) -> Any:
        return MODELS[kind].from_config(values, dtype=dtype, device=device)

    torch.manual_seed(5)
    expected = made("cpu")
    after = torch.rand(1)
    model = made("meta")
    materialize(model, torch.device("cpu"))
    torch.manual_seed(5)
    init_sharded_weights(model, made("meta"))
    assert torch.equal(torch.rand(1), after)
    found = model.state_dict()
    assert found.keys() == expected.state_dict().keys()
    for key, value in expected.state_dict().items():
        assert torch.equal(found[key], value), key
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == expected.ties_head


def test_any_threads_draw_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "CHUNK", 1000)
    sizes = SIZES | MOE | {"model_type": "qwen3_moe", "initializer_range": 0.5}
    states = []
    for cpus in (1, 3):
        monkeypatch.setattr(init, "count_rank_cpus", lambda cpus=cpus: cpus)
        torch.manual_seed(5)
        with torch.inference_mode(cpus == 3):  # a mode that the threads do not inherit
            states.append(MODELS["qwen3_moe"].from_config(sizes, device="cpu").state_dict())
    few, many = states
    for key, value in few.items():
        assert torch.equal(value, many[key]), key
    values = torch.cat([x.flatten() for x in few.values() if x.dim() > 1])
    assert values.std().item() == pytest.approx(0.5, rel=0.02)
    assert len(values.unique()) > 0.9 * len(values)  # every chunk has numbers of its own


def test_a_seed_draws_what_its_version_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who changes the numbers here raises DRAWS: adapters are resumed over weights drawn anew."""
    assert init.CHUNK == 1 << 20
    monkeypatch.setattr(init, "CHUNK", 100)
    torch.manual_seed(5)
    sizes = SIZES | MOE | {"model_type": "qwen3_moe", "initializer_range": 0.5}
    model = MODELS["qwen3_moe"].from_config(sizes, device="cpu")
    values = torch.cat([p.detach().flatten() for p in model.parameters() if p.dim() > 1]).double()
    order = torch.linspace(-1, 1, len(values), dtype=torch.double)
    assert (init.DRAWS, values @ order) == (2, pytest.approx(-15.82513, abs=1e-3))


def test_rows_that_a_rank_does_not_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "CHUNK", 100)
    whole, part = torch.zeros(40, 25), torch.zeros(40, 25)
    marks = torch.zeros(40, dtype=torch.bool)
    marks[9:18] = True
    init._draw_normal(whole, 1.0, itertools.count(7), torch.ones_like(marks))
    init._draw_normal(part, 1.0, itertools.count(7), marks)
    assert whole.count_nonzero() == 1000
    whole[:8] = whole[20:] = 0  # a chunk has four rows
    assert torch.equal(part, whole)
