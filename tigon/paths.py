"""Paths as users write them."""

import os
from pathlib import Path


def expanded(path: str | os.PathLike[str]) -> Path:
    """With `~` and `~name` replaced by home directories; ValueError where there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError(
            f"{os.fspath(path)}: no home directory is known for {Path(path).parts[0]}; a file of "
            "this name in the current directory is ./~..."
        ) from None
