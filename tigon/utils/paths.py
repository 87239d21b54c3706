"""Paths as users write them."""

import os
from pathlib import Path


def expand_user(path: str | os.PathLike[str]) -> Path:
    """Replaces `~` and `~name` by home directories; raises ValueError where there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError(
            f"{os.fspath(path)}: no home directory is known for {Path(path).parts[0]}; a file of "
            "this name in the current directory is ./~..."
        ) from None


def check_file_name(name: str) -> None:
    """Raises ValueError for a name that is no UTF-8, which no JSON file of a run could hold."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"the file name {name!a} is not UTF-8: rename it") from None
