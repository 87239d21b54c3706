"""A run directory belongs to one process at a time, however that process ends."""

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tigon.train import checkpoint
from tigon.train.config import Config
from tigon.train.distributed import World
from tigon.weights import Locked, locked, recover

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
                locked(path / LOCK, path, "in use", "choose another run_dir")
            )
        except Locked as error:
            if not error.here:
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
            recover(path / export[1])
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
