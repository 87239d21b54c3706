"""Packing: which sequences share a row.

A row holds spans of the tokens of a corpus. Each span is a sequence of its own: positions restart,
and neither attention nor labels cross its ends. The examples of a group share a row.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

from tigon.data.mixture import Window


@dataclass(frozen=True)
class Rows:
    """Row r holds the token ranges spans[offsets[r] : offsets[r + 1]].

    Packed, they follow each other in one line of a batch; otherwise each has a line of its own.
    """

    spans: np.ndarray  # int64 [S, 2], start and stop in the tokens of the corpus
    offsets: np.ndarray  # int64 [R + 1]
    seq_len: int
    packing: bool
    truncated: int = 0  # examples that were cut to fit into seq_len
    dropped: int = 0  # examples left out: too long, or nothing to learn in what is left

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.spans[self.offsets[row] : self.offsets[row + 1]]


def whole(
    window: Window,
    seq_len: int,
    *,
    packing: bool = True,
    truncate: bool = True,
    most: int | None = None,
) -> Rows:
    """Rows of unsplit groups of examples: best-fit decreasing when packing, otherwise one a row.

    An example longer than seq_len, or `most`, is cut there. When packing, a whole group has to fit:
    the examples of one that then does not are cut to seq_len divided by their number. Without
    `truncate` groups that would be cut are left out. A group is also left out if one of its
    examples has no supervised token after its first, and so nothing to learn.
    """
    starts, stops = window.starts, window.stops
    first, sizes = window.groups[:-1], np.diff(window.groups)
    lengths = stops - starts
    most = seq_len if most is None else min(most, seq_len)
    bounded = np.minimum(lengths, most)
    needed = np.add.reduceat(bounded, first) if packing else np.maximum.reduceat(bounded, first)
    share = np.minimum(seq_len // sizes, most) if packing else np.full_like(sizes, most)
    limit = np.repeat(np.where(needed > seq_len, share, most), sizes)
    long = np.maximum.reduceat(lengths > limit, first)
    stops = np.minimum(stops, starts + limit)
    spans, targets = np.stack([starts, stops], axis=1), window.targets.copy()
    short = np.flatnonzero(lengths > limit)
    targets[short] = window.corpus.targets(spans[short])
    keep = np.minimum.reduceat(targets, first) > 0
    keep &= truncate | ~long
    kept = np.repeat(keep, sizes)
    spans, sizes = spans[kept], sizes[keep]
    counts = sizes
    if packing and keep.any():
        rows = best_fit(np.add.reduceat(np.diff(spans)[:, 0], np.cumsum(sizes) - sizes), seq_len)
        taken = np.concatenate(rows)
        place = np.argsort(taken)  # of each group, in the order of the rows
        spans = spans[np.argsort(np.repeat(place, sizes), kind="stable")]
        ends = np.cumsum([len(row) for row in rows])
        counts = np.add.reduceat(sizes[taken], np.append(0, ends[:-1]))
    offsets = np.concatenate([[0], np.cumsum(counts)])
    cut = kept & (lengths > limit)
    return Rows(spans, offsets, seq_len, packing, int(cut.sum()), int((~kept).sum()))


def split(window: Window, seq_len: int, *, packing: bool = True) -> Rows:
    """Rows of text, none left out: documents joined and cut every seq_len tokens when packing,
    otherwise each document cut every seq_len tokens, one piece to a row."""
    if len(window.groups) != len(window) + 1:
        raise ValueError("groups of examples cannot be split: make rows of them with whole()")
    ends = np.concatenate([[0], np.cumsum(window.stops - window.starts)])
    if packing:
        every = np.arange(0, ends[-1], seq_len)
    else:
        pieces = -(-np.diff(ends) // seq_len)
        within = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        every = np.repeat(ends[:-1], pieces) + within * seq_len
    cuts = np.union1d(ends, every)
    document = np.searchsorted(ends, cuts[:-1], side="right") - 1
    shift = (window.starts - ends[:-1])[document]  # from places among these documents to tokens
    spans = np.stack([cuts[:-1] + shift, cuts[1:] + shift], axis=1)
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
