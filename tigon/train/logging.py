"""Logs a run: metrics.jsonl and samples.jsonl, the terminal, TensorBoard, Weights & Biases."""

import json
import math
import os
import platform
import re
import secrets
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tigon.settings.config import Config
from tigon.settings.load import dump
from tigon.train.console import SPEED, Console, Row
from tigon.train.distributed import World
from tigon.utils.json import parse_object
from tigon.utils.paths import write_text
from tigon.weights.files import explain_full_disk

FINISH = 60.0  # seconds that the end of a run waits for W&B's uploads


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
    """Raises ImportError for a sink whose package is missing."""
    for name in names:
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


PACKAGES = ("torch", "tokenizers", "safetensors", "numpy")
SAMPLES = "samples.jsonl"
EXPORT_NOTE = ".exported"  # in a run directory: the step of run_dir/hf


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
        with explain_full_disk(self.metrics), self.metrics.open("a", encoding="utf-8") as file:
            file.write(_line(row))
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
            (self.path / EXPORT_NOTE).unlink()

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
        return int((path / EXPORT_NOTE).read_text())
    except (FileNotFoundError, ValueError):  # a crash of the machine may have left it empty
        return None


def write_exported_step(path: Path, step: int) -> None:
    """Notes in the run directory that its export has the weights of this step."""
    _write(path / EXPORT_NOTE, f"{step}\n")


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
