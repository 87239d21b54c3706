"""Prints a run: steps in columns that fit the terminal, evaluations, samples and checkpoints."""

import json
import math
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tigon.report import format_duration
from tigon.settings.config import Config
from tigon.utils.terminal import escape_controls

SPEED = {"step_seconds", "data_seconds", "data_share", "tokens_per_second", "mfu"} | {
    *("tokens", "supervised_tokens", "memory_gib", "memory_reserved_gib")
}
Row = dict[str, Any]
WARM_UP = 2  # steps that compile and allocate, and say nothing of those after them
TIMED_STEPS = 50  # steps
PACE = 0.25  # seconds between the lines of a terminal, at least
WAIT_SHARE = 0.01  # share of a step, above which waiting for data is said
# What has a column, or none, in a line; the rest of a row are metrics that the settings name
COLUMNS = SPEED | {"step", "epoch", "lr", "loss", "grad_norm", "accuracy", "skipped"}


class Console:
    """Prints lines in columns: every `log_every` steps, and on a terminal each step, unless it is
    too short to read, with as many columns as fit."""

    def __init__(self, config: Config, steps: int, say: Callable[[str], None]):
        self.steps, self.say, self.log_every = steps, say, config.log_every
        self.eval_every = config.eval_every if config.evaluates else None
        self.times: deque[float] = deque(maxlen=TIMED_STEPS)  # of steps, after the warm-up
        self.evaluation_seconds = 0.0
        self.num_steps = 0  # steps of this process
        self.new_rows: list[Row] = []  # since the last line
        self.printed_at = -PACE
        self.terminal = sys.stdout.isatty()

    def step(self, row: Row) -> None:
        """Prints the line of an optimizer step from its row of metrics.jsonl, if one is due."""
        self.num_steps += 1
        if self.num_steps > WARM_UP:
            self.times.append(row["step_seconds"])
        if self.num_steps == WARM_UP + 1:
            self.new_rows = []
        self.new_rows.append(row)
        due = self.num_steps == 1 or row["step"] % self.log_every == 0 or row["step"] == self.steps
        now = time.monotonic()
        if due or (self.terminal and now - self.printed_at >= PACE):
            width = shutil.get_terminal_size().columns - 1 if self.terminal else None
            self.say(fit_columns(self._columns(row), width))
            self.new_rows, self.printed_at = [], now

    def evaluation(self, row: Row) -> None:
        """Prints an evaluation from its row: all held-out data, each named data set, each task."""
        self.evaluation_seconds = row["seconds"]
        whole, sets = split_by_set(row)
        tokens = f"{row['eval_tokens']:,} tokens " if "eval_tokens" in row else ""
        took = f"{tokens}in {row['seconds']:.1f} s"
        measures = f"{format_measures(whole)}  " if whole else ""
        lines = [f"{self._step(row['step'])}  eval {measures}{took}"]
        lines += [f"  {name}: {format_measures(values)}" for name, values in sets.items()]
        self.say("\n".join(lines))

    def samples(self, rows: Sequence[Mapping[str, str]]) -> None:
        """Prints each prompt and its answer, cut to a line."""
        for row in rows:
            self.say(f"  {shorten(row['prompt'], 40)} -> {shorten(row['text'], 70)}")

    def saved(self, step: int, seconds: float, *, whole: bool = True) -> None:
        """Prints how long training waited for a checkpoint; `whole`: it is on the disk."""
        text = "checkpoint, in" if whole else "checkpoint begun; training waited"
        self.say(f"{self._step(step)}  {text} {seconds:.1f} s")

    def seconds_left(self, step: int) -> float | None:
        """Returns an estimate of the seconds of steps and evaluations; None if unknown."""
        if step == self.steps:
            return 0.0
        if not self.times:
            return None
        evaluations = 0
        if self.eval_every is not None:
            every = self.eval_every or self.steps
            evaluations = (self.steps - 1) // every - step // every + 1  # the last is at the end
        mean = sum(self.times) / len(self.times)
        return (self.steps - step) * mean + evaluations * self.evaluation_seconds

    def _columns(self, row: Row) -> list[tuple[int, str]]:
        """Returns the texts with their ranks: the highest is dropped first if there is no room."""
        seconds = sum(r["step_seconds"] for r in self.new_rows)
        left = self.seconds_left(row["step"])
        found = [(0, self._step(row["step"])), (0, format_measures({"loss": row["loss"]}))]
        if "accuracy" in row:
            found.append((4, format_measures({"accuracy": row["accuracy"]})))
        found += [(7, format_measures({name: row[name]})) for name in row if name not in COLUMNS]
        found += [(6, f"lr {row['lr']:.2e}"), (5, f"grad {format_number(row['grad_norm'])}")]
        found.append((2, f"{sum(r['tokens'] for r in self.new_rows) / seconds:7.0f} tok/s"))
        if row["mfu"] is not None:
            mfu = sum(r["mfu"] * r["step_seconds"] for r in self.new_rows) / seconds
            found.append((3, f"MFU {mfu:5.1%}"))
        found.append((8, f"{row['memory_gib']:5.1f} GiB"))
        found.append((1, f"{'-' if left is None else format_duration(left):>8} left"))
        waited = sum(r["data_seconds"] for r in self.new_rows) / seconds
        if waited > WAIT_SHARE:
            found.append((3, f"waits {waited:.0%}"))
        if "skipped" in row:
            found.append((0, f"skipped: {row['skipped']}"))
        return found

    def _step(self, step: int) -> str:
        """Returns "step N/STEPS", aligned."""
        return f"step {step:{len(str(self.steps))}}/{self.steps}"


def fit_columns(columns: Sequence[tuple[int, str]], width: int | None) -> str:
    """Returns the texts of the columns (rank, text) that fit the width (None: all): the highest
    rank is dropped first. If those of rank 0 are too long, their text is cut."""
    kept = list(columns)
    while width is not None and len(text := "  ".join(t for _, t in kept)) > width:
        worst = max(rank for rank, _ in kept)
        if worst == 0:
            return text[: max(1, width)]
        kept.remove(next(column for column in reversed(kept) if column[0] == worst))
    return "  ".join(text for _, text in kept)


def split_by_set(row: Row) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Returns the metrics of all data in an evaluation's row, and of each named data set."""
    whole: dict[str, float] = {}
    sets: dict[str, dict[str, float]] = {}
    for key, value in row.items():
        if key.startswith("eval_") and key != "eval_tokens":
            name, _, which = key.removeprefix("eval_").partition("/")
            if f"eval_loss/{which}" in row:
                sets.setdefault(which, {})[name] = value
            else:  # a metric may have such a name too, as rewards/chosen
                whole[key.removeprefix("eval_")] = value
        elif key.startswith("eval/"):  # eval/task/metric
            task, _, metric = key.removeprefix("eval/").rpartition("/")
            sets.setdefault(task, {})[metric] = value
    return whole, sets


def format_measures(values: Mapping[str, float]) -> str:
    """Returns names and formatted values in a line; a NaN but for the loss becomes "-"."""
    texts = []
    for name, value in values.items():
        shown = f"{value:6.1%}" if name == "accuracy" else format_number(value)
        shown = f"{'-':>7}" if name != "loss" and math.isnan(value) else shown
        texts.append(f"{'acc' if name == 'accuracy' else name} {shown}")
    return "  ".join(texts)


def shorten(text: str, most: int) -> str:
    """Returns the text in quotes on one line, without control characters, cut to a length."""
    shown = escape_controls(json.dumps(text, ensure_ascii=False))
    return shown if len(shown) <= most else shown[: most - 4] + '..."'


def format_number(value: float) -> str:
    """Formats five digits below 1,000, a whole number below 10^6, else two digits with an exponent,
    in seven characters if they fit."""
    if abs(value) < 1000:
        digits = 4 if abs(value) < 10 else 3 if abs(value) < 100 else 2
        return f"{value:7.{digits}f}"
    return f"{value:7.0f}" if abs(value) < 1e6 else f"{value:7.1e}"
