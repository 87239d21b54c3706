"""Examples of many sources as one corpus, the order in which they are taken, and windows of it.

# E examples, G groups of examples, S spans
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from tigon.data.examples import FILL_VALUES, Examples, pad_columns

WEIGHT_RESOLUTION = 10**6  # into which the weights of a mixture are resolved


class Corpus:
    """Several Examples as one: tokens, examples and groups are numbered through all parts."""

    def __init__(
        self, parts: Sequence[Examples], *, extra_columns: Mapping[str, DTypeLike] | None = None
    ):
        """A column that only some parts have gets its value in FILL_VALUES elsewhere; columns of
        FILL_VALUES that are in `extra_columns` exist even if no part has them."""
        self.parts = tuple(parts)
        self.first_token = _offsets([len(part.tokens) for part in parts])
        self.num_tokens = int(self.first_token[-1])
        self.first_group = _offsets([part.num_groups for part in parts])
        self.columns: dict[str, dict[str, np.ndarray]] = {"per_token": {}, "per_example": {}}
        for kind, columns in self.columns.items():
            for part in parts:
                for name, column in getattr(part, kind).items():
                    values, before = pad_columns(name, [column[:0], columns.get(name, column)[:0]])
                    if len(part):
                        _check_shape(name, values, before, part.files)
                    columns[name] = values
            for name in columns:
                # A part of a stream's window may be empty
                if name not in FILL_VALUES and any(
                    name not in getattr(p, kind) for p in parts if len(p)
                ):
                    raise ValueError(f"only some of the data has the column {name}")
        for name, dtype in (extra_columns or {}).items():
            if name in FILL_VALUES:
                self.columns["per_token"].setdefault(name, np.empty(0, dtype))
        self.files = tuple(dict.fromkeys(file for part in parts for file in part.files))
        self._added: dict[str, np.ndarray] = {}  # columns per token, of all parts
        self._lock = Lock()  # a thread reads ahead

    def open(self, part: int) -> Examples:
        """Returns the examples of a part, with the columns that were added."""
        examples = self.parts[part]
        with self._lock:
            if not self._added:
                return examples
            bounds = slice(*self.first_token[part : part + 2].tolist())
            added = {name: values[bounds] for name, values in self._added.items()}
        return replace(examples, per_token={**examples.per_token, **added})

    def add(self, name: str, values: np.ndarray) -> None:
        """Adds or replaces a column of one value for each token of the corpus."""
        with self._lock:
            self._added[name] = values
            self.columns["per_token"][name] = values[:0]

    def location(self, position: int) -> str:
        """Returns the "file:line" of the example that holds a token."""
        examples, start, _ = next(self.slices(np.array([[position, position]])))
        return examples.location(start)

    def slices(self, spans: np.ndarray) -> Iterator[tuple[Examples, int, int]]:
        """Yield the part that each span [S, 2] of tokens is in, with its start and stop there."""
        parts = self.part_indices(spans)
        local = spans - self.first_token[parts][:, None]
        for part, (start, stop) in zip(parts.tolist(), local.tolist(), strict=True):
            yield self.open(part), start, stop

    def part_indices(self, spans: np.ndarray) -> np.ndarray:
        """int64 [S], the index of the part that each span is in."""
        return np.searchsorted(self.first_token, spans[:, 0], side="right") - 1

    def targets(self, spans: np.ndarray) -> np.ndarray:
        """int64 [S], the number of supervised tokens in each span, its first token left out."""
        counts = (np.count_nonzero(e.supervised[a + 1 : b]) for e, a, b in self.slices(spans))
        return np.fromiter(counts, dtype=np.int64)


@dataclass(frozen=True)
class Window:
    """Groups of a corpus, in the order in which they are taken; rows are packed of these."""

    corpus: Corpus
    starts: np.ndarray  # int64 [E], of each example in the tokens of the corpus
    stops: np.ndarray  # int64 [E]
    targets: np.ndarray  # int64 [E], predicted tokens
    groups: np.ndarray  # int64 [G + 1], offsets into the examples
    epoch: int = 0
    index: int = 0  # within its epoch
    last: bool = True  # of its epoch

    @classmethod
    def from_groups(
        cls,
        corpus: Corpus,
        groups: np.ndarray,
        *,
        epoch: int = 0,
        index: int = 0,
        last: bool = True,
    ) -> "Window":
        """Makes a window of the groups of the corpus that have these numbers."""
        parts = np.searchsorted(corpus.first_group, groups, side="right") - 1
        sizes = np.zeros(len(groups), dtype=np.int64)
        slots = []
        for part in np.unique(parts):
            examples = corpus.parts[int(part)]
            positions = np.flatnonzero(parts == part)
            local = groups[positions] - corpus.first_group[part]
            first, sizes[positions] = local, 1
            if examples.groups is not None:
                first = examples.groups[local]
                sizes[positions] = examples.groups[local + 1] - first
            indices = concat_ranges(first, sizes[positions])
            bounds = examples.offsets[indices], examples.offsets[indices + 1]
            base = corpus.first_token[part]
            values = np.stack([bounds[0] + base, bounds[1] + base, examples.targets[indices]])
            slots.append((positions, values.astype(np.int64)))
        offsets = _offsets(sizes)
        merged = np.zeros((3, int(offsets[-1])), dtype=np.int64)
        for positions, values in slots:
            merged[:, concat_ranges(offsets[positions], sizes[positions])] = values
        starts, stops, counts = merged
        return cls(corpus, starts, stops, counts, offsets, epoch, index, last)

    def __len__(self) -> int:
        return len(self.starts)


class WindowSource:
    """Where windows come from: a Mixture or a Stream."""

    repeats: bool  # whether every epoch has the same windows
    per_epoch: int | None  # windows; None: not known

    def window(self, number: int) -> Window:
        """Returns window `number`, counted through all epochs."""
        raise NotImplementedError

    def release_before(self, number: int) -> None:
        """Drops the windows before this one, if they are stored; here nothing is."""

    def state(self, number: int) -> dict[str, Any]:
        """Returns the cursor from which a stream begins with this window; empty without need."""
        return {}

    def identity(self) -> str:
        """Returns a digest of what the windows hold."""
        raise NotImplementedError

    def sample(self) -> str:
        """Returns a digest of a few bytes of a stream's sources; "" where `identity` is of all."""
        return ""

    def check_vocabulary(self, size: int) -> None:
        """Raises ValueError, here or in `window`, if a token is `size` or more."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends a process that tokenizes; here there is none."""


class DrawPattern:
    """Interleaves entries by weight: the j-th draw of entry i has the key (j + 1/2) / w_i, and
    draws are sorted by key. Weights are rounded to whole shares, so the pattern repeats."""

    def __init__(self, weights: Sequence[float]):
        shares = [max(1, round(WEIGHT_RESOLUTION * weight / sum(weights))) for weight in weights]
        self.shares = [share // gcd(*shares) for share in shares]
        entries = np.repeat(np.arange(len(self.shares)), self.shares)
        index = concat_ranges(np.zeros(len(self.shares), dtype=np.int64), np.array(self.shares))
        # (2 j + 1) / (2 w_i), exactly the same float wherever two are equal
        keys = (2 * index + 1) / np.array(self.shares)[entries]
        order = np.argsort(keys, kind="stable")  # of equal ones, the first entry
        self.entries, self.index = entries[order], index[order]

    def __call__(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns, for each place, its entry and how many draws of that entry come before."""
        cycles, offsets = np.divmod(positions, len(self.entries))
        entry = self.entries[offsets]
        return entry, cycles * np.array(self.shares)[entry] + self.index[offsets]

    def count_drawn(self, position: int) -> np.ndarray:
        """Counts the draws of each entry before a place."""
        cycles, offset = divmod(position, len(self.entries))
        partial = np.bincount(self.entries[:offset], minlength=len(self.shares))
        return cycles * np.array(self.shares) + partial


class Mixture(WindowSource):
    """Windows of a corpus that is complete, in memory or in the cache; see Stream for others.

    With weights, entry i has its share w_i / sum(w) of every stretch of the groups, and begins
    again when it ends. Without, the entries follow each other. An epoch is as many groups as all
    have.
    """

    def __init__(
        self,
        entries: Sequence[Sequence[Examples]],
        *,
        size: int,
        weights: Sequence[float] | None = None,
    ):
        """`entries`: the parts of each entry, which has one weight; `size`: groups in a window."""
        self.corpus = Corpus([part for parts in entries for part in parts])
        self.entry_of_part = [i for i, parts in enumerate(entries) for _ in parts]
        self.sizes = tuple(sum(part.num_groups for part in parts) for parts in entries)
        self.weights = None if weights is None else tuple(weights)
        self.pattern = None if weights is None else DrawPattern(weights)
        self.size = size
        self.repeats = weights is None
        self.per_epoch: int = -(-sum(self.sizes) // size)

    def window(self, number: int) -> Window:
        """Makes window `number`, counted through all epochs."""
        (epoch, index), total = divmod(number, self.per_epoch), sum(self.sizes)
        groups = np.arange(index * self.size, min((index + 1) * self.size, total))
        if self.pattern is not None:
            entry, draws = self.pattern(epoch * total + groups)
            groups = _offsets(self.sizes)[entry] + draws % np.array(self.sizes)[entry]
        last = index == self.per_epoch - 1
        return Window.from_groups(self.corpus, groups, epoch=epoch, index=index, last=last)

    def passes(self) -> list[float]:
        """Counts how often an epoch goes through each entry."""
        if self.pattern is None:
            return [1.0] * len(self.sizes)
        share = sum(self.sizes) / sum(self.pattern.shares)
        return [share * n / size for n, size in zip(self.pattern.shares, self.sizes, strict=True)]

    def check_vocabulary(self, size: int) -> None:
        """Raises ValueError if a token of the corpus is `size` or more."""
        check_vocabulary(self.corpus.parts, size)

    def identity(self) -> str:
        """Returns a digest of the groups and of their order."""
        parts = [part.key for part in self.corpus.parts]
        order = self.sizes, self.weights
        return hashlib.blake2b(repr((parts, order)).encode(), digest_size=16).hexdigest()


def _check_shape(name: str, column: np.ndarray, before: np.ndarray, files: Sequence[str]) -> None:
    """Raises ValueError if the values of a column have another shape than in the parts before."""
    if column.shape[1:] != before.shape[1:]:
        raise ValueError(
            f"{', '.join(files)}: values of {name} have shape {column.shape[1:]}, and in the files "
            f"before {before.shape[1:]}: give all the same number"
        )


def check_vocabulary(parts: Sequence[Examples], size: int) -> None:
    """Raises ValueError if a token of the parts is `size` or more."""
    highest = max(part.highest for part in parts)
    if highest >= size:
        raise ValueError(
            f"the tokenizer gives token {highest}, or a row has it, but the model's vocabulary has "
            f"{size}: if tokens were added to the tokenizer, name them in new_tokens, which "
            "resizes the model (in Python model.resize_token_embeddings(len(tokenizer))); "
            "otherwise give the model's own tokenizer"
        )


def concat_ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Returns int64, the numbers from starts[i] to starts[i] + sizes[i] - 1, for every i."""
    ends = np.cumsum(sizes)
    return np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(starts - ends + sizes, sizes)


def _offsets(sizes: Sequence[int] | np.ndarray) -> np.ndarray:
    """int64 [n + 1], the sums of the first 0, 1, ..., n sizes."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
