"""SIGTERM from a scheduler that grants so many seconds."""

import os
import re
import signal
import time

import pytest

from tigon.train import checkpoint, main, trainer
from tigon.train.checkpoint import saver
from tigon.train.logging import read_metrics
from tigon.train.signals import Signals


@pytest.fixture
def signalled(monkeypatch):
    """Sends a signal in a step, while the main thread waits for the device."""

    def plan(at: int, number: int = signal.SIGTERM) -> None:
        numbers, count = trainer.to_host, iter(range(1, 1000))

        def then(values):
            if next(count) == at:
                os.kill(os.getpid(), number)
            return numbers(values)

        monkeypatch.setattr(trainer, "to_host", then)

    return plan


def stop(settings: list[str], code: int = 143) -> None:
    with pytest.raises(SystemExit) as error:
        main(settings)
    assert error.value.code == code


def names(run) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_signal_stops_after_the_step(workspace, signalled, capsys):
    signalled(2)
    stop(workspace.settings("prompt", steps=9))
    assert names(workspace.root / "prompt") == ["step-00000002"]
    said = "stopped by a signal after step 2: resume=auto goes on from step-00000002"
    assert said in capsys.readouterr().out


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("background", ["true", "false"])
def test_no_checkpoint_without_enough_time(workspace, signalled, monkeypatch, capsys, background):
    """The last one has taken half a second; less is granted."""
    write_sums = saver.write_sums

    def slow(directory, sums):
        time.sleep(0.5)
        write_sums(directory, sums)

    monkeypatch.setattr(saver, "write_sums", slow)
    signalled(7)
    run = f"late-{background}"
    same = {"save_every": 3, "stop_seconds": 0.4, "async_save": background}
    settings = workspace.settings(run, steps=8, **same)
    stop(settings)
    printed = capsys.readouterr().out
    assert names(workspace.root / run) == ["step-00000003", "step-00000006"]
    checkpoint.verify(workspace.root / run / "checkpoints/step-00000006")
    assert re.search(r"no checkpoint of step 7: .* about \d s, and 0 s are left of stop_s", printed)
    assert "stopped by a signal after step 7: resume=auto goes on from step-00000006" in printed
    warned = re.findall(r"note: a step and a checkpoint take \d s, longer than stop_se", printed)
    assert len(warned) == 1  # before the signal
    monkeypatch.undo()
    main([*settings, "resume=auto"])
    rows = read_metrics(workspace.root / run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 9))


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("changes", "number"),
    [({"stop_seconds": 0}, signal.SIGTERM), ({}, signal.SIGTERM), ({}, signal.SIGINT)],
)
def test_a_checkpoint_is_written_where_there_is_time(
    workspace, signalled, monkeypatch, tmp_path, changes, number
):
    seconds = 1000.0 if "stop_seconds" in changes or number == signal.SIGINT else 20.0
    monkeypatch.setattr(saver.Saver, "expected", lambda self: seconds)
    signalled(1, number)
    stop(workspace.settings("x", run_dir=tmp_path / "run", steps=3, **changes), 128 + number)
    assert names(tmp_path / "run") == ["step-00000001"]


@pytest.mark.slow
def test_without_a_checkpoint_the_run_begins_again(workspace, signalled, monkeypatch, capsys):
    monkeypatch.setattr(saver.Saver, "expected", lambda self: 31.0)
    signalled(2)
    settings = workspace.settings("anew", steps=3, resume="auto")
    stop(settings)
    said = capsys.readouterr().out
    assert "it would take about 31 s, and 30 s are left of stop_seconds=30" in said
    assert "stopped by a signal after step 2: resume=auto begins again: there is no" in said
    monkeypatch.undo()
    main(settings)
    assert workspace.metrics("anew", "step") == [1, 2, 3]


def test_time_left_counts_from_the_signal():
    """Not from when the main thread hears of it."""
    with Signals(silent=True) as signals, signals.deferred():
        assert signals.left(1.0) == float("inf")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        assert 0 < signals.left(100.0) < 99.95
        assert signals.left(0) == float("inf")
