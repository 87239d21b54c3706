"""Batches as a pure function of the step: no iterator, and next to no state.

# R rows of a window
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import RLock
from typing import Any, NamedTuple

import numpy as np

from tigon.data.collate import MicroBatch, collate_rows
from tigon.data.mixture import Window, WindowSource, concat_ranges
from tigon.data.packing import PackedRows, PackingReport

MAX_RECENT = 8  # windows, and calls for a step, that stay at hand: a thread reads ahead of training
MAX_EMPTY_EXAMPLES = 2**16  # without a row, after which a stream is an error: it may never end
ATTENTION_COST_TOKENS = 2**15  # of a sequence whose attention costs about as much as all else


class PackedWindow(NamedTuple):
    """A window with its packed rows, their cost and their shuffled order."""

    window: Window
    rows: PackedRows
    cost: np.ndarray  # int64 [R], of training on a row
    order: np.ndarray  # int64 [R], shuffled


WindowSlices = list[tuple[PackedWindow, np.ndarray]]  # windows, and rows of each, in order


class WindowRows(NamedTuple):
    """Rows `begin` to `end` - 1 of an epoch, those of one window; `last` ends the epoch."""

    number: int
    begin: int
    end: int
    last: bool


@dataclass
class Epoch:
    """The first step of an epoch, and its windows as far as they were packed."""

    first_step: int
    windows: list[WindowRows] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """The number of the epoch's rows up to the end of its last packed window."""
        return self.windows[-1].end if self.windows else 0

    @property
    def is_complete(self) -> bool:
        """Whether all windows of the epoch were packed."""
        return bool(self.windows) and self.windows[-1].last


class Loader:
    """The micro-batches of any step, for any rank of any world.

    The rows of an epoch are those of its windows, shuffled within each by seed, epoch and window.
    Step s takes the next batch_size of them; an epoch's last batch may be smaller. Within a batch,
    rows are dealt by their cost, so that the ranks have about the same work at a time. Micro-batch
    i of rank r holds the same rows as micro-batch i * world + r of one rank, so a run is the same
    on any number of ranks.
    """

    def __init__(
        self,
        windows: WindowSource,
        rows: Callable[[Window], PackedRows],
        *,
        batch_size: int,
        micro_batch_size: int,
        seed: int | None = None,
        rank: int = 0,
        world: int = 1,
        dropout_seed: int | None = None,
        cursor: Mapping[str, Any] | None = None,
    ):
        """`batch_size` counts rows over all ranks and micro-batches; seed None keeps their order.

        Packed rows are lines of seq_len tokens. Otherwise every sequence is a line, padded on the
        right to the longest of its micro-batch. Without a `dropout_seed` there are no keys of
        dropout. `cursor`: what `state` said of the step at which the windows of a stream begin.
        """
        if batch_size % (micro_batch_size * world):
            raise ValueError(
                f"batch_size {batch_size} must be a multiple of micro_batch_size "
                f"{micro_batch_size} x {world} ranks"
            )
        self.windows, self.pack, self.seed = windows, rows, seed
        self.dropout_seed = dropout_seed
        self.batch_size, self.micro_batch_size = batch_size, micro_batch_size
        self.rank, self.world = rank, world
        start = cursor or {"first_step": 0, "rows": 0}
        self._epochs = [Epoch(start["first_step"])]  # that have begun
        self._rows_before: int = start["rows"]  # rows of the first epoch before its first window
        self._packed: dict[int, PackedWindow] = {}
        self._recent: deque[set[int]] = deque(maxlen=MAX_RECENT)
        # Counts of recent steps, kept so that training does not wait for the prefetch thread
        self._counts: dict[int, tuple[np.ndarray, np.ndarray, int]] = {}  # as `lengths` has them
        self._lock = RLock()  # a thread reads ahead
        self._report = PackingReport()

    @cached_property
    def steps_per_epoch(self) -> int | None:
        """Counts the steps of the first epoch; None for a stream."""
        if self.windows.per_epoch is None:
            return None
        with self._lock:
            while not self._epochs[0].is_complete:
                self._append_window()
            return self._count_steps(self._epochs[0])

    def report(self) -> PackingReport:
        """Returns the counts of groups, rows and tokens in the first epoch."""
        assert self.steps_per_epoch is not None
        return self._report

    def epoch(self, steps: int) -> float | None:
        """Converts a number of steps to a number of epochs; None for a stream."""
        return None if self.steps_per_epoch is None else steps / self.steps_per_epoch

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """Collates this rank's part of a step's global batch.

        Every rank gets the same number: one that has run out of rows gets a line of padding.
        """
        with self._lock:
            pieces = self._window_slices(step)
            columns = pieces[0][0].window.corpus
            cost = np.concatenate([packed.cost[rows] for packed, rows in pieces])
            rows = [
                (packed.window.corpus, packed.rows, i) for packed, order in pieces for i in order
            ]
            dealt = np.argsort(-cost, kind="stable")
            size = self.micro_batch_size
            count = -(-len(dealt) // (size * self.world))
            starts = (np.arange(count) * self.world + self.rank) * size
            shares = [dealt[start : start + size] for start in starts]
            batches = [collate_rows(columns, [rows[i] for i in share]) for share in shares]
            if self.dropout_seed is not None:
                counts = np.array([len(packed[i]) for _, packed, i in rows])
                first = np.cumsum(counts) - counts
                for i, share in enumerate(shares):
                    numbers = concat_ranges(first[share], counts[share])
                    batches[i] = batches[i].with_dropout(self.dropout_seed, step, numbers)
            self._counts[step] = self._count_tokens(pieces)
            if len(self._counts) > MAX_RECENT:
                del self._counts[next(iter(self._counts))]
            return batches

    def counts(self, step: int) -> tuple[int, int]:
        """Counts the tokens and the predicted tokens of the global batch."""
        lengths, _, targets = self.lengths(step)
        return int(lengths.sum()), targets

    def lengths(self, step: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Returns int64 [n] the tokens of each sequence of the global batch, int64 [n] those of the
        prompt that it shares with an earlier one, and the number of predicted tokens."""
        if (counts := self._counts.get(step)) is not None:
            return counts
        with self._lock:
            return self._count_tokens(self._window_slices(step))

    @cached_property
    def targets(self) -> int:
        """Counts the predicted tokens of the first epoch."""
        assert self.steps_per_epoch is not None
        return sum(self.counts(step)[1] for step in range(self.steps_per_epoch))

    def location(self, step: int) -> list[str]:
        """Lists the "file:line" of each example in the global batch."""
        with self._lock:
            return [
                packed.window.corpus.location(start)
                for packed, rows in self._window_slices(step)
                for row in rows
                for start, _ in packed.rows[row]
            ]

    def state(self, step: int) -> dict[str, Any]:
        """Returns the cursor from which a stream begins with this step; {} for other data."""
        if self.windows.per_epoch is not None:
            return {}
        with self._lock:
            epoch, first, _ = self._locate_step(step)
            window = next(window for window in epoch.windows if window.end > first)
            cursor = {"first_step": epoch.first_step, "rows": window.begin}
            return cursor | self.windows.state(window.number)

    def close(self) -> None:
        """Ends the tokenizing of a stream."""
        self.windows.close()

    def _count_tokens(self, pieces: WindowSlices) -> tuple[np.ndarray, np.ndarray, int]:
        """Counts what `lengths` returns, for these rows."""
        lengths, before, targets = [], [], 0
        for packed, rows in pieces:
            lines = [packed.rows.line(row) for row in rows]
            spans = np.concatenate([line_spans for line_spans, _ in lines])
            lengths.append(np.diff(spans)[:, 0])
            before += [shared for _, shared in lines]
            targets += int(packed.window.corpus.targets(spans).sum())
        return np.concatenate(lengths), np.concatenate(before), targets

    def _window_slices(self, step: int) -> WindowSlices:
        """Lists the windows of the global batch, with the rows that it takes of each, in shuffled
        order; drops windows that are no longer needed."""
        epoch, first, stop = self._locate_step(step)
        slices, numbers = [], set()
        for number, begin, end, _ in epoch.windows:
            if max(begin, first) < min(end, stop):  # a window may have no rows
                packed = self._window(number)
                slices.append((packed, packed.order[max(0, first - begin) : stop - begin]))
                numbers.add(number)
        self._recent.append(numbers)
        self._evict_windows()
        return slices

    def _locate_step(self, step: int) -> tuple[Epoch, int, int]:
        """Find the epoch of a step, and the range [first, stop) of the epoch's shuffled rows that
        it takes; packs windows up to there."""
        while True:
            index = bisect_right(self._epochs, step, key=lambda epoch: epoch.first_step) - 1
            if index < 0:
                raise ValueError(f"this stream begins after step {step}")
            epoch = self._epochs[index]
            first = (step - epoch.first_step) * self.batch_size
            stop = min(first + self.batch_size, epoch.rows)
            if index < len(self._epochs) - 1 or stop - first == self.batch_size:
                return epoch, first, stop
            if not epoch.is_complete:
                self._append_window()
            elif first < stop:
                return epoch, first, stop
            else:
                self._epochs.append(Epoch(epoch.first_step + self._count_steps(epoch)))

    def _count_steps(self, epoch: Epoch) -> int:
        """Counts the steps of an epoch that is complete; the last may be smaller."""
        return -(-epoch.rows // self.batch_size)

    def _append_window(self) -> None:
        """Packs the next window and appends its rows to the last epoch; a window that repeats one
        of the epoch before is not packed again. Raises ValueError if no row is to be expected."""
        number, epoch = sum(len(epoch.windows) for epoch in self._epochs), self._epochs[-1]
        begin = epoch.rows if number else self._rows_before
        if self.windows.repeats and len(self._epochs) > 1:
            same = self._epochs[-2].windows[len(epoch.windows)]
            epoch.windows.append(same._replace(number=number))
            return
        packed = self._window(number)
        window = packed.window
        end = begin + len(packed.rows)
        if number < (self.windows.per_epoch or 0):
            self._report.add(window, packed.rows)
        is_stream, examples = self.windows.per_epoch is None, (number + 1) * len(window)
        if end == 0 and (window.last or (is_stream and examples >= MAX_EMPTY_EXAMPLES)):
            cut, seq_len = packed.rows.truncation, packed.rows.seq_len
            limits = ["max_length"] * (cut.max_length_drops > 0)
            if cut.row_drops or not limits:
                limits.append(f"seq_len {seq_len}")
            fits = f": seq_len={cut.min_seq_len} takes all" if cut.min_seq_len > seq_len else ""
            raise ValueError(
                f"no example of {', '.join(window.corpus.files)} has anything to learn within "
                f"{' and '.join(limits)}{fits}"
            )
        epoch.windows.append(WindowRows(number, begin, end, window.last))

    def _window(self, number: int) -> PackedWindow:
        """Returns window `number`, counted through all epochs, with its packed rows and their
        order; packs it unless it is at hand."""
        if number in self._packed:
            return self._packed[number]
        before = self._packed.get(number - (self.windows.per_epoch or 0))
        if before is not None and self.windows.repeats:
            window = replace(before.window, epoch=before.window.epoch + 1)
            packed = before._replace(window=window, order=self._order(window, len(before.rows)))
        else:
            window = self.windows.window(number)
            rows = self.pack(window)
            sizes = np.diff(rows.spans)[:, 0]
            costs = sizes * (sizes + 2 * rows.shared + ATTENTION_COST_TOKENS)
            cost = np.add.reduceat(costs, rows.offsets[:-1]) if len(costs) else costs
            packed = PackedWindow(window, rows, cost, self._order(window, len(rows)))
        self._packed[number] = packed
        self._evict_windows()
        return packed

    def _evict_windows(self) -> None:
        """Drops the packed windows that no recent step takes, but not the last MAX_RECENT."""
        recent = set().union(*self._recent)
        for number in list(self._packed)[:-MAX_RECENT]:
            if number not in recent:
                del self._packed[number]
        self.windows.release_before(min(recent, default=0))

    def _order(self, window: Window, rows: int) -> np.ndarray:
        """int64 [rows], the rows of a window, shuffled by seed, epoch and window."""
        if self.seed is None:
            return np.arange(rows)
        # Raw bits and a stable sort: numpy promises these streams, not those of permutation().
        bits = np.random.PCG64([self.seed, window.epoch, window.index]).random_raw(rows)
        return np.argsort(bits, kind="stable")
