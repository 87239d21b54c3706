"""Packing: which sequences share a row.

A row holds spans of the token array. Each span is a sequence of its own: positions restart, and
neither attention nor labels cross its ends. The examples of a group share a row.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

from tigon.data.examples import Examples


@dataclass(frozen=True)
class Rows:
    """Row r holds the token ranges spans[offsets[r] : offsets[r + 1]].

    Packed, they follow each other in one line of a batch; otherwise each has a line of its own.
    """

    spans: np.ndarray  # int64 [S, 2], start and stop in Examples.tokens
    offsets: np.ndarray  # int64 [R + 1]
    seq_len: int
    packing: bool
    truncated: int = 0  # examples that were cut to fit into seq_len
    dropped: int = 0  # examples left out: too long, or nothing to learn in what is left

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.spans[self.offsets[row] : self.offsets[row + 1]]


def whole(examples: Examples, seq_len: int, *, packing: bool = True, truncate: bool = True) -> Rows:
    """Rows of unsplit groups of examples: best-fit decreasing when packing, otherwise one a row.

    An example longer than seq_len is cut there. When packing, a whole group has to fit: the
    examples of one that does not are cut to seq_len divided by their number. Without `truncate`
    such groups are left out. A group is also left out if one of its examples has no supervised
    token after its first, and so nothing to learn.
    """
    starts, stops = examples.offsets[:-1], examples.offsets[1:]
    ends = np.arange(len(examples) + 1) if examples.groups is None else examples.groups
    first, sizes = ends[:-1], np.diff(ends)
    lengths = stops - starts
    needed = np.add.reduceat(lengths, first) if packing else np.maximum.reduceat(lengths, first)
    long = needed > seq_len
    share = seq_len // sizes if packing else np.full_like(sizes, seq_len)
    limit = np.repeat(np.where(long, share, seq_len), sizes)
    stops = np.minimum(stops, starts + limit)
    keep = np.minimum.reduceat(targets(examples, starts, stops), first) > 0
    keep &= truncate | ~long
    if not keep.any():
        raise ValueError(
            f"no example of {', '.join(examples.files)} has anything to learn "
            f"within seq_len {seq_len} ({long.sum()} of {len(sizes)} are longer)"
        )
    kept = np.repeat(keep, sizes)
    spans, sizes = np.stack([starts, stops], axis=1)[kept], sizes[keep]
    counts = sizes
    if packing:
        rows = best_fit(np.add.reduceat(np.diff(spans)[:, 0], np.cumsum(sizes) - sizes), seq_len)
        place = np.argsort(np.concatenate(rows))  # of each group, in the order of the rows
        spans = spans[np.argsort(np.repeat(place, sizes), kind="stable")]
        counts = np.array([sizes[row].sum() for row in rows])
    offsets = np.concatenate([[0], np.cumsum(counts)])
    cut = kept & (lengths > limit)
    return Rows(spans, offsets, seq_len, packing, int(cut.sum()), int((~kept).sum()))


def split(examples: Examples, seq_len: int, *, packing: bool = True) -> Rows:
    """Rows of text, none left out: documents joined and cut every seq_len tokens when packing,
    otherwise each document cut every seq_len tokens, one piece to a row."""
    if examples.groups is not None:
        raise ValueError("groups of examples cannot be split: make rows of them with whole()")
    if packing:
        every = np.arange(0, len(examples.tokens), seq_len)
    else:
        ranges = zip(examples.offsets[:-1], examples.offsets[1:], strict=True)
        every = np.concatenate([np.arange(a, b, seq_len) for a, b in ranges])
    cuts = np.union1d(examples.offsets, every)
    spans = np.stack([cuts[:-1], cuts[1:]], axis=1)
    offsets = np.append(np.searchsorted(cuts[:-1], every), len(spans))
    return Rows(spans, offsets, seq_len, packing)


def best_fit(lengths: np.ndarray, seq_len: int) -> list[list[int]]:
    """Bins of indices, longest first, each into the fullest bin that still takes it."""
    bins: list[list[int]] = []
    by_space: dict[int, list[list[int]]] = {}
    spaces: list[int] = []  # sorted keys of by_space
    for i in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[i])
        at = bisect_left(spaces, length)
        if at == len(spaces):
            space = seq_len
            bins.append(chosen := [])
        else:
            space = spaces[at]
            chosen = by_space[space].pop()
            if not by_space[space]:
                del by_space[space], spaces[at]
        chosen.append(i)
        left = space - length
        if left not in by_space:
            by_space[left] = []
            insort(spaces, left)
        by_space[left].append(chosen)
    return bins


def targets(examples: Examples, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """How many tokens of each range are predicted: the supervised ones but for its first."""
    before = np.concatenate([[0], np.cumsum(examples.supervised)])
    return before[stops] - before[np.minimum(starts + 1, stops)]
