"""Runs whose ranks share each layer (gloo, FSDP2) against one process: all objectives, evaluation
and what it writes, and ranks that share layers and the tokens of rows."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.numbers import relative_error
from tests.small import EXPERTS, write_model
from tests.train.ranks import Ranks
from tests.train.test_context import SAME, TOLERANCE, kinds, near, rows_of
from tigon.train import load, prepare, start, train
from tigon.train.config import Parallel

__all__ = ["kinds"]  # a fixture
KINDS = ["seen", "lines", "experts", "dpo", "kto", "distill", "reward", "reward-lora"]
FEW = "few heads dpo"  # one on a rank, of which two ranks of four have parts of the queries
FOUR = ["lines", "experts", "dpo", "reward", FEW]
WAYS = {"two": (2, {"tensor": 2}, KINDS), "four": (4, {"tensor": 2, "context": 2}, FOUR)}


def run_all(parallel: dict[str, int], runs: list[list[str]]) -> None:
    """Train each on the ranks there are; leave the model in each."""
    torch.set_num_threads(1)
    with start("cpu", parallel=Parallel(**parallel)) as world:
        for settings in runs:
            run = prepare(load(None, settings), world)
            assert train(run) == 0
            run.model.save_pretrained(Path(run.config.run_dir, "trained"))


@pytest.fixture(scope="module")
def runs(workspace, kinds) -> None:
    experts = write_model(workspace.root / "more-heads", **EXPERTS)

    merged = {"lora.rank": 3, "lora.merge": "true", "export": "true"}
    kinds["reward-lora"] = kinds["reward"] | merged

    def settings(way: str, kind: str) -> list[str]:
        changes = {f"parallel.{name}": size for name, size in WAYS.get(way, (1, {}))[1].items()}
        if kind == "experts":
            changes["model"] = experts
        if kind == "seen":
            changes |= {"hooks": "[]", "return_logits": "false", "eval_return_logits": "null"}
        return workspace.settings(f"{kind}-{way}", **SAME | kinds[kind] | changes)

    del kinds[FEW]["reference"]  # of one head, which two ranks cannot divide
    run_all({}, [settings("one", kind) for kind in [*KINDS, FEW]])
    cache = {"TIGON_CACHE": str(workspace.root / "cache")}  # references are computed anew
    for way, (count, parallel, some) in WAYS.items():
        all_settings = [settings(way, kind) for kind in some]
        Ranks(count, run_all, parallel, all_settings, environment=cache).finish(400)


@pytest.mark.timeout(500)
@pytest.mark.parametrize(("way", "kind"), [(w, k) for w, (*_, some) in WAYS.items() for k in some])
def test_ranks_that_share_layers(workspace, runs, way, kind):
    """Everything that is logged, and the weights."""
    # DPO's gradient is a small difference of two sums: on some CPUs 1.3e-5 is rounding
    tolerance = 3 * TOLERANCE if kind == "dpo" else TOLERANCE
    expected, found = (rows_of(workspace, f"{kind}-{w}") for w in ("one", way))
    assert len(found) == len(expected) > 0
    for old, new in zip(expected, found, strict=True):
        unknown = {key for key, value in old.items() if value is None}  # means of nothing
        assert {key for key, value in new.items() if value is None} == unknown
        old, new = ({k: v for k, v in row.items() if k not in unknown} for row in (old, new))
        assert new == near(old, tolerance)
    files = (workspace.root / f"{kind}-{w}/trained/model.safetensors" for w in ("one", way))
    old, new = map(load_file, files)
    assert old.keys() == new.keys()
    for name, weight in old.items():
        assert relative_error(new[name], weight) <= tolerance, name


def test_what_is_written_of_an_evaluation(workspace, runs):
    def read(run: str, name: str) -> list[dict[str, Any]]:
        text = (workspace.root / run / name).read_text()
        return [json.loads(line) for line in text.splitlines()]

    for name in ("predictions-step-00000002.jsonl", "samples.jsonl"):
        expected, found = (read(run, name) for run in ("seen-one", "seen-two"))
        assert len(expected) == len(found) > 0
        for old, new in zip(expected, found, strict=True):
            assert {k: v for k, v in new.items() if k != "entropy"} == {
                k: v for k, v in old.items() if k != "entropy"
            }
