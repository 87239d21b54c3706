"""Runs whose ranks share each layer (gloo), with updates in backward, Muon and products of 8 bits,
against one process."""

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader

from tests.numbers import relative_error
from tests.small import EXPERTS, write_model
from tests.train.checkpoints import assert_equal
from tests.train.ranks import Ranks
from tigon.train import load, prepare, start, train
from tigon.train.config import Parallel

pytestmark = pytest.mark.slow
STEPS = 5
SAME: dict[str, Any] = {
    **{"steps": STEPS, "warmup_steps": 2, "seq_len": 67, "batch_size": 2, "max_grad_norm": 0},
    **{"weight_decay": 0.1, "save_every": 0},
}
ON = {"optimizer_in_backward": "true"}
# The ranks, their layout, and the rows of a micro-batch, which is a step's only one. Of two kv
# heads each of four ranks has one that another has, too
WAYS = {
    "one": (1, {}, 2),
    "two": (2, {"tensor": 2}, 2),
    "four": (4, {"tensor": 4}, 2),
    "both": (4, {"fsdp": 2, "tensor": 2}, 1),
    "expert": (2, {"expert": 2}, 1),
    "context": (4, {"context": 2, "expert": 2}, 1),
}
IN_BACKWARD: dict[str, tuple[str, dict[str, Any]]] = {  # on which ranks, and what differs
    "four": ("four", {}),
    "experts": ("both", {"activation_checkpointing": "true"}),
    "lora": ("two", {"lora.rank": 3}),
    "whole experts": ("expert", {}),
    "whole experts, sharded": ("context", {}),
}


def run_all(parallel: dict[str, int], runs: list[list[str]]) -> None:
    torch.set_num_threads(1)
    with start("cpu", parallel=Parallel(**parallel)) as world:
        for settings in runs:
            assert train(prepare(load(None, settings), world)) == 0


def saved(workspace, run: str, number: int = STEPS) -> dict[str, torch.Tensor]:
    """Weights and states, whole."""
    directory = workspace.root / run / f"checkpoints/step-{number:08d}"
    reader = HuggingFaceStorageReader(str(directory))
    known = reader.read_metadata().state_dict_metadata
    state = {n: torch.empty(info.size, dtype=info.properties.dtype) for n, info in known.items()}
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


MUON: dict[str, Any] = {
    **{"optimizer": "muon", "lr": 1e-2, "adamw_lr": 1e-3, "save_every": 2, "keep_last": 0}
}
BF16 = {"dtype": "bfloat16", "lr": 1e-3}
ZERO: dict[str, Any] = {
    **{"micro_batch_size": 1, "batch_size": 4, "ema_decay": 0.5, "max_grad_norm": 0.1},
    **{"save_every": 2, "keep_last": 0},
}
OF_EXPERTS = ["both", "expert", "context"]
# What goes on from another layout's second step: on which ranks, and from which
AGAIN = {
    "muon-fewer": ("one", "four"),
    "muon-more": ("both", "one"),
    "zero-fewer": ("one", "both"),
    "zero-more": ("both", "one"),
}


def sharding(way: str) -> dict[str, str]:
    return {"sharding": "full" if way == "one" else "gradients"}


@pytest.fixture(scope="module")
def runs(workspace) -> None:
    experts = write_model(workspace.root / "experts", **EXPERTS | {"num_experts": 4})
    of: dict[str, list[list[str]]] = {way: [] for way in WAYS}

    def add(way: str, run: str, **changes: Any) -> None:
        _, parallel, rows = WAYS[way]
        layout = {f"parallel.{name}": size for name, size in parallel.items()}
        its = SAME | {"micro_batch_size": rows} | layout | changes
        of[way].append(workspace.settings(run, **its))

    for case, (way, changes) in IN_BACKWARD.items():
        own = changes | ({"model": experts} if "experts" in case else {})
        add(way, f"{case}-after", **own)
        add(way, f"{case}-in", **own | ON)
    for way in ("one", "two", "four", "both"):
        add(way, f"muon-{way}", **MUON)
    for way in ("one", *OF_EXPERTS):
        add(way, f"muon-experts-{way}", **MUON, model=experts)
    for way in ("one", "both"):
        add(way, f"fp8-{way}", **BF16, fp8="true")
    add("one", "bf16-one", **BF16)
    for way in ("one", "two", "both"):
        add(way, f"zero-{way}", **ZERO, **sharding(way))
    add("both", "muon-zero", **MUON, sharding="gradients")
    for way, settings in of.items():
        count, parallel, _ = WAYS[way]
        said = Ranks(count, run_all, parallel, settings).finish(400)
        assert "fp8=true leaves" not in said
        settings.clear()
    for run, (way, source) in AGAIN.items():
        kind = run.partition("-")[0]
        begun = workspace.root / f"{kind}-{source}/checkpoints/step-00000002"
        add(way, run, resume=begun, **(MUON if kind == "muon" else ZERO | sharding(way)))
    for way, settings in of.items():
        if settings:
            Ranks(WAYS[way][0], run_all, WAYS[way][1], settings).finish(400)


@pytest.mark.parametrize("case", IN_BACKWARD)
def test_updates_in_backward_are_those_after_it(workspace, runs, case):
    """On ranks that have norms and kv heads alike. The order in which four ranks add up gradients
    depends on what is added up together; two have the same bits."""
    way, _ = IN_BACKWARD[case]
    after, found = (saved(workspace, f"{case}-{w}") for w in ("after", "in"))
    for key in ("loss", "grad_norm"):
        expected, ours = (workspace.metrics(f"{case}-{w}", key) for w in ("after", "in"))
        assert len(ours) == STEPS
        assert ours == (expected if way != "four" else pytest.approx(expected, rel=1e-5)), key
    if way != "four":
        return assert_equal(found, after)
    assert found.keys() == after.keys()
    for name, values in after.items():
        assert relative_error(found[name], values) < 1e-6, name


def assert_as_one(workspace, one: str, run: str) -> dict[str, torch.Tensor]:
    """What is logged, weights and states; these."""
    for key in ("loss", "grad_norm"):
        expected, found = (workspace.metrics(name, key) for name in (one, run))
        assert len(found) == STEPS - 2 * (run in AGAIN)
        assert found == pytest.approx(expected[-len(found) :], rel=1e-5), key
    expected, states = (saved(workspace, name) for name in (one, run))
    assert states.keys() == expected.keys()
    for name, values in expected.items():
        assert relative_error(states[name], values) < 1e-5, name
    return states


@pytest.mark.parametrize("way", ["two", "four", "both", "fewer", "more", "zero"])
def test_muon_is_as_on_one_rank(workspace, runs, way):
    """Matrices that ranks have rows or columns of, and kv heads that several ranks have; and runs
    that go on in another layout with momentum."""
    states = assert_as_one(workspace, "muon-one", f"muon-{way}")
    assert any(name.startswith("optimizer.momentum_buffer.") for name in states)


@pytest.mark.parametrize("way", OF_EXPERTS)
def test_muon_of_experts_is_as_on_one_rank(workspace, runs, way):
    """Of which ranks have units, or some whole."""
    assert_as_one(workspace, "muon-experts-one", f"muon-experts-{way}")


@pytest.mark.parametrize("way", ["two", "both", "fewer", "more"])
def test_gradients_of_a_part_are_divided(workspace, runs, way):
    """By sharding=gradients, over the ranks with the same part and other rows."""
    assert_as_one(workspace, "zero-one", f"zero-{way}")


def test_fp8_products_are_as_near_to_bfloat16(workspace, runs):
    """They differ between the two: scales are of what a rank sums over."""
    for key in ("loss", "grad_norm"):
        names = ("bf16-one", "fp8-one", "fp8-both")
        exact, one, both = (torch.tensor(workspace.metrics(run, key)) for run in names)
        assert len(both) == STEPS and not torch.equal(both, one)
        assert relative_error(both, exact) <= 2 * relative_error(one, exact) + 1e-3, key
