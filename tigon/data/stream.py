"""Windows of a corpus that is never there as a whole, tokenized shortly before they are needed.

Each rank tokenizes all of it, in a process of its own, so that a batch is a function of the step on
any number of ranks.
"""

import hashlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from queue import Empty, Full, Queue
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

from tigon.data.examples import Encoder, Examples
from tigon.data.mixture import Corpus, DrawPattern, Window, WindowSource, check_vocabulary
from tigon.data.sources import BLOCK_BYTES, Source
from tigon.data.tokenized import one_tokenizer_thread, worker_errors

PREFETCHED_WINDOWS = 2  # windows that are made before they are needed
POLL_SECONDS = 0.1  # seconds between two looks at whether the stream is closed
SAMPLED_PIECES = 1024  # about so many of all sources are hashed to compare them between hosts

State = dict[str, Any]
EncodedWindow = tuple[State, bool, list[list[Examples]]]  # its begin, is last, parts of entries


class Stream(WindowSource):
    """Windows that a process tokenizes shortly before they are needed; entries may be endless.

    With weights they are those of a Mixture's first epoch, which here never ends; without, those of
    all its epochs.
    """

    repeats = False
    per_epoch: int | None = None

    def __init__(
        self,
        entries: Sequence[Sequence[Source]],
        encoder: Encoder,
        *,
        size: int,
        weights: Sequence[float] | None = None,
        workers: int | None = None,
        cursor: Mapping[str, Any] | None = None,
    ):
        """`entries`: the sources of each; `size`: groups of examples in a window; `workers` 0
        tokenizes in this process. `cursor`: `state` of the first window, to go on from there.
        """
        self.encoder, self.size, self.weights = encoder, size, weights
        self.pattern = None if weights is None else DrawPattern(weights)
        self.workers = 1 if workers is None else min(workers, 1)
        self.sources = [source for sources in entries for source in sources]
        if weights is None:  # they follow each other
            entries = [self.sources]
        self.entries = [[encoder.open(source) for source in sources] for sources in entries]
        self.vocabulary: int | None = None  # tokens that the model knows
        start = {"epoch": 0, "window": 0, "places": [[0, 0, 0, 0]] * len(entries)}
        start |= {name: cursor[name] for name in start} if cursor else {}
        self._states: dict[int, State] = {0: start}
        self._windows: dict[int, Window] = {}
        self._closed = threading.Event()
        self._next, self._queue = 0, self._begin(0)

    def window(self, number: int) -> Window:
        """Returns window `number`, counted through all epochs, when the process has made it; raises
        the error of its rows, or RuntimeError once the stream is closed."""
        if number < self._next and number not in self._windows:  # training has gone back
            self._next, self._queue = number, self._begin(number)
        while self._next <= number:
            encoded = self._wait()
            if isinstance(encoded, Exception):
                raise encoded
            self._windows[self._next] = self._window(self._next, encoded)
            self._next += 1
        return self._windows[number]

    def _wait(self) -> "EncodedWindow | Exception":
        """Takes the next window, or the error that ends them; RuntimeError once it is closed."""
        while not self._closed.is_set():  # by another thread
            with suppress(Empty):
                return self._queue.get(timeout=POLL_SECONDS)
        raise RuntimeError("the stream is closed")

    def release_before(self, number: int) -> None:
        """Drops the windows before this one; `window` makes them again if training goes back."""
        for old in [n for n in self._windows if n < number]:
            del self._windows[old]

    def state(self, number: int) -> State:
        """Returns the cursor of a window, which must have been made or be the first."""
        return self._states[number]

    def check_vocabulary(self, size: int) -> None:
        """Lets `window` raise ValueError from now on if a token is `size` or more."""
        self.vocabulary = size

    def identity(self) -> str:
        """Returns a digest of the sources' settings and sizes, of a sample of their bytes, and of
        weights and encoder, since a stream is never read as a whole."""
        sources = [(source, source.size()) for source in self.sources]
        facts = sources, self.weights, self.encoder.digest(), BLOCK_BYTES, self.sample()
        return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()

    def sample(self) -> str:
        """Returns a digest of about SAMPLED_PIECES pieces of all sources."""
        count = SAMPLED_PIECES // max(1, len(self.sources))
        samples = (source.sample(count) for source in self.sources)
        return hashlib.blake2b(b"".join(samples), digest_size=16).hexdigest()

    def close(self) -> None:
        """Stops the tokenizing; a call of `window` that waits raises RuntimeError."""
        self._closed.set()

    def _begin(self, number: int) -> Queue[Any]:
        """Start a thread that puts the windows from this one on into a queue, and return the queue.
        The thread is a daemon: a source that never answers, such as a pipe, must not keep a run
        from ending."""
        windows = _WindowDataset(
            self.entries, self.encoder, self.size, self.pattern, self._states[number]
        )
        queue: Queue[Any] = Queue(PREFETCHED_WINDOWS)

        def put(window: EncodedWindow | Exception) -> bool:
            """Puts a window into the queue; False if the stream was closed or has gone back."""
            while not self._closed.is_set() and queue is self._queue:
                with suppress(Full):
                    queue.put(window, timeout=POLL_SECONDS)
                    return True
            return False

        def fill() -> None:
            try:
                with worker_errors():
                    with one_tokenizer_thread() if self.workers else nullcontext():
                        iterator = iter(_process_loader(windows) if self.workers else windows)
                    for window in iterator:
                        if not put(window):
                            return
            except Exception as error:  # the process has died: nobody may wait for its windows
                put(error)

        self._queue = queue
        threading.Thread(target=fill, name="tigon stream", daemon=True).start()
        return queue

    def _window(self, number: int, encoded: EncodedWindow) -> Window:
        """Makes window `number` of its encoded examples, and keeps the state at its beginning."""
        state, last, entries = encoded
        parts = [part for examples in entries for part in examples]
        corpus = Corpus(parts, extra_columns=self.encoder.per_token)
        if self.vocabulary is not None:
            check_vocabulary(corpus.parts, self.vocabulary)
        groups = np.arange(corpus.first_group[-1])
        self._states[number] = state
        if self.pattern is not None:
            start = state["window"] * self.size
            entry, index = self.pattern(np.arange(start, start + self.size))
            sizes = [sum(part.num_groups for part in examples) for examples in entries]
            first = np.cumsum([0, *sizes])
            groups = first[entry] + index - self.pattern.count_drawn(start)[entry]
        epoch, index = state["epoch"], state["window"]
        return Window.from_groups(corpus, groups, epoch=epoch, index=index, last=last)


def _process_loader(windows: "_WindowDataset") -> DataLoader[Any]:
    """Makes an iterable of the windows that makes them in a worker process."""
    return DataLoader(
        windows,
        batch_size=None,
        num_workers=1,
        prefetch_factor=PREFETCHED_WINDOWS,
        collate_fn=_identity,
        multiprocessing_context="forkserver",  # a fork of a process with threads may crash
    )


def _identity(window: Any) -> Any:
    """Returns the window as it is: nothing is collated."""
    return window


@dataclass(eq=False)
class _WindowDataset(IterableDataset[Any]):
    """Yields all windows from a state on, or the error that ends them."""

    entries: Sequence[Sequence[Source]]
    encoder: Encoder
    size: int
    pattern: DrawPattern | None
    state: State

    def __iter__(self) -> Iterator[EncodedWindow | Exception]:
        try:
            yield from self._windows()
        except Exception as error:  # as it is: the loader would add its own words
            yield error

    def _windows(self) -> Iterator[EncodedWindow]:
        """Yields each window's state, whether its epoch ends, and the examples of each entry."""
        state = self.state
        begins = zip(self.entries, state["places"], strict=True)
        readers = [_GroupReader(sources, self.encoder, place) for sources, place in begins]
        while True:
            start, counts = state["window"] * self.size, [self.size]
            if self.pattern is not None:
                before, after = map(self.pattern.count_drawn, (start, start + self.size))
                counts = (after - before).tolist()
            last, entries = False, []
            for reader, count in zip(readers, counts, strict=True):
                parts: list[Examples] = []
                if self.pattern is None:  # an epoch is a pass
                    reader.take(count, parts)
                    last = reader.ended()
                else:
                    while count := count - reader.take(count, parts):
                        reader.restart()
                entries.append(parts)
            yield state, last, entries
            if last:
                readers[0].restart()
            epoch, window = state["epoch"] + last, 0 if last else state["window"] + 1
            places = [reader.place for reader in readers]
            state = {"epoch": epoch, "window": window, "places": places}


class _GroupReader:
    """Reads the groups of an entry's sources from a place on, again and again.

    A place is the number of passes that are done, the index of a source, the first record of a
    block of it, and the index of a group in that block.
    """

    def __init__(self, sources: Sequence[Source], encoder: Encoder, place: Sequence[int]):
        self.sources, self.encoder = sources, encoder
        self.times, self.source, self.record, self.group = place
        self.is_new = not any(place[1:4])  # whether this pass has seen all groups so far
        self.examples: Examples | None = None
        self.blocks = self._blocks(self.source, self.record)

    @property
    def place(self) -> list[int]:
        """The place of the next group, from which another reader can go on."""
        return [self.times, self.source, self.record, self.group]

    def take(self, count: int, parts: list[Examples]) -> int:
        """Append up to `count` groups of this pass to `parts`; return how many."""
        total = 0
        while total < count and not self.ended():
            assert self.examples is not None
            stop = min(self.group + count - total, self.examples.num_groups)
            parts.append(self.examples.slice_groups(self.group, stop))
            total, self.group = total + stop - self.group, stop
        return total

    def ended(self) -> bool:
        """Reads blocks until there is a group; True if the pass has no more, ValueError if none."""
        while self.examples is None or self.group >= self.examples.num_groups:
            at_place = self.examples is None
            block = next(self.blocks, None)
            if block is None:
                if self.is_new:
                    raise ValueError(f"{', '.join(s.name for s in self.sources)}: no rows")
                return True
            self.source, self.record, self.examples = block
            self.group = self.group if at_place else 0
            self.is_new = self.is_new and not len(self.examples)
        return False

    def restart(self) -> None:
        """Begins another pass over the sources, from the first group."""
        self.times, self.source, self.record, self.group = self.times + 1, 0, 0, 0
        self.is_new, self.examples = True, None
        self.blocks = self._blocks(0, 0)

    def _blocks(self, first: int, record: int) -> Iterator[tuple[int, int, Examples]]:
        """Yields, from a record of the first source on, the index of each block's source, the
        number of its first record, and its examples."""
        for i in range(first, len(self.sources)):
            for block in self.sources[i].blocks(record):
                yield i, record, self.encoder(block)
                record += len(block.records)
            record = 0
