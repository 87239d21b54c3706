"""Errors of a disk in words, and names that survive a crash."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FULL = errno.ENOSPC, errno.EDQUOT
DENIED = errno.EFBIG, errno.EACCES, errno.EROFS, errno.EPERM
IN_THE_WAY = errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY


@contextmanager
def disk_errors(path: Path, size: int | None = None) -> Iterator[None]:
    """A full disk, a directory that cannot be written, or one where a file belongs or the reverse,
    as one line that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in (*FULL, *DENIED, *IN_THE_WAY):
            raise
        raise cache_error(path, error, size) from None


def cache_error(path: Path, error: OSError, size: int | None) -> OSError:
    other = "set TIGON_CACHE to a directory elsewhere"
    if error.errno in IN_THE_WAY:
        named = Path(error.filename2 or error.filename or path)  # a renamed file's new name
        there = next(p for p in (named, *named.parents) if os.path.lexists(p))
        return OSError(
            f"cannot write the data cache {path}: {there} is in the way ({error.strerror}): "
            f"move it away, or {other}"
        )
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
