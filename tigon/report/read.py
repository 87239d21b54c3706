"""Reads the files of a run directory, however much of it is missing or damaged."""

import fcntl
import json
import math
from array import array
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tigon.utils.json import parse_object, read_bytes
from tigon.utils.safetensors_header import read_tensors
from tigon.utils.yaml import parse_yaml

LARGEST_STEP = 1 << 53  # the largest exact integer of a float
LARGEST = 1e100  # larger values count as infinite: their sums overflow
BYTES, LOG_BYTES = 1 << 18, 1 << 30  # of config.yaml and of metrics.jsonl, at most
DAMAGED = (OSError, ValueError, AttributeError, LookupError, TypeError, RecursionError)


@dataclass
class Column:
    """Holds the values of a metric by step; NaN stands for null, a number that was not finite."""

    steps: "array[int]" = field(default_factory=lambda: array("q"))
    values: "array[float]" = field(default_factory=lambda: array("d"))

    def finite(self) -> list[float]:
        """Returns the values that are finite, in order."""
        return [value for value in self.values if not math.isnan(value)]

    def median(self) -> float:
        """Returns the median of the finite values; StatisticsError without any."""
        return median(self.finite())

    def missing(self) -> list[int]:
        """Returns the steps whose value is not finite."""
        return [s for s, v in zip(self.steps, self.values, strict=True) if math.isnan(v)]

    def last(self) -> float:
        """Returns the last finite value; NaN without any."""
        return next(reversed(self.finite()), math.nan)

    def lowest(self) -> tuple[int, float] | None:
        """Returns the step and the value of the first minimum; None without finite values."""
        value = min(self.finite(), default=None)
        return None if value is None else (self.steps[self.values.index(value)], value)


@dataclass
class RunFiles:
    """Holds what a run directory says; `problems` are sentences about what could not be read."""

    path: Path
    name: str
    config: dict[str, Any] = field(default_factory=dict)
    machine: str = ""
    columns: dict[str, Column] = field(default_factory=dict)
    skipped: list[tuple[int, str]] = field(default_factory=list)  # steps, and why
    rollbacks: list[int] = field(default_factory=list)
    samples: dict[str, dict[int, str]] = field(default_factory=dict)  # text by prompt and step
    problems: list[str] = field(default_factory=list)
    exported: int | None = None
    running: bool = False
    architecture: str = ""
    parameters: int | None = None

    def column(self, key: str) -> Column:
        """Returns the column of a key of metrics.jsonl, an empty one if no row has it."""
        return self.columns.get(key, Column())

    @property
    def last_step(self) -> int | None:
        """Returns the highest step that has a loss; None without any."""
        return max(self.column("loss").steps, default=None)

    @property
    def is_finished(self) -> bool:
        """Returns whether the run has done all the steps or epochs of its settings, or its last
        step is the one that was exported."""
        steps, epochs = self.config.get("steps"), _number(self.config.get("epochs") or 1)
        if self.last_step is None or self.last_step in (self.exported, steps):
            return self.last_step is not None
        return bool(self.config) and steps is None and self.column("epoch").last() >= epochs - 1e-9

    @property
    def ended_early(self) -> bool:
        """Returns whether `patience` evaluations have passed since the best one."""
        patience, losses = self.config.get("patience"), self.column("eval_loss")
        best = losses.lowest()
        if not isinstance(patience, int) or patience <= 0 or best is None:
            return False
        return sum(step > best[0] for step in losses.steps) >= patience


def read(path: Path) -> RunFiles:
    """Reads a run; raises ValueError for a directory without one, FileNotFoundError for none."""
    if not path.is_dir():
        raise FileNotFoundError(f"no run directory {path}")
    if not any((path / name).exists() for name in ("config.yaml", "metrics.jsonl")):
        inside = min((str(file.parent) for file in path.glob("*/config.yaml")), default="")
        hint = f"; name those in it, such as {inside}" if inside else ""
        raise ValueError(f"{path} holds no run: it has neither config.yaml nor metrics.jsonl{hint}")
    run = RunFiles(path, path.resolve().name or str(path), running=_is_locked(path / ".lock"))
    _read_config(run)
    _read_metrics(run)
    for row in _rows(run, "samples.jsonl"):
        prompt = row.get("prompt")
        prompt = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
        run.samples.setdefault(prompt, {})[row["step"]] = str(row.get("text", ""))
    with suppress(OSError, ValueError):
        run.exported = int(_content(path / ".exported", 100))
    _read_model(run)
    return run


def _content(path: Path, limit: int = BYTES) -> bytes:
    """Returns the bytes of a file; ValueError for a link or more than `limit` bytes."""
    if path.is_symlink():
        raise ValueError("it is a link, which may leave the run")
    return read_bytes(path, limit)


def _read_config(run: RunFiles) -> None:
    """Reads settings and machine from config.yaml into the run, or notes a problem."""
    try:
        text = _content(run.path / "config.yaml").decode(errors="replace")
        config = parse_yaml(text, "config.yaml")
        if not isinstance(config, dict):
            raise ValueError("it holds no settings")
        run.config = {str(key): value for key, value in config.items()}
        first = text.split("\n", 1)[0]
        run.machine = first.removeprefix("#").strip() if first.startswith("#") else ""
    except FileNotFoundError:
        run.problems.append("There is no config.yaml, so the settings are not known.")
    except (OSError, ValueError) as error:
        run.problems.append(f"config.yaml cannot be read: {error}.")


def _read_metrics(run: RunFiles) -> None:
    """Reads columns, skips and rollbacks from metrics.jsonl into the run, or notes problems."""
    rollbacks = 0.0
    for row in _rows(run, "metrics.jsonl"):
        step = row.pop("step")
        if isinstance(skipped := row.get("skipped"), str):
            run.skipped.append((step, skipped))
        if (count := _number(row.pop("rollbacks", 0))) > rollbacks:
            run.rollbacks.append(step)
            rollbacks = count
        for key, value in row.items():
            if value is None or type(value) in (int, float):
                column = run.columns.setdefault(key, Column())
                column.steps.append(step)
                column.values.append(_number(value))
    if run.last_step is None:
        run.problems.append("No training step has been recorded in metrics.jsonl.")
    if run.columns and not any(key.startswith(("eval_", "eval/")) for key in run.columns):
        run.problems.append("There is no evaluation among the metrics.")


def _number(value: Any) -> float:
    """Returns a value as a float; NaN if it is no number, or above LARGEST."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return number if abs(number) <= LARGEST else math.nan


def _rows(run: RunFiles, name: str) -> Iterator[dict[str, Any]]:
    """Yields the readable rows of a .jsonl file, none if it is missing; how many others it has
    becomes a problem of the run, and so does a file that cannot be read."""
    damaged = 0
    try:
        lines = _content(run.path / name, LOG_BYTES).splitlines()
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        run.problems.append(f"{name} cannot be read: {error}.")
        return
    for line in filter(bytes.strip, lines):
        row: dict[str, Any] = {}
        with suppress(ValueError):
            row = parse_object(line, "row", nan=True)
        if type(step := row.get("step")) is int and 0 <= step < LARGEST_STEP:
            yield row
        else:
            damaged += 1
    if damaged:
        run.problems.append(f"Left out of {name}: {damaged} lines that cannot be read.")


def _is_locked(path: Path) -> bool:
    """Returns whether a living process has locked the run."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _read_model(run: RunFiles) -> None:
    """Reads architecture and parameters from the export or newest checkpoint into the run."""
    steps = run.path.glob("checkpoints/step-*")
    newest = max(steps, default=None, key=lambda path: (len(path.name), path.name))
    for folder in filter(None, (run.path / "hf", newest)):
        with suppress(*DAMAGED):
            config = parse_object(_content(folder / "config.json"), "config", nan=True)
            run.architecture = str((config.get("architectures") or [config["model_type"]])[0])
            names = (*folder.glob("model*.safetensors"), *folder.glob("weights-*.safetensors"))
            files = [name for name in names if name.is_file() and not name.is_symlink()]
            count = sum(tensor.count for file in files for tensor in read_tensors(file).values())
            run.parameters = count if 0 < count < LARGEST_STEP else None
            return
