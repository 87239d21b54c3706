"""The largest magnitudes of a matrix's rows and columns, found by the operator that writes it.

# R rows, C columns of a matrix

A cast to 8 bits needs them before it can scale a number. An operator that has the numbers at hand
anyway finds them and notes them on its output, and a later cast reads the output once less. The
notes of a gradient are found only if they will be read: the product that will cast it asks for them
on its output (`request_maxima`), and the backward pass of what reads that output is the writer.
"""

from typing import NamedTuple

from torch import Tensor

from tigon.kernels.recompute import Note, find_note
from tigon.kernels.runtime import tl, triton


class Maxima(NamedTuple):
    """The largest magnitudes of the rows and columns of a bf16 matrix [R, C], as fp32 bits."""

    rows: Tensor | None  # int32 [R]
    columns: Tensor | None  # int32 [C]


NO_MAXIMA = Maxima(None, None)


class _MaximaNote(Note):
    """Keeps a tensor's maxima beside it, for the next cast of the same numbers."""

    __slots__ = ("maxima",)

    def __init__(self, x: Tensor, maxima: Maxima):
        super().__init__(x)
        self.maxima = maxima


def note_maxima(x: Tensor, maxima: Maxima) -> None:
    """Notes the maxima of `x` [..., C] on it, for its casts; the operator that wrote x calls it."""
    x._maxima = _MaximaNote(x, maxima)  # type: ignore[attr-defined]


def find_maxima(x: Tensor) -> Maxima:
    """Returns the maxima noted on the matrix `x`, or NO_MAXIMA."""
    note: _MaximaNote | None = find_note(x, "_maxima")
    if note is None:
        return NO_MAXIMA
    fits = all(b is None or b.numel() == n for b, n in zip(note.maxima, x.shape, strict=True))
    return note.maxima if fits else NO_MAXIMA


def request_maxima(y: Tensor) -> None:
    """Notes on the output of a product that its backward pass will cast the gradient of `y`."""
    y._maxima_request = Note(y)  # type: ignore[attr-defined]


def are_maxima_requested(y: Tensor) -> bool:
    """Whether the maxima of the gradient of `y` will be read."""
    return find_note(y, "_maxima_request") is not None


@triton.jit
def magnitude(x):
    """Returns the bits of |x| in fp32.

    As integers they are ordered like the numbers, then inf, then NaN: maxima keep a NaN, and atomic
    maxima are the same in any order.
    """
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def atomic_max_columns(maxima, columns, top, mask):
    """Computes maxima[columns] = max(maxima[columns], top) atomically.

    Neighboring columns are in neighboring threads, whose requests are merged. `^ 0` hides from the
    compiler that columns are consecutive: it would give four to a thread, as for stores, and merge
    only two.
    """
    zero = tl.num_programs(0) >> 31
    tl.atomic_max(maxima + (columns ^ zero), top, mask=mask, sem="relaxed")
