"""A rank that is killed or does not answer: the others end soon, name it and its step, and the run
goes on with those that are left."""

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from tests.train.ranks import Ranks, train_on
from tigon.train import board, main
from tigon.train.board import ENDED, Silence, place_of, sign_of, tell_silence

STEPS = 12
SAME = {"steps": STEPS, "save_every": 1, "schedule": "constant", "workers": 0}


def impatient(settings: list[str], seconds: float) -> None:
    """A run whose ranks wait so long for a sign of life."""
    board.SILENT = seconds
    main(settings)


def wait_for_steps(running: Ranks, run: Path, count: int) -> None:
    until, file = time.monotonic() + 60, run / "metrics.jsonl"
    while not (file.exists() and file.read_text().count('"loss"') >= count):
        assert time.monotonic() < until and None in running.codes, running.errors
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("number", "seconds", "said", "tensor"),
    [
        (signal.SIGKILL, 60.0, "ended without a word; its last step was ", 1),
        (signal.SIGKILL, 60.0, "ended without a word; its last step was ", 2),
        (signal.SIGSTOP, 3.0, "has not answered for 3 s; its last step was ", 2),
    ],
)
def test_the_others_end_and_name_it(workspace, number, seconds, said, tensor) -> None:
    """Without a parent that would tell them, as where the rank was on another host."""
    name = f"{number.name}-{tensor}"
    run, settings = workspace.root / name, workspace.settings(name, **SAME)
    running = Ranks(2, impatient, [*settings, f"parallel.tensor={tensor}"], seconds)
    wait_for_steps(running, run, 2)
    os.kill(running.processes[1].pid, number)
    began = time.monotonic()
    running.processes[0].join(30)
    took, errors = time.monotonic() - began, running.errors
    running.kill()
    assert running.codes[0] == 1 and took < 20, errors
    (line,) = [line for line in errors.splitlines() if line.startswith("tigon.train: ")]
    assert line.startswith("tigon.train: rank 1 on ") and said in line
    step = int(line.rpartition(" ")[2])
    seen = [row["step"] for row in map(json.loads, (run / "metrics.jsonl").open()) if "loss" in row]
    assert max(seen) <= step <= max(seen) + 1
    assert "Traceback" not in errors
    if number == signal.SIGKILL:
        train_on(1, [*settings, "resume=auto"])
        assert workspace.metrics(name, "step") == [*range(1, STEPS + 1)]


def test_silence_is_counted_by_looks_at_an_unchanged_sign(monkeypatch) -> None:
    now = [100.0]
    monkeypatch.setattr(board.time, "monotonic", lambda: now[0])
    store = dist.HashStore()
    silence = Silence(store, 3, most=2.0)

    def after(seconds: float, sign: str | None = None) -> str | None:
        if sign is not None:
            store.set(sign_of(3), sign)
        now[0] += seconds
        failure = silence.look()
        return failure and failure.text

    assert after(500) is None  # it has not begun
    assert after(1, '[1, 0, "there"]') is None
    assert after(1000) is None  # this process was stopped: both need a moment
    for _ in range(int(board.SILENT / 2) - 1):
        assert after(2.0) is None
    assert after(1, '[2, 7, "there"]') is None  # alive
    for _ in range(int(board.SILENT)):
        assert after(1.0 - 1e-6) is None
    assert after(1.0) == "rank 3 on there has not answered for 45 s; its last step was 7"
    assert json.loads(store.get("failure"))["rank"] == 3
    for _ in range(100):
        assert after(2.0, ENDED) is None


def test_what_was_told_first_stays() -> None:
    store = dist.HashStore()
    assert place_of(store, 0) == ("", "")
    store.set(sign_of(0), '[9, 0, "here"]')
    assert place_of(store, 0) == (" on here", "; it had not begun a step")
    tell_silence(store, 0, "is gone")
    assert tell_silence(store, 1, "is gone").rank == 0


def test_a_rank_leaves_a_sign_at_once(monkeypatch) -> None:
    """So that the others name it, however soon it is killed."""
    store = dist.HashStore()
    monkeypatch.setattr(board, "connect", lambda: store)
    monkeypatch.setattr(board, "POLL", 60.0)
    made = board.Board(1, 2)
    assert json.loads(store.get(sign_of(1)))[1] == 0
    made.close()


def test_the_first_rank_that_is_left_on_a_host_says_it(monkeypatch) -> None:
    """Of ranks 4 to 7, where 4 was killed; of one that ends by itself, as it says it itself."""
    said = {}
    for place in range(4):
        monkeypatch.setenv("RANK", str(4 + place))
        monkeypatch.setenv("LOCAL_RANK", str(place))
        for rank, killed in [(4, True), (4, False), (5, True), (0, True)]:
            if board.first_left(board.Failure("", rank=rank, killed=killed)) == str(place):
                said.setdefault((rank, killed), []).append(place)
    assert said == {(4, True): [1], (4, False): [0], (5, True): [0], (0, True): [0]}


def test_what_a_rank_starts_is_no_rank_whose_parent_was_killed(monkeypatch) -> None:
    monkeypatch.setenv(board.LAUNCHED, str(os.getpid()))  # of another process than its parent
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert not board.orphaned()
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert board.orphaned()
    monkeypatch.setenv(board.LAUNCHED, str(os.getppid()))
    assert not board.orphaned()


def test_a_store_that_is_gone_is_told_once(monkeypatch, capsys) -> None:
    """A collective may fail, as another rank has ended of it, before this rank's watch ends it."""
    monkeypatch.setattr(board, "connect", dist.HashStore)
    monkeypatch.setattr(board, "POLL", 60.0)
    monkeypatch.setenv(board.LAUNCHED, str(os.getpid()))  # of another process than its parent
    for name, value in {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "there"}.items():
        monkeypatch.setenv(name, value)
    made = board.Board(0, 2)

    def check(keys: list[str]) -> bool:
        raise RuntimeError("Broken pipe")

    monkeypatch.setattr(made, "store", SimpleNamespace(check=check))
    found = made.failure()
    assert found == board.Failure(f"{board.ORPHANED}; the last step of rank 0 was 0")
    made.say(found)
    made.say(found)
    assert capsys.readouterr().err == f"tigon.train: {found.text}\n"
    made._closed.set()
