"""A run directory belongs to one process at a time, however that process ends."""

import errno
import fcntl
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tigon.train import checkpoint
from tigon.train.config import Config

LOCK = ".lock"
HELD: set[tuple[int, int]] = set()  # device and inode of the locks of this process
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def claim(config: Config) -> Iterator[None]:
    """Hold run_dir, which is made; it is removed again if nothing was written into it.

    The system gives the lock back when the process ends, even by SIGKILL. Raises FileExistsError
    if another process has it, or if it has files that the run would overwrite.
    """
    path = Path(config.run_dir)
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"run_dir={path} cannot be made: {error}") from None
    begun = (path / LOCK).exists() or (path / "metrics.jsonl").exists()
    descriptor = _lock(path / LOCK)
    try:
        try:
            _check_files(path, begun, bool(config.resume))
        except FileExistsError:
            if descriptor is not None and not begun:
                (path / LOCK).unlink()
            raise
        yield
    finally:
        if descriptor is not None:
            if [file.name for file in path.iterdir()] == [LOCK]:
                (path / LOCK).unlink()
                with suppress(OSError):  # not empty
                    for folder in missing:
                        folder.rmdir()
            HELD.discard(_identity(descriptor))
            os.close(descriptor)


def _lock(path: Path) -> int | None:
    """A descriptor that holds the lock; None where this process has it, or nobody can."""
    me = f"process {os.getpid()} on {socket.gethostname()}"
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 1000).decode(errors="replace")
            held = _identity(descriptor) in HELD
            os.close(descriptor)
            if held:  # a run that was prepared here before
                return None
            raise FileExistsError(
                f"{path.parent} is in use by {holder or 'another process'}: wait until it ends, "
                "or choose another run_dir"
            ) from None
        except OSError as error:
            os.close(descriptor)
            if error.errno not in UNSUPPORTED:
                raise
            warnings.warn(f"{path.parent}: its file system has no locks ({error})", stacklevel=2)
            return None
        with suppress(FileNotFoundError):
            if os.fstat(descriptor).st_ino == path.stat().st_ino:
                break
        os.close(descriptor)  # of a file that its holder has just removed
    HELD.add(_identity(descriptor))
    os.truncate(descriptor, 0)
    os.write(descriptor, me.encode())
    return descriptor


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


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
