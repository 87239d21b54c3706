"""Where the rows of metrics.jsonl go besides: TensorBoard and Weights & Biases."""

import math
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from tigon.train.config import Config

FLUSH = 10  # seconds until TensorBoard's file has an event, at most
FINISH = 60.0  # seconds that the end of a run waits for W&B's uploads
DISK = 20.0  # seconds that a run waits for TensorBoard's file to be on the disk
EVENTS = 1 << 20  # that wait for a slow disk, before the run would wait too
SPEED = {"step_seconds", "data_seconds", "data_share", "tokens_per_second", "mfu"} | {
    *("tokens", "supervised_tokens", "memory_gib", "memory_reserved_gib")
}
Row = dict[str, Any]


class Sink(Protocol):
    def log(self, row: Row) -> None: ...
    def rewind(self, rows: Sequence[Row], step: int) -> None:
        """The steps after `step` come again; `rows` are those up to it."""

    def flush(self) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """An event file in run_dir/tensorboard for each process of the run.

    A session's start makes readers forget all steps from that on; its rows are written again.
    """

    def __init__(self, config: Config, rows: Sequence[Row], start: int):
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        directory = Path(config.run_dir, "tensorboard")
        begun = directory.is_dir() and any(directory.iterdir())
        self.writer = EventFileWriter(str(directory), max_queue_size=EVENTS, flush_secs=FLUSH)
        self.rewind(rows, start if begun else 0)

    def log(self, row: Row) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=k, simple_value=v) for k, v in scalars(row).items()]
        self._add(row["step"], summary=Summary(value=values))

    def rewind(self, rows: Sequence[Row], step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._add(step, session_log=SessionLog(status=SessionLog.START))
        for row in rows:
            if row["step"] >= step:
                self.log(row)

    def flush(self) -> None:
        bounded(self.writer.flush, DISK)

    def close(self) -> None:
        bounded(self.writer.close, DISK)

    def _add(self, step: int, **what: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self.writer.add_event(Event(wall_time=time.time(), step=step, **what))


class WandB:
    """One W&B run, whose id is kept in run_dir, however often the run goes on.

    W&B takes no step twice: of those that come again it keeps the first.
    """

    def __init__(self, config: Config, rows: Sequence[Row], start: int):
        import wandb

        # init would ask at a terminal for a key, and a run that nobody watches would wait for ever
        online = wandb.setup().settings.mode in ("online", "run")
        if online and not wandb.login(prompt=False, verify=False):
            raise ValueError(
                "no API key: run wandb login, or set WANDB_API_KEY or WANDB_MODE=offline"
            )
        path = Path(config.run_dir)
        file = path / ".wandb-id"
        found = file.read_text(errors="replace").strip() if file.is_file() else ""
        begun = re.fullmatch(r"[\w-]+", found) is not None
        if not begun:  # or a crash of the machine has left it empty
            found = secrets.token_hex(4)
            file.unlink(missing_ok=True)
            file.write_text(found)
        settings = wandb.Settings(console="off", finish_timeout=FINISH)
        if "WANDB_QUIET" not in os.environ:
            settings.quiet = True  # its summary at the end repeats the report's
        self.run = wandb.init(
            id=found,
            resume="allow",
            project=os.environ.get("WANDB_PROJECT", "tigon"),
            name=os.environ.get("WANDB_NAME", path.resolve().name),
            dir=str(path),
            config=asdict(config),
            settings=settings,
        )
        # Offline, nobody knows what an earlier process has logged
        self.first = start + 1 if begun and self.run.offline else self.run.step
        self.rewind(rows, 0)

    def log(self, row: Row) -> None:
        if row["step"] >= self.first:
            self.first = row["step"]
            self.run.log(scalars(row), step=row["step"])

    def rewind(self, rows: Sequence[Row], step: int) -> None:
        for row in rows:
            if row["step"] >= step:
                self.log(row)

    def flush(self) -> None:
        """A process of W&B's own has what was logged."""

    def close(self) -> None:
        self.run.finish()


SINKS: dict[str, Callable[[Config, Sequence[Row], int], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
}


class Sinks:
    """Those of `log_to`. One that fails is left out from then on, and said: it ends no run."""

    def __init__(self, config: Config, rows: Sequence[Row], start: int, say: Callable[[str], None]):
        """`rows` are those of the `start` steps that are done."""
        self.say = say
        self.open: dict[str, Sink] = {}
        for name in config.log_to:
            self._try(name, partial(self._begin, name, config, rows, start))

    def log(self, row: Row) -> None:
        self._each(lambda sink: sink.log(row))

    def rewind(self, rows: Sequence[Row], step: int) -> None:
        self._each(lambda sink: sink.rewind(rows, step))

    def flush(self) -> None:
        self._each(lambda sink: sink.flush())

    def close(self) -> None:
        self._each(lambda sink: sink.close())
        self.open = {}

    def _begin(self, name: str, config: Config, rows: Sequence[Row], start: int) -> None:
        self.open[name] = SINKS[name](config, rows, start)

    def _each(self, call: Callable[[Sink], None]) -> None:
        for name, sink in list(self.open.items()):
            self._try(name, partial(call, sink))

    def _try(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self.open.pop(name, None)
            problem = f"{type(error).__name__}: {error}"
            self.say(f"log_to={name} has failed, and the run goes on without it: {problem}")


def bounded(call: Callable[[], None], seconds: float) -> None:
    """Raises TimeoutError where it takes longer, and leaves it behind; what it raises else."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"its disk has not answered in {seconds:g} s")
    if raised:
        raise raised[0]


def check_sinks(names: Sequence[str]) -> None:
    """ValueError for names that are not known, ImportError for packages that are not there."""
    for name in names:
        if name not in SINKS:
            raise ValueError(f"log_to={name} is not one of {', '.join(SINKS)}")
        if find_spec(name) is None:
            raise ImportError(f"log_to={name} needs a package: pip install 'tigon[{name}]'")


def scalars(row: Row) -> dict[str, float]:
    """The finite numbers of a row, as train/..., speed/... and eval/..."""
    found = {}
    for key, value in row.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if key == "step" or not number or not math.isfinite(value):
            continue
        group = "speed" if key in SPEED else "train"
        if "eval_loss" in row:
            group, key = "eval", key.removeprefix("eval_")
        found[f"{group}/{key}"] = float(value)
    return found
