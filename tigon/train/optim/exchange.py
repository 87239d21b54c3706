"""Whole matrices from sharded parameters: which rank gets which, and their rows there and back.

# Rows are those of a parameter's flattening [-1, last dim]
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

ROUND = 1 << 26  # elements that a rank takes at a time


class Matrix(NamedTuple):
    """Rows of a parameter that are a matrix of their own."""

    parameter: int
    first: int  # row
    rows: int
    cols: int

    @property
    def cost(self) -> int:
        """Of a Newton-Schulz iteration, in multiply-adds."""
        short, long = sorted((self.rows, self.cols))
        return short * short * (2 * long + short)


class Copy(NamedTuple):
    """`length` elements of a rank's part of a parameter, of matrices of one shape."""

    parameter: int
    offset: int
    length: int
    shape: tuple[int, int]

    def meets(self, after: "Copy") -> bool:
        same = (self.parameter, self.shape) == (after.parameter, after.shape)
        return same and self.offset + self.length == after.offset


class Move(NamedTuple):
    """From elements of a message to those of matrices."""

    source: int
    target: int
    length: int

    def meets(self, after: "Move") -> bool:
        return (self.source + self.length, self.target + self.length) == after[:2]


@dataclass
class Round:
    """What one rank does with the matrices of all ranks in a round."""

    own: list[Matrix] = field(default_factory=list)  # equal shapes together
    out: list[Copy] = field(default_factory=list)  # what it sends, in the order of the message
    sizes_out: list[int] = field(default_factory=list)  # elements to each rank
    sizes_in: list[int] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)  # from the message to the matrices


def rows_of_ranks(shape: Sequence[int], ranks: int) -> list[tuple[int, int]]:
    """Begin and end of each rank's rows of a parameter that FSDP2 shards."""
    each = -(-shape[0] // ranks)
    inner = math.prod(shape[1:-1])
    bounds = [min(each * rank, shape[0]) * inner for rank in range(ranks + 1)]
    return list(itertools.pairwise(bounds))


def deal(matrices: Sequence[Matrix], rows: Sequence[Sequence[tuple[int, int]]]) -> list[int]:
    """The rank for each matrix, so that all have about the same cost.

    A rank that has all rows of a matrix keeps it, as long as that is not more than its share. The
    others go, the costliest first, to whoever has the least. `rows` are those of each parameter on
    each rank.
    """
    ranks, total = len(rows[0]), sum(matrix.cost for matrix in matrices)
    costs, owners = [0] * ranks, [-1] * len(matrices)
    order = sorted(range(len(matrices)), key=lambda i: (-matrices[i].cost, matrices[i]))
    for i in order:
        holder = _holder(matrices[i], rows[matrices[i].parameter])
        if holder is not None and (costs[holder] + matrices[i].cost) * ranks <= total:
            owners[i] = holder
            costs[holder] += matrices[i].cost
    for i in order:
        if owners[i] < 0:
            owners[i] = min(range(ranks), key=costs.__getitem__)
            costs[owners[i]] += matrices[i].cost
    return owners


def _holder(matrix: Matrix, rows: Sequence[tuple[int, int]]) -> int | None:
    """The rank that has all rows of the matrix."""
    end = matrix.first + matrix.rows
    whole = (r for r, (a, b) in enumerate(rows) if a <= matrix.first and end <= b)
    return next(whole, None)


def plan(
    matrices: Sequence[Matrix],
    rows: Sequence[Sequence[tuple[int, int]]],
    rank: int,
    size: int = ROUND,
) -> list[Round]:
    """What `rank` does, in rounds of about `size` elements for each owner."""
    ranks = len(rows[0])
    rounds: list[list[list[Matrix]]] = []  # of each round, the matrices of each rank
    owners = deal(matrices, rows)
    for owner in range(ranks):
        mine = [m for m, o in zip(matrices, owners, strict=True) if o == owner]
        mine.sort(key=lambda m: (-m.cost, m.rows, m))  # equal shapes together
        at, taken = 0, 0
        for m in mine:
            if taken and taken + m.rows * m.cols > size:
                at, taken = at + 1, 0
            taken += m.rows * m.cols
            if at == len(rounds):
                rounds.append([[] for _ in range(ranks)])
            rounds[at][owner].append(m)
    return [_round(of_rank, rows, rank) for of_rank in rounds]


def _round(
    of_rank: Sequence[Sequence[Matrix]], rows: Sequence[Sequence[tuple[int, int]]], rank: int
) -> Round:
    made = Round(own=list(of_rank[rank]))
    for theirs in of_rank:
        size = 0
        for m in theirs:
            begin, length = _common(m, rows[m.parameter][rank])
            if length:
                offset = (begin - rows[m.parameter][rank][0]) * m.cols
                copy = Copy(m.parameter, offset, length * m.cols, (m.rows, m.cols))
                if made.out and made.out[-1].meets(copy):
                    before = made.out.pop()
                    copy = before._replace(length=before.length + copy.length)
                made.out.append(copy)
                size += length * m.cols
        made.sizes_out.append(size)
    source = 0
    for sender in range(len(of_rank)):
        target, begun = 0, source
        for m in made.own:
            begin, length = _common(m, rows[m.parameter][sender])
            if length:
                move = Move(source, target + (begin - m.first) * m.cols, length * m.cols)
                if made.moves and made.moves[-1].meets(move):
                    previous = made.moves.pop()
                    move = previous._replace(length=previous.length + move.length)
                made.moves.append(move)
                source += length * m.cols
            target += m.rows * m.cols
        made.sizes_in.append(source - begun)
    return made


def _common(matrix: Matrix, rows: tuple[int, int]) -> tuple[int, int]:
    """The first row that a matrix has among these, and how many."""
    begin = max(matrix.first, rows[0])
    return begin, max(0, min(matrix.first + matrix.rows, rows[1]) - begin)
