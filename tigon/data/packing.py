"""Packing: which sequences share a row.

A row holds spans of the tokens of a corpus. Each span is a sequence of its own: positions restart,
and neither attention nor labels cross its ends. The examples of a group share a row.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field, fields

import numpy as np

from tigon.data.mixture import Corpus, Window

MIN_SHARED_FRACTION = 1 / 64  # of all tokens: sharing fewer costs as much as it saves


@dataclass(frozen=True)
class TruncationStats:
    """Counts truncated and dropped groups; one over both limits counts as too long for its row."""

    max_length_cuts: int = 0  # groups of which an example is longer than `max_length`
    max_length_drops: int = 0
    row_cuts: int = 0  # groups that do not fit into a row
    row_drops: int = 0
    unlearned: int = 0  # groups left out in which nothing is to be learned, however long the rows
    duplicates: int = 0  # of those left out by a limit, groups whose examples it would make equal
    longest: int = 0  # tokens of the longest example
    min_seq_len: int = 0  # tokens of a row into which every group fits

    def __add__(self, other: "TruncationStats") -> "TruncationStats":
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        sums["longest"] = max(self.longest, other.longest)
        sums["min_seq_len"] = max(self.min_seq_len, other.min_seq_len)
        return TruncationStats(**sums)

    @property
    def truncated(self) -> int:
        """The number of groups that were cut."""
        return self.max_length_cuts + self.row_cuts

    @property
    def dropped(self) -> int:
        """The number of groups that were left out."""
        return self.max_length_drops + self.row_drops + self.unlearned


@dataclass(frozen=True)
class PackedRows:
    """Row r holds spans[offsets[r] : offsets[r + 1]], in one line if packed, else each its own."""

    spans: np.ndarray  # int64 [S, 2], start and stop in the tokens of the corpus
    offsets: np.ndarray  # int64 [R + 1]
    seq_len: int
    packing: bool
    truncation: TruncationStats = TruncationStats()
    # int64 [S]: length of the shared prompt; it is stored with the last span whose value is 0
    shared: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def __post_init__(self) -> None:
        if not len(self.shared):
            object.__setattr__(self, "shared", np.zeros(len(self.spans), dtype=np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.spans[self.offsets[row] : self.offsets[row + 1]]

    def line(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the spans of a row, and the tokens of the shared prompt left out before each."""
        return self[row], self.shared[self.offsets[row] : self.offsets[row + 1]]


@dataclass
class PackingReport:
    """Counts of the groups, rows and tokens in the windows of an epoch."""

    groups: int = 0  # those left out too
    rows: int = 0
    row_tokens: int = 0
    shared: int = 0  # tokens left out of rows, in whose place others of their group are computed
    space: int = 0  # tokens that the rows have room for, when packing
    truncation: TruncationStats = TruncationStats()

    def add(self, window: Window, rows: PackedRows) -> None:
        """Adds the counts of a window and its rows."""
        self.groups += len(window.groups) - 1
        self.rows += len(rows)
        self.row_tokens += int(np.diff(rows.spans).sum())
        self.shared += int(rows.shared.sum())
        self.space += len(rows) * rows.seq_len * rows.packing
        self.truncation += rows.truncation

    @property
    def waste(self) -> float:
        """The fraction of packed rows that is padding; 0 without packing."""
        return 1 - self.row_tokens / self.space if self.space else 0.0


def pack_examples(
    window: Window,
    seq_len: int,
    *,
    packing: bool = True,
    truncate: bool = True,
    max_length: int | None = None,
    share_prompts: bool = False,
    min_fraction: float = MIN_SHARED_FRACTION,
    distinct: bool = False,
) -> PackedRows:
    """Makes rows of whole groups of examples, by best-fit decreasing, or one a row without packing.

    An example is cut to `max_length` tokens. A group has to fit into a row: packed, all of it;
    otherwise each example by itself. If it does not, its examples are cut to the largest common
    length that fits. Without `truncate`, groups that would be cut are left out. A group is also
    left out if one of its examples has no supervised token after its first, and so nothing to
    learn; with `distinct` also if its examples are equal once they are cut.

    With `share_prompts`, only the first packed example of a group keeps the prompt, and the others
    leave it out up to its last token, unless that is less than the share `min_fraction` of the
    window's tokens. Groups of one example share it with those to the same prompt in their row.
    Which examples are cut or left out is as without `share_prompts`.
    """
    starts, first, sizes = window.starts, window.groups[:-1], np.diff(window.groups)
    spans, targets = np.stack([starts, window.stops], axis=1), window.targets.copy()

    def cut(stops: np.ndarray, over: np.ndarray, keep: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Cuts the examples, of groups `over` their limit; returns those to `keep`, and copies."""
        shorter, spans[:, 1] = stops < spans[:, 1], stops
        targets[shorter] = window.corpus.targets(spans[shorter])
        keep = keep & (np.minimum.reduceat(targets, first) > 0) & (truncate | ~over)
        copies = _duplicate_groups(window.corpus, spans, sizes, keep & over & distinct)
        return keep & ~copies, copies

    lengths, has_targets = window.stops - starts, np.minimum.reduceat(targets, first) > 0
    bounded = lengths.copy() if max_length is None else np.minimum(lengths, max_length)
    long = np.maximum.reduceat(lengths - bounded, first) > 0
    reached, duplicates = cut(starts + bounded, long, has_targets)
    shared, alone = np.zeros_like(lengths), len(sizes) == len(window)
    if share_prompts and packing and not alone:
        shared = shared_prompt_lengths(window.corpus, spans, sizes, min_fraction)
    combine = np.add if packing else np.maximum
    min_seq_len = combine.reduceat(bounded - shared, first)
    over = min_seq_len > seq_len
    if over.any():
        of = np.repeat(over, sizes)
        bounded[of] = _truncate_to_row(bounded[of], shared[of], sizes[over], seq_len, combine)
    keep, by_row = cut(starts + bounded, over, reached)
    truncation = TruncationStats(
        max_length_cuts=int((keep & long & ~over).sum()),
        max_length_drops=int((has_targets & ~reached).sum()),
        row_cuts=int((keep & over).sum()),
        row_drops=int((reached & ~keep).sum()),
        unlearned=int((~has_targets).sum()),
        duplicates=int((duplicates | by_row).sum()),
        longest=int(lengths.max(initial=0)),
        min_seq_len=int(min_seq_len[reached].max(initial=0)),
    )
    mask = np.repeat(keep, sizes)
    spans, shared, counts = spans[mask], shared[mask], sizes[keep]
    if packing and keep.any():
        if share_prompts and alone:
            return _pack_shared_prompts(window.corpus, spans, seq_len, min_fraction, truncation)
        spans[:, 0] += shared
        spans, shared, counts = _reorder_by_row(spans, shared, counts, seq_len)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return PackedRows(spans, offsets, seq_len, packing, truncation, shared)


def _truncate_to_row(
    lengths: np.ndarray, shared: np.ndarray, sizes: np.ndarray, seq_len: int, combine: np.ufunc
) -> np.ndarray:
    """int64 [E], the lengths to which examples are cut so that each group fits into a row, without
    the `shared` tokens of each.

    All examples of a group get the largest common limit that fits, found by bisection. `combine`:
    np.add if a group is packed into one line, np.maximum if each example has its own.
    """
    first = np.cumsum(sizes) - sizes
    low, high = np.zeros_like(sizes), np.full_like(sizes, seq_len)
    while (low < high).any():
        middle = (low + high + 1) // 2
        cut_lengths = np.maximum(np.minimum(lengths, np.repeat(middle, sizes)) - shared, 0)
        fits = combine.reduceat(cut_lengths, first) <= seq_len
        low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
    return np.minimum(lengths, np.repeat(low, sizes))


def _duplicate_groups(
    corpus: Corpus, spans: np.ndarray, sizes: np.ndarray, candidates: np.ndarray
) -> np.ndarray:
    """bool [G], the groups among the `candidates`, bool [G], whose examples are all equal."""
    duplicates, first = np.zeros_like(candidates), np.cumsum(sizes) - sizes
    for group in np.flatnonzero(candidates).tolist():
        members = spans[first[group] : first[group] + sizes[group]]
        if len(members) > 1 and np.ptp(np.diff(members)) == 0:
            ids = [examples.tokens[start:stop] for examples, start, stop in corpus.slices(members)]
            duplicates[group] = all(np.array_equal(ids[0], other) for other in ids[1:])
    return duplicates


def _reorder_by_row(
    spans: np.ndarray, shared: np.ndarray, sizes: np.ndarray, seq_len: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sorts spans and shared lengths by the row they are packed into; counts spans of each row."""
    rows = pack_best_fit(np.add.reduceat(np.diff(spans)[:, 0], np.cumsum(sizes) - sizes), seq_len)
    groups = np.concatenate(rows)
    rank = np.argsort(groups)  # of each group, in the order of the rows
    order = np.argsort(np.repeat(rank, sizes), kind="stable")
    ends = np.cumsum([len(row) for row in rows])
    counts = np.add.reduceat(sizes[groups], np.append(0, ends[:-1]))
    return spans[order], shared[order], counts


def _pack_shared_prompts(
    corpus: Corpus,
    spans: np.ndarray,
    seq_len: int,
    min_fraction: float,
    truncation: TruncationStats,
) -> PackedRows:
    """Makes rows of examples; neighbors with the same prompt share it within a row."""
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    common = shared_prompt_lengths(corpus, spans, np.array([len(spans)]), min_fraction)
    rows = pack_prompts(np.diff(spans)[:, 0], common, seq_len)
    order = np.array([s for row in rows for prompt in row for s in prompt])
    first = np.array([s == prompt[0] for row in rows for prompt in row for s in prompt])
    shared = np.where(first, 0, common[order])
    offsets = np.cumsum([0, *(sum(map(len, row)) for row in rows)])
    spans = spans[order] + np.stack([shared, np.zeros_like(shared)], axis=1)
    return PackedRows(spans, offsets, seq_len, True, truncation, shared)


def shared_prompt_lengths(
    corpus: Corpus, spans: np.ndarray, sizes: np.ndarray, min_fraction: float
) -> np.ndarray:
    """int64 [S], the tokens of its prompt that each span shares with the previous one of its group.

    Spans with the same prompt share all of it but its last token, which predicts one that is
    learned. All are 0 where that is less than the share `min_fraction` of the spans.
    """
    shared, starts = np.zeros(len(spans), dtype=np.int64), {0, *np.cumsum(sizes).tolist()}
    before = np.zeros(0, dtype=np.int32)
    for i, (examples, start, stop) in enumerate(corpus.slices(spans)):
        answer = int(examples.supervised[start:stop].argmax())
        prompt = examples.tokens[start : start + answer]
        if i not in starts and len(prompt) and np.array_equal(prompt, before):
            shared[i] = len(prompt) - 1
        before = prompt
    pays = shared.sum() >= min_fraction * np.diff(spans).sum()
    return shared if pays else np.zeros_like(shared)


def pack_documents(window: Window, seq_len: int, *, packing: bool = True) -> PackedRows:
    """Make rows of text, none left out: join documents and cut them every seq_len tokens, or
    without packing cut each document, one piece to a row."""
    if len(window.groups) != len(window) + 1:
        raise ValueError("groups of examples cannot be split: pack_examples() makes rows of them")
    ends = np.concatenate([[0], np.cumsum(window.stops - window.starts)])
    if packing:
        row_starts = np.arange(0, ends[-1], seq_len)
    else:
        pieces = -(-np.diff(ends) // seq_len)
        within = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        row_starts = np.repeat(ends[:-1], pieces) + within * seq_len
    cuts = np.union1d(ends, row_starts)
    document = np.searchsorted(ends, cuts[:-1], side="right") - 1
    shift = (window.starts - ends[:-1])[document]  # from places among these documents to tokens
    spans = np.stack([cuts[:-1] + shift, cuts[1:] + shift], axis=1)
    offsets = np.append(np.searchsorted(cuts[:-1], row_starts), len(spans))
    return PackedRows(spans, offsets, seq_len, packing)


def pack_best_fit(lengths: np.ndarray, seq_len: int) -> list[list[int]]:
    """Puts the indices of `lengths` into bins of seq_len, the longest first, each into the fullest
    bin that has room for it, or else a new one; returns the bins."""
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
        remaining = space - length
        if remaining not in by_space:
            by_space[remaining] = []
            insort(spaces, remaining)
        by_space[remaining].append(chosen)
    return bins


# Rows in which answers share their prompts.
#
# S sequences

MAX_KEY_COPIES = 4  # keys that attention copies, for each token of a row, at most: they take memory


def pack_prompts(lengths: np.ndarray, shared: np.ndarray, seq_len: int) -> list[list[list[int]]]:
    """Pack sequences so that those with one prompt share it: a row is a list of such lists, of
    which the first sequence has the prompt. `lengths` int64 [S] counts the prompt; `shared` int64
    [S]: tokens in common with the sequence before, 0 for the first one with a prompt.

    Prompts come by the tokens of all their sequences, the most first. These go into the fullest row
    that takes all. If there is none, the emptiest row takes as many as fit, and so on with the
    rest: kept together, those that take two thirds of a row would leave a third of it empty.
    """
    first = np.flatnonzero(shared == 0)
    totals, prompts = np.add.reduceat(lengths - shared, first), np.maximum.reduceat(shared, first)
    stops, sizes = np.append(first[1:], len(shared)), lengths.tolist()
    rows: list[list[list[int]]] = []
    spaces: list[tuple[int, int]] = []  # sorted: how many tokens a row still takes, and which it is
    for i in np.argsort(-totals, kind="stable").tolist():
        remaining = sorted((sizes[s], s) for s in range(first[i], stops[i]))
        prompt, total = int(prompts[i]), int(totals[i])
        while remaining:
            at = min(bisect_left(spaces, (total, 0)), len(spaces) - 1)
            if at < 0 or spaces[at][0] < remaining[0][0]:  # not even one
                at = len(spaces)
                spaces.append((seq_len, len(rows)))
                rows.append([])
            space, row = spaces.pop(at)
            fitting, used = _remove_fitting(remaining, prompt, space)
            rows[row].append(fitting)
            insort(spaces, (space - used, row))
            total += prompt - used
    return rows


def _remove_fitting(
    remaining: list[tuple[int, int]], prompt: int, space: int
) -> tuple[list[int], int]:
    """Removes from `remaining`, sorted pairs (length with prompt, index), the sequences that fit
    into a space if all but the first leave out the prompt, the longest first.

    Returns their indices, sorted, and how many tokens they take; stops where attention would copy
    the prompt's keys too often.
    """
    fitting: list[int] = []
    used = 0
    while remaining:
        again = prompt if fitting else 0
        at = bisect_left(remaining, (space - used + again + 1, 0)) - 1
        if at < 0 or len(fitting) * prompt > MAX_KEY_COPIES * (used + remaining[at][0] - again):
            break
        size, s = remaining.pop(at)
        used += size - again
        fitting.append(s)
    return sorted(fitting), used
