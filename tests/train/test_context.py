"""Runs whose ranks share the tokens of rows (gloo, FSDP2) against one process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.numbers import relative_error
from tests.small import EXPERTS, WORDS, write_model
from tests.train import preferences
from tests.train.ranks import Ranks
from tigon.train import load, prepare, start, train
from tigon.train.config import Parallel
from tigon.train.logging import read_metrics

TOLERANCE = 1e-5
SAME = {"steps": 3, "seq_len": 67, "batch_size": 2, "max_grad_norm": 0.1}  # odd
KINDS = [
    "sft",
    "seen",
    "lines",
    "experts",
    "lora",
    "dpo",
    "orpo",
    "kto",
    "grpo",
    "reward",
    "distill",
    "zero",
    "few heads",
    "few heads dpo",
]
FEW = ["few heads", "few heads dpo", "experts"]  # of two heads, which four ranks divide
# What metrics.jsonl has that does not depend on the clock
TIMES = ("seconds", "share", "tokens_per_second", "memory", "own_loss", "mfu", "time")


def run_all(parallel: dict[str, int] | None, runs: list[list[str]]) -> None:
    """Train each on the ranks there are; leave weights.pt in each."""
    torch.set_num_threads(1)
    with start("cpu", parallel=None if parallel is None else Parallel(**parallel)) as world:
        for settings in runs:
            run = prepare(load(None, settings), world)
            assert train(run) == 0
            weights = {
                name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
                for name, p in run.model.named_parameters()
            }
            if world.main:
                torch.save(weights, Path(run.config.run_dir, "weights.pt"))


@pytest.fixture(scope="module")
def kinds(workspace) -> dict[str, dict[str, Any]]:
    """Each objective, and what may be measured, watched, recomputed and added to a model."""
    root = workspace.root
    pairs = preferences.write(root / "pairs.jsonl", preferences.pairs(9, 5))
    kto = preferences.write(root / "kto.jsonl", preferences.labelled(9, 5))
    grpo = preferences.write(root / "grpo.jsonl", preferences.rewarded(5))
    text = root / "text.txt"
    text.write_text(" ".join(WORDS * 30))
    experts = write_model(root / "experts", **EXPERTS | {"num_attention_heads": 2})
    teacher = write_model(root / "teacher", num_hidden_layers=1)
    held_out = f"[{{path: {workspace.held_out}, name: some}}]"
    seen = {"metrics": "entropy", "predictions": "true", "eval_data": held_out}
    watching = "tests.train.watching"
    seen |= {"hooks": f"[{watching}:report, {watching}:FirstAnswers]", "return_logits": "true"}
    seen |= {"sample_prompts": "[a model]", "eval_return_logits": "false"}
    lora = {"lora.rank": 3, "lora.dropout": 0.3}
    few = write_model(root / "few", num_attention_heads=2, num_key_value_heads=1)
    one = write_model(root / "one", num_attention_heads=1, num_key_value_heads=1)
    return {
        "sft": {"steps": 5, "save_every": 2, "keep_last": 0, "activation_checkpointing": "true"},
        "seen": {"steps": 2, "sample_tokens": 4} | seen,
        "lines": {"packing": "false", "logits_to_keep": 6, "loss_reduction": "sequence"},
        "experts": {
            "task": "pretrain",
            "data": text,
            "model": experts,
            "router_aux_loss_coef": 0.5,
        },
        "lora": {"packing": "false", "activation_checkpointing": "true", "lr": 1e-2} | lora,
        "dpo": {"task": "dpo", "data": pairs},
        "orpo": {"task": "orpo", "data": pairs, "activation_checkpointing": 2},
        "kto": {"task": "kto", "data": kto},
        "grpo": {"task": "grpo", "data": grpo, "beta": 0.1, "loss_type": "grpo"},
        "reward": {"task": "reward", "data": pairs},
        "distill": {"task": "distill", "teacher": teacher, "cross_entropy_weight": 0.3},
        "zero": {"sharding": "gradients"},
        # A teacher whose heads are divided in another way
        "few heads": {
            "model": few,
            "task": "distill",
            "teacher": teacher,
            "activation_checkpointing": "true",
        },
        "few heads dpo": {"task": "dpo", "data": pairs, "model": few, "reference": one},
    }


@pytest.fixture(scope="module")
def runs(workspace, kinds) -> Any:
    def settings(way: str, kind: str, **changes: Any) -> list[str]:
        return workspace.settings(f"{kind}-{way}", **SAME | kinds[kind] | changes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REPORT", str(workspace.root / "report-one"))
        run_all(None, [settings("one", kind) for kind in KINDS])
    parallel = {"parallel.context": 2}
    two = [settings("two", kind, **parallel) for kind in KINDS]
    cache = {"TIGON_CACHE": str(workspace.root / "cache")}  # references are computed anew
    report = {"REPORT": str(workspace.root / "report-two")}
    Ranks(2, run_all, {"context": 2}, two, environment=cache | report).finish(400)
    four = [settings("four", kind, **parallel) for kind in ("sft", "experts", "dpo")]
    Ranks(4, run_all, {"context": 2}, four, environment=cache).finish(400)
    row = [settings("row", kind, **{"parallel.context": 4}) for kind in FEW]
    Ranks(4, run_all, {"context": 4}, row, environment=cache).finish(400)
    return settings


def rows_of(workspace, run: str) -> list[dict[str, Any]]:
    rows = read_metrics(workspace.root / run / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not any(t in k for t in TIMES)} for row in rows]


def near(row: dict[str, Any], rel: float = TOLERANCE) -> dict[str, Any]:
    """What another layout logs. Rewards and divergences are small differences of sums of
    log-probabilities, whose rounding they have."""

    def within(name: str) -> float:
        return 3e-5 if any(t in name for t in ("reward", "kl", "margin")) else 2e-6

    return {k: pytest.approx(v, rel=rel, abs=within(k)) for k, v in row.items()}


def assert_same(workspace, kind: str, way: str, first: int = 0) -> None:
    """Everything that is logged of the steps from `first` on, and the weights."""
    expected, found = (rows_of(workspace, f"{kind}-{w}") for w in ("one", way))
    expected = expected[first:]
    assert len(found) == len(expected) > 0
    for old, new in zip(expected, found, strict=True):
        unknown = {key for key, value in old.items() if value is None}  # means of nothing
        assert {key for key, value in new.items() if value is None} == unknown
        old, new = ({k: v for k, v in row.items() if k not in unknown} for row in (old, new))
        assert new == near(old)
    old, new = (torch.load(workspace.root / f"{kind}-{w}" / "weights.pt") for w in ("one", way))
    assert old.keys() == new.keys()
    for name, weight in old.items():
        assert relative_error(new[name], weight) <= TOLERANCE, name


@pytest.mark.timeout(500)
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_that_share_rows(workspace, runs, kind):
    assert_same(workspace, kind, "two")


@pytest.mark.parametrize("kind", ["sft", "experts", "dpo"])
def test_two_groups_of_two(workspace, runs, kind):
    assert_same(workspace, kind, "four")


@pytest.mark.parametrize("kind", FEW)
def test_four_ranks_share_two_heads(workspace, runs, kind):
    assert_same(workspace, kind, "row")


def test_replicas_of_groups(workspace, runs):
    parallel = {"replicate": 2, "context": 2}
    settings = runs("replicas", "lines", parallel=json.dumps(parallel))
    Ranks(4, run_all, parallel, [settings]).finish(400)
    assert_same(workspace, "lines", "replicas")


def test_what_is_written_of_an_evaluation(workspace, runs):
    for name in ("predictions-step-00000002.jsonl", "samples.jsonl"):
        expected, found = (
            [json.loads(line) for line in (workspace.root / run / name).read_text().splitlines()]
            for run in ("seen-one", "seen-two")
        )
        assert len(expected) == len(found) > 0
        for old, new in zip(expected, found, strict=True):
            assert old.keys() == new.keys()
            for key, value in old.items():
                if key != "entropy":
                    assert new[key] == value, key


def test_hooks_of_each_rank_see_everything(workspace, runs):
    expected = (workspace.root / "report-one-0").read_text()
    assert any(json.loads(line)["right"] for line in expected.splitlines())
    for rank in range(2):
        assert (workspace.root / f"report-two-{rank}").read_text() == expected


def test_checkpoints_go_on_in_other_layouts(workspace, runs):
    source = workspace.root / "sft-two/checkpoints/step-00000002"
    run_all(None, [runs("two-one", "sft", resume=source)])
    assert_same(workspace, "sft", "two-one", first=2)
    source = workspace.root / "sft-one/checkpoints/step-00000002"
    settings = runs("one-four", "sft", resume=source, **{"parallel.context": 4})
    Ranks(4, run_all, {"context": 4}, [settings]).finish(400)
    assert_same(workspace, "sft", "one-four", first=2)
