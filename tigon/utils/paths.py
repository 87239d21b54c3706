"""Paths as users write them, and files that appear whole or not at all."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def expand_user(path: str | os.PathLike[str]) -> Path:
    """Replaces `~` and `~name` by home directories; raises ValueError where there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        name, advice = Path(path).parts[0], "a file of this name in the current directory is ./~..."
        if name == "~":
            advice = f"set HOME; {advice}"
        text = f"{os.fspath(path)}: no home directory is known for {name}: {advice}"
        raise ValueError(text) from None


def check_file_name(name: str) -> None:
    """Raises ValueError for a name that is no UTF-8, which no JSON file of a run could hold."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"the file name {name!a} is not UTF-8: rename it") from None


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yields a temporary name beside `path`, whose file replaces it at the end, or is removed on an
    error. Create it with mode "x", which follows no link that another user has planted."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        yield temporary
        fsync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes or replaces a file in one step; what UTF-8 cannot write becomes a question mark."""
    with new_file(path) as new, new.open("x", encoding="utf-8", errors="replace") as file:
        file.write(text)


def fsync(path: Path) -> None:
    """Flushes a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
