"""Full disks: noticed before anything is written, and said with sizes."""

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskFull(OSError):
    """The disk has no room for what is to be written."""


def require_space(directory: Path, needed: int) -> None:
    """Raises DiskFull unless `needed` bytes fit there."""
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise DiskFull(f"the disk of {directory} is too full: {_sizes(needed, free)}")


@contextmanager
def named_if_full(path: Path, needed: int) -> Iterator[None]:
    """Let an error of a full disk, of a quota, or that names no file say what was to be written."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            if error.errno is None or error.filename is not None:
                raise
            raise OSError(error.errno, error.strerror, str(path)) from error
        free = shutil.disk_usage(path.parent).free
        quota = " (a quota)" if error.errno == errno.EDQUOT else ""
        raise DiskFull(
            f"the disk{quota} became full while {path} was written: {_sizes(needed, free)}"
        ) from error


def _sizes(needed: int, free: int) -> str:
    """In bytes where rounding would hide that they differ."""
    found = [_size(count) for count in (needed, free)]
    if found[0] == found[1]:
        found = [f"{count:,} bytes" for count in (needed, free)]
    return f"{found[0]} needed, {found[1]} free"


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
