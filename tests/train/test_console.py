"""What a run says: columns, what fits a terminal, and how long it will take."""

import os
import pty
import re
import sys
import termios
from contextlib import suppress

import pytest

from tigon.train import console as module
from tigon.train import load, main
from tigon.train.console import (
    Console,
    fit_columns,
    format_measures,
    format_number,
    shorten,
    split_by_set,
)

ROW = {
    "step": 1, "epoch": 0.1, "lr": 1e-5, "loss": 1.25, "grad_norm": 0.5, "accuracy": 0.5,
    "tokens": 1000, "supervised_tokens": 400, "step_seconds": 2.0, "data_seconds": 0.0,
    "data_share": 0.0, "tokens_per_second": 500.0, "mfu": 0.4, "memory_gib": 61.2,
    "memory_reserved_gib": 70.0,
}  # fmt: skip


@pytest.fixture
def console(workspace):
    def make(steps=1000, **changes):
        said = []
        settings = workspace.settings("x", eval_data=workspace.held_out, **changes)
        return Console(load(None, settings), steps, said.append), said

    return make


def test_a_line_in_a_file(console):
    one, said = console(log_every=5)
    for step in range(1, 11):
        one.step(ROW | {"step": step, "step_seconds": 60.0 if step < 3 else 2.0})
    assert said == [
        "step    1/1000  loss  1.2500  acc  50.0%  lr 1.00e-05  grad  0.5000       17 tok/s  "
        "MFU 40.0%   61.2 GiB         - left",
        # Neither speed nor the time that is left know of the steps that compile
        "step    5/1000  loss  1.2500  acc  50.0%  lr 1.00e-05  grad  0.5000      500 tok/s  "
        "MFU 40.0%   61.2 GiB   33m 10s left",
        "step   10/1000  loss  1.2500  acc  50.0%  lr 1.00e-05  grad  0.5000      500 tok/s  "
        "MFU 40.0%   61.2 GiB   33m 00s left",
    ]
    assert max(map(len, said)) <= 120


def test_speed_is_a_mean_since_the_last_line(console):
    one, said = console(log_every=2)
    for step in range(1, 5):
        slow = {"step_seconds": 6.0, "mfu": 0.1, "data_seconds": 0.8} if step == 3 else {}
        one.step(ROW | {"step": step} | slow)
    assert "250 tok/s  MFU 17.5%" in said[-1] and said[-1].endswith("left  waits 10%")
    assert "waits" not in said[-2]
    one.step(ROW | {"step": 6, "mfu": None, "skipped": "spike", "nll": 1.5, "loss": float("nan")})
    assert "MFU" not in said[-1] and said[-1].endswith("skipped: spike")
    assert "loss     nan  acc  50.0%  nll  1.5000  lr" in said[-1]


def test_what_is_left_counts_evaluations(console):
    one, said = console(steps=100, eval_every=30)
    evaluation = {"eval_loss": 2.0, "eval_accuracy": 0.25, "eval_tokens": 1234, "seconds": 50.0}
    for step in range(1, 5):
        one.step(ROW | {"step": step})
    assert one.seconds_left(4) == 96 * 2
    one.evaluation({"step": 30, **evaluation})
    assert said[-1] == "step  30/100  eval loss  2.0000  acc  25.0%  1,234 tokens in 50.0 s"
    assert one.seconds_left(4) == 96 * 2 + 4 * 50  # at 30, 60, 90 and the end
    assert one.seconds_left(30) == 70 * 2 + 3 * 50
    assert one.seconds_left(90) == 10 * 2 + 50
    assert one.seconds_left(100) == 0
    once, _ = console(steps=100)
    once.times.append(1.0)
    once.evaluation_seconds = 5.0
    assert once.seconds_left(99) == 1 + 5
    one.evaluation({"step": 60, **evaluation, "eval_loss/math": 1.0, "eval_accuracy/math": 1.0})
    assert said[-1].splitlines()[1:] == ["  math: loss  1.0000  acc 100.0%"]


NAN = float("nan")
COLUMNS = [(0, "step 1/9"), (2, "acc"), (9, "memory"), (1, "left")]
EVALUATION = {"eval_loss": 1.0, "eval_rewards/chosen": 2.0, "eval_tokens": 3}
NAMED = {"eval_loss/a": 4.0, "eval_accuracy/a": 0.5}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (format_number(1.23456), " 1.2346"),
        (format_number(12.3456), " 12.346"),
        (format_number(123.456), " 123.46"),
        (format_number(1234.56), "   1235"),
        (format_number(1e7), "1.0e+07"),
        (format_number(-0.5), "-0.5000"),
        (format_number(NAN), "    nan"),
        # A mean of nothing is no divergence
        (format_measures({"loss": NAN, "kl": NAN}), "loss     nan  kl       -"),
        (format_measures({"accuracy": NAN}), "acc       -"),
        # Columns go where there is no room
        (fit_columns(COLUMNS, None), "step 1/9  acc  memory  left"),
        (fit_columns(COLUMNS, 27), "step 1/9  acc  memory  left"),
        (fit_columns(COLUMNS, 26), "step 1/9  acc  left"),
        (fit_columns(COLUMNS, 18), "step 1/9  left"),
        (fit_columns(COLUMNS, 5), "step "),
        (shorten("a\x1b]0;b\x07\x9bc\u2028", 70), r'"a\u001b]0;b\u0007\x9bc\u2028"'),
        (split_by_set(EVALUATION), ({"loss": 1.0, "rewards/chosen": 2.0}, {})),
        (split_by_set(EVALUATION | NAMED)[1], {"a": {"loss": 4.0, "accuracy": 0.5}}),
    ],
)
def test_formats(found, expected):
    assert found == expected


def test_terminal_lines_fit_its_width(workspace, monkeypatch):
    """The same text without control characters; its width is that of the terminal."""
    terminal, end = pty.openpty()
    termios.tcsetwinsize(end, (24, 60))
    monkeypatch.setattr(module, "PACE", 0)
    monkeypatch.delenv("COLUMNS", raising=False)
    with open(end, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        monkeypatch.setattr(sys, "__stdout__", output)
        main(workspace.settings("terminal", steps=3))
        monkeypatch.undo()
    shown = b""
    with suppress(OSError):  # the other end is closed
        while True:
            shown += os.read(terminal, 4096)
    os.close(terminal)
    lines = [text for text in shown.decode().split("\r\n") if text.startswith("step ")]
    assert [text.split()[1] for text in lines] == ["1/3", "2/3", "3/3", "3/3"]
    assert re.fullmatch(r"step 1/3  loss  \d\.\d{4} +\d+ tok/s +- left", lines[0])
    assert all(len(text) < 60 for text in lines)
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", shown.decode().replace("\r\n", ""))


def test_every_row_has_its_speed(workspace, capsys):
    main(workspace.settings("speed", steps=2, log_every=1))
    said = capsys.readouterr().out
    assert said.count("step 2/2  loss") == 1 and "MFU" not in said  # of a CPU it is not known
    assert workspace.metrics("speed", "mfu") == [None, None]
    assert workspace.metrics("speed", "memory_reserved_gib") == [None, None]
    assert all(0.05 < gib < 64 for gib in workspace.metrics("speed", "memory_gib"))
