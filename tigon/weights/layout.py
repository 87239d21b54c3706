"""Which rows of which tensors of a checkpoint every parameter is made of."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Rows(NamedTuple):
    """`length` rows of a tensor from `source` on are those of a parameter from `target` on."""

    source: int
    target: int
    length: int


@dataclass(frozen=True)
class Part:
    """A checkpoint's tensor, and the rows that a parameter has of it: one slice or several.

    A shard of a packed projection has several of a tensor that is stored packed, [gate; up]: a
    slice of gate and one of up. `shape` is the whole tensor's. Rows of a parameter with one
    dimension more, [E, N, D], are those of its flattening [E * N, D].
    """

    name: str
    shape: tuple[int, ...]
    slices: tuple[Rows, ...]

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...], target: int = 0) -> "Part":
        """All rows of the tensor, from row `target` of the parameter on."""
        return cls(name, shape, (Rows(0, target, shape[0] if shape else 1),))


Layout = dict[str, tuple[Part, ...]]  # parameter -> the tensors that it has rows of


def fills(parts: Sequence[Part], parameter: Tensor) -> bool:
    """Whether the parts have every row of the parameter once, from rows that their tensors have."""
    rest = parts[0].shape[1:]
    lead = parameter.dim() - len(rest)
    if parameter.shape[lead:] != rest or any(part.shape[1:] != rest for part in parts):
        return False
    for part in parts:
        height = part.shape[0] if part.shape else 1
        if any(s.source < 0 or s.source + s.length > height for s in part.slices):
            return False
    spans = [(s.target, s.length) for part in parts for s in part.slices]
    return tiles(spans, math.prod(parameter.shape[:lead]))


def tiles(spans: Sequence[tuple[int, int]], height: int) -> bool:
    """Whether spans of (first row, rows) cover `height` rows once each."""
    end = 0
    for first, count in sorted(spans):
        if first != end:
            return False
        end += count
    return end == height
