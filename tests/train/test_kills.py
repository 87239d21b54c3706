"""kill -9 at random moments of a run, its checkpoints' own writing among them.

What was killed goes on with resume=auto, on as many ranks and on another number. TIGON_KILLS=30:
that many moments on one rank and as many on two; pytest -n spreads them over processes.
"""

import os
import random
import shutil
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.numbers import relative_error
from tests.train.layouts import assert_same_metrics, load_weights
from tests.train.ranks import Ranks, train_on
from tigon.train import checkpoint, main

KILLS = int(os.environ.get("TIGON_KILLS", "1"))
STEPS = 5
SAME: dict[str, Any] = {
    "steps": STEPS, "save_every": 1, "keep_last": 2, "eval_every": 3, "hf_every": 4, "seed": 5,
    "export": "true", "workers": 0,
}  # fmt: skip
WAYS: list[dict[str, Any]] = [  # by number of the kill; the curve of all is the same
    {},
    {"async_save": "false"},
    {"streaming": "true", "shuffle_window": 16},
]
BITS = ("step", "loss", "grad_norm", "accuracy", "lr", "tokens", "supervised_tokens")
BITS += ("eval_loss", "eval_accuracy")
NEAR = 2e-6  # relative: sums over ranks in another order
# What Python tells of the files under a directory, in the order in which a run touches them
EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.truncate")


@dataclass(frozen=True)
class Whole:
    """A run that nothing has disturbed."""

    directory: Path
    events: list[int]  # of each rank


def counted(settings: list[str], directory: str, counts: str) -> None:
    """Write down how many events of its files each rank has."""
    seen = watch(directory)
    main(settings)
    Path(f"{counts}-{os.environ.get('RANK', '0')}").write_text(str(len(seen)))


def killed_at(settings: list[str], directory: str, rank: int, event: int) -> None:
    if int(os.environ.get("RANK", "0")) == rank:
        watch(directory, event)
    main(settings)


def watch(directory: str, kill: int | None = None) -> list[str]:
    """The events of files under a directory as they come; the process ends before number `kill`."""
    seen: list[str] = []
    lock = threading.Lock()  # checkpoints are written by a thread

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS and str(arguments[0]).startswith(directory):
            with lock:
                seen.append(event)
                if len(seen) == kill:
                    os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    return seen


@pytest.fixture(scope="module")
def whole(workspace, tmp_path_factory):
    """Of a number of ranks and a way, made when first asked for."""
    made: dict[tuple[int, int], Whole] = {}

    def make(ranks: int, way: int) -> Whole:
        if (ranks, way) not in made:
            root = tmp_path_factory.mktemp("whole")
            run, counts = root / "run", root / "events"
            settings = settings_of(workspace, run, way)
            Ranks(ranks, counted, settings, str(run / "checkpoints"), str(counts)).finish()
            events = [int(Path(f"{counts}-{rank}").read_text()) for rank in range(ranks)]
            assert min(events) >= 2 * STEPS, "too few moments to choose from"
            made[ranks, way] = Whole(run, events)
        return made[ranks, way]

    return make


def settings_of(workspace, run: Path, way: int) -> list[str]:
    changes = SAME | WAYS[way] | {"eval_data": workspace.held_out, "run_dir": run}
    return workspace.settings("", **changes)


@pytest.mark.slow(first=KILLS)
@pytest.mark.parametrize("number", range(KILLS))
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_and_resumed(workspace, whole, tmp_path, ranks, number):
    """Even kills come during a file operation of a checkpoint, odd ones at any time of the run."""
    draw = random.Random(f"{ranks} {number}")
    way = number // 2 % len(WAYS)
    expected = whole(ranks, way)
    run = tmp_path / "killed"
    settings = settings_of(workspace, run, way)
    if number % 2 == 0:
        rank = draw.randrange(ranks)
        event = draw.randint(1, expected.events[rank] - 2)
        running = Ranks(ranks, killed_at, settings, str(run / "checkpoints"), rank, event)
        assert running.one_ended(200), running.errors
    else:
        cache = str(tmp_path / "cache")  # so that a kill may come while it is made
        running = Ranks(ranks, main, settings, environment={"TIGON_CACHE": cache})
        after = draw.randrange(STEPS)
        until = time.monotonic() + 200
        while after and None in running.codes and len(workspace.metrics(run, "loss")) < after:
            assert time.monotonic() < until, running.errors
            time.sleep(0.005)
        time.sleep(draw.random() * (0.3 if after else 2.0))
    running.kill()
    assert -signal.SIGKILL in running.codes or number % 2, running.errors
    said: list[str] = []
    checkpoint.newest_complete(run / "checkpoints", said.append)
    assert not said, said  # what has a checkpoint's name is whole

    other = tmp_path / "on-another-number"
    shutil.copytree(run, other) if run.exists() else None
    train_on(ranks, [*settings, "resume=auto"])
    assert_same_bits(workspace, run, expected.directory)
    train_on(3 - ranks, [*settings_of(workspace, other, way), "resume=auto"])
    assert_near(workspace, other, expected.directory)


def last_files(run: Path) -> dict[str, Path]:
    """Weights and optimizer states of the last step, and the exports, by their names."""
    last = run / f"checkpoints/step-{STEPS:08d}"
    checkpoint.verify(last)
    assert [p.name for p in (run / "checkpoints").glob(".*")] == []
    folders = [last, run / "hf", run / "hf-step-00000004"]
    found = [path for folder in folders for path in folder.glob("*.safetensors")]
    return {str(path.relative_to(run)): path for path in found}


def assert_same_bits(workspace, run: Path, expected: Path) -> None:
    assert_same_metrics(workspace, expected, run, *BITS, rel=0)
    assert len(workspace.metrics(run, "loss")) == STEPS
    assert len(workspace.metrics(run, "eval_loss")) == 3
    found, files = last_files(run), last_files(expected)
    assert found.keys() == files.keys() and len(files) > 3
    for name, path in files.items():
        assert found[name].read_bytes() == path.read_bytes(), name


def assert_near(workspace, run: Path, expected: Path) -> None:
    assert_same_metrics(workspace, expected, run, *BITS, rel=NEAR)
    assert len(workspace.metrics(run, "loss")) == STEPS
    exported, whole = (load_weights(path / "hf") for path in (run, expected))
    assert exported.keys() == whole.keys()
    for name, weight in whole.items():
        assert relative_error(exported[name], weight) <= NEAR, name
