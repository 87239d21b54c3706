"""Ranks that share the tokens of rows compute what one rank computes (gloo, fp32)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.models.contract import TINY
from tests.models.tiny import CASES, FIRST, SIZES
from tests.parallel.context_ranks import CALLS, rank_main
from tests.train.ranks import Ranks

# Beside the first of each family: windows, both sides, and RoPEs that turn with the longest row
MORE = [
    ("mistral", "window"),
    ("gemma3_text", "both sides"),
    ("llama", "rope dynamic"),
    ("llama", "rope longrope long"),
    ("llama", "one kv head"),
    ("llama", "tied"),
    ("qwen2_moe", "some dense"),
    ("ministral3", "queries grow"),
]
LLAMA = {**TINY, "model_type": "llama"}


def cases() -> dict[str, dict[str, Any]]:
    made: dict[str, dict[str, Any]] = {}

    def add(
        name: str, config: dict[str, Any], call: str, batch: str, ranks: Any, **more: Any
    ) -> None:
        case = {"config": config, "call": call, "batch": batch, "ranks": ranks}
        made[name] = case | more

    def pair() -> tuple[int, int]:  # in turns, so that two pairs work at a time
        return ((0, 1), (2, 3))[len(made) % 2]

    balanced = {"router_aux_loss_coef": 0.5, "output_router_logits": True}
    for model_type, case in dict.fromkeys(FIRST + MORE):
        config = SIZES | CASES[model_type][case] | balanced | {"model_type": model_type}
        batch = "long" if case.startswith("rope") else "packed and padded"
        recomputed = {"recomputed": len(made) % 3 == 0}
        add(f"{model_type}, {case}", config, "trained", batch, pair(), **recomputed)
    for call in CALLS:
        for batch in ("packed and padded", "padded", "restarting", "two tokens each"):
            if call != "generated" or batch == "padded":
                add(f"{call}, {batch}", LLAMA, call, batch, pair())
    experts = LLAMA | balanced | {"model_type": "mixtral", "num_local_experts": 4}
    add("experts, an odd row", experts, "trained", "restarting", pair())
    add("experts by sequence", experts, "by sequence", "padded", pair())
    for batch in ("restarting", "padded"):
        add(f"four ranks, two kv heads, {batch}", LLAMA, "trained", batch, (0, 1, 2, 3))
        six = LLAMA | {"num_attention_heads": 6}
        add(f"three ranks, two kv heads, {batch}", six, "log probabilities", batch, (0, 1, 2))
    add("three ranks, four heads", LLAMA, "trained", "padded", (0, 1, 2))
    return made


EVERY = cases()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, dict[str, Any]]]]:
    root: Path = tmp_path_factory.mktemp("context")
    Ranks(4, rank_main, root, EVERY).finish()
    yield [json.loads((root / f"{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.parametrize("name", [name for name in EVERY if name != "three ranks, four heads"])
def test_ranks_compute_what_one_does(results: Any, name: str) -> None:
    for rank in EVERY[name]["ranks"]:
        errors = results[rank][name]
        assert errors and {n: e for n, e in errors.items() if not e <= 1e-5} == {}


def test_heads_that_cannot_be_divided(results: Any) -> None:
    error = results[0]["three ranks, four heads"]["error"]
    assert error.startswith("4 query heads cannot be divided over 3 ranks")
    assert "give parallel.context a divisor of 4" in error
