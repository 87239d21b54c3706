"""One run in several layouts of ranks, and what must be the same in all of them."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from tests.support.numbers import relative_error
from tests.train.ranks import Ranks
from tigon.train import load, prepare, start, train
from tigon.train.logging import read_metrics

TOLERANCE = 1e-5
ADAPTER: dict[str, Any] = {
    "steps": 4, "save_every": 2, "keep_last": 0, "lr": 1e-2, "lora.rank": 4, "lora.alpha": 8,
    "lora.merge": "true", "export": "true",
}  # fmt: skip
# What metrics.jsonl has that depends on the clock or the machine
TIMES = ("seconds", "share", "tokens_per_second", "memory", "local_loss", "mfu", "time")


def train_all(runs: list[list[str]]) -> None:
    """Trains each on the ranks there are, which share them alike; leaves its model in trained/."""
    torch.set_num_threads(1)
    with start("cpu", parallel=load(None, runs[0]).parallel) as world:
        for settings in runs:
            run = prepare(load(None, settings), world)
            assert train(run) == 0
            model = run.model
            save = model.save_pretrained if model.active_adapter is None else model.save_adapter
            save(Path(run.config.run_dir, "trained"))


def train_once(ranks: int, settings: list[str], **environment: str) -> str:
    """Trains on so many ranks unless a test has done it; returns the run's name."""
    run = Path(settings[0].removeprefix("run_dir="))
    if not (run / "trained").exists():
        if ranks == 1:
            with patch.dict(os.environ, environment):
                train_all([settings])
        else:
            Ranks(ranks, train_all, [settings], environment=environment).finish(400)
    return run.name


def logged_rows(workspace: Any, run: str) -> list[dict[str, Any]]:
    rows = read_metrics(workspace.root / run / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not any(t in k for t in TIMES)} for row in rows]


def near(row: dict[str, Any], rel: float = TOLERANCE) -> dict[str, Any]:
    """What another layout logs. Rewards and divergences are small differences of sums of
    log-probabilities, whose rounding they have."""

    def within(name: str) -> float:
        return 3e-5 if any(t in name for t in ("reward", "kl", "margin")) else 2e-6

    return {k: pytest.approx(v, rel=rel, abs=within(k)) for k, v in row.items()}


def assert_same_run(
    workspace: Any,
    one: str,
    other: str,
    first: int = 0,
    tolerance: float = TOLERANCE,
    weights: float = TOLERANCE,
    absolute: float = 0.0,
    keys: Sequence[str] = (),
) -> None:
    """All that is logged of the steps from `first` on, and the weights of the run and its exports.

    `weights` is relative; `absolute` is enough instead, where it is not 0.
    """
    expected, found = logged_rows(workspace, one)[first:], logged_rows(workspace, other)
    assert len(found) == len(expected) > 0
    for old, new in zip(expected, found, strict=True):
        old, new = ({k: row[k] for k in keys or row} for row in (old, new))
        undefined = {key for key, value in old.items() if value is None}  # means of nothing
        assert {key for key, value in new.items() if value is None} == undefined
        old, new = ({k: v for k, v in row.items() if k not in undefined} for row in (old, new))
        assert new == near(old, tolerance)
    for directory in ("trained", "hf", "hf-ema"):
        old, new = (load_weights(workspace.root / run / directory) for run in (one, other))
        assert old.keys() == new.keys() and (old or directory != "trained")
        for name, weight in old.items():
            close = absolute and torch.allclose(new[name], weight, rtol=0, atol=absolute)
            assert close or relative_error(new[name], weight) <= weights, name


def load_weights(directory: Path, files: str = "*") -> dict[str, torch.Tensor]:
    """The tensors of a model, or of a checkpoint's files of a kind, as weights-*."""
    paths = sorted(directory.glob(f"{files}.safetensors"))
    return {name: weight for path in paths for name, weight in load_file(path).items()}


def assert_same_metrics(
    workspace: Any, one: str, other: str, *keys: str, rel: float = TOLERANCE
) -> None:
    """The steps or evaluations that `other` has made; `keys`: loss and grad_norm by default."""
    for key in keys or ("loss", "grad_norm"):
        expected, found = (workspace.metrics(run, key) for run in (one, other))
        assert found and found == pytest.approx(expected[-len(found) :], rel=rel, abs=0), key


def assert_same_tensors(one: Path, other: Path, atol: float = 0.0) -> None:
    """The tensors of two safetensors files, or of the models in two directories."""
    old, new = (load_file(p / "model.safetensors" if p.is_dir() else p) for p in (one, other))
    assert old.keys() == new.keys()
    for name, weight in old.items():
        torch.testing.assert_close(new[name], weight, rtol=0, atol=atol, msg=name)
