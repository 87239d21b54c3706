"""Reads of files: which bytes go where.

A line is a row of a tensor's last dimension, or an element where a tensor has one dimension. Lines
that follow each other in a file and in memory are a `Run`; runs that follow each other in a file
are read at once, as a `Transfer`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Run:
    """Lines of a file, `width` elements each, and the memory [lines, columns] they go to.

    Of each line it takes as many columns as `out` has, from `column` on. Bytes that go there as
    they are may also be lines of one byte, `out` [bytes].
    """

    path: Path
    offset: int  # of the first line's first byte
    dtype: torch.dtype
    width: int
    column: int
    out: Tensor

    @property
    def line_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return len(self.out) * self.line_bytes

    @property
    def direct(self) -> bool:
        """Whether the bytes are those of `out` as they are."""
        if self.out.dim() == 1:
            return True
        whole = self.out.shape[1] == self.width and self.out.is_contiguous()
        return whole and self.out.dtype == self.dtype

    def plain(self) -> "Run":
        """The same as bytes, which can be cut anywhere, if they go to `out` as they are."""
        if not self.direct:
            return self
        flat = self.out.view(-1).view(torch.uint8)
        return Run(self.path, self.offset, torch.uint8, 1, 0, flat)

    def pieces(self, most: int) -> Iterator["Run"]:
        """The run in pieces of at most that many bytes, or of one element."""
        if self.nbytes <= most:
            yield self
            return
        if self.line_bytes > most and self.width > 1:
            for i, line in enumerate(self.out):  # of a matrix with very long rows
                begin = self.offset + i * self.line_bytes + self.column * self.dtype.itemsize
                yield from Run(self.path, begin, self.dtype, 1, 0, line.unsqueeze(1)).pieces(most)
            return
        step = max(1, most // max(1, self.line_bytes))
        begin = self.offset
        for out in self.out.split(step):
            yield Run(self.path, begin, self.dtype, self.width, self.column, out)
            begin += step * self.line_bytes


@dataclass(slots=True)
class Transfer:
    """One read of a file: runs that follow each other in it."""

    path: Path
    offset: int
    nbytes: int
    runs: list[Run]


def transfers(runs: Iterable[Run], most: Callable[[Run], int]) -> list[Transfer]:
    """The runs in the order of the files, cut and merged into reads of at most `most` bytes.

    Only runs that are read in one way and to one device are merged. What goes to memory as it is
    has become plain bytes.
    """
    found: list[Transfer] = []
    kind = None
    for run in sorted(runs, key=lambda run: (str(run.path), run.offset)):
        run, limit = run.plain(), most(run)
        its_kind = (run.path, run.out.device, run.dtype, run.direct)
        for piece in run.pieces(limit):
            nbytes = piece.nbytes
            last = found[-1] if found and its_kind == kind else None
            if (
                last is not None
                and last.offset + last.nbytes == piece.offset
                and last.nbytes + nbytes <= limit
            ):
                last.runs.append(piece)
                last.nbytes += nbytes
            else:
                found.append(Transfer(piece.path, piece.offset, nbytes, [piece]))
            kind = its_kind
    return found
