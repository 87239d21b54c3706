"""Whole matrices from parameters that ranks divide: which rank gets which, and the blocks of it
that each has, there and back.

# Rows are those of a parameter's flattening [-1, last dim]
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from tigon.weights import Cut, Part, cut_parts, own_rows, own_slices

ROUND = 1 << 26  # elements that a rank takes at a time


class Matrix(NamedTuple):
    rows: int
    cols: int

    @property
    def cost(self) -> int:
        """Of a Newton-Schulz iteration, in multiply-adds."""
        short, long = sorted(self)
        return short * short * (2 * long + short)


class Block(NamedTuple):
    """What a rank has of a matrix: elements of its part of a parameter, from `offset` on."""

    parameter: int
    offset: int
    matrix: int
    row: int  # of the matrix, and its column: where the block begins
    col: int
    rows: int
    cols: int


class Copy(NamedTuple):
    """`length` elements of a rank's part of a parameter, of matrices of one shape."""

    parameter: int
    offset: int
    length: int
    shape: Matrix

    def meets(self, after: "Copy") -> bool:
        same = (self.parameter, self.shape) == (after.parameter, after.shape)
        return same and self.offset + self.length == after.offset


class Move(NamedTuple):
    """From elements of a message to `rows` lines of matrices, `step` elements apart."""

    source: int
    target: int
    rows: int
    cols: int
    step: int

    @property
    def length(self) -> int:
        return self.rows * self.cols

    def meets(self, after: "Move") -> bool:
        ends = self.source + self.length, self.target + self.length
        return self.rows == after.rows == 1 and ends == after[:2]


@dataclass
class Round:
    """What one rank does with the matrices of all ranks in a round."""

    own: list[Matrix] = field(default_factory=list)  # equal shapes together
    out: list[Copy] = field(default_factory=list)  # what it sends, in the order of the message
    sizes_out: list[int] = field(default_factory=list)  # elements to each rank
    sizes_in: list[int] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)  # from the message to the matrices


def blocks_of(
    parameter: Tensor, index: int, heights: Sequence[int], first: int, cut: Cut | None
) -> Iterator[Block]:
    """What this rank has of a parameter's matrices, which are numbered from `first` on.

    `heights`: the rows of each, of the whole parameter. `cut`: what this rank's is of that, without
    FSDP's division of its rows.
    """
    own, begin = own_rows(f"parameter {index}", parameter)
    cols = parameter.shape[-1] if cut is None else cut.shape[-1]
    start = 0
    for matrix, rows in enumerate(heights, first):
        parts: Sequence[Part] = (Part.whole("", (rows, cols), start),)
        if cut is not None:
            parts = cut_parts(parts, cut)
        for part in parts:
            for (row, col), block in own_slices(part, parameter.shape, own, begin):
                assert block.is_contiguous()  # of columns a rank has one piece
                offset = int(block.storage_offset() - own.storage_offset())
                yield Block(index, offset, matrix, row, col, *block.shape)
        start += rows


def deal(matrices: Sequence[Matrix], blocks: Sequence[Sequence[Block]]) -> list[int]:
    """The rank for each matrix, so that all have about the same cost. `blocks`: of each rank.

    A rank that has all of a matrix keeps it, as long as that is not more than its share. The
    others go, the costliest first, to whoever has the least.
    """
    ranks, total = len(blocks), sum(matrix.cost for matrix in matrices)
    holders: dict[int, int] = {}
    for rank, of_rank in enumerate(blocks):
        for b in of_rank:
            if (b.rows, b.cols) == matrices[b.matrix]:
                holders.setdefault(b.matrix, rank)
    costs, owners = [0] * ranks, [-1] * len(matrices)
    order = sorted(range(len(matrices)), key=lambda i: -matrices[i].cost)
    for i in order:
        if i in holders and (costs[holders[i]] + matrices[i].cost) * ranks <= total:
            owners[i] = holders[i]
            costs[owners[i]] += matrices[i].cost
    for i in order:
        if owners[i] < 0:
            owners[i] = min(range(ranks), key=costs.__getitem__)
            costs[owners[i]] += matrices[i].cost
    return owners


def plan(
    matrices: Sequence[Matrix], blocks: Sequence[Sequence[Block]], rank: int, size: int = ROUND
) -> list[Round]:
    """What `rank` does, in rounds of about `size` elements for each owner. `blocks`: of each rank;
    what several have comes from each of them, and goes back to all."""
    ranks = len(blocks)
    rounds: list[list[list[int]]] = []  # of each round, the matrices of each rank
    owners = deal(matrices, blocks)
    for owner in range(ranks):
        mine = [i for i, o in enumerate(owners) if o == owner]
        mine.sort(key=lambda i: (-matrices[i].cost, matrices[i].rows, i))  # equal shapes together
        at, taken = 0, 0
        for i in mine:
            elements = matrices[i].rows * matrices[i].cols
            if taken and taken + elements > size:
                at, taken = at + 1, 0
            taken += elements
            if at == len(rounds):
                rounds.append([[] for _ in range(ranks)])
            rounds[at][owner].append(i)
    held: list[dict[int, list[Block]]] = [{} for _ in blocks]  # of each rank, by matrix
    for of_rank, its in zip(held, blocks, strict=True):
        for b in its:
            of_rank.setdefault(b.matrix, []).append(b)
    return [_round(matrices, dealt, held, rank) for dealt in rounds]


def _round(
    matrices: Sequence[Matrix],
    dealt: Sequence[Sequence[int]],
    held: Sequence[dict[int, list[Block]]],
    rank: int,
) -> Round:
    made = Round(own=[matrices[i] for i in dealt[rank]])
    for theirs in dealt:
        size = 0
        for b in (b for i in theirs for b in held[rank].get(i, ())):
            copy = Copy(b.parameter, b.offset, b.rows * b.cols, matrices[b.matrix])
            if made.out and made.out[-1].meets(copy):
                before = made.out.pop()
                copy = before._replace(length=before.length + copy.length)
            made.out.append(copy)
            size += b.rows * b.cols
        made.sizes_out.append(size)
    source = 0
    for of_sender in held:
        target, begun = 0, source
        for i in dealt[rank]:
            cols = matrices[i].cols
            for b in of_sender.get(i, ()):
                at = target + b.row * cols + b.col
                move = Move(source, at, b.rows, b.cols, cols)
                if b.cols == cols or b.rows == 1:
                    move = Move(source, at, 1, b.rows * b.cols, 0)
                if made.moves and made.moves[-1].meets(move):
                    previous = made.moves.pop()
                    move = previous._replace(cols=previous.cols + move.cols)
                made.moves.append(move)
                source += b.rows * b.cols
            target += matrices[i].rows * cols
        made.sizes_in.append(source - begun)
    return made
