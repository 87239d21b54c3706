"""Which rows of a source are read: slices of splits, `skip` and `take`, a held-out fraction."""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tigon.data.blocks import Block, Rows, RowsBlock, Source
from tigon.data.formats import KEYS, OTHER_NAMES, Format, Row

_BOUND = r"(-?\d{1,18})(%?)"
_SPLIT = re.compile(rf"(\w[\w.-]*)(?:\[(?:{_BOUND})?:(?:{_BOUND})?\])?")


class Split(NamedTuple):
    """A split of a data set and a slice of its rows; bounds are rows, or percent of them."""

    name: str = "train"
    start: int | None = None
    stop: int | None = None
    percent: bool = False


def parse_split(text: str) -> list[Split]:
    """The splits that a text such as "train[80%:]" or "train+test[:10]" names, as in `datasets`.

    ValueError for a text that is none.
    """
    splits = []
    for part in text.split("+"):
        match = _SPLIT.fullmatch(part.strip())
        if match is None:
            raise ValueError(
                f"split={text!r} is no split: write train, train[:100], train[80%:] or train+test"
            )
        name, start, start_unit, stop, stop_unit = match.groups()
        units = {unit for unit in (start_unit, stop_unit) if unit is not None}
        if len(units) > 1:
            raise ValueError(f"split={text!r} mixes rows and percent: give both bounds in one unit")
        first, last = (int(bound) if bound else None for bound in (start, stop))
        split = Split(name, first, last, percent="%" in units)
        if split.percent and max(abs(split.start or 0), abs(split.stop or 0)) > 100:
            raise ValueError(f"split={text!r} has a bound beyond 100%")
        splits.append(split)
    return splits


def select_split(sources: Sequence[Source], split: Split) -> list[Source]:
    """The rows of the slice, out of those of all sources end to end, rounded as in `datasets`."""
    start, stop = split.start, split.stop
    if split.percent or (start or 0) < 0 or (stop or 0) < 0:
        total = sum(_count(source) for source in sources)
        if split.percent:
            start, stop = (b if b is None else round(b * total / 100) for b in (start, stop))
        start, stop = (max(total + b, 0) if b is not None and b < 0 else b for b in (start, stop))
    return select_rows(sources, start or 0, stop)


def select_rows(sources: Sequence[Source], start: int, stop: int | None) -> list[Source]:
    """The rows from `start` to `stop`, out of those of all sources end to end."""
    if start == 0 and stop is None:
        return list(sources)
    chosen: list[Source] = []
    for i, source in enumerate(sources):
        if stop is not None and stop <= start:
            break
        chosen.append(RowRange(source.name, source.format, source, start, stop))
        if i + 1 < len(sources):
            count = _count(source)
            if count <= start:
                chosen.pop()
            start, stop = max(0, start - count), None if stop is None else max(0, stop - count)
    return chosen


def _count(source: Source) -> int:
    count = source.count()
    if count is None:
        raise ValueError(
            f"{source.name} is streamed, and its number of rows is not known: give a slice from "
            "its start, in rows, such as train[:1000], or streaming=false"
        )
    return count


@dataclass(frozen=True)
class _Part(Source):
    """Some of the rows of another source."""

    source: Source

    def digest(self) -> str:
        options = {k: v for k, v in vars(self).items() if k not in ("name", "format", "source")}
        whole = replace(self.source, format=self.format).digest()
        return hashlib.sha256(f"{whole} {sorted(options.items())}".encode()).hexdigest()

    def size(self) -> int:
        return self.source.size()

    def sample(self, count: int) -> bytes:
        return self.source.sample(count)


@dataclass(frozen=True)
class RowRange(_Part):
    """The rows of a source from `start` to `stop`."""

    start: int
    stop: int | None

    def blocks(self) -> Iterator[Block]:
        position = 0
        for block in replace(self.source, format=self.format).blocks():
            if self.stop is not None and position >= self.stop:
                break
            rows = list(block.rows())
            stop = len(rows) if self.stop is None else self.stop - position
            if chosen := rows[max(0, self.start - position) : stop]:
                yield RowsBlock(self.name, self.format, tuple(chosen))
            position += len(rows)
        if position <= self.start:
            raise ValueError(
                f"{self.name} has no rows left by split, skip and take: it has {position:,}, and "
                f"{self.start:,} are skipped"
            )

    def count(self) -> int | None:
        count = self.source.count()
        if count is None:
            return None
        return max(0, min(count, count if self.stop is None else self.stop) - self.start)


@dataclass(frozen=True)
class FractionBlock(Block):
    """The rows of a block that are held out, or those that are not."""

    block: Block
    fraction: float
    held_out: bool

    def rows(self) -> Rows:
        for line, row in self.block.rows():
            # A bad row is one of the training rows, so that it is counted once
            held_out = not isinstance(row, ValueError) and is_held_out(
                row, self.format, self.fraction
            )
            if held_out == self.held_out:
                yield line, row

    def content(self) -> bytes:
        return f"{self.fraction} {self.held_out} ".encode() + self.block.content()


@dataclass(frozen=True)
class Fraction(_Part):
    """The rows of a source that `eval_fraction` holds out, or those that are left for training."""

    fraction: float
    held_out: bool

    def blocks(self) -> Iterator[Block]:
        for block in replace(self.source, format=self.format).blocks():
            yield FractionBlock(self.name, self.format, block, self.fraction, self.held_out)


def select_fraction(sources: Sequence[Source], fraction: float, held_out: bool) -> list[Source]:
    """The held-out rows of the sources, or the others; without sources that have none of them."""
    parts = [Fraction(s.name, s.format, s, fraction, held_out) for s in sources]
    return [part for part in parts if next(part.rows(), None) is not None]


def is_held_out(row: Row, form: Format, fraction: float) -> bool:
    """Whether a row is part of the held-out fraction.

    A digest of what formats read of it decides, so that it is the same on every machine, in every
    order, and for each copy of the row, also under another id.
    """
    read = {ours: row[form.key(ours)] for ours in KEYS if row.get(form.key(ours)) is not None}
    for name, ours in OTHER_NAMES.items():
        if ours not in read and row.get(name) is not None:
            read[ours] = row[name]
    text = json.dumps(read or row, sort_keys=True, default=str)
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return number < fraction * 2**64
