"""What a run directory says about its run, however much of it is missing or damaged."""

import errno
import json
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from tigon.report.series import Column
from tigon.utils.json import parse_object
from tigon.utils.yaml import parse_yaml

try:
    import fcntl
except ImportError:  # not on Windows: a run is then never told to be running
    fcntl = None  # type: ignore[assignment]

HEADER_BYTES = 100 << 20  # of a safetensors file, at most
LARGEST_STEP = 1 << 53  # what a float holds exactly
LARGEST = 1e300  # of a value; what is above is as good as infinite, and breaks arithmetic
LINE_BYTES = 1 << 20  # of a row that is read
CONFIG_BYTES = 1 << 18  # of config.yaml, which takes seconds to read
COLUMNS = 1000  # keys of metrics.jsonl, at most


# What JSON that is not what it should be leads to
DAMAGED = (OSError, ValueError, AttributeError, LookupError, TypeError, RecursionError)


@dataclass(frozen=True)
class Sample:
    step: int
    prompt: str
    text: str


@dataclass
class RunFiles:
    """Of one run. `problems` are sentences for people: what could not be read."""

    path: Path
    name: str
    config: dict[str, Any] = field(default_factory=dict)
    machine: str = ""
    columns: dict[str, Column] = field(default_factory=dict)
    skipped: list[tuple[int, str]] = field(default_factory=list)
    rollbacks: list[int] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    exported: int | None = None
    running: bool = False
    architecture: str = ""
    parameters: int | None = None
    updates: list[int] = field(default_factory=list)  # the first and the last step with a loss

    def column(self, key: str) -> Column:
        return self.columns.get(key, Column())

    @property
    def last_step(self) -> int | None:
        return self.updates[1] if self.updates else None

    @property
    def is_finished(self) -> bool:
        """Whether the run has done all the steps that its settings ask for."""
        last = self.last_step
        if last is None:
            return False
        steps, epochs = self.config.get("steps"), _number(self.config.get("epochs") or 1)
        if last in (self.exported, steps):
            return True
        return bool(self.config) and steps is None and self.column("epoch").last() >= epochs - 1e-9

    @property
    def ended_early(self) -> bool:
        """By patience: so many evaluations since the best."""
        patience, losses = self.config.get("patience"), self.column("eval_loss")
        best = losses.lowest()
        if not isinstance(patience, int) or patience <= 0 or best is None:
            return False
        return sum(step > best[0] for step in losses.steps) >= patience


def read(path: Path) -> RunFiles:
    """ValueError for a directory that holds no run, FileNotFoundError where there is none."""
    if not path.is_dir():
        raise FileNotFoundError(f"no run directory {path}")
    if not any((path / name).exists() for name in ("config.yaml", "metrics.jsonl")):
        raise ValueError(f"{path} holds no run: it has neither config.yaml nor metrics.jsonl")
    run = RunFiles(path, path.resolve().name or str(path))
    _read_config(run)
    _read_metrics(run)
    _read_samples(run)
    with suppress(OSError, ValueError):
        run.exported = int(_content(path / ".exported", 100))
    run.running = _is_locked(path / ".lock")
    _read_model(run)
    return run


def _read_config(run: RunFiles) -> None:
    path = run.path / "config.yaml"
    try:
        text = _content(path, CONFIG_BYTES).decode(errors="replace")
        config = parse_yaml(text, "config.yaml")
    except FileNotFoundError:
        run.problems.append("There is no config.yaml, so the settings are not known.")
        return
    except (OSError, ValueError) as error:
        run.problems.append(f"config.yaml cannot be read: {error}.")
        return
    if isinstance(config, dict):
        run.config = {str(key): value for key, value in config.items()}
    else:
        run.problems.append("config.yaml holds no settings.")
    first = text.split("\n", 1)[0]
    run.machine = first.removeprefix("#").strip() if first.startswith("#") else ""


def _open(path: Path) -> BinaryIO:
    """To read; OSError for what is no file: a pipe or a device may never end, and a link may lead
    to a file of somebody else."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise OSError(errno.EINVAL, "it is no file")
    return path.open("rb")


def _content(path: Path, most: int) -> bytes:
    """ValueError for more bytes than that."""
    with _open(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return content


def _read_metrics(run: RunFiles) -> None:
    path, seen, rollbacks = run.path / "metrics.jsonl", 0, 0.0
    others: set[str] = set()
    if not path.exists():
        run.problems.append("There is no metrics.jsonl: no step has been recorded.")
    for row in _rows(run, path):
        step = row["step"]
        seen += 1
        if "loss" in row:
            run.updates = [min([step, *run.updates]), max([step, *run.updates])]
        if isinstance(skipped := row.get("skipped"), str):
            run.skipped.append((step, skipped))
        for key, value in row.items():
            if key == "step" or not (value is None or type(value) in (int, float)):
                continue
            if key in run.columns or len(run.columns) < COLUMNS:
                run.columns.setdefault(key, Column()).add(step, _number(value))
            else:
                others.add(key)
        if (count := _number(row.get("rollbacks", 0))) > rollbacks:
            run.rollbacks.append(step)
            rollbacks = count
    run.columns.pop("rollbacks", None)
    if others:
        run.problems.append(
            f"metrics.jsonl measures more than {COLUMNS:,} things: {len(others):,} "
            "of them are left out."
        )
    if path.exists() and not seen:
        run.problems.append("metrics.jsonl has no rows: no step has been recorded.")
    elif not run.updates:
        run.problems.append("No training step has been recorded.")
    if seen and "eval_loss" not in run.columns:
        run.problems.append("There is no evaluation among the metrics.")


def _number(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return number if abs(number) <= LARGEST else math.nan


def _rows(run: RunFiles, path: Path) -> Iterator[dict[str, Any]]:
    """The rows that can be read; what a kill or a crash left of others is counted."""
    lost = 0
    try:
        with _open(path) as file:
            for line in _lines(file):
                row = _row(line)
                if row is not None:
                    yield row
                elif line.strip():
                    lost += 1
    except FileNotFoundError:
        return
    except OSError as error:
        run.problems.append(f"{path.name} cannot be read: {error.strerror}.")
    if lost:
        lines = "A line" if lost == 1 else f"{lost} lines"
        run.problems.append(f"{lines} of {path.name} cannot be read and {_are(lost)} left out.")


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Of one that is too long only the beginning, which is too long too."""
    while line := file.readline(LINE_BYTES + 1):
        rest = line
        while rest and not rest.endswith(b"\n"):
            rest = file.readline(LINE_BYTES)
        yield line


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _row(line: bytes) -> dict[str, Any] | None:
    if len(line) > LINE_BYTES:
        return None
    try:
        row = parse_object(line, "row", nan=True)
    except ValueError:
        return None
    step = row.get("step")
    return row if type(step) is int and 0 <= step < LARGEST_STEP else None


def _read_samples(run: RunFiles) -> None:
    for row in _rows(run, run.path / "samples.jsonl"):
        prompt = row.get("prompt")
        prompt = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
        run.samples.append(Sample(row["step"], prompt, str(row.get("text", ""))))


def _is_locked(path: Path) -> bool:
    """Whether a living process has the run."""
    if fcntl is None:
        return False
    try:
        with _open(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _read_model(run: RunFiles) -> None:
    """Architecture and parameters, from the export or the newest checkpoint, if there is one."""
    steps = run.path.glob("checkpoints/step-*")
    newest = max(steps, default=None, key=lambda path: _digits(path.name))
    for directory in filter(None, (run.path / "hf", newest)):
        files = [*directory.glob("model*.safetensors"), *directory.glob("weights-*.safetensors")]
        with suppress(*DAMAGED):
            config = parse_object(
                _content(directory / "config.json", LINE_BYTES), "config", nan=True
            )
            run.architecture = str((config.get("architectures") or [config["model_type"]])[0])
            count = sum(map(_parameters, files))
            run.parameters = count if 0 < count < LARGEST_STEP else None
            return


def _digits(name: str) -> int:
    found = re.search(r"\d{1,18}", name)
    return int(found[0]) if found else -1


def _parameters(path: Path) -> int:
    """Of the tensors that the header of a safetensors file lists."""
    with _open(path) as file:
        size = int.from_bytes(file.read(8), "little")
        if size > HEADER_BYTES:
            raise ValueError(f"{path.name} has no header")
        header = parse_object(file.read(size), path)
    shapes = (tensor["shape"] for name, tensor in header.items() if name != "__metadata__")
    return sum(map(_values, shapes))


def _values(shape: list[int]) -> int:
    """Bounded: the product of a million sizes would take a minute."""
    if len(shape) > 64 or not all(type(n) is int and 0 <= n < LARGEST_STEP for n in shape):
        raise ValueError("no shape of a tensor")
    return math.prod(shape)
