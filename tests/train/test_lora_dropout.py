"""Runs whose adapter has dropout: the same draws wherever and however often a step is computed."""

import json
from typing import Any

import pytest
import torch

from tests.train.ranks import train_on
from tigon.train import load, main, prepare

SETTINGS: dict[str, Any] = {
    "steps": 4,
    "save_every": 2,
    "keep_last": 0,
    "lr": 1e-2,
    "lora.rank": 4,
    "lora.dropout": 0.3,
    "export": "true",
}


@pytest.fixture(scope="module")
def settings(workspace):
    def make(run: str, **changes: Any) -> list[str]:
        return workspace.settings(run, eval_data=workspace.held_out, **SETTINGS | changes)

    main(make("one"))
    return make


def assert_same(workspace, run: str, first: int = 0, rel: float = 0) -> None:
    """As the run `one` from its step `first` on."""
    for key in ("loss", "grad_norm"):
        expected = workspace.metrics("one", key)[first:]
        assert workspace.metrics(run, key) == pytest.approx(expected, rel=rel, abs=0), key


def test_it_learns_with_dropout_and_evaluates_without(workspace, settings):
    main(settings("none", **{"lora.dropout": 0, "eval_every": 1}))
    main(settings("evaluated", eval_every=1))
    assert_same(workspace, "evaluated")
    for key in ("loss", "eval_loss"):  # B is 0 in the first step
        plain, found = (workspace.metrics(run, key) for run in ("none", "evaluated"))
        assert found[0] == plain[0] and found[1:] != plain[1:]
    assert workspace.metrics("one", "loss")[-1] < workspace.metrics("one", "loss")[0] - 0.1
    directory = workspace.root / "one" / "adapter"
    assert json.loads((directory / "adapter_config.json").read_text())["lora_dropout"] == 0.3
    main(settings("seed", seed=1))
    assert workspace.metrics("seed", "loss")[1:] != workspace.metrics("one", "loss")[1:]


def test_recomputation_and_resumption_have_the_same_bits(workspace, settings):
    main(settings("again", activation_checkpointing="true"))
    assert_same(workspace, "again")
    source = workspace.root / "one" / "checkpoints" / "step-00000002"
    main(settings("resumed", resume=source))
    assert_same(workspace, "resumed", 2)


def test_micro_batches_and_ranks_have_the_same_draws(workspace, settings):
    main(settings("small", micro_batch_size=1))
    assert_same(workspace, "small", rel=1e-5)
    train_on(2, settings("two", packing="true"))
    assert_same(workspace, "two", rel=1e-5)


def test_keys_reach_training_and_no_evaluation(workspace, settings, world):
    run = prepare(load(None, settings("prepared")), world)
    (batch, *_) = run.data.micro_batches(0)
    assert run.eval_data is not None
    assert all(b.dropout_keys is None for b in run.eval_data.micro_batches(0))
    inputs = run.task.resolve(run.model, batch)
    assert torch.equal(inputs.batch.dropout_keys, batch.dropout_keys)
