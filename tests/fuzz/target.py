"""What a fuzz target is: a valid example, mutations of it, and what loads it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis.strategies import SearchStrategy


@dataclass(frozen=True)
class Link:
    """In the place of a file's content: a symlink."""

    to: str


Content = bytes | Link | None  # None: the file is absent
Files = Mapping[str, bytes]  # by their path in the folder
Case = Mapping[str, Content]  # the files that are not as in the example


@dataclass(frozen=True)
class Target:
    name: str
    share: float  # of all cases; the shares need not add up to one
    example: Callable[[Path], None]  # fills a new folder
    cases: Callable[[Files], SearchStrategy[Case]]  # from the example's files
    load: Callable[[Path], Any]  # the folder


def read_files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
