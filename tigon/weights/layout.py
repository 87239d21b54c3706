"""Which rows of which tensors of a checkpoint every parameter is made of."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """`length` rows of a tensor from `source` on are those of a parameter from `target` on."""

    source: int
    target: int
    length: int


class Copy(NamedTuple):
    """One of several ranks of tensor parallelism that have the same."""

    number: int = 0
    of: int = 1


@dataclass(frozen=True)
class Part:
    """A checkpoint's tensor, and the rows that a parameter has of it: one slice or several.

    A shard of a packed projection has several of a tensor that is stored packed, [gate; up]: a
    slice of gate and one of up. `shape` is the whole tensor's. Rows of a parameter with one
    dimension more, [E, N, D], are those of its flattening [E * N, D].

    Under tensor parallelism a parameter may have a share of each row: `spans` say it, for each
    dimension after the first. A parameter may then have several parts of one tensor.
    """

    name: str
    shape: tuple[int, ...]
    slices: tuple[Rows, ...]
    spans: tuple[Rows, ...] = ()  # (): whole rows
    copy: Copy | None = None  # None: there is no tensor parallelism

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...], target: int = 0) -> "Part":
        """All rows of the tensor, from row `target` of the parameter on."""
        return cls(name, shape, (Rows(0, target, shape[0] if shape else 1),))

    @property
    def row_spans(self) -> tuple[Rows, ...]:
        return self.spans or tuple(Rows(0, 0, size) for size in self.shape[1:])

    @property
    def column(self) -> int:
        """The first that it has of the tensor's last dimension."""
        return self.spans[-1].source if self.spans else 0

    def lines(self, shape: Sequence[int]) -> Iterator[Rows]:
        """The slices as rows of the last dimension, of the tensor and of a parameter of `shape`."""
        middle = self.row_spans[:-1]
        if all(span == Rows(0, 0, n) for span, n in zip(middle, self.shape[1:-1], strict=True)):
            per_row = math.prod(self.shape[1:-1])
            for rows in self.slices:
                yield Rows(*(per_row * n for n in rows))
            return
        (span,) = middle
        theirs, ours = self.shape[1], shape[-2]
        for source, target, length in self.slices:
            for i in range(length):
                at = (source + i) * theirs + span.source, (target + i) * ours + span.target
                yield Rows(*at, span.length)


Layout = dict[str, tuple[Part, ...]]  # parameter -> the tensors that it has rows of


@dataclass(frozen=True)
class Cut:
    """What a rank of tensor or expert parallelism has of a parameter: pieces of one dimension."""

    shape: tuple[int, ...]  # of the whole
    dim: int
    pieces: tuple[tuple[Rows, Copy], ...]

    @property
    def length(self) -> int:
        return sum(rows.length for rows, _ in self.pieces)

    def take(self, whole: Tensor) -> Tensor:
        """The rank's own of a parameter, in memory of its own."""
        return torch.cat(
            [whole.narrow(self.dim, r.source, r.length) for r, _ in self.pieces], self.dim
        )


def cut_parts(parts: Sequence[Part], own: Cut) -> tuple[Part, ...]:
    """What the rank's own parameter is made of, where the whole one is made of `parts`."""
    return tuple(new for part in parts for new in _cut_part(part, own))


def _cut_part(part: Part, own: Cut) -> Iterator[Part]:
    lead = len(own.shape) - len(part.shape[1:])  # dimensions that its rows count over
    if own.dim >= lead:
        for rows, copy in own.pieces:
            spans = list(part.row_spans)
            spans[own.dim - lead] = rows
            yield replace(part, spans=tuple(spans), copy=copy)
        return
    by_copy: dict[Copy, list[Rows]] = {}
    inner = math.prod(own.shape[own.dim + 1 : lead])  # rows for each index of the dimension
    size = own.shape[own.dim] * inner
    for source, target, length in part.slices:
        for outer in range(target // size, -(-(target + length) // size)):
            for piece, copy in own.pieces:
                begin = outer * size + piece.source * inner
                first = max(target, begin)
                end = min(target + length, begin + piece.length * inner)
                if first < end:
                    at = (outer * own.length + piece.target) * inner + first - begin
                    own_rows = Rows(source + first - target, at, end - first)
                    by_copy.setdefault(copy, []).append(own_rows)
    for copy, found in (by_copy or {Copy(): []}).items():
        yield replace(part, slices=tuple(found), copy=copy)


def fills(parts: Sequence[Part], parameter: Tensor) -> bool:
    """Whether the parts have every row of the parameter once, from rows that their tensors have."""
    dims = len(parts[0].shape[1:])
    lead = parameter.dim() - dims
    rest = parameter.shape[lead:]
    slices: dict[tuple[tuple[int, int], ...], list[tuple[int, int]]] = {}
    for part in parts:
        if len(part.shape[1:]) != dims:
            return False
        height = part.shape[0] if part.shape else 1
        bounds = [(rows, height) for rows in part.slices]
        bounds += zip(part.row_spans, part.shape[1:], strict=True)
        if any(s.source < 0 or s.source + s.length > size for s, size in bounds):
            return False
        spans = tuple((s.target, s.length) for s in part.row_spans)
        slices.setdefault(spans, []).extend((s.target, s.length) for s in part.slices)
    height = math.prod(parameter.shape[:lead])
    if not all(tiles(found, height) for found in slices.values()):
        return False
    # Only one dimension is cut into several
    several = [list(dict.fromkeys(at)) for at in zip(*slices, strict=True)]
    return all(tiles(at, n) for at, n in zip(several, rest, strict=True))


def tiles(spans: Sequence[tuple[int, int]], height: int) -> bool:
    """Whether spans of (first row, rows) cover `height` rows once each."""
    end = 0
    for first, count in sorted(spans):
        if first != end:
            return False
        end += count
    return end == height
