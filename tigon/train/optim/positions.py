"""Where in the whole model the elements are that a rank has: random bits are drawn by that.

A rank of tensor or expert parallelism has pieces of a parameter, and FSDP divides these by rows.
What is left lies in runs: rows are one block of the whole, columns are lines of it that are equally
far apart, and a packed projection has such a run for each of its parts.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.weights import Cut, Rows

LONGEST = 1 << 30  # elements of a line: kernels count within one by 32 bits


class Run(NamedTuple):
    """`length` elements of a rank's part of a parameter, from its element `first` on.

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
        """Width and pitch; None of one block."""
        return (self.width, self.pitch) if self.width < self.length else None

    def between(self, begin: int, end: int, device: torch.device) -> Tensor:
        """int64: the positions of those among the part's elements `begin` to `end` that it has."""
        begin, end = max(begin - self.first, 0), min(end - self.first, self.length)
        if begin >= end:
            return torch.empty(0, dtype=torch.int64, device=device)
        if self.lines is None:
            return torch.arange(self.position + begin, self.position + end, device=device)
        at = torch.arange(begin, end, device=device)
        return at.add_(at // self.width, alpha=self.pitch - self.width).add_(self.position)


def runs_of(cut: Cut | None, begin: int, count: int, position: int) -> tuple[Run, ...]:
    """The runs of a rank's part, in the order of its elements.

    `cut` says what ranks of tensor or expert parallelism have of the parameter; None: all. Of
    that the rank has `count` elements from `begin` on, which are whole rows. `position`: of the
    whole parameter's first element.
    """
    every = _block(0, begin + count, 0) if cut is None else _runs(cut)
    found = (_within(run, begin, begin + count) for run in every)
    return tuple(run._replace(position=position + run.position) for run in found if run.length)


def positions(runs: Sequence[Run], begin: int, end: int, device: torch.device) -> Tensor:
    """int64 [end - begin], of the elements `begin` to `end` of a rank's part."""
    found = [run.between(begin, end, device) for run in runs]
    found = [each for each in found if len(each)]
    return found[0] if len(found) == 1 else torch.cat(found)


def _block(first: int, count: int, position: int) -> Iterator[Run]:
    if count:
        yield Run(first, count, position, count, count)


def _runs(cut: Cut) -> Iterator[Run]:
    """Of all that a rank of tensor or expert parallelism has."""
    outer, inner = math.prod(cut.shape[: cut.dim]), math.prod(cut.shape[cut.dim + 1 :])
    own, whole = cut.length * inner, cut.shape[cut.dim] * inner
    if not own:
        return
    pieces = [Rows(*(inner * n for n in rows)) for rows, _ in cut.pieces]
    source, _, width = pieces[0]
    pitch = whole // len(pieces)
    even = [Rows(source + i * pitch, i * width, width) for i in range(len(pieces))]
    # With several pieces the next line after the last one's is the first one's of the next row
    if outer > 1 and pieces == even and pitch * len(pieces) == whole and width < LONGEST:
        yield Run(0, outer * own, source, width, pitch)
        return
    for i in range(outer):
        for source, target, length in pieces:
            yield from _block(i * own + target, length, i * whole + source)


def _within(run: Run, begin: int, end: int) -> Run:
    """What is left of it, none perhaps, where only the elements `begin` to `end` are there."""
    skipped = max(begin - run.first, 0)
    count = max(min(end - run.first, run.length) - skipped, 0)
    lines, rest = divmod(skipped, run.width)
    assert run.lines is None or not rest  # rows are divided, and lines are within rows
    return Run(
        run.first + skipped - begin,
        count,
        run.position + lines * run.pitch + rest,
        min(run.width, count),
        run.pitch,
    )
