import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.small import write_chats, write_model
from tests.train.checkpoints import State
from tests.train.layouts import load_weights
from tigon.train import main, trainer
from tigon.train.distributed import World, start
from tigon.train.logging import read_metrics
from tigon.train.trainer import forward_backward

FIXED = {"micro_batch_size": 1, "sharding": "full", "activation_checkpointing": "false"}
FIXED |= {"cuda_graphs": "false"}


class Workspace:
    """A small model and data on disk, and runs that differ in what a test says."""

    def __init__(self, root: Path):
        self.root = root
        self.model = write_model(root / "model")
        self.data = write_chats(root / "train.jsonl", 43)  # 17 packed rows of 128
        self.held_out = write_chats(root / "eval.jsonl", 7, seed=1)

    def settings(self, run: str, **changes: Any) -> list[str]:
        values = {
            "run_dir": self.root / run,
            "model": self.model,
            "data": self.data,
            "seq_len": 128,
            "batch_size": 4,
            "lr": 3e-3,
            "device": "cpu",
            "export": "false",
        }
        values |= changes
        if values["device"] == "cuda":  # what is compared must not depend on the GPU's memory
            values = FIXED | values
        return [f"{key}={value}" for key, value in values.items()]

    def checkpoint(self, run: str, step: int) -> Path:
        return self.root / run / f"checkpoints/step-{step:08d}"

    def tensors(self, run: str, step: int, kind: str = "weights") -> dict[str, torch.Tensor]:
        """Those that a checkpoint has of a kind; `kind` may be optimizer or ema."""
        return load_weights(self.checkpoint(run, step), f"{kind}-*")

    def metrics(self, run: str, key: str) -> list[float]:
        return [row[key] for row in read_metrics(self.root / run / "metrics.jsonl") if key in row]


@pytest.fixture(scope="module", autouse=True)
def no_curves() -> Iterator[None]:
    """Reports without curves, whose drawing takes most of a second; tests/report has them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tigon.report.page.charts", lambda _: iter(()))
        yield


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Each file's own. pytest may build it again for a file's later tests, so it has a new folder
    each time, where no run of its names exists."""
    return Workspace(tmp_path_factory.mktemp("train"))


@pytest.fixture
def world() -> Iterator[World]:
    with start("cpu") as world:
        yield world


@pytest.fixture
def state(workspace: Workspace, world: World) -> State:
    return State(workspace.model, world)


@pytest.fixture(scope="module")
def finished(workspace: Workspace) -> Path:
    """A run of three steps, each of which is saved."""
    main(workspace.settings("finished", steps=3, save_every=1, keep_last=0))
    return workspace.root / "finished"


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache of the test's own, where nothing is computed yet."""
    monkeypatch.setenv("TIGON_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def poisoned(monkeypatch):
    """Makes the gradients of chosen data steps NaN, before they are measured."""

    def poison(*steps: int, factor: float = math.nan) -> None:
        def then(run, data_step, **options):
            values, scale = forward_backward(run, data_step, **options)
            if data_step in steps:
                values["grad_norm"] *= factor
                values["loss"] *= factor
                for p in run.model.parameters():
                    p.grad *= factor
            return values, scale

        monkeypatch.setattr(trainer, "forward_backward", then)

    return poison
