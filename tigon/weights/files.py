"""Files that appear whole or not at all: atomic directories, locks, and errors of full disks."""

import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tigon.utils.paths import expand_user, fsync

FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskFullError(OSError):
    """The disk has no room for what is to be written."""


def require_space(directory: Path, needed: int) -> None:
    """Raises DiskFullError unless `needed` bytes fit on the directory's disk, if it has a size:
    /proc and some network disks say 0, and writing tells."""
    usage = shutil.disk_usage(directory)
    if usage.total and usage.free < needed:
        sizes = _sizes(needed, usage.free)
        raise DiskFullError(f"the disk of {directory} is too full: {sizes}")


@contextmanager
def explain_full_disk(path: Path, needed: int | None = None) -> Iterator[None]:
    """Rewords an OSError that says too little: a full disk with sizes, others with `path`."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise full_disk_error(path, error, needed) from error
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def full_disk_error(
    path: Path, error: OSError, needed: int | None, remedy: str = ""
) -> DiskFullError:
    """Makes the error that says how much is free for `path`, and how to help."""
    free = shutil.disk_usage(next(p for p in path.parents if p.exists())).free
    quota = " (a quota)" if error.errno == errno.EDQUOT else ""
    text = f"the disk{quota} became full while {path} was written: {_sizes(needed, free)}"
    return DiskFullError(f"{text}; {remedy}" if remedy else text)


def _sizes(needed: int | None, free: int) -> str:
    """A text with both sizes, in bytes if they are equal when rounded."""
    sizes = {"needed": needed, "free": free}
    texts = [
        f"{n / 2**30:.2f} GiB {name}" if n >= 2**30 else f"{n / 2**20:.1f} MiB {name}"
        for name, n in sizes.items()
        if n is not None
    ]
    if texts[0].removesuffix("needed") == texts[-1].removesuffix("free"):
        texts = [f"{needed:,} bytes needed", f"{free:,} bytes free"]
    return ", ".join(texts)


# Locks, which end with their process

UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
# Device and inode of the locks of this process, whose name one in another container may have too
_held: set[tuple[int, int]] = set()


class LockedError(FileExistsError):
    """The lock is taken; `by_this_process` says whether it is by this process."""

    by_this_process = False


@contextmanager
def lock_file(path: Path, target: Path, doing: str, instead: str) -> Iterator[bool]:
    """Locks the file `path` for a target; yields False if the file system has no locks.

    The lock ends with the process, even by SIGKILL; the file stays. Raises LockedError if another
    process has the lock: the target is `doing`, such as "in use": wait, or do `instead`.
    """
    descriptor = _lock(path, target, doing, instead)
    if descriptor is None:
        yield False
        return
    identity = _identity(descriptor)
    _held.add(identity)
    try:
        with suppress(OSError):  # a full disk: the file then names no process
            os.truncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield True
    finally:
        _held.discard(identity)
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # forked processes may have the descriptor too
        os.close(descriptor)


def _lock(path: Path, target: Path, doing: str, instead: str) -> int | None:
    """Locks a file, which is created if need be, and returns its descriptor, or None, with a
    warning, where the file system has no locks; raises LockedError if it is taken."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            text = f"{target} cannot be written: {error.strerror}"
            raise OSError(error.errno, text, str(path)) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _locked_error(descriptor, f"{target} is {doing}", instead) from None
        except OSError as error:
            os.close(descriptor)
            if error.errno not in UNSUPPORTED:
                raise
            warnings.warn(f"{path.parent}: its file system has no locks ({error})", stacklevel=5)
            return None
        with suppress(FileNotFoundError):
            if os.fstat(descriptor).st_ino == path.stat().st_ino:
                break
        os.close(descriptor)  # the file was just removed by the process that had the lock
    if not os.path.isfile(descriptor) or not re.match(rb"process \d|$", os.pread(descriptor, 9, 0)):
        os.close(descriptor)
        raise FileExistsError(f"{path} is a file, not a lock: rename it or the target")
    return descriptor


def _locked_error(descriptor: int, busy: str, instead: str) -> LockedError:
    """Returns the error that names who holds the lock, and closes the descriptor."""
    holder = os.read(descriptor, 1000).decode(errors="replace") or "another process"
    error = LockedError(f"{busy} by {holder}: wait until it ends, or {instead}")
    error.by_this_process = _identity(descriptor) in _held
    os.close(descriptor)
    return error


def _identity(descriptor: int) -> tuple[int, int]:
    """Returns device and inode of an open file."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


# Directories that appear whole or not at all, each written by one process at a time

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of Linux's renameat2


@contextmanager
def new_directory(
    path: str | os.PathLike[str],
    *,
    replace: bool = False,
    needed: int = 0,
    stale: Callable[[str], bool] = lambda name: False,
) -> Iterator[Path]:
    """Yields a temporary directory, which is renamed to `path` at the end or removed on an error.

    `path` must be free or an empty directory; with `replace` it may be any directory but no link.
    The old directory stays until the new one is complete, even if this process is killed. Its files
    without a new file of the same name are kept, unless `stale(name)`. All files are flushed to the
    disk but .safetensors, which their writers flush. Removes what killed writers left beside
    `path`. Raises FileExistsError if another process is writing `path`, and DiskFullError unless
    `needed` bytes are free.
    """
    target = check_free(path, replace=replace)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target) as has_lock:
        if has_lock:
            _recover(target)
            check_free(target, replace=replace)
        require_space(target.parent, needed)
        temporary = _hidden(target, "tmp")
        temporary.mkdir()
        try:
            with explain_full_disk(target, needed):
                yield temporary
                for item in [*temporary.rglob("*"), temporary]:
                    if item.suffix != ".safetensors":  # flushed on the host of its writer
                        fsync(item)
                check_free(target, replace=replace)
                if replace and target.is_dir():
                    carry_over_files(target, temporary, stale)
                    shutil.copymode(target, temporary)
            _publish(temporary, target, replace)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def check_free(path: str | os.PathLike[str], *, replace: bool = False) -> Path:
    """The absolute path; raises FileExistsError if `new_directory` cannot write there."""
    named = expand_user(path)
    if replace and named.is_symlink():
        raise FileExistsError(
            f"{named} is a link to {os.readlink(named)}, which is not replaced: remove the link, "
            "or choose another path"
        )
    target = named.resolve()
    if replace and target in _current_directories():
        raise FileExistsError(f"{target} has the current directory: name a directory inside it")
    if target.is_dir() and (replace or not any(target.iterdir())):
        if target.is_mount():
            raise FileExistsError(f"{target} is a mount point: name a directory inside it")
    elif target.exists():
        what = "a directory with files in it" if target.is_dir() else "a file"
        raise FileExistsError(f"{target} exists and is {what}: remove it or choose another path")
    return target


def _current_directories() -> list[Path]:
    """Returns the current directory and its parents; none if it was removed meanwhile."""
    try:
        return [Path.cwd(), *Path.cwd().parents]
    except FileNotFoundError:
        return []


@contextmanager
def _locked(target: Path) -> Iterator[bool]:
    """Locks a target directory while it is written; yields False if there are no locks."""
    path = target.with_name(f".{target.name}.lock")
    with lock_file(path, target, "being written", "choose another path") as held:
        try:
            yield held
        finally:
            if held:
                with suppress(OSError):
                    path.unlink()


def remove_leftovers(parent: Path, names: str) -> None:
    """Removes what killed writers of directories with such `names`, a pattern, left in `parent`."""
    pattern = re.compile(rf"\.({names})\.(?:lock|(?:tmp|old)-[0-9a-f]{{16}})")
    matches = map(pattern.fullmatch, os.listdir(parent) if parent.is_dir() else ())
    for name in sorted({match[1] for match in matches if match is not None}):
        with suppress(OSError), _locked(parent / name) as has_lock:
            if has_lock:
                _recover(parent / name)


def _recover(target: Path) -> None:
    """Removes what killed writers left, or puts an old directory back; call it with the lock."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.(tmp|old)-[0-9a-f]{{16}}")
    for path in sorted(target.parent.iterdir()):
        if not (name := pattern.fullmatch(path.name)) or path.is_symlink():
            continue
        if name[1] == "old" and not target.exists():
            path.rename(target)
        else:
            shutil.rmtree(path, ignore_errors=True)


def carry_over_files(old: Path, new: Path, stale: Callable[[str], bool], folder: str = "") -> None:
    """Links the files that only the old directory has, such as notes, into the new one.

    `stale(path)`: whether to leave out a file, by its path inside `old`. Links, not moves, so that
    an interruption loses no file.
    """
    for path in sorted(old.iterdir()):
        name, target = folder + path.name, new / path.name
        if path.is_dir() and not path.is_symlink():
            target.mkdir(exist_ok=True)
            carry_over_files(path, target, stale, f"{name}/")
            shutil.copymode(path, target)
        elif not os.path.lexists(target) and not stale(name):
            try:
                os.link(path, target, follow_symlinks=False)
            except (OSError, NotImplementedError):  # a file system without hard links
                shutil.copy2(path, target, follow_symlinks=False)
    fsync(new)


def _publish(temporary: Path, target: Path, replace: bool) -> None:
    """Renames a directory to `target`; OSError if the one it replaces has a `read_lock`."""
    if not replace or not (target.is_dir() and any(target.iterdir())):
        os.rename(temporary, target)
        fsync(target.parent)
        return
    with _unread(target) as free:
        if not free:
            raise OSError(f"{target} is being read by another process")
        old = temporary
        if not _exchange(temporary, target):
            old = _hidden(target, "old")
            os.rename(target, old)
            try:
                os.rename(temporary, target)
            except BaseException:
                os.rename(old, target)
                raise
        fsync(target.parent)  # before the old one is removed
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def read_lock(directory: Path) -> Iterator[None]:
    """Keeps writers from removing a directory in the body of a `with`, if there are locks."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _unread(directory: Path) -> Iterator[bool]:
    """Keeps readers from a directory in the body of a `with`; yields False if one has it."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        free = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # others: a file system without locks
            free = not isinstance(error, BlockingIOError)
        yield free
    finally:
        os.close(descriptor)


def remove_directory(directory: Path) -> bool:
    """Removes a directory unless a process has its `read_lock`; returns whether it is gone.

    It is renamed first, so that its name is never that of a part of it. A link is removed, not the
    directory that it leads to.
    """
    try:
        with _unread(directory) as free:
            if not free:
                return False
            doomed = directory.rename(_hidden(directory, "tmp"))
    except FileNotFoundError:
        directory.unlink(missing_ok=True)  # a link that leads nowhere
        return True
    if doomed.is_symlink():
        doomed.unlink()
    else:
        shutil.rmtree(doomed)
    return True


def _hidden(target: Path, kind: str) -> Path:
    """Makes a unique hidden name beside the target."""
    return target.with_name(f".{target.name}.{kind}-{secrets.token_hex(8)}")


def _exchange(first: Path, second: Path) -> bool:
    """Swaps two directories atomically; returns False if the system cannot."""
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
