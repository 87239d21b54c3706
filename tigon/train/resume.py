"""Claims a run directory for one process, and decides where a run resumes from."""

import json
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from tigon.data import Loader
from tigon.tokenizer import chat_template
from tigon.train import checkpoint
from tigon.train.config import Config, Parallel
from tigon.train.distributed import World
from tigon.train.state import TrainState
from tigon.weights.files import LockedError, lock_file, remove_leftovers

LOCK, PROBE = ".lock", ".rank-{}-{}"
_EXPORT = r"(?:hf|adapter)(?:-ema|-best|-step-\d+)?"
_TEXTS = r"config\.yaml|(?:metrics|samples|predictions-step-\d+)\.jsonl|\.exported"
_DIGESTS = r"(?:reference|teacher)\.json"
WRITTEN = re.compile(
    rf"{_EXPORT}|{_TEXTS}|{_DIGESTS}|report\.html|checkpoints|tensorboard|wandb|profile"
    r"|flight-recorder|\.wandb-id"
)
LEFT_EXPORT = re.compile(rf"\.({_EXPORT})\.(?:lock|(?:tmp|old)-[0-9a-f]{{16}})")
LEFT_FILE = re.compile(
    rf"\.(?:(?:{_TEXTS})(?:\.rank-\d+)?\.partial|{_DIGESTS}\.[0-9a-f]{{16}}"
    r"|(?:report|comparison)\.html\.[a-z0-9_]{8}|rank-\d+-[0-9a-f]{8})"
)


@contextmanager
def claim(config: Config) -> Iterator[None]:
    """Hold run_dir, which is made; it is removed again if nothing was written into it.

    What a run that was killed has left half written in it is removed. The system gives the lock
    back when the process ends, even by SIGKILL. Raises FileExistsError if another process has it,
    or if it has files that the run would overwrite, or links that it would write through.
    """
    path = Path(config.run_dir)
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"run_dir={path} cannot be made: {error}") from None
    begun = (path / LOCK).exists() or (path / "metrics.jsonl").exists()
    with _lock(path) as held:
        try:
            _check_files(path, begun, bool(config.resume))
            if held:
                _clean(path)
        except FileExistsError:
            if held and not begun:
                (path / LOCK).unlink()
            raise
        try:
            yield
        finally:
            # Somebody may have removed it, which is not to hide what ended the run
            if held and path.is_dir() and [file.name for file in path.iterdir()] == [LOCK]:
                (path / LOCK).unlink()
                with suppress(OSError):  # not empty
                    for folder in missing:
                        folder.rmdir()


@contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Hold the directory's lock; False where this process has it already, or nobody can."""
    with ExitStack() as stack:
        try:
            held = stack.enter_context(
                lock_file(path / LOCK, path, "in use", "choose another run_dir")
            )
        except LockedError as error:
            if not error.by_this_process:
                raise
            held = False  # a run that was prepared here before
        yield held


def _check_files(path: Path, begun: bool, resume: bool) -> None:
    files = {file.name for file in path.iterdir()} - {LOCK}
    if files and not begun:
        raise FileExistsError(f"{path} is not empty, and holds no run: choose another run_dir")
    metrics = path / "metrics.jsonl"
    done = checkpoint.latest(path / "checkpoints") is not None
    done = done or (metrics.exists() and metrics.stat().st_size > 0)
    if done and not resume:
        raise FileExistsError(
            f"{path} is not empty: continue the run in it with resume=auto, "
            "or choose another run_dir"
        )
    for file in sorted(path.iterdir()):
        if file.is_symlink() and WRITTEN.fullmatch(file.name):
            raise FileExistsError(
                f"{file} is a link to {os.readlink(file)}, and the run would write there: remove "
                "the link, or choose another run_dir, which may itself be a link"
            )


def _clean(path: Path) -> None:
    """Remove what a killed run has left, and nothing of other names. The lock is held."""
    checkpoint.clean(path / "checkpoints")
    for file in sorted(path.iterdir()):
        if export := LEFT_EXPORT.fullmatch(file.name):
            remove_leftovers(path / export[1])
        elif LEFT_FILE.fullmatch(file.name) and file.is_file() and not file.is_symlink():
            with suppress(OSError):
                file.unlink()


def check_shared(config: Config, world: World) -> None:
    """Raises InputError if a rank does not see the run_dir that the first one has claimed, as on a
    host with a disk of its own, or cannot write there: its first checkpoint would be lost. Every
    rank calls this."""
    if world.size == 1:
        return
    path = Path(config.run_dir)
    probe = path / PROBE.format(world.rank, secrets.token_hex(4))
    try:
        with world.raise_on_all_ranks():
            _make(probe)
        first = world.gather(probe.name)[0]
        with world.raise_on_all_ranks():
            if not (path / str(first)).exists():
                raise ValueError(
                    f"run_dir={path} is another directory than that of rank 0: all hosts need the "
                    "same one, on storage that they share"
                )
    finally:
        with suppress(OSError):
            probe.unlink()


def _make(probe: Path) -> None:
    try:
        probe.touch(exist_ok=False)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(f"run_dir={probe.parent}, which all ranks write to: {reason}") from None


# Where a run goes on from, and whether it may.

AFRESH = "give the same again, or begin another run_dir, with model= an export of this one"

LONG = 2**20  # steps of a run that may have been longer before its settings changed


def find_source(config: Config, world: World) -> Path | None:
    """The checkpoint to resume from, or None to begin; `claim` has seen to the run directory.

    Every rank calls this: together they check that the files are as they were written.
    """
    run = Path(config.run_dir)
    newest = checkpoint.latest(run / "checkpoints")
    if not config.resume:
        return None
    if config.resume in (True, "auto"):
        return checkpoint.newest_complete(run / "checkpoints", world.log_rank0)
    chosen = Path(str(config.resume))
    checkpoint.step_of(chosen)
    if newest is not None and newest.resolve() != chosen.resolve():
        raise FileExistsError(
            f"{run} already has {newest.name}: to go on from {chosen}, choose another run_dir"
        )
    checkpoint.verify(chosen)
    return chosen


def run_metadata(config: Config, data: Loader) -> dict[str, Any]:
    """What a checkpoint must remember to be resumed: settings, and which data its steps meant."""
    return json.loads(json.dumps({"data": data.identity(), "config": asdict(config)}))


def start_time(source: Path | None, world: World) -> datetime:
    """When the run began, which is what chat templates write as the present time: as the checkpoint
    `source` has it, or rank 0. Every rank calls this."""
    known = None if source is None else checkpoint.read_metadata(source).get("strftime_now")
    first = world.gather(str(known or chat_template.now().isoformat()))[0]
    try:
        return datetime.fromisoformat(str(first))
    except ValueError:
        raise ValueError(f"{source}: run.json has strftime_now={first!r:.100}, no time") from None


def with_new_tokens(source: Path, config: Config) -> Config:
    """The settings, with the new_tokens of the run if they name none: it may have found them in its
    data."""
    known = checkpoint.read_metadata(source).get("config", {}).get("new_tokens") or ()
    return config if config.new_tokens else replace(config, new_tokens=tuple(known))


def check_adapter(source: Path, config: Config) -> None:
    """Raises ValueError for another adapter, and for another model under the same one.

    First of all checks: what others refuse may follow from such a change.
    """
    before, now, changed = _changes(source, config)
    was, own = ({"quantize": None, **(c["lora"] or {}), "merge": False} for c in (before, now))
    names = ("model", "revision", "init") if before["lora"] and now["lora"] else ()
    others = [changed[name] for name in names if name in changed]
    if was != own or others:
        others += [changed["lora"]] if was != own else []
        raise ValueError(f"{source} is of another adapter or model: {', '.join(others)}; {AFRESH}")


def _changes(source: Path, config: Config) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """The checkpoint's settings and the run's, as JSON has them, and what a person is told of each
    that differs. A setting that the checkpoint does not know had today's default."""
    known = checkpoint.read_metadata(source)
    if "config" not in known:
        raise ValueError(f"{source / 'run.json'} lacks config: it is no run's checkpoint")
    plain = {field.name: field.default for field in fields(Config)} | known["config"]
    before, now = (json.loads(json.dumps(c)) for c in (plain, asdict(config)))
    changed = {
        name: _describe_change(name, before[name], value)
        for name, value in now.items()
        if name not in ("resume", "run_dir") and before[name] != value
    }
    return before, now, changed


def _describe_change(name: str, was: Any, now: Any) -> str:
    """Describes a changed setting; of lora and parallel only the fields that differ."""
    if name == "parallel" and all(isinstance(of, dict | None) for of in (was, now)):
        was, now = (asdict(Parallel()) | (of or {}) for of in (was, now))
    if name in ("lora", "parallel") and isinstance(was, dict) and isinstance(now, dict):
        each = {key: (was.get(key), now.get(key)) for key in {**now, **was}}
        told = [_describe_change(f"{name}.{key}", a, b) for key, (a, b) in each.items() if a != b]
        if told:  # otherwise one of them says what the other leaves out
            return ", ".join(told)
    return f"{name} {json.dumps(was)} -> {json.dumps(now)}"


def check_base(source: Path, config: Config, found: str) -> None:
    """Raises ValueError if an adapter was trained on other weights than the base has now. `found`:
    their digest. Checkpoints of earlier versions do not say."""
    if checkpoint.read_metadata(source).get("base", found) != found:
        raise ValueError(
            f"{source} is an adapter of other weights than {config.model or config.init} has now: "
            "put the files back that it had, or name the revision"
        )


def read_state(source: Path, steps: int) -> TrainState:
    """What the checkpoint remembers. ValueError for rows passed over that no run of so many steps
    passes over, as finding the next ones could take for ever."""
    state = TrainState.of(checkpoint.read_metadata(source))
    # A rollback passes over no more steps than a run has
    most = state.rollbacks * max(steps, LONG)
    if state.offset > most:
        raise ValueError(
            f"{source / 'run.json'} has offset={state.offset} in its state, and rollbacks="
            f"{state.rollbacks} pass over {most} steps at most: resume from another checkpoint, or "
            "begin another run_dir, with model= an export of this run"
        )
    return state


def check_settings(source: Path, config: Config, data: Loader) -> list[str]:
    """The settings that differ from the checkpoint's; an error if the data stream does.

    `check_adapter` checks adapters before.
    """
    was, now = checkpoint.read_metadata(source), run_metadata(config, data)
    if was.get("step", step := checkpoint.step_of(source)) != step:
        raise ValueError(f"{source} is of step {was['step']}: give it its own name back")
    _, _, changed = _changes(source, config)
    if "data" not in was:
        raise ValueError(f"{source / 'run.json'} lacks data: it is no run's checkpoint")
    orders = [field.name for field in fields(Config) if field.metadata.get("stream")]
    wrong = [changed[name] for name in orders if name in changed]
    if wrong:
        raise ValueError(
            f"{source} was made with another order of the data: {', '.join(wrong)}; {AFRESH}"
        )
    if was["data"] != now["data"]:
        paths = ", ".join(e if isinstance(e, str) else e.path for e in config.data)
        raise ValueError(f"{source} was made with other data than {paths}; {AFRESH}")
    return list(changed.values())
