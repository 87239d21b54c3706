"""Directories that appear whole or not at all, each written by one process at a time."""

import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tigon.weights.disk import named_if_full, require_space

UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of Linux's renameat2


@contextmanager
def new_directory(
    path: str | os.PathLike[str], *, replace: bool = False, needed: int = 0
) -> Iterator[Path]:
    """A temporary sibling to write into, renamed to `path` at the end or removed on an error.

    What is at `path` must be an empty directory; with `replace` it may be any directory, which
    stays until the new one is whole, also if this process is killed. What killed writers of `path`
    have left beside it is removed. Raises FileExistsError if another process writes `path` now, and
    DiskFull unless `needed` bytes are free.
    """
    target = Path(path).expanduser().resolve()
    _check_free(target, replace)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target) as locked:
        if locked:
            _recover(target)
            _check_free(target, replace)
        require_space(target.parent, needed)
        temporary = _hidden(target, "tmp")
        temporary.mkdir()
        try:
            with named_if_full(target, needed):
                yield temporary
                for item in [*temporary.rglob("*"), temporary]:
                    fsync(item)
            _check_free(target, replace)
            _publish(temporary, target, replace)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def _check_free(target: Path, replace: bool) -> None:
    if target.is_dir() and (replace or not any(target.iterdir())):
        if target.is_mount():
            raise FileExistsError(f"{target} is a mount point: name a directory inside it")
    elif target.exists():
        what = "a directory with files in it" if target.is_dir() else "a file"
        raise FileExistsError(f"{target} exists and is {what}: remove it or choose another path")


@contextmanager
def _locked(target: Path) -> Iterator[bool]:
    """Hold the lock of a target, which the system gives back however the process ends.

    False where the file system has no locks.
    """
    path = target.with_name(f".{target.name}.lock")
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            text = f"{target} cannot be written: {error.strerror}"
            raise OSError(error.errno, text, str(path)) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 1000).decode(errors="replace")
            os.close(descriptor)
            raise FileExistsError(
                f"{target} is being written by {holder or 'another process'}: wait until it ends, "
                "or choose another path"
            ) from None
        except OSError as error:
            os.close(descriptor)
            if error.errno not in UNSUPPORTED:
                raise
            warnings.warn(f"{target.parent}: its file system has no locks ({error})", stacklevel=4)
            yield False
            return
        with suppress(FileNotFoundError):
            if os.fstat(descriptor).st_ino == path.stat().st_ino:
                break
        os.close(descriptor)  # of a file that its holder has just removed
    if not os.path.isfile(descriptor) or not re.match(rb"process \d|$", os.pread(descriptor, 9, 0)):
        os.close(descriptor)
        raise FileExistsError(f"{path} is somebody's file, not a lock: rename it or the target")
    try:
        with suppress(OSError):  # on a full disk the other process stays unnamed
            os.truncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield True
    finally:
        with suppress(OSError):
            path.unlink()
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # forked processes may have the descriptor too
        os.close(descriptor)


def _recover(target: Path) -> None:
    """Remove what killed writers have left; if one had just moved the old directory, put it back.

    The lock is held, so none of them is alive.
    """
    ours = re.compile(rf"\.{re.escape(target.name)}\.(tmp|old)-[0-9a-f]{{16}}")
    for path in sorted(target.parent.iterdir()):
        if not (name := ours.fullmatch(path.name)) or path.is_symlink():
            continue
        if name[1] == "old" and not target.exists():
            path.rename(target)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _publish(temporary: Path, target: Path, replace: bool) -> None:
    """Give a whole directory its name; with `replace`, what had it before is removed."""
    if not replace or not (target.is_dir() and any(target.iterdir())):
        os.rename(temporary, target)
        fsync(target.parent)
        return
    old = temporary
    if not _exchange(temporary, target):
        old = _hidden(target, "old")
        os.rename(target, old)
        try:
            os.rename(temporary, target)
        except BaseException:
            os.rename(old, target)
            raise
    fsync(target.parent)  # before the old one goes
    shutil.rmtree(old, ignore_errors=True)


def _hidden(target: Path, kind: str) -> Path:
    """A name beside the target that nobody else has, nor another container's process."""
    return target.with_name(f".{target.name}.{kind}-{secrets.token_hex(8)}")


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step; False where the system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # not Linux
        return False
    names = (os.fsencode(first), os.fsencode(second))
    if renameat2(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(second))


def fsync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
