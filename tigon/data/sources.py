"""Where rows come from: files and data sets, in pieces small enough for any memory.

A row has a place, file:line. In tables and data sets, lines count rows.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tigon.data.formats import Format, Row

SIZE = 2**22  # bytes of a block, about
LARGEST = 2**27  # characters of one document
HUB = "hf://"
ACCEPTED = (
    ".jsonl, .json and .txt files (also .gz and .zst), .parquet, .arrow, directories that the "
    f"library datasets has saved, and data sets of the hub as {HUB}owner/name"
)

Rows = Iterator[tuple[int, Row | ValueError]]  # line, and its row or why there is none


@dataclass(frozen=True)
class Entry:
    """One item of a list of data: a path, a glob, or a data set of the hub, hf://owner/name."""

    path: str
    weight: float | None = None  # its share of the examples drawn from all entries
    format: str = "auto"  # one of formats.KINDS
    columns: Mapping[str, str] = field(default_factory=dict)  # our name of a key -> theirs
    split: str = "train"  # of a data set
    config: str | None = None  # of a data set of the hub
    revision: str | None = None  # of a data set of the hub


@dataclass(frozen=True)
class Block:
    """A few megabytes of a source, which worker processes are sent."""

    name: str  # of the source
    format: Format

    def rows(self) -> Rows:
        raise NotImplementedError


@dataclass(frozen=True)
class Source:
    """The rows of one file or data set."""

    name: str  # for messages; a file's is its path
    format: Format

    def blocks(self) -> Iterator[Block]:
        """All rows in order, read on demand. ValueError for a file that cannot be read."""
        raise NotImplementedError

    def digest(self) -> str:
        """Changes with the content, and with how it is divided into rows and read."""
        raise NotImplementedError

    def rows(self) -> Rows:
        for block in self.blocks():
            yield from block.rows()
