"""A file that one process holds at a time, however that process ends."""

import errno
import fcntl
import os
import re
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_held: set[tuple[int, int]] = set()  # device and inode of the locks of this process


class Locked(FileExistsError):
    """Somebody holds the lock; `here`: this process does."""

    here = False


@contextmanager
def locked(path: Path, target: Path, doing: str, instead: str) -> Iterator[bool]:
    """Hold the lock file of a target, which is made and stays; False where the file system has no
    locks.

    The system gives the lock back when the process ends, even by SIGKILL. If another process has
    it, Locked says that the target is `doing`, such as "in use", by that one, and to wait for its
    end or `instead`.
    """
    descriptor = _lock(path, target, doing, instead)
    if descriptor is None:
        yield False
        return
    identity = _identity(descriptor)
    _held.add(identity)
    try:
        with suppress(OSError):  # on a full disk this process stays unnamed
            os.truncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield True
    finally:
        _held.discard(identity)
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # forked processes may have the descriptor too
        os.close(descriptor)


def _lock(path: Path, target: Path, doing: str, instead: str) -> int | None:
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            text = f"{target} cannot be written: {error.strerror}"
            raise OSError(error.errno, text, str(path)) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _refused(descriptor, f"{target} is {doing}", instead) from None
        except OSError as error:
            os.close(descriptor)
            if error.errno not in UNSUPPORTED:
                raise
            warnings.warn(f"{path.parent}: its file system has no locks ({error})", stacklevel=5)
            return None
        with suppress(FileNotFoundError):
            if os.fstat(descriptor).st_ino == path.stat().st_ino:
                break
        os.close(descriptor)  # of a file that its holder has just removed
    if not os.path.isfile(descriptor) or not re.match(rb"process \d|$", os.pread(descriptor, 9, 0)):
        os.close(descriptor)
        raise FileExistsError(f"{path} is somebody's file, not a lock: rename it or the target")
    return descriptor


def _refused(descriptor: int, busy: str, instead: str) -> Locked:
    holder = os.read(descriptor, 1000).decode(errors="replace") or "another process"
    error = Locked(f"{busy} by {holder}: wait until it ends, or {instead}")
    error.here = _identity(descriptor) in _held
    os.close(descriptor)
    return error


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
