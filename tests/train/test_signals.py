"""SIGTERM and SIGINT at every stage of a run."""

import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from typing import Any

import pytest

from tests.train.checkpoints import saved_steps
from tests.train.layouts import assert_same_metrics
from tests.train.ranks import Ranks
from tests.train.test_resume import KEYS
from tigon.train import checkpoint, main, trainer
from tigon.train.checkpoint import saver
from tigon.train.logging import RunLog, read_metrics
from tigon.train.signals import DEFER, REPEAT_SECONDS, Signals

# A run that sends itself signals where `when` is called
RUN = """
import os, signal, time
from tigon.train import {module} as module, main
before = module.{function}
def then(*args, **kwargs):
    {action}
    return before(*args, **kwargs)
module.{function} = then
main({settings})
"""


def signalled(settings: list[str], module: str, function: str, action: str) -> Ranks:
    """A run that has ended."""
    code = RUN.format(module=module, function=function, action=action, settings=settings)
    run = Ranks(1, run_code, code)
    assert run.one_ended(200), run.errors
    return run


def run_code(code: str) -> None:
    exec(code, {"__name__": "run"})


def kill(name: str) -> str:
    return f"os.kill(os.getpid(), signal.{name})"


NOW = kill("SIGTERM")


def test_signal_after_training_error(workspace, monkeypatch):
    """torchrun sends SIGTERM to the ranks that are left over, whose collectives fail."""
    signals = []

    def fail(run: Any, _: RunLog) -> int:
        signals.append(run.world.signals)
        raise OSError("a collective")

    monkeypatch.setattr(trainer, "train_steps", fail)
    with pytest.raises((SystemExit, OSError), match="a collective"):
        main(workspace.settings("left-over", steps=2))
    assert signals[0].phase == "in training: resume=auto goes on from the last checkpoint"


def test_signal_while_loading(workspace, tmp_path):
    settings = workspace.settings("x", run_dir=tmp_path / "run")
    for name, code in (("SIGTERM", 143), ("SIGINT", 130)):
        done = signalled(settings, "build", "load_tokenizer", kill(name))
        assert done.codes[0] == code
        assert done.errors.split("\n") == [
            "",
            f"tigon.train: stopped by {name} before the first step: nothing was trained",
            "",
        ]
        assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def whole(workspace):
    settings = {"eval_data": workspace.held_out, "eval_every": 2, "steps": 5, "export": "true"}
    main(workspace.settings("unsignalled", **settings))
    return settings


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("function", ["all_reduce_sums", "export"])
def test_signal_in_last_evaluation_or_export(workspace, whole, function):
    run = f"ended-{function}"
    settings = workspace.settings(run, **whole, resume="auto")
    metrics = workspace.root / run / "metrics.jsonl"  # 5 steps and 3 evaluations before the last
    action = f"open({str(metrics)!r}).read().count('step_') == 5 and {NOW}"
    done = signalled(settings, "trainer", function, action)
    assert done.codes[0] == 143, done.errors
    assert "stopped by SIGTERM in the last evaluation or the export: resume=auto" in done.errors
    directory = workspace.root / run
    assert (directory / "checkpoints/step-00000005").exists() and not (directory / "hf").exists()
    rows = read_metrics(directory / "metrics.jsonl")
    main(settings)
    assert (directory / "hf/model.safetensors").exists()
    assert read_metrics(directory / "metrics.jsonl")[: len(rows)] == rows
    assert_same_metrics(workspace, "unsignalled", run, *KEYS, rel=0)
    files = [path for path in directory.iterdir() if path.name != ".lock"]
    before = {path: path.stat().st_mtime_ns for path in files}
    main(settings)  # finished: it changes nothing
    assert {path: path.stat().st_mtime_ns for path in files} == before


def test_an_export_of_fewer_steps_is_made_again(workspace, whole):
    settings = workspace.settings("grown", **whole | {"steps": 2})
    main(settings)
    longer = [*settings, "steps=3", "resume=auto"]
    killed = signalled(longer, "trainer", "export", "os.kill(os.getpid(), signal.SIGKILL)")
    assert killed.codes[0] == -signal.SIGKILL
    old = (workspace.root / "grown/hf/model.safetensors").read_bytes()
    main(longer)
    assert (workspace.root / "grown/hf/model.safetensors").read_bytes() != old
    assert workspace.metrics("grown", "step").count(3) == 2  # the step and its evaluation


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGHUP", 129)])
def test_signal_in_the_loop(workspace, name, code):
    """Ctrl-C, or a terminal that goes away."""
    settings = workspace.settings(name, steps=50)
    done = signalled(settings, "trainer", "update_weights", f"args[1] == 2 and {kill(name)}")
    assert done.codes[0] == code
    again = "; again to stop now" * (name == "SIGINT")
    assert f"{name}: stopping after this step, with a checkpoint{again}\n" in done.errors
    newest = checkpoint.latest(workspace.root / name / "checkpoints")
    assert newest is not None and newest.name == "step-00000003"
    assert len(workspace.metrics(name, "loss")) == 3
    assert "Traceback" not in done.errors


def test_ignored_hangups_stay_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with Signals() as signals, signals.deferred():
            os.kill(os.getpid(), signal.SIGHUP)
            assert not signals.received
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_second_interrupt_has_no_traceback(workspace):
    settings = workspace.settings("twice", steps=50)
    twice = (
        f"[(os.kill(os.getpid(), signal.SIGINT), time.sleep({REPEAT_SECONDS + 0.5})) for _ in 'ab']"
    )
    done = signalled(settings, "trainer", "update_weights", f"args[1] == 2 and {twice}")
    assert done.codes[0] == 130
    assert "stopped now; what was saved last is in run_dir/checkpoints" in done.errors
    assert "Traceback" not in done.errors
    assert checkpoint.latest(workspace.root / "twice/checkpoints") is None


def test_signal_while_main_thread_is_busy(capfd):
    with Signals() as signals, signals.deferred():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # a scheduler's and a launcher's
        until, said = time.monotonic() + 60, ""
        while "stopping" not in said and time.monotonic() < until:
            time.sleep(0.1)
            said += capfd.readouterr().err
        assert signals.received == signal.SIGTERM
    said += capfd.readouterr().err
    assert said.count("stopping after this step") == 1
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_late_announcer_knows_what_was_deferred(monkeypatch, capfd):
    """On a busy machine it may read of the signal after the loop has ended."""
    monkeypatch.setattr("tigon.train.signals.PATIENCE", 3600)  # else it ends this process
    interval = sys.getswitchinterval()
    sys.setswitchinterval(3600)  # the announcer runs once this thread waits
    try:
        with Signals() as stopper, stopper.deferred():
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        sys.setswitchinterval(interval)
    assert stopper.received == signal.SIGTERM
    assert "stopping after this step" in capfd.readouterr().err


def test_a_process_goes_on_that_catches_the_exit(monkeypatch):
    """As notebooks do."""
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr("tigon.train.signals.PATIENCE", 1.0)
    with pytest.raises(SystemExit, match="143"), Signals(silent=True):
        os.kill(os.getpid(), signal.SIGTERM)
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join(5)  # until it has been cancelled, or has ended this process
    assert not ended


def sleep_long(begun: Any) -> None:
    begun.set()
    time.sleep(600)


def test_a_forked_process_has_signals_of_its_own(capfd):
    """As of the workers that tokenize, which their pool ends by SIGTERM."""
    context = multiprocessing.get_context("fork")
    with Signals() as stopper, stopper.deferred():
        process = context.Process(target=sleep_long, args=(begun := context.Event(),))
        process.start()
        assert begun.wait(60)
        process.terminate()
        process.join(60)
        code = process.exitcode
        process.kill()
    assert code == -signal.SIGTERM and not stopper.received
    assert capfd.readouterr().err == ""


def test_a_process_forked_between_two_runs_has_signals_of_its_own():
    """One run inside another has ended, and the outer one's handlers are in place again."""
    with Signals(silent=True):
        with Signals(silent=True):
            pass
        if not (child := os.fork()):
            os._exit(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_a_thread_may_enter_first():
    """Which installs no handlers, as Python allows only the main thread to; nor do others then."""
    entered, ended = threading.Event(), threading.Event()

    def run() -> None:
        with stopper:
            entered.set()
            ended.wait(60)

    stopper, thread = Signals(silent=True), threading.Thread(target=run)
    thread.start()
    assert entered.wait(60)
    with stopper, stopper.deferred():
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    ended.set()
    thread.join()


def test_an_announcer_that_waits_ends_no_run(monkeypatch):
    """As for a terminal that takes no more text, while a profiler's signals fill the pipe."""
    waits, goes_on = threading.Event(), threading.Event()
    monkeypatch.setattr(Signals, "_say", lambda *_: (waits.set(), goes_on.wait(60)))
    with Signals() as stopper, stopper.deferred():
        os.kill(os.getpid(), signal.SIGTERM)
        assert waits.wait(60)
        with pytest.raises(BlockingIOError):
            while True:
                os.write(stopper._fds[1], bytes([DEFER]) * 4096)
        with stopper.deferred():
            pass
        goes_on.set()
    assert stopper.received == signal.SIGTERM


@pytest.fixture
def signal_in_step(monkeypatch):
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


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("background", ["true", "false"])
def test_no_checkpoint_without_enough_time(
    workspace, signal_in_step, monkeypatch, capsys, background
):
    """The last one has taken half a second; less is granted."""
    write_sums = saver.write_sums

    def slow(directory, sums):
        time.sleep(0.5)
        write_sums(directory, sums)

    monkeypatch.setattr(saver, "write_sums", slow)
    signal_in_step(7)
    run = f"late-{background}"
    same = {"save_every": 3, "stop_seconds": 0.4, "async_save": background}
    settings = workspace.settings(run, steps=8, **same)
    stop(settings)
    printed = capsys.readouterr().out
    assert saved_steps(workspace.root / run) == ["step-00000003", "step-00000006"]
    checkpoint.verify(workspace.checkpoint(run, 6))
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
    workspace, signal_in_step, monkeypatch, tmp_path, changes, number
):
    seconds = 1000.0 if "stop_seconds" in changes or number == signal.SIGINT else 20.0
    monkeypatch.setattr(saver.Saver, "expected", lambda self: seconds)
    signal_in_step(1, number)
    stop(workspace.settings("x", run_dir=tmp_path / "run", steps=3, **changes), 128 + number)
    assert saved_steps(tmp_path / "run") == ["step-00000001"]


@pytest.mark.slow
def test_without_a_checkpoint_the_run_begins_again(workspace, signal_in_step, monkeypatch, capsys):
    monkeypatch.setattr(saver.Saver, "expected", lambda self: 31.0)
    signal_in_step(2)
    settings = workspace.settings("anew", steps=3, resume="auto")
    stop(settings)
    said = capsys.readouterr().out
    assert re.search(r"would take about 31 s, and \d\d s are left of stop_seconds=30", said)
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
