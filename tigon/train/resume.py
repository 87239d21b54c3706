"""Claims a run directory for one process, and checks what a run resumes from.

RUN_DIR/.lock belongs to the process that trains; only names that runs write (`RUN_FILES`,
`LEFTOVER`) are checked or removed. The checkpoint must be of the same data in the same order, and
of the same adapter and base.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from tigon.data import Loader
from tigon.settings.command import check_new_run
from tigon.settings.config import Config, Parallel
from tigon.tokenizer import chat_template
from tigon.train import checkpoint
from tigon.train.distributed import World
from tigon.train.state import TrainState
from tigon.weights.files import LockedError, lock_file, remove_leftovers

LOCK = ".lock"
_EXPORT = r"(?:hf|adapter)(?:-ema|-best|-step-\d+)?"
_TEXTS = r"config\.yaml|(?:metrics|samples|predictions-step-\d+)\.jsonl|\.exported"
RUN_FILES = re.compile(
    rf"{_EXPORT}|{_TEXTS}|report\.html|checkpoints|tensorboard|wandb|profile"
    r"|flight-recorder-\d+|\.wandb-id"
)
LEFTOVER = re.compile(
    rf"\.(?:(?:{_TEXTS}|\.wandb-id|(?:report|comparison)\.html)\.[0-9a-f]{{16}}"
    r"|rank-\d+-[0-9a-f]{8})"
)

REMEDY = f"give the same again, or {checkpoint.BEGIN_AGAIN}"
MIN_STEPS = 2**20  # steps of a run that may have been longer before its settings changed


# The run directory


@contextmanager
def claim(config: Config) -> Iterator[None]:
    """Holds the lock of run_dir, which is created, and removed again if nothing was written.

    Removes what killed runs have left in it. Raises FileExistsError if another process holds the
    lock, which ends with its process, or if run_dir has files that the run would overwrite or links
    that it would write through.
    """
    path = Path(config.run_dir)
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"run_dir={path} cannot be made: {error}") from None
    begun = (path / LOCK).exists() or (path / "metrics.jsonl").exists()
    with ExitStack() as stack:
        has_lock = False
        try:
            lock = lock_file(path / LOCK, path, "in use", "choose another run_dir")
            has_lock = stack.enter_context(lock)
        except LockedError as error:
            if not error.by_this_process:  # this process may prepare a run twice
                raise
        try:
            _check_files(path, begun, bool(config.resume))
        except FileExistsError:
            if has_lock and not begun:
                (path / LOCK).unlink()
            raise
        if has_lock:
            _clean(path)
        try:
            yield
        finally:
            # If a user has removed it, that must not hide what ended the run
            if has_lock and path.is_dir() and [file.name for file in path.iterdir()] == [LOCK]:
                (path / LOCK).unlink()
                with suppress(OSError):  # not empty
                    for folder in missing:
                        folder.rmdir()


def _check_files(path: Path, begun: bool, resume: bool) -> None:
    """Raises FileExistsError if the directory holds other files than a run's, a run that is not to
    be resumed, or links that the run would write through."""
    if not begun and {file.name for file in path.iterdir()} - {LOCK}:
        raise FileExistsError(f"{path} is not empty, and holds no run: choose another run_dir")
    if not resume:
        check_new_run(path)
    for file in sorted(path.iterdir()):
        if file.is_symlink() and RUN_FILES.fullmatch(file.name):
            raise FileExistsError(
                f"{file} is a link to {os.readlink(file)}, and the run would write there: remove "
                "the link, or choose another run_dir, which may itself be a link"
            )


def _clean(path: Path) -> None:
    """Removes what a killed run has left, and nothing with other names. The lock is held."""
    remove_leftovers(path / "checkpoints", r"step-\d+")
    remove_leftovers(path, _EXPORT)
    for file in sorted(path.iterdir()):
        if LEFTOVER.fullmatch(file.name) and file.is_file() and not file.is_symlink():
            with suppress(OSError):
                file.unlink()


# The checkpoint to resume from


def find_source(config: Config, world: World) -> Path | None:
    """Returns the verified checkpoint to resume from, None to begin. Every rank calls this."""
    run = Path(config.run_dir)
    if not config.resume:
        return None
    if config.resume in (True, "auto"):
        return checkpoint.newest_complete(run / "checkpoints", world.log_rank0)
    source, newest = Path(str(config.resume)), checkpoint.latest(run / "checkpoints")
    checkpoint.step_of(source)
    if newest is not None and newest.resolve() != source.resolve():
        raise FileExistsError(
            f"{run} already has {newest.name}: to go on from {source}, choose another run_dir"
        )
    checkpoint.verify(source)
    return source


def run_metadata(config: Config, data: Loader) -> dict[str, Any]:
    """Returns what a checkpoint remembers to be resumed: settings, and the digest of the data."""
    return json.loads(json.dumps({"data": data.windows.identity(), "config": asdict(config)}))


def start_time(source: Path | None, world: World) -> datetime:
    """Returns when the run began, which chat templates write as the present time: as the checkpoint
    says, or the clock of rank 0. Every rank calls this."""
    saved = checkpoint.read_metadata(source).get("strftime_now")
    first = world.gather(str(saved or chat_template.now().isoformat()))[0]
    try:
        return datetime.fromisoformat(first)
    except ValueError:
        raise ValueError(f"{source}: run.json has strftime_now={first!r:.100}, no time") from None


def check_adapter(source: Path, config: Config) -> None:
    """Raises ValueError for another adapter or base; first, as others may follow from it."""
    before, now, changed = _find_changes(source, config)
    was, new = ({"quantize": None, **(c["lora"] or {}), "merge": False} for c in (before, now))
    names = ("model", "revision", "init") if before["lora"] and now["lora"] else ()
    faults = [changed[name] for name in names if name in changed]
    if was != new:
        faults.append(changed["lora"])
    if faults:
        raise ValueError(f"{source} is of another adapter or model: {', '.join(faults)}; {REMEDY}")


def check_base(source: Path, config: Config, digest: str) -> None:
    """Raises ValueError if the adapter's base had another digest than now."""
    if checkpoint.read_metadata(source).get("base", digest) != digest:
        remedy = "put the files back that it had, or name the revision"
        if config.init:
            remedy = "put the file back that it had, or use the version of Tigon that drew them"
        raise ValueError(
            f"{source} is an adapter of other weights than {config.model or config.init} has now: "
            f"{remedy}"
        )


def check_settings(source: Path, config: Config, data: Loader) -> list[str]:
    """Returns the settings that differ from the checkpoint's; ValueError if the data does, or its
    order. `check_adapter` runs before."""
    saved, step = checkpoint.read_metadata(source), checkpoint.step_of(source)
    if saved.get("step", step) != step:
        raise ValueError(f"{source} is of step {saved['step']}: give it its own name back")
    changed = _find_changes(source, config)[2]
    ordering = [field.name for field in fields(Config) if field.metadata.get("stream")]
    if wrong := [changed[name] for name in ordering if name in changed]:
        raise ValueError(f"{source} has another order of the data: {', '.join(wrong)}; {REMEDY}")
    if saved["data"] != run_metadata(config, data)["data"]:
        paths = ", ".join(e if isinstance(e, str) else e.path for e in config.data)
        others = f" (settings that differ: {', '.join(changed.values())})" if changed else ""
        raise ValueError(
            f"{source} was made with other data than {paths}, or by an earlier version of Tigon"
            f"{others}; {REMEDY}"
        )
    return list(changed.values())


def read_state(source: Path, steps: int) -> TrainState:
    """Returns the checkpoint's state; ValueError if a run of so many steps cannot have passed over
    so many rows, as looking for the next ones could take for ever."""
    state = TrainState.of(checkpoint.read_metadata(source))
    most = state.rollbacks * max(steps, MIN_STEPS)  # a rollback passes over a run's steps at most
    if state.offset > most:
        raise ValueError(
            f"{source / 'run.json'} has offset={state.offset} in its state, and rollbacks="
            f"{state.rollbacks} pass over {most} steps at most: resume from another checkpoint, or "
            f"{checkpoint.BEGIN_AGAIN}"
        )
    return state


def _find_changes(
    source: Path, config: Config
) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """Returns the settings of checkpoint and run as JSON, and a description of each change."""
    saved = checkpoint.read_metadata(source)
    for name in ("config", "data"):
        if name not in saved:
            raise ValueError(f"{source / 'run.json'} lacks {name}: it is no run's checkpoint")
    defaults = {field.name: field.default for field in fields(Config)}
    before, now = (json.loads(json.dumps(c)) for c in (defaults | saved["config"], asdict(config)))
    changed = {
        name: _describe_change(name, before[name], value)
        for name, value in now.items()
        if name not in ("resume", "run_dir") and before[name] != value
    }
    return before, now, changed


def _describe_change(name: str, was: Any, now: Any) -> str:
    """Returns "NAME BEFORE -> NOW" of a changed setting, as JSON has the values; of lora and
    parallel only the fields that differ."""
    if name == "parallel" and all(isinstance(value, dict | None) for value in (was, now)):
        was, now = (asdict(Parallel()) | (value or {}) for value in (was, now))
    if name in ("lora", "parallel") and isinstance(was, dict) and isinstance(now, dict):
        changes = [
            _describe_change(f"{name}.{key}", was.get(key), now.get(key))
            for key in {**now, **was}
            if was.get(key) != now.get(key)
        ]
        if changes:  # otherwise one of them says what the other leaves out
            return ", ".join(changes)
    return f"{name} {json.dumps(was)} -> {json.dumps(now)}"
