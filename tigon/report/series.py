"""Columns of metrics.jsonl, and the points that are drawn of them."""

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

POINTS = 240  # of a line, at most


@dataclass
class Column:
    """One key of metrics.jsonl: its values by step. NaN stands for null, which is what the record
    writes for a number that is not finite."""

    steps: "array[int]" = field(default_factory=lambda: array("q"))
    values: "array[float]" = field(default_factory=lambda: array("d"))

    def add(self, step: int, value: float) -> None:
        self.steps.append(step)
        self.values.append(value)

    def finite(self) -> list[float]:
        return [value for value in self.values if not math.isnan(value)]

    def missing(self) -> list[int]:
        """The steps whose value is not finite."""
        pairs = zip(self.steps, self.values, strict=True)
        return [step for step, value in pairs if math.isnan(value)]

    def last(self) -> float:
        """NaN if there is none."""
        return next((value for value in reversed(self.values) if not math.isnan(value)), math.nan)

    def lowest(self) -> tuple[int, float] | None:
        """Step and value of the least; the first of equals."""
        pairs = zip(self.values, self.steps, strict=True)
        value, step = min((p for p in pairs if not math.isnan(p[0])), default=(math.nan, 0))
        return None if math.isnan(value) else (step, value)


@dataclass(frozen=True)
class Point:
    """Of the steps `first` to `last`; mean, low and high are NaN if no value is finite."""

    first: int
    last: int
    mean: float
    low: float
    high: float

    @property
    def x(self) -> float:
        return (self.first + self.last) / 2

    @property
    def empty(self) -> bool:
        return math.isnan(self.mean)


def points(column: Column, limit: int = POINTS) -> list[Point]:
    """At most `limit` buckets of as many steps each, or every step."""
    size = math.ceil(len(column.steps) / limit) if column.steps else 1
    return list(_buckets(column, size))


def _buckets(column: Column, size: int) -> Iterator[Point]:
    for begin in range(0, len(column.steps), size):
        steps = column.steps[begin : begin + size]
        values = [v for v in column.values[begin : begin + size] if not math.isnan(v)]
        if not values:
            yield Point(steps[0], steps[-1], math.nan, math.nan, math.nan)
            continue
        mean = math.fsum(value / len(values) for value in values)  # a sum may overflow
        yield Point(steps[0], steps[-1], mean, min(values), max(values))
