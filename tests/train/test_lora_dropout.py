"""Runs whose adapter has dropout: the same draws wherever and however often a step is computed."""

import json
from typing import Any

import pytest
import torch

from tests.train.adapters import SETTINGS, assert_same_curve, step
from tests.train.ranks import train_on
from tigon.train import load, main, prepare


@pytest.fixture(scope="module")
def settings(workspace):
    def make(run: str, **changes: Any) -> list[str]:
        own = SETTINGS | {"lora.dropout": 0.3, "lora.merge": "false"}
        return workspace.settings(run, eval_data=workspace.held_out, **own | changes)

    main(make("one", eval_every=1))
    return make


def test_it_learns_with_dropout_and_evaluates_without(workspace, settings):
    main(settings("none", **{"lora.dropout": 0, "eval_every": 1}))
    for key in ("loss", "eval_loss"):  # B is 0 in the first step
        plain, found = (workspace.metrics(run, key) for run in ("none", "one"))
        assert found[0] == plain[0] and found[1:] != plain[1:]
    assert workspace.metrics("one", "loss")[-1] < workspace.metrics("one", "loss")[0] - 0.1
    directory = workspace.root / "one" / "adapter"
    assert json.loads((directory / "adapter_config.json").read_text())["lora_dropout"] == 0.3
    main(settings("seed", seed=1, steps=2))
    assert workspace.metrics("seed", "loss")[1] != workspace.metrics("one", "loss")[1]


@pytest.mark.slow(first=3)
@pytest.mark.parametrize(
    ("ranks", "changes", "rel"),
    [
        (1, {"activation_checkpointing": "true"}, 0),
        (1, {"resume": 2}, 0),
        (1, {"micro_batch_size": 1}, 1e-5),
        (2, {"packing": "true"}, 1e-5),
    ],
)
def test_the_same_draws(workspace, settings, ranks, changes, rel):
    run = f"{ranks}-{next(iter(changes))}"
    if "resume" in changes:
        changes = {"resume": step(workspace, "one", changes["resume"])}
    train_on(ranks, settings(run, **changes)) if ranks > 1 else main(settings(run, **changes))
    assert_same_curve(workspace, run, "one", rel)


def test_keys_reach_training_and_no_evaluation(workspace, settings, world):
    run = prepare(load(None, settings("prepared")), world)
    (batch, *_) = run.data.micro_batches(0)
    assert run.eval_data is not None
    assert all(b.dropout_keys is None for b in run.eval_data.micro_batches(0))
    inputs = run.task.resolve(run.model, batch)
    assert torch.equal(inputs.batch.dropout_keys, batch.dropout_keys)
