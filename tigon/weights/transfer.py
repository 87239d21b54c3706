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

    Of each line it takes as many columns as `out` has, from `column` on.
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
        whole = self.out.shape[1] == self.width and self.out.is_contiguous()
        return whole and self.out.dtype == self.dtype

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
        for i in range(0, len(self.out), step):
            begin = self.offset + i * self.line_bytes
            out = self.out[i : i + step]
            yield Run(self.path, begin, self.dtype, self.width, self.column, out)


@dataclass(slots=True)
class Transfer:
    """One read of a file: runs that follow each other in it."""

    path: Path
    offset: int
    nbytes: int
    runs: list[Run]


def transfers(runs: Iterable[Run], most: Callable[[Run], int]) -> list[Transfer]:
    """The runs in the order of the files, cut and merged into reads of at most `most` bytes.

    Only runs that are read in one way and to one device are merged.
    """
    cut = [piece for run in runs for piece in run.pieces(most(run))]
    cut.sort(key=lambda run: (str(run.path), run.offset))
    found: list[Transfer] = []
    kind = None
    for run in cut:
        nbytes, its_kind = run.nbytes, (run.path, run.out.device, run.dtype, run.direct)
        last = found[-1] if found and its_kind == kind else None
        if (
            last is not None
            and last.offset + last.nbytes == run.offset
            and last.nbytes + nbytes <= most(run)
        ):
            last.runs.append(run)
            last.nbytes += nbytes
        else:
            found.append(Transfer(run.path, run.offset, nbytes, [run]))
        kind = its_kind
    return found
