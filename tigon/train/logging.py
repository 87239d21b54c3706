"""Logs a run: metrics.jsonl and samples.jsonl, the terminal, TensorBoard, Weights & Biases."""

import json
import math
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tigon.train.config import Config
from tigon.train.config_file import dump
from tigon.train.distributed import World
from tigon.utils.json import parse_object
from tigon.utils.paths import write_text
from tigon.utils.terminal import escape_controls
from tigon.weights.files import explain_full_disk

FINISH = 60.0  # seconds that the end of a run waits for W&B's uploads
SPEED = {"step_seconds", "data_seconds", "data_share", "tokens_per_second", "mfu"} | {
    *("tokens", "supervised_tokens", "memory_gib", "memory_reserved_gib")
}
Row = dict[str, Any]


class TensorBoard:
    """Writes rows to an event file in run_dir/tensorboard, one for each process of the run."""

    def __init__(self, config: Config):
        from torch.utils.tensorboard import SummaryWriter

        # Readers then forget what an earlier process logged: all its rows are logged again
        directory = str(Path(config.run_dir, "tensorboard"))
        self.writer = SummaryWriter(directory, purge_step=0, flush_secs=10)

    def log(self, row: Row) -> None:
        """Adds the row's `scalar_tags` to the event file."""
        for tag, value in scalar_tags(row).items():
            self.writer.add_scalar(tag, value, row["step"])

    def close(self) -> None:
        self.writer.close()


class WandB:
    """Logs rows to one W&B run, whose id is kept in run_dir so that a resumed run continues it."""

    def __init__(self, config: Config):
        import wandb

        # init would ask at a terminal for a key, and a run that nobody watches would wait for ever
        online = wandb.setup().settings.mode in ("online", "run")
        if online and not wandb.login(prompt=False, verify=False):
            raise ValueError("no API key: run wandb login, or set WANDB_MODE=offline")
        path = Path(config.run_dir)
        file = path / ".wandb-id"
        run_id = file.read_text(errors="replace").strip() if file.is_file() else ""
        if not re.fullmatch(r"[\w-]+", run_id):  # none yet, or a crash has left the file empty
            run_id = secrets.token_hex(4)
            _write(file, run_id)
        settings = wandb.Settings(console="off", finish_timeout=FINISH)
        if "WANDB_QUIET" not in os.environ:
            settings.quiet = True  # its summary at the end repeats the report's
        self.run = wandb.init(
            id=run_id,
            resume="allow",
            project=os.environ.get("WANDB_PROJECT", "tigon"),
            name=os.environ.get("WANDB_NAME", path.resolve().name),
            dir=str(path),
            config=asdict(config),
            settings=settings,
        )

    def log(self, row: Row) -> None:
        """Logs the row's `scalar_tags`, unless W&B has a later step already."""
        if row["step"] >= self.run.step:  # W&B drops earlier steps with a warning
            self.run.log(scalar_tags(row), step=row["step"])

    def close(self) -> None:
        self.run.finish()


SINKS: dict[str, type[TensorBoard | WandB]] = {"tensorboard": TensorBoard, "wandb": WandB}


class Sinks:
    """Logs rows to all of `log_to`; drops one that fails, with a line on the terminal."""

    def __init__(self, config: Config, rows: Sequence[Row], say: Callable[[str], None]):
        """`rows` are those of earlier processes, which a sink may not have."""
        self.say = say
        self.sinks: dict[str, TensorBoard | WandB] = {}
        for name in config.log_to:
            with self._dropped_on_error(name):
                self.sinks[name] = SINKS[name](config)
        for row in rows:
            self.log(row)

    def log(self, row: Row) -> None:
        """Sends a row to every service; one that fails is reported and dropped."""
        for name, sink in list(self.sinks.items()):
            with self._dropped_on_error(name):
                sink.log(row)

    def close(self) -> None:
        """Closes all services; reports one that fails."""
        for name, sink in list(self.sinks.items()):
            with self._dropped_on_error(name):
                sink.close()
        self.sinks = {}

    @contextmanager
    def _dropped_on_error(self, name: str) -> Iterator[None]:
        """Drops a service if the `with` block raises an Exception, and reports it."""
        try:
            yield
        except Exception as error:
            self.sinks.pop(name, None)
            problem = f"{type(error).__name__}: {error}"
            self.say(f"log_to={name} has failed, and the run goes on without it: {problem}")


def check_sinks(names: Sequence[str]) -> None:
    """Raises ValueError for an unknown sink and ImportError for one whose package is missing."""
    for name in names:
        if name not in SINKS:
            raise ValueError(f"log_to={name} is not one of {', '.join(SINKS)}")
        if find_spec(name) is None:
            raise ImportError(f"log_to={name} needs a package: pip install 'tigon[{name}]'")


def is_evaluation(row: Row) -> bool:
    """Returns whether a row of metrics.jsonl is that of an evaluation, not of a step."""
    return any(key.startswith(("eval_", "eval/")) for key in row)


def scalar_tags(row: Row) -> dict[str, float]:
    """Returns the finite numbers of a row, named train/..., speed/... or eval/..."""
    tags = {}
    for key, value in row.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if key == "step" or not is_number or not math.isfinite(value):
            continue
        group = "speed" if key in SPEED else "train"
        if is_evaluation(row):
            group, key = "eval", key.removeprefix("eval_").removeprefix("eval/")
        tags[f"{group}/{key}"] = float(value)
    return tags


WARM_UP = 2  # steps that compile and allocate, and say nothing of those after them
MEAN_OF = 50  # steps
PACE = 0.25  # seconds between the lines of a terminal, at least
WAITING = 0.01  # share of a step, above which waiting for data is said
# What has a column, or none, in a line; the rest of a row are metrics that the settings name
PLACED = SPEED | {"step", "epoch", "lr", "loss", "grad_norm", "accuracy", "skipped"}


class Console:
    """Prints lines in columns: every `log_every` steps, and on a terminal each step, unless it is
    too short to read, with as many columns as fit."""

    def __init__(self, config: Config, steps: int, say: Callable[[str], None]):
        self.steps, self.say, self.log_every = steps, say, config.log_every
        self.eval_every = config.eval_every if config.evaluates else None
        self.times: deque[float] = deque(maxlen=MEAN_OF)  # of steps, after the warm-up
        self.evaluation_seconds = 0.0
        self.count = 0  # steps of this process
        self.since: list[Row] = []  # the last line
        self.last = -PACE
        self.terminal = sys.stdout.isatty()

    def step(self, row: Row) -> None:
        """Prints the line of an optimizer step from its row of metrics.jsonl, if one is due."""
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
            self.say(fit_columns(self._columns(row), width))
            self.since, self.last = [], now

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
        seconds = sum(r["step_seconds"] for r in self.since)
        left = self.seconds_left(row["step"])
        found = [(0, self._step(row["step"])), (0, format_measures({"loss": row["loss"]}))]
        if "accuracy" in row:
            found.append((4, format_measures({"accuracy": row["accuracy"]})))
        found += [(7, format_measures({name: row[name]})) for name in row if name not in PLACED]
        found += [(6, f"lr {row['lr']:.2e}"), (5, f"grad {format_number(row['grad_norm'])}")]
        found.append((2, f"{sum(r['tokens'] for r in self.since) / seconds:7.0f} tok/s"))
        if row["mfu"] is not None:
            mfu = sum(r["mfu"] * r["step_seconds"] for r in self.since) / seconds
            found.append((3, f"MFU {mfu:5.1%}"))
        found.append((8, f"{row['memory_gib']:5.1f} GiB"))
        found.append((1, f"{'-:--' if left is None else format_duration(left):>8} left"))
        waited = sum(r["data_seconds"] for r in self.since) / seconds
        if waited > WAITING:
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


def format_duration(seconds: float) -> str:
    """Formats a duration as 4:05, 1:04:05 or 2 d 01:04."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours_of_day = divmod(hours, 24)
    if days:
        return f"{days} d {hours_of_day:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


PACKAGES = ("torch", "tokenizers", "safetensors", "numpy")
SAMPLES = "samples.jsonl"
EXPORTED = ".exported"  # in a run directory: the step of run_dir/hf


class RunLog:
    """Writes the run directory and logs rows; does nothing on ranks other than the first."""

    def __init__(self, config: Config, world: World, start: int, steps: int):
        """`start` steps are done already; rows of metrics.jsonl after them are dropped."""
        self.path, self.main = Path(config.run_dir), world.main
        if not self.main:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        _write(self.path / "config.yaml", _versions(world) + dump(config))
        self.metrics = self.path / "metrics.jsonl"
        self.rewind(start)
        self.console = Console(config, steps, world.log_rank0)
        self.sinks = Sinks(config, read_metrics(self.metrics), world.log_rank0)
        world.closing.callback(self.sinks.close)  # however the run ends

    def log(self, row: dict[str, Any], samples: Sequence[dict[str, str]] = ()) -> None:
        """Logs an optimizer step, or an evaluation and the texts that it generated."""
        if not self.main:
            return
        if samples:  # first, and in place of those of an evaluation that did not get to its row
            path, step = self.path / SAMPLES, row["step"]
            kept = [known for known in read_metrics(path) if known["step"] != step]
            new = [{"step": step, **sample} for sample in samples]
            _write(path, "".join(map(_line, kept + new)))
        self._append(row)
        self.sinks.log(row)
        if is_evaluation(row):
            self.console.evaluation(row)
            self.console.samples(samples)
        else:
            self.console.step(row)

    def rewind(self, step: int) -> None:
        """Removes the rows after a step, all for 0, and the note of a later export."""
        if not self.main:
            return
        for path in (self.metrics, self.path / SAMPLES):
            kept = [row for row in read_metrics(path) if step and row["step"] <= step]
            if kept or path == self.metrics or path.exists():
                _write(path, "".join(map(_line, kept)))
        if (_noted_export(self.path) or 0) > step:  # of weights that are trained anew
            (self.path / EXPORTED).unlink()

    def sync(self) -> None:
        """Flushes the rows of metrics.jsonl to the disk."""
        if self.main:
            with self.metrics.open("rb") as file:
                os.fsync(file.fileno())

    def saved(self, step: int, seconds: float, *, whole: bool) -> None:
        """Prints how long training waited for a checkpoint; `whole`: it is on the disk."""
        if self.main:
            self.console.saved(step, seconds, whole=whole)

    def close(self) -> None:
        """Closes the services."""
        if self.main:
            self.sinks.close()

    def _append(self, row: dict[str, Any]) -> None:
        """Appends a row to metrics.jsonl."""
        try:
            with self.metrics.open("a", encoding="utf-8") as file:
                file.write(_line(row))
        except OSError as error:  # a full disk does not say of what
            raise OSError(error.errno, error.strerror, str(self.metrics)) from None


def is_unfinished(config: Config, step: int) -> bool:
    """Returns whether a run that ends with `step` lacks its last evaluation or its export."""
    path = Path(config.run_dir)
    evaluated = not config.evaluates or read_eval_loss(path / "metrics.jsonl", step) is not None
    return not evaluated or (config.export and read_exported_step(config) != step)


def read_eval_loss(metrics: Path, step: int) -> float | None:
    """Returns the loss of this step's evaluation, inf if it has no finite one; None without."""
    rows = [row for row in read_metrics(metrics) if row["step"] == step and is_evaluation(row)]
    if not rows:
        return None
    loss = rows[0].get("eval_loss")
    return math.inf if loss is None else loss


def read_exported_step(config: Config) -> int | None:
    """Returns the step whose weights are in run_dir/hf, or whose adapter in run_dir/adapter."""
    path, wanted = Path(config.run_dir), ["hf"]
    if config.lora is not None:
        wanted = ["adapter", "hf"] if config.lora.merge else ["adapter"]
    return _noted_export(path) if all((path / name).exists() for name in wanted) else None


def _noted_export(path: Path) -> int | None:
    """Returns the step that the last export is of, if it is noted."""
    try:
        return int((path / EXPORTED).read_text())
    except (FileNotFoundError, ValueError):  # a crash of the machine may have left it empty
        return None


def write_exported_step(path: Path, step: int) -> None:
    """Notes in the run directory that its export has the weights of this step."""
    _write(path / EXPORTED, f"{step}\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a metrics.jsonl, without what a kill or a crash has left of others."""
    rows = []
    for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else []:
        with suppress(ValueError):
            row = parse_object(line, "metrics.jsonl", nan=True)
            if type(row.get("step")) is int:
                rows.append(row)
    return rows


def _versions(world: World) -> str:
    """Returns a comment with ranks, commit and package versions for config.yaml."""
    packages = " ".join(f"{name} {version(name)}" for name in PACKAGES)
    commit = "no git"
    with suppress(OSError):  # it is not installed
        command = ["git", "describe", "--always", "--dirty"]
        git = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
        commit = f"commit {git.stdout.strip()}" if git.returncode == 0 else commit
    ranks = f"{world.size} rank{'s' * (world.size > 1)} on {world.device.type}"
    return f"# {ranks}, {commit}, python {platform.python_version()} {packages}\n"


def _line(row: dict[str, Any]) -> str:
    """Returns a row of JSON, which has neither NaN nor infinity: they become null."""
    bad = [k for k, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
    plain = row | dict.fromkeys(bad)
    return json.dumps(plain, allow_nan=False, ensure_ascii=False) + "\n"


def _write(path: Path, text: str) -> None:
    """Replaces a file in one step."""
    with explain_full_disk(path):
        write_text(path, text)
