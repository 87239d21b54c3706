"""Packing: which sequences share a row.

A row holds spans of the tokens of a corpus. Each span is a sequence of its own: positions restart,
and neither attention nor labels cross its ends. The examples of a group share a row.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field

import numpy as np

from tigon.data.examples import Examples
from tigon.data.mixture import Corpus, Window

LEAST_SHARED = 1 / 64  # of all tokens: to copy keys and values of the rest takes as long, about


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
    # int64 [S]: so many tokens before a span are left out, in whose place are those with which the
    # last span before it begins that leaves out none
    shared: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    most: int | None = None  # tokens of an example, where that is fewer than seq_len

    def __post_init__(self) -> None:
        if not len(self.shared):
            object.__setattr__(self, "shared", np.zeros(len(self.spans), dtype=np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.spans[self.offsets[row] : self.offsets[row + 1]]

    def line(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """The spans of a row, and how many tokens are left out before each."""
        return self[row], self.shared[self.offsets[row] : self.offsets[row + 1]]


@dataclass
class Report:
    """What the windows of an epoch hold."""

    examples: int = 0
    tokens: int = 0
    rows: int = 0
    row_tokens: int = 0
    shared: int = 0  # tokens left out of rows, in whose place others of their group are computed
    space: int = 0  # tokens that the rows have room for, when packing
    truncated: int = 0
    dropped: int = 0

    def add(self, window: Window, rows: Rows) -> None:
        self.examples += len(window)
        self.tokens += int((window.stops - window.starts).sum())
        self.rows += len(rows)
        self.row_tokens += int(np.diff(rows.spans).sum())
        self.shared += int(rows.shared.sum())
        self.space += len(rows) * rows.seq_len * rows.packing
        self.truncated += rows.truncated
        self.dropped += rows.dropped

    @property
    def waste(self) -> float:
        """The share of packed rows that is padding."""
        return 1 - self.row_tokens / self.space if self.space else 0.0


def whole(
    window: Window,
    seq_len: int,
    *,
    packing: bool = True,
    truncate: bool = True,
    most: int | None = None,
    share: bool = False,
) -> Rows:
    """Rows of unsplit groups of examples: best-fit decreasing when packing, otherwise one a row.

    An example longer than seq_len, or `most`, is cut there. When packing, a whole group has to fit:
    the examples of one that then does not are cut to seq_len divided by their number. Without
    `truncate` groups that would be cut are left out. A group is also left out if one of its
    examples has no supervised token after its first, and so nothing to learn.

    With `share`, packed examples of a group leave out the prompt that they begin with, up to its
    last token, but for the first one: its prompt is that of all. What is cut stays the same.
    """
    starts, stops = window.starts, window.stops
    first, sizes = window.groups[:-1], np.diff(window.groups)
    lengths = stops - starts
    most = seq_len if most is None else min(most, seq_len)
    bounded = np.minimum(lengths, most)
    needed = np.add.reduceat(bounded, first) if packing else np.maximum.reduceat(bounded, first)
    part = np.minimum(seq_len // sizes, most) if packing else np.full_like(sizes, most)
    limit = np.repeat(np.where(needed > seq_len, part, most), sizes)
    long = np.maximum.reduceat(lengths > limit, first)
    stops = np.minimum(stops, starts + limit)
    spans, targets = np.stack([starts, stops], axis=1), window.targets.copy()
    short = np.flatnonzero(lengths > limit)
    targets[short] = window.corpus.targets(spans[short])
    keep = np.minimum.reduceat(targets, first) > 0
    keep &= truncate | ~long
    kept = np.repeat(keep, sizes)
    spans, sizes = spans[kept], sizes[keep]
    counts, shared = sizes, np.zeros(len(spans), dtype=np.int64)
    if packing and keep.any():
        if share:
            shared = shared_tokens(window.corpus, spans, sizes)
            spans[:, 0] += shared
        rows = best_fit(np.add.reduceat(np.diff(spans)[:, 0], np.cumsum(sizes) - sizes), seq_len)
        taken = np.concatenate(rows)
        place = np.argsort(taken)  # of each group, in the order of the rows
        order = np.argsort(np.repeat(place, sizes), kind="stable")
        spans, shared = spans[order], shared[order]
        ends = np.cumsum([len(row) for row in rows])
        counts = np.add.reduceat(sizes[taken], np.append(0, ends[:-1]))
    offsets = np.concatenate([[0], np.cumsum(counts)])
    cut = kept & (lengths > limit)
    counted = int(cut.sum()), int((~kept).sum())
    return Rows(
        spans, offsets, seq_len, packing, *counted, shared, most if most < seq_len else None
    )


def shared_tokens(corpus: Corpus, spans: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """int64 [S], with how many tokens each span begins that one before it in its group begins with
    too, none of which is learned, nor predicts one that is: for `Rows.shared`. 0 of all where that
    is too little to pay.
    """
    shared, first = np.zeros(len(spans), dtype=np.int64), np.cumsum(sizes) - sizes
    slices = list(corpus.slices(spans))
    for start, size in zip(first.tolist(), sizes.tolist(), strict=True):
        ids, prompt = _prompt(*slices[start])
        for i in range(start + 1, start + size):
            own, length = _prompt(*slices[i])
            both = min(prompt, length)
            differ = np.flatnonzero(ids[:both] != own[:both])
            shared[i] = max(0, (differ[0] if len(differ) else both) - 1)
            if not shared[i]:
                ids, prompt = own, length
    pays = shared.sum() >= LEAST_SHARED * np.diff(spans).sum()
    return shared if pays else np.zeros_like(shared)


def _prompt(examples: Examples, start: int, stop: int) -> tuple[np.ndarray, int]:
    """The tokens of an example, and how many come before the first that is learned."""
    return examples.tokens[start:stop], int(examples.supervised[start:stop].argmax())


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
