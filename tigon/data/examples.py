"""Token ids with named columns of values, and how the rows of files become them.

# N tokens, E examples, G groups of examples
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from tigon.data.sources import Block, Row, Source

SUPERVISED = {"supervised": np.bool_}  # the column of the tokens that are to be learned
NONE: Mapping[str, Any] = MappingProxyType({})
NAMED = 5  # bad rows that a report shows


class Example(NamedTuple):
    """The tokens of one sequence, and its values for the columns of both kinds."""

    ids: Sequence[int]
    per_token: Mapping[str, Any]  # as many values as ids
    per_example: Mapping[str, Any] = NONE  # one value


Group = tuple[int, Sequence[Example]]  # a line, and the examples of its row


@dataclass(frozen=True)
class Report:
    """What became of rows; those of several blocks add up."""

    rows: int = 0
    skipped: int = 0  # rows that could not be read or encoded, with bad_rows=skip
    silent: int = 0  # rows left out since the weights of all that could be learned are 0
    errors: tuple[str, ...] = ()  # of the first rows that were skipped
    ignored_keys: tuple[str, ...] = ()  # keys of rows and of messages that nothing reads

    def __add__(self, other: "Report") -> "Report":
        return Report(
            self.rows + other.rows,
            self.skipped + other.skipped,
            self.silent + other.silent,
            (self.errors + other.errors)[:NAMED],
            tuple(sorted({*self.ignored_keys, *other.ignored_keys})),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON; Report(**values) reads it back."""
        return asdict(self)


@dataclass(frozen=True)
class Examples:
    """Tokenised examples, end to end, with columns of values per token and per example.

    The column "supervised" says which tokens are to be learned; without it, all are. The column
    "loss_weights" multiplies the tokens' losses; without it, all are 1. Consecutive examples can
    form groups, such as a chosen and a rejected answer, which share a micro-batch.
    """

    tokens: np.ndarray  # int32 [N]
    offsets: np.ndarray  # int64 [E + 1], example e is tokens[offsets[e] : offsets[e + 1]]
    origin: np.ndarray  # int32 [E, 2], index into files, line
    files: tuple[str, ...]
    per_token: Mapping[str, np.ndarray]  # [N, ...] each
    per_example: Mapping[str, np.ndarray] = field(default_factory=dict)  # [E, ...] each
    groups: np.ndarray | None = None  # int64 [G + 1], offsets into the examples; None: no groups
    report: Report = Report()

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def supervised(self) -> np.ndarray:
        """bool [N], the tokens that are to be learned."""
        if "supervised" in self.per_token:
            return self.per_token["supervised"]
        return np.ones(len(self.tokens), dtype=bool)

    def index(self, positions: np.ndarray) -> np.ndarray:
        """The example that holds each token position."""
        return np.searchsorted(self.offsets, positions, side="right") - 1

    def where(self, position: int) -> str:
        """The "file:line" of the example that holds token `position`."""
        file, line = self.origin[self.index(np.asarray(position))]
        return f"{self.files[file]}:{line}"

    def fingerprint(self) -> int:
        """A checksum that changes with any token, value of a column, or group."""
        value = zlib.crc32(self.tokens.tobytes())
        for columns in (self.per_token, self.per_example):
            for name in sorted(columns):
                value = zlib.crc32(columns[name].tobytes(), value)
        return value if self.groups is None else zlib.crc32(self.groups.tobytes(), value)


class Encoder:
    """Rows to examples: what an objective makes of its data.

    Picklable, since worker processes have a copy each. An objective of its own subclasses it:
    `row`, the columns, and `digest` if it has settings.
    """

    per_token: Mapping[str, DTypeLike] = SUPERVISED  # columns that examples may have
    per_example: Mapping[str, DTypeLike] = NONE
    # Columns that only some sources have, and the value that stands for them elsewhere: they are
    # absent from Examples in which all values are this one
    fills: Mapping[str, float] = MappingProxyType({"loss_weights": 1.0})
    skip_bad_rows = False

    def open(self, source: Source) -> Source:
        """The source with its rows' format, which its first ones decide. ValueError if none fits.

        The blocks and the digest of this one are those to use.
        """
        return source

    def digest(self) -> str:
        """Changes with whatever changes the examples of a row, such as the tokenizer."""
        raise NotImplementedError

    def row(self, row: Row, block: Block) -> Sequence[Example]:
        """The examples of one row, a group if there are several; ValueError for a bad row."""
        raise NotImplementedError

    def batch(self, rows: Sequence[Row], block: Block) -> Iterator[Sequence[Example] | ValueError]:
        """`row` of each, or its error; overridden where many at once are faster."""
        for row in rows:
            try:
                yield self.row(row, block)
            except ValueError as error:
                yield error

    def __call__(self, block: Block) -> Examples:
        """The examples of a block, with `block.name` as their only file, and the report."""
        raise NotImplementedError
