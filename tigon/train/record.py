"""What a run leaves for people: config.yaml, metrics.jsonl, samples.jsonl."""

import json
import math
import os
import platform
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tigon.train.config import Config
from tigon.train.config_file import dump
from tigon.train.console import Console
from tigon.train.parallel import World
from tigon.train.sinks import Sinks
from tigon.utils.json import parse_object

PACKAGES = ("torch", "tokenizers", "safetensors", "numpy")
SAMPLES = "samples.jsonl"
EXPORTED = ".exported"  # in a run directory: the step of run_dir/hf


class Record:
    """The run directory of `config`; on every rank but the first it does nothing."""

    def __init__(self, config: Config, world: World, start: int, steps: int):
        """`start` steps are done already; rows of metrics.jsonl after them are dropped."""
        self.path, self.main = Path(config.run_dir), world.main
        if not self.main:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        _write(self.path / "config.yaml", _versions(world) + dump(config))
        self.metrics = self.path / "metrics.jsonl"
        self._cut(start)
        self.console = Console(config, steps, world.say)
        self.sinks = Sinks(config, read_metrics(self.metrics), start, world.say)
        world.closing.callback(self.sinks.close)  # however the run ends

    def step(self, row: dict[str, Any]) -> None:
        """One optimizer step."""
        if self.main:
            self._append(row)
            self.sinks.log(row)
            self.console.step(row)

    def evaluation(self, row: dict[str, Any], samples: Sequence[dict[str, str]] = ()) -> None:
        """An evaluation and the texts that it generated."""
        if not self.main:
            return
        if samples:  # first, and in place of those of an evaluation that did not get to its row
            path, step = self.path / SAMPLES, row["step"]
            kept = [known for known in read_metrics(path) if known["step"] != step]
            new = [{"step": step, **sample} for sample in samples]
            _write(path, "".join(map(_line, kept + new)))
        self._append(row)
        self.sinks.log(row)
        self.sinks.flush()
        self.console.evaluation(row)
        self.console.samples(samples)

    def rewind(self, step: int) -> None:
        """Forget the steps after `step`, which come again."""
        if self.main:
            self._cut(step)
            self.sinks.rewind(read_metrics(self.metrics), step)

    def sync(self) -> None:
        """Before a checkpoint: its rows are on the disk, whatever happens to the machine."""
        if not self.main:
            return
        with self.metrics.open("rb") as file:
            os.fsync(file.fileno())
        self.sinks.flush()

    def saved(self, step: int, seconds: float, *, whole: bool) -> None:
        """A checkpoint, for which training waited so long; `whole`: it is on the disk."""
        if self.main:
            self.console.saved(step, seconds, whole=whole)

    def close(self) -> None:
        if self.main:
            self.sinks.close()

    def _append(self, row: dict[str, Any]) -> None:
        try:
            with self.metrics.open("a", encoding="utf-8") as file:
                file.write(_line(row))
        except OSError as error:  # a full disk does not say of what
            raise OSError(error.errno, error.strerror, str(self.metrics)) from None

    def _cut(self, step: int) -> None:
        for path in (self.metrics, self.path / SAMPLES):
            kept = [row for row in read_metrics(path) if step and row["step"] <= step]
            if kept or path == self.metrics or path.exists():
                _write(path, "".join(map(_line, kept)))
        if (_noted_export(self.path) or 0) > step:  # of weights that are trained anew
            (self.path / EXPORTED).unlink()


def unfinished(config: Config, step: int) -> bool:
    """Whether a run that ends with `step` lacks its last evaluation or its export."""
    path = Path(config.run_dir)
    evaluated = not config.held_out or eval_loss(path / "metrics.jsonl", step) is not None
    return not evaluated or (config.export and exported(config) != step)


def eval_loss(metrics: Path, step: int) -> float | None:
    """Of the evaluation at this step, inf if it was no number; None if there was none."""
    rows = [row for row in read_metrics(metrics) if row["step"] == step and "eval_loss" in row]
    if not rows:
        return None
    loss = rows[0]["eval_loss"]
    return math.inf if loss is None else loss


def exported(config: Config) -> int | None:
    """The step whose weights are in run_dir/hf, or whose adapter in run_dir/adapter."""
    path, wanted = Path(config.run_dir), ["hf"]
    if config.lora is not None:
        wanted = ["adapter", "hf"] if config.lora.merge else ["adapter"]
    return _noted_export(path) if all((path / name).exists() for name in wanted) else None


def _noted_export(path: Path) -> int | None:
    try:
        return int((path / EXPORTED).read_text())
    except (FileNotFoundError, ValueError):  # a crash of the machine may have left it empty
        return None


def note_export(path: Path, step: int) -> None:
    _write(path / EXPORTED, f"{step}\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl, without what a kill, a full disk or a crash of the machine left
    of others: a beginning, or zeros."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [row for line in lines if (row := _row(line)) is not None]


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = parse_object(line, "metrics.jsonl", nan=True)
    except ValueError:
        return None
    return row if type(row.get("step")) is int else None


def _versions(world: World) -> str:
    packages = " ".join(f"{name} {version(name)}" for name in PACKAGES)
    commit = "no git"
    with suppress(OSError):  # it is not installed
        git = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
        )
        commit = f"commit {git.stdout.strip()}" if git.returncode == 0 else commit
    ranks = f"{world.size} rank{'s' * (world.size > 1)} on {world.device.type}"
    return f"# {ranks}, {commit}, python {platform.python_version()} {packages}\n"


def _line(row: dict[str, Any]) -> str:
    """JSON has neither NaN nor infinity: they become null."""
    plain = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in row.items()
    }
    return json.dumps(plain, allow_nan=False, ensure_ascii=False) + "\n"


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.partial")
    temporary.unlink(missing_ok=True)  # never written through, should it be a link
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
