"""Which sequences share a row.

A row holds spans of the token array. Each span is a sequence of its own: positions restart, and
nothing attends or predicts across its ends.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

from tigon.data.examples import Examples


@dataclass(frozen=True)
class Rows:
    """Row r holds the token ranges spans[offsets[r] : offsets[r + 1]]."""

    spans: np.ndarray  # int64 [S, 2], start and stop in Examples.tokens
    offsets: np.ndarray  # int64 [R + 1]
    seq_len: int
    truncated: int = 0  # examples longer than seq_len that were cut to it
    dropped: int = 0  # examples left out: too long, or nothing to learn in what is left

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.spans[self.offsets[row] : self.offsets[row + 1]]


def whole(examples: Examples, seq_len: int, *, packing: bool = True, truncate: bool = True) -> Rows:
    """Rows of unsplit examples: best-fit decreasing when packing, otherwise one to a row.

    One longer than seq_len is cut there, or left out when `truncate` is false. One without a
    supervised token after its first has nothing to learn and is left out. Both are counted.
    """
    starts, stops = examples.offsets[:-1], examples.offsets[1:]
    long = stops - starts > seq_len
    stops = np.minimum(stops, starts + seq_len)
    keep = targets(examples, starts, stops) > 0
    keep &= truncate | ~long
    if not keep.any():
        raise ValueError(
            f"no example of {', '.join(examples.files)} has anything to learn "
            f"within seq_len {seq_len} ({long.sum()} of {len(examples)} are longer)"
        )
    spans = np.stack([starts, stops], axis=1)[keep]
    if packing:
        rows = best_fit(spans[:, 1] - spans[:, 0], seq_len)
        spans = spans[np.concatenate(rows)]
        sizes = [len(row) for row in rows]
    else:
        sizes = [1] * len(spans)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return Rows(spans, offsets, seq_len, int((long & keep).sum()), int((~keep).sum()))


def split(examples: Examples, seq_len: int, *, packing: bool = True) -> Rows:
    """Rows of text, none left out: documents joined and cut every seq_len tokens when packing,
    otherwise each document cut every seq_len tokens, one piece to a row."""
    if packing:
        every = np.arange(0, len(examples.tokens), seq_len)
    else:
        every = np.concatenate(
            [np.arange(a, b, seq_len) for a, b in zip(*_ranges(examples), strict=True)]
        )
    cuts = np.union1d(examples.offsets, every)
    spans = np.stack([cuts[:-1], cuts[1:]], axis=1)
    offsets = np.append(np.searchsorted(cuts[:-1], every), len(spans))
    return Rows(spans, offsets, seq_len)


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


def _ranges(examples: Examples) -> tuple[np.ndarray, np.ndarray]:
    return examples.offsets[:-1], examples.offsets[1:]
