"""What a run says while it trains: a line for a step, as on a terminal as in a file."""

import json
import math
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tigon.train.config import Config
from tigon.utils.terminal import escape_controls

WARM_UP = 2  # steps that compile and allocate, and say nothing of those after them
MEAN_OF = 50  # steps
PACE = 0.25  # seconds between the lines of a terminal, at least
WAITING = 0.01  # share of a step, above which waiting for data is said
# Of a row of metrics.jsonl, what has a place of its own in a line or none; the rest was asked for
PLACED = {"step", "epoch", "lr", "loss", "grad_norm", "accuracy", "skipped"} | {
    *("tokens", "supervised_tokens", "step_seconds", "data_seconds", "data_share"),
    *("tokens_per_second", "mfu", "memory_gib", "memory_reserved_gib"),
}
Row = Mapping[str, Any]


class Console:
    """Plain lines in columns. A file has one every `log_every` steps, a terminal one each step,
    but for steps that are too short to read, and only as many columns as it is wide."""

    def __init__(self, config: Config, steps: int, say: Callable[[str], None]):
        self.steps, self.say, self.log_every = steps, say, config.log_every
        self.eval_every = config.eval_every if config.held_out else None
        self.times: deque[float] = deque(maxlen=MEAN_OF)  # of steps, after the warm-up
        self.evaluation_seconds = 0.0
        self.count = 0  # steps of this process
        self.since: list[Row] = []  # the last line
        self.last = -PACE
        self.terminal = sys.stdout.isatty()

    def step(self, row: Row) -> None:
        """An optimizer step, by its row of metrics.jsonl; a line, if one is due."""
        self.count += 1
        if self.count > WARM_UP:
            self.times.append(row["step_seconds"])
        if self.count == WARM_UP + 1:
            self.since = []
        self.since.append(row)
        due = self.count == 1 or row["step"] % self.log_every == 0 or row["step"] == self.steps
        now = time.monotonic()
        if due or (self.terminal and now - self.last >= PACE):
            width = shutil.get_terminal_size().columns - 1 if self.terminal else None
            self.say(line(self._columns(row), width))
            self.since, self.last = [], now

    def evaluation(self, row: Row) -> None:
        """An evaluation, by its row: all held-out data, and each data set that has a name."""
        self.evaluation_seconds = row["seconds"]
        whole, sets = by_set(row)
        found = f"eval {measures(whole)}  {row['eval_tokens']:,} tokens in {row['seconds']:.1f} s"
        lines = [f"{self._step(row['step'])}  {found}"]
        lines += [f"  {name}: {measures(values)}" for name, values in sets.items()]
        self.say("\n".join(lines))

    def samples(self, rows: Sequence[Mapping[str, str]]) -> None:
        """What the model has said to each prompt, as much of it as a line has room for."""
        for row in rows:
            self.say(f"  {shorten(row['prompt'], 40)} -> {shorten(row['text'], 70)}")

    def saved(self, step: int, seconds: float, *, whole: bool = True) -> None:
        """A checkpoint, for which training waited so long; `whole`: it is on the disk."""
        text = f"checkpoint, in {seconds:.1f} s"
        if not whole:
            text = f"checkpoint begun; training waited {seconds:.1f} s"
        self.say(f"{self._step(step)}  {text}")

    def seconds_left(self, step: int) -> float | None:
        """Of steps and evaluations; None as long as nothing is known."""
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
        """Each with its rank: what is dropped first where there is no room has the highest."""
        seconds = sum(r["step_seconds"] for r in self.since)
        left = self.seconds_left(row["step"])
        found = [(0, self._step(row["step"])), (0, measures({"loss": row["loss"]}))]
        if "accuracy" in row:
            found.append((4, measures({"accuracy": row["accuracy"]})))
        found += [(7, measures({name: row[name]})) for name in row if name not in PLACED]
        found += [(6, f"lr {row['lr']:.2e}"), (5, f"grad {number(row['grad_norm'])}")]
        found.append((2, f"{sum(r['tokens'] for r in self.since) / seconds:7.0f} tok/s"))
        if row["mfu"] is not None:
            mfu = sum(r["mfu"] * r["step_seconds"] for r in self.since) / seconds
            found.append((3, f"MFU {mfu:5.1%}"))
        found.append((8, f"{row['memory_gib']:5.1f} GiB"))
        found.append((1, f"{'-:--' if left is None else duration(left):>8} left"))
        waited = sum(r["data_seconds"] for r in self.since) / seconds
        if waited > WAITING:
            found.append((3, f"waits {waited:.0%}"))
        if "skipped" in row:
            found.append((0, f"skipped: {row['skipped']}"))
        return found

    def _step(self, step: int) -> str:
        return f"step {step:{len(str(self.steps))}}/{self.steps}"


def line(columns: Sequence[tuple[int, str]], width: int | None) -> str:
    """The columns that there is room for, in their order; those of rank 0 in any case."""
    kept = list(columns)
    while width is not None and len(text := "  ".join(t for _, t in kept)) > width:
        worst = max(rank for rank, _ in kept)
        if worst == 0:
            return text[: max(1, width)]
        kept.remove(next(column for column in reversed(kept) if column[0] == worst))
    return "  ".join(text for _, text in kept)


def by_set(row: Row) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """What an evaluation measured of all data, and of each named data set."""
    whole: dict[str, float] = {}
    sets: dict[str, dict[str, float]] = {}
    for key, value in row.items():
        if key.startswith("eval_") and key != "eval_tokens":
            name, _, which = key.removeprefix("eval_").partition("/")
            if f"eval_loss/{which}" in row:
                sets.setdefault(which, {})[name] = value
            else:  # a metric may have such a name too, as rewards/chosen
                whole[key.removeprefix("eval_")] = value
    return whole, sets


def measures(values: Mapping[str, float]) -> str:
    """Loss, accuracy and whatever else was measured, one after the other.

    A NaN of the loss is said; another one is a mean of nothing, as of kto's chosen answers where a
    step has none, unless the loss beside it says otherwise.
    """
    texts = []
    for name, value in values.items():
        if name != "loss" and math.isnan(value):
            texts.append(f"{name if name != 'accuracy' else 'acc'} {'-':>7}")
        elif name == "accuracy":
            texts.append(f"acc {value:6.1%}")
        else:
            texts.append(f"{name} {number(value)}")
    return "  ".join(texts)


def shorten(text: str, most: int) -> str:
    """In quotes on one line, without control characters, and cut to so many characters."""
    shown = escape_controls(json.dumps(text, ensure_ascii=False))
    return shown if len(shown) <= most else shown[: most - 4] + '..."'


def number(value: float) -> str:
    """Five digits, in seven characters if it fits."""
    if abs(value) < 1000:
        digits = 4 if abs(value) < 10 else 3 if abs(value) < 100 else 2
        return f"{value:7.{digits}f}"
    return f"{value:7.0f}" if abs(value) < 1e6 else f"{value:7.1e}"


def duration(seconds: float) -> str:
    """As 4:05, 1:04:05 or 2 d 01:04."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours_of_day = divmod(hours, 24)
    if days:
        return f"{days} d {hours_of_day:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
