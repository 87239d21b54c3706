"""The cache directory: where it is, atomic writes, errors of a full disk, and cleaning."""

import errno
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tigon.utils.paths import expand_user
from tigon.weights.files import FULL, full_disk_error

TEMPORARY = re.compile(r"\.[0-9a-f]{32}\.(digest|npy|json)\.[0-9a-f]{16}")
DAY = 86400.0  # seconds
CACHE_NAME = re.compile(r"[0-9a-f]{32}")
UNWRITABLE = (
    *(errno.EFBIG, errno.EACCES, errno.EROFS, errno.EPERM),
    *(errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY),  # something is in the way
)
REMEDY = "set TIGON_CACHE to a directory elsewhere"


@contextmanager
def disk_errors(path: Path, size: int | None = None) -> Iterator[None]:
    """Turns OSErrors of the body of a `with` (full disk, permissions, blocked path) into one that
    says in a line what to do; `size`: the bytes to write."""
    try:
        yield
    except OSError as error:
        # The second is what `datasets` says before it writes to a disk without a free byte
        if error.errno in FULL or str(error).startswith("Not enough disk space"):
            raise full_disk_error(path, error, size, REMEDY) from None
        if error.errno in UNWRITABLE:
            place = error.filename2 or error.filename or path  # a renamed file's new name
            text = f"cannot write the data cache {place} ({error.strerror}): {REMEDY}"
            raise OSError(text) from None
        raise


def cache_root() -> Path:
    """Returns the directory $TIGON_CACHE, or ~/.cache/tigon."""
    return expand_user(os.environ.get("TIGON_CACHE") or "~/.cache/tigon")


def make_directory(path: Path) -> None:
    """Makes a directory below the cache's root, which only the user can read if it is new, and
    remove temporary files of killed processes that are a day old."""
    cache_root().mkdir(mode=0o700, parents=True, exist_ok=True)
    path.mkdir(parents=True, exist_ok=True)
    for file in path.glob(".*"):
        if TEMPORARY.fullmatch(file.name) and file.is_file() and not file.is_symlink():
            with suppress(OSError):  # another process removes it
                if time.time() - file.stat().st_mtime > DAY:
                    file.unlink()


@dataclass
class CleanReport:
    """Counts data sets that were removed, their bytes, and those used too recently."""

    removed: int = 0
    bytes: int = 0
    recent: int = 0

    def __str__(self) -> str:
        suffix = f"; {self.recent:,} used lately" * bool(self.recent)
        return f"removed: {self.removed:,}, of {self.bytes / 2**30:.2f} GiB{suffix}"


def clean_cache(days: float = 0.0) -> CleanReport:
    """Removes the tokenized data that was not used for `days` from the cache; returns counts.

    Data that is being made stays, and a process that has data open can go on reading it.
    """
    with train_extra():
        from filelock import FileLock, Timeout

    if not 0 <= days < float("inf"):
        raise ValueError(f"days={days} must be a number of at least 0")
    cleaned, root, before = CleanReport(), cache_root() / "data", time.time() - days * DAY
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        if path.is_symlink() or not CACHE_NAME.fullmatch(path.stem):
            continue
        if days and path.lstat().st_mtime > before:
            cleaned.recent += path.is_dir()
        elif path.suffix == ".digest":
            path.unlink()
        elif path.is_dir():
            with suppress(Timeout), FileLock(f"{path}.lock", timeout=0):
                cleaned.bytes += sum(file.lstat().st_size for file in path.rglob("*"))
                cleaned.removed += 1
                shutil.rmtree(path)
    return cleaned


@contextmanager
def train_extra() -> Iterator[None]:
    """Turns an ImportError in the body of a `with` into one that names the extra `train`."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"the data cache needs pip install 'tigon[train]': {error}") from None
