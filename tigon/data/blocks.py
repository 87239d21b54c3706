"""What every source of rows is: blocks of them, in order.

A row has a place, file:line. In tables and data sets, lines count rows.
"""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self

from tigon.data.formats import Format, Row

SIZE = 2**20  # bytes of a block, about
HASHED = 2**25  # bytes that a thread hashes at a time
LARGEST_ROW = 2**24  # characters; tokenizing them takes 2.4 GB
SAMPLED = 4096  # bytes of each piece that `sample` hashes

Rows = Iterator[tuple[int, Row | ValueError]]  # line, and its row or what is wrong with it


@dataclass(frozen=True)
class Block:
    """About a megabyte of a source; picklable, for worker processes."""

    name: str  # the source's
    format: Format

    def rows(self) -> Rows:
        raise NotImplementedError

    def content(self) -> bytes:
        """What its rows are made of."""
        return repr(self).encode(errors="backslashreplace")


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

    def count(self) -> int | None:
        """How many rows there are; None if only reading all of a stream would tell."""
        return sum(1 for _ in self.rows())

    def size(self) -> int:
        """Bytes on this host; 0 if they come from elsewhere."""
        return sum(file.stat().st_size for file in self._files())

    def sample(self, count: int) -> bytes:
        """Digests of about `count` pieces at equal distances, at least both ends of each file on
        this host: they tell most contents apart, and little is read."""
        files = self._files()
        each = max(2, count // max(1, len(files)))
        return b"".join(_hash_sample(file, each) for file in files)

    def _files(self) -> list[Path]:
        path = Path(self.name)
        files = path.rglob("*") if path.is_dir() else [path]
        return sorted(file for file in files if file.is_file())

    def rows(self) -> Rows:
        for block in self.blocks():
            yield from block.rows()

    def as_format(self, format: Format) -> Self:
        return replace(self, format=format)


def hash_files(paths: list[Path], *options: object) -> str:
    """A digest of the files' bytes and of the options."""
    total = hashlib.sha256(repr(options).encode())
    with ThreadPoolExecutor() as threads:
        for path in paths:
            size = path.stat().st_size
            starts = range(0, max(size, 1), HASHED)
            for digest in threads.map(partial(_hash_piece, path), starts):
                total.update(digest)
    return total.hexdigest()


def _hash_piece(path: Path, start: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        piece = hashlib.sha256()
        for _ in range(0, HASHED, 2**20):
            piece.update(file.read(2**20))
        return piece.digest()


def _hash_sample(path: Path, count: int) -> bytes:
    last = max(0, path.stat().st_size - SAMPLED)
    found = hashlib.sha256()
    with path.open("rb") as file:
        for start in sorted({last * i // max(1, count - 1) for i in range(count)}):
            file.seek(start)
            found.update(file.read(SAMPLED))
    return found.digest()
