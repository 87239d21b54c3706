"""Which files belong to a folder. What was downloaded may have links to anything in its place.

A tokenizer's files are copied into exports and a config's values are quoted in messages, so that
a link to a private file would give it away, and a pipe or a device may never end.
"""

import os
import shlex
import stat
from pathlib import Path, PurePosixPath


def check_name(name: str, what: str = "the file") -> str:
    """The name of a file or folder inside another; raises ValueError if it leads out of that."""
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts or "\\" in name or "\0" in name:
        raise ValueError(f"{what} {name!r} is outside the repository: give a path inside it")
    return name


def is_own_file(folder: Path, name: str) -> bool:
    """Whether the folder has a file of this name. Raises ValueError for what only stands for one.

    That is a link to what is not in the folder, a pipe, a device. The folder itself may be a link,
    and one of a hub's cache (snapshots/COMMIT) has links to its blobs.
    """
    path = folder / check_name(name)
    try:
        target = Path(os.path.realpath(path, strict=True))
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise ValueError(
                f"{path} is a link to {os.readlink(path)}, which is not there"
            ) from None
        return False
    except OSError as error:  # a circle of links
        raise ValueError(f"{path} cannot be followed: {error.strerror}") from None
    root = Path(os.path.realpath(folder))
    if not target.is_relative_to(root) and not _is_blob(target, root):
        raise ValueError(
            f"{path} is a link to {target}, outside of {folder}: it is not read. If you trust it, "
            "put a copy of that file in its place"
        )
    mode = target.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise ValueError(f"{path} is no file but a pipe, a socket or a device: remove it")
    return stat.S_ISREG(mode)


def check_folder(folder: Path) -> None:
    """Raises ValueError, naming the file, unless all that is in the folder belongs to it."""
    for name in sorted(os.listdir(folder)):
        is_own_file(folder, name)


def _is_blob(target: Path, root: Path) -> bool:
    """Whether that is where a hub's cache keeps a file of its snapshot, or folder in one, `root`.

    CACHE/models--OWNER--NAME/snapshots/COMMIT/FILE is a link to ../../blobs/HASH, and that perhaps
    to CACHE/blobs/HA/HASH, which several repositories share.
    """
    for snapshots in root.parents:
        repository = snapshots.parent
        if snapshots.name == "snapshots" and repository.name.startswith("models--"):
            shared = repository.parent / "blobs" / target.name[:2]
            return target.parent in (repository / "blobs", shared)
    return False


def adapter_hint(place: str) -> str:
    """For a message: what to do with a folder or repository that holds PEFT's files."""
    return (
        f"{place} is an adapter: load its base and call load_adapter, or "
        f"`tigon export {shlex.quote(place)} DIRECTORY --merge` writes both as a model"
    )
