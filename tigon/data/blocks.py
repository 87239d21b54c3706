"""What every source of rows is: blocks of them, in order.

A row has a place, file:line. In tables and data sets, lines count rows.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from tigon.data.formats import Format, Row

SIZE = 2**22  # bytes of a block, about

Rows = Iterator[tuple[int, Row | ValueError]]  # line, and its row or what is wrong with it


@dataclass(frozen=True)
class Block:
    """A few megabytes of a source; picklable, for worker processes."""

    name: str  # the source's
    format: Format

    def rows(self) -> Rows:
        raise NotImplementedError


@dataclass(frozen=True)
class RowsBlock(Block):
    """Rows that are read already."""

    lines: tuple[tuple[int, Row | ValueError], ...]

    def rows(self) -> Rows:
        yield from self.lines


@dataclass(frozen=True)
class Source:
    """The rows of one file or data set."""

    name: str  # for messages; a file's path
    format: Format

    def blocks(self) -> Iterator[Block]:
        """All rows in order, read on demand; ValueError for a file that cannot be read."""
        raise NotImplementedError

    def digest(self) -> str:
        """Changes with the content, and with how rows are made of it."""
        raise NotImplementedError

    def rows(self) -> Rows:
        for block in self.blocks():
            yield from block.rows()

    def as_format(self, format: Format) -> Self:
        return replace(self, format=format)


def hash_files(paths: list[Path], *options: object) -> str:
    """A digest of the files' bytes and of the options."""
    total = hashlib.sha256(repr(options).encode())
    for path in paths:
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()
