"""The positions of a rank's elements in the whole model, from which random bits are drawn.

A rank of tensor or expert parallelism has pieces of a parameter, and FSDP divides these by rows.
What is left lies in runs: rows are one block of the whole, columns are lines that are equally far
apart, and a packed projection has such a run for each of its parts.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.weights import RowSpan, ShardSpec

MAX_LINE = 1 << 30  # elements of a line of a PositionRun: kernels count within one by 32 bits


class PositionRun(NamedTuple):
    """Describes `length` elements of a rank's part of a parameter, from its element `first` on.

    The i-th of them, from 0, has the position `position + i // width * pitch + i % width` in the
    model: lines of `width` elements, each `pitch` behind the one before. A block is one line.
    """

    first: int
    length: int
    position: int
    width: int
    pitch: int

    @property
    def lines(self) -> tuple[int, int] | None:
        """Returns width and pitch, or None for one block."""
        return (self.width, self.pitch) if self.width < self.length else None

    def between(self, begin: int, end: int, device: torch.device) -> Tensor:
        """Returns the positions (int64) of its elements among `begin` to `end` of the part."""
        begin, end = max(begin - self.first, 0), min(end - self.first, self.length)
        if begin >= end:
            return torch.empty(0, dtype=torch.int64, device=device)
        if self.lines is None:
            return torch.arange(self.position + begin, self.position + end, device=device)
        at = torch.arange(begin, end, device=device)
        return at.add_(at // self.width, alpha=self.pitch - self.width).add_(self.position)


def runs_of(
    spec: ShardSpec | None, begin: int, count: int, position: int
) -> tuple[PositionRun, ...]:
    """Returns the runs of a rank's part, in the order of its elements.

    `spec` is the shard of tensor or expert parallelism (None: the whole parameter), of which the
    rank has `count` elements from `begin` on, in whole rows. `position` is that of the whole
    parameter's first element.
    """
    runs = [_block_run(0, begin + count, 0)] if spec is None else _shard_runs(spec)
    overlaps = (_intersect(run, begin, begin + count) for run in runs if run.length)
    return tuple(run._replace(position=position + run.position) for run in overlaps if run.length)


def positions(runs: Sequence[PositionRun], begin: int, end: int, device: torch.device) -> Tensor:
    """Returns the positions int64 [end - begin] of elements `begin` to `end` of a rank's part."""
    return torch.cat([run.between(begin, end, device) for run in runs])


def _block_run(first: int, count: int, position: int) -> PositionRun:
    """Returns the run of `count` elements that follow each other in the whole parameter."""
    return PositionRun(first, count, position, count, count)


def _shard_runs(spec: ShardSpec) -> Iterator[PositionRun]:
    """Yields the runs of a whole shard of tensor or expert parallelism."""
    outer, inner = math.prod(spec.shape[: spec.dim]), math.prod(spec.shape[spec.dim + 1 :])
    part, whole = spec.length * inner, spec.shape[spec.dim] * inner
    if not part:
        return
    pieces = [RowSpan(*(inner * n for n in rows)) for rows, _ in spec.pieces]
    source, _, width = pieces[0]
    pitch = whole // len(pieces)
    even = [RowSpan(source + i * pitch, i * width, width) for i in range(len(pieces))]
    # With several pieces the next line after the last one's is the first one's of the next row
    if outer > 1 and pieces == even and pitch * len(pieces) == whole and width < MAX_LINE:
        yield PositionRun(0, outer * part, source, width, pitch)
        return
    for i in range(outer):
        for source, target, length in pieces:
            yield _block_run(i * part + target, length, i * whole + source)


def _intersect(run: PositionRun, begin: int, end: int) -> PositionRun:
    """Returns the part of a run, maybe empty, that lies in the elements `begin` to `end`."""
    skipped = max(begin - run.first, 0)
    count = max(min(end - run.first, run.length) - skipped, 0)
    lines, rest = divmod(skipped, run.width)
    assert run.lines is None or not rest  # rows are divided, and lines are within rows
    position, width = run.position + lines * run.pitch + rest, min(run.width, count)
    return PositionRun(run.first + skipped - begin, count, position, width, run.pitch)
