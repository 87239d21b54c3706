"""Preferences learned by an adapter: the reference is the model without it."""

from typing import Any

import pytest

from tests.train import preferences
from tests.train.ranks import train_on
from tigon.train import main

ADAPTER = {"lora.rank": 4, "lora.alpha": 8, "lr": 1e-2}
KEYS = ("loss", "grad_norm", "rewards/chosen", "rewards/margins", "logps/rejected")


@pytest.fixture(scope="module")
def settings(workspace):
    data = preferences.write(workspace.root / "pairs.jsonl", preferences.pairs(21, 5))

    def make(run: str, **changes: Any) -> list[str]:
        same = {"task": "dpo", "data": data, "steps": 4, "save_every": 2, "max_grad_norm": 0}
        return workspace.settings(run, **same | ADAPTER | changes)

    main(make("one"))
    return make


def curves(workspace: Any, run: str) -> list[list[float]]:
    return [workspace.metrics(run, key) for key in KEYS]


def test_it_begins_as_its_reference_and_learns(workspace, settings):
    assert workspace.metrics("one", "loss")[0] == pytest.approx(0.6931471806, abs=1e-6)
    assert workspace.metrics("one", "rewards/chosen")[0] == 0
    assert workspace.metrics("one", "rewards/margins")[-1] > 0.05


def test_the_base_by_its_path_is_the_same_reference(workspace, settings):
    main(settings("apart", reference=workspace.model))
    for curve, expected in zip(curves(workspace, "apart"), curves(workspace, "one"), strict=True):
        assert curve == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_resumed(workspace, settings):
    source = workspace.root / "one/checkpoints/step-00000002"
    main(settings("resumed", resume=source))
    assert curves(workspace, "resumed") == [curve[2:] for curve in curves(workspace, "one")]


@pytest.mark.slow
def test_two_ranks(workspace, settings):
    train_on(2, settings("two"))
    for curve, expected in zip(curves(workspace, "two"), curves(workspace, "one"), strict=True):
        assert curve == pytest.approx(expected, rel=2e-4, abs=1e-5)


def test_recomputed_blocks(workspace, settings):
    main(settings("recomputed", activation_checkpointing="true"))
    assert curves(workspace, "recomputed") == curves(workspace, "one")


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"lora.quantize": "nf4"}, {"task": "reward"}])
def test_packed_and_padded(workspace, settings, more):
    """All rows in each step; under an adapter, over four bits, and with a new head."""
    name, all_rows = "-".join(map(str, more.values())), {"batch_size": 64, **more}
    main(settings(f"packed{name}", **all_rows))
    main(settings(f"padded{name}", packing="false", micro_batch_size=4, **all_rows))
    for key in ("loss", "grad_norm"):
        expected = workspace.metrics(f"packed{name}", key)
        assert len(expected) == 4 and abs(expected[0] - expected[-1]) > 0.05
        assert workspace.metrics(f"padded{name}", key) == pytest.approx(expected, rel=2e-4), key
