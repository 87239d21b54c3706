"""Which entries of the cache are in use, and the removal of the others.

Who looks for entries holds a shared lock until they are noted in a file of its process, which is
locked as long as the process lives. Entries are removed under an exclusive lock.
"""

import atexit
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

LOCK, USES = ".lock", ".uses"
ENTRY = re.compile(r"[0-9a-f]{32}")
OTHERS = re.compile(r"[0-9a-f]{32}\.(lock|digest|failed|partial)|\.[0-9a-f]{32}\..*")
READ_ONLY = (errno.EACCES, errno.EROFS, errno.EPERM)

_mine: dict[Path, IO[str]] = {}  # this process' file, by directory of entries


@contextmanager
def lock(path: Path, *, wait: bool = True, shared: bool = False) -> Iterator[bool]:
    """Hold a file's lock, which ends with the process; without `wait`, whether it was free."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(descriptor, kind | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(descriptor)


@contextmanager
def looking(root: Path) -> Iterator[None]:
    """No entry is removed meanwhile. Nobody removes those of a cache that is only read."""
    held = lock(root / LOCK, shared=True)
    try:
        held.__enter__()
    except OSError as error:
        if error.errno not in READ_ONLY:
            raise
        yield
        return
    try:
        yield
    finally:
        held.__exit__(None, None, None)


def note(root: Path, keys: Iterable[str]) -> None:
    """These entries are used, and stay as long as this process lives."""
    keys = dict.fromkeys(keys)
    with suppress(OSError):  # a cache that is only read, or a full disk
        file = _mine.get(root)
        if file is None or not Path(file.name).exists():
            name = root / f"{os.getpid()}-{secrets.token_hex(4)}{USES}"
            file = _mine[root] = name.open("x")
            fcntl.flock(file, fcntl.LOCK_EX)
            atexit.register(name.unlink, missing_ok=True)
        file.write("".join(f"{key}\n" for key in keys))
        file.flush()
    for key in keys:
        with suppress(OSError):
            os.utime(root / key)  # when it was last used


@dataclass
class Cleaned:
    """What was removed from a cache, and what was not."""

    removed: int = 0
    bytes: int = 0
    used: int = 0
    recent: int = 0

    def __str__(self) -> str:
        left = f"; {self.used:,} in use" * bool(self.used)
        left += f"; {self.recent:,} used lately" * bool(self.recent)
        return f"removed: {self.removed:,}, of {self.bytes / 2**30:.2f} GiB{left}"


def clean(root: Path, days: float = 0.0) -> Cleaned:
    """Remove what no process uses, and what was not used for so many days.

    Nothing but what the cache itself has made is touched. OSError while a process tokenises.
    """
    found = Cleaned()
    if not root.is_dir():
        return found
    with lock(root / LOCK, wait=False) as free:
        if not free:
            raise OSError(f"{root} is being written by a run that tokenises: try again after it")
        used, before = _used(root), time.time() - days * 86400
        for path in sorted(root.iterdir()):
            entry = ENTRY.fullmatch(path.name) is not None
            if not entry and OTHERS.fullmatch(path.name) is None:
                continue
            if path.name in used:
                found.used += 1
            elif days and path.lstat().st_mtime > before:
                found.recent += entry
            else:
                found.bytes += _remove(path)
                found.removed += entry
    return found


def _used(root: Path) -> set[str]:
    """The names that living processes have noted; the files of others are removed."""
    used: set[str] = set()
    for path in root.glob(f"*{USES}"):
        if not stat.S_ISREG(path.lstat().st_mode):
            continue  # no process has made it
        with lock(path, wait=False) as free:
            if free:
                path.unlink()
            else:
                used.update(path.read_text(errors="replace").split())
    return used


def _remove(path: Path) -> int:
    """Its size."""
    if path.is_symlink() or not path.is_dir():
        size = path.lstat().st_size
        path.unlink()
        return size
    size = sum(file.lstat().st_size for file in path.rglob("*"))
    shutil.rmtree(path)
    return size
