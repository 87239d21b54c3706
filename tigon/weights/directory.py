"""Directories that appear whole or not at all, each written by one process at a time."""

import ctypes
import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tigon.utils.paths import expand_user
from tigon.weights.disk import named_if_full, require_space
from tigon.weights.lock import locked

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of Linux's renameat2


@contextmanager
def new_directory(
    path: str | os.PathLike[str],
    *,
    replace: bool = False,
    needed: int = 0,
    stale: Callable[[str], bool] = lambda name: False,
) -> Iterator[Path]:
    """A temporary sibling to write into, renamed to `path` at the end or removed on an error.

    What is at `path` must be an empty directory; with `replace` it may be any directory but no
    link, which stays until the new one is whole, also if this process is killed. Its files that
    have other names than the new ones stay, but for those that are `stale` by their names. What
    killed writers of `path` have left beside it is removed. Raises FileExistsError if another
    process writes `path` now, and DiskFull unless `needed` bytes are free.
    """
    target = check_free(path, replace=replace)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target) as locked:
        if locked:
            _recover(target)
            check_free(target, replace=replace)
        require_space(target.parent, needed)
        temporary = _hidden(target, "tmp")
        temporary.mkdir()
        try:
            with named_if_full(target, needed):
                yield temporary
                for item in [*temporary.rglob("*"), temporary]:
                    fsync(item)
                check_free(target, replace=replace)
                if replace and target.is_dir():
                    keep_files(target, temporary, stale)
            _publish(temporary, target, replace)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def check_free(path: str | os.PathLike[str], *, replace: bool = False) -> Path:
    """The absolute path; FileExistsError if `new_directory` would not take it."""
    named = expand_user(path)
    if replace and named.is_symlink():
        raise FileExistsError(
            f"{named} is a link to {os.readlink(named)}, which is not replaced: remove the link, "
            "or choose another path"
        )
    target = named.resolve()
    if target.is_dir() and (replace or not any(target.iterdir())):
        if target.is_mount():
            raise FileExistsError(f"{target} is a mount point: name a directory inside it")
    elif target.exists():
        what = "a directory with files in it" if target.is_dir() else "a file"
        raise FileExistsError(f"{target} exists and is {what}: remove it or choose another path")
    return target


@contextmanager
def _locked(target: Path) -> Iterator[bool]:
    """Hold the lock of a target; False where the file system has no locks."""
    path = target.with_name(f".{target.name}.lock")
    with locked(path, target, "being written", "choose another path") as held:
        try:
            yield held
        finally:
            if held:
                with suppress(OSError):
                    path.unlink()


def recover(target: Path) -> None:
    """Remove what killed writers of a directory have left beside it, unless it is being written."""
    with suppress(OSError), _locked(target) as locked:
        if locked:
            _recover(target)


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


def keep_files(old: Path, new: Path, stale: Callable[[str], bool], folder: str = "") -> None:
    """Give a directory that replaces another the files that only the old one has, such as notes.

    `stale`: whether a file goes with the old one, by its path inside it. Files are linked, not
    moved, so that each has a name in one of the two at any time.
    """
    for path in sorted(old.iterdir()):
        name, kept = folder + path.name, new / path.name
        if path.is_dir() and not path.is_symlink():
            kept.mkdir(exist_ok=True)
            keep_files(path, kept, stale, f"{name}/")
        elif not os.path.lexists(kept) and not stale(name):
            try:
                os.link(path, kept, follow_symlinks=False)
            except (OSError, NotImplementedError):  # a file system without hard links
                shutil.copy2(path, kept, follow_symlinks=False)
    fsync(new)


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
