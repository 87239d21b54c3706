"""Errors of a disk in words, and names that survive a crash."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FULL = errno.ENOSPC, errno.EDQUOT


@contextmanager
def disk_errors(path: Path, size: int | None = None) -> Iterator[None]:
    """A full disk, or a directory that cannot be written, as one line that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in (*FULL, errno.EFBIG, errno.EACCES, errno.EROFS, errno.EPERM):
            raise
        raise cache_error(path, error, size) from None


def cache_error(path: Path, error: OSError, size: int | None) -> OSError:
    other = "set TIGON_CACHE to a directory elsewhere"
    if error.errno not in FULL:
        return OSError(f"cannot write the data cache {path} ({error.strerror}): {other}")
    have = next(p for p in (path, *path.parents) if p.exists())
    needed = "" if size is None else f" that needs about {size / 2**30:.2f} GiB"
    free = shutil.disk_usage(have).free / 2**30
    return OSError(
        f"disk full: {path} holds the data cache{needed}, and {free:.2f} GiB are free; "
        f"make room, or {other}"
    )


def sync(directory: Path) -> None:
    """Names in a directory, to the disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
