"""Windows of a corpus that is never there as a whole, tokenised shortly before they are needed.

On every host, one process tokenises ahead, into a directory a window; each rank says which windows
it still needs, and what no rank needs is deleted.
"""

import atexit
import fcntl
import hashlib
import json
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from tigon.data.blocks import SIZE, Source
from tigon.data.cache import cache_root, lock, make_directory, write
from tigon.data.disk import disk_errors
from tigon.data.examples import Encoder
from tigon.data.mixture import Corpus, Pattern, Window, check_vocabulary
from tigon.data.reader import Reader
from tigon.data.store import Store, Stored
from tigon.data.workers import Pool, cpus
from tigon.utils.json import read_json

AHEAD = 2  # windows that are made before they are needed
WAIT = 0.02  # seconds between two looks
PATIENCE = 10.0  # seconds for a block that is being read or tokenised, at the end
PIECES = 1024  # about so many of all sources are hashed to compare them between hosts
START = 120.0  # seconds in which all ranks of a host begin

WINDOW, FAILED, LOCK = "window.json", "failed", "lock"

State = dict[str, Any]


class Stream:
    """The windows of endless entries.

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
        name: str = "",
        local_rank: int = 0,
        local_ranks: int = 1,
        cursor: Mapping[str, Any] | None = None,
    ):
        """`entries`: the sources of each; `size`: groups of examples in a window. The ranks of
        a host know each other by `name`; the first of them tokenises. `cursor`: `state` of the
        first window, to go on from there.
        """
        self.encoder, self.size, self.weights = encoder, size, weights
        self.pattern = None if weights is None else Pattern(weights)
        self.directory = root() / name if local_rank else stream_directory(name)
        self.local_rank = local_rank
        self.vocabulary: int | None = None  # tokens that the model knows
        self._closed = threading.Event()
        self.sources = [source for sources in entries for source in sources]
        if weights is None:  # they follow each other
            entries = [[source for sources in entries for source in sources]]
        start = {"epoch": 0, "window": 0, "places": [[0, 0, 0, 0, ""]] * len(entries)}
        start |= {name: cursor[name] for name in start} if cursor else {}
        self._states: dict[int, State] = {}
        self._needed, self._wanted, self._begun = 0, 0, local_rank == 0
        self._producer: _Producer | None = None
        if local_rank == 0:
            workers = max(1, cpus() // (4 * local_ranks)) if workers is None else workers
            self._producer = _Producer(self, entries, start, workers, local_ranks)
            self._producer.start()

    def window(self, number: int) -> Window:
        """Window `number`, counted from the first; waits until it is made."""
        self._begin()
        self._say(min(number, self._needed), number)
        path = self.directory / f"{number:08d}"
        while (read := self._read(path)) is None:
            if self._closed.is_set():  # by another thread
                raise RuntimeError("the stream is closed")
            if (self.directory / FAILED).exists():
                raise ValueError((self.directory / FAILED).read_text())
            if self._producer is not None:
                if not self._producer.is_alive():
                    raise RuntimeError("the stream has ended") from self._producer.error
            else:
                with lock(self.directory / LOCK, wait=False) as free:
                    if free:
                        raise RuntimeError("the process that tokenises the stream has ended")
            time.sleep(WAIT)
        facts, corpus = read
        if self.vocabulary is not None:
            check_vocabulary(corpus.parts, self.vocabulary)
        groups = np.arange(corpus.first_group[-1])
        state = self._states[number] = facts["state"]
        if self.pattern is not None:
            start = state["window"] * self.size
            entry, index = self.pattern(np.arange(start, start + self.size))
            groups = corpus.first_group[entry] + index - self.pattern.drawn(start)[entry]
        window = Window.of(corpus, groups, epoch=state["epoch"], index=state["window"])
        return replace(window, last=facts["last"])

    def keep(self, number: int) -> None:
        """Windows before this one are not needed on this rank. Earlier ones may be, later."""
        if number != self._needed and self._begun:
            self._say(number, self._wanted)

    def _begin(self) -> None:
        """Wait until the first rank of the host has begun."""
        until = time.monotonic() + START
        while not self._begun:
            if (self.directory / LOCK).exists():
                with lock(self.directory / LOCK, wait=False) as free:
                    # One that has failed already holds it no more
                    self._begun = not free or (self.directory / FAILED).exists()
            if not self._begun and time.monotonic() > until:
                raise RuntimeError(f"no process of this host tokenises: {self.directory} is absent")
            time.sleep(WAIT)

    def _say(self, needed: int, wanted: int) -> None:
        """Tell the producer which windows this rank needs, and which one it reads last."""
        self._needed, self._wanted = needed, wanted
        write(self.directory / f"rank-{self.local_rank}", f"{needed} {wanted}")

    def state(self, number: int) -> State:
        """What a stream that begins with this window needs."""
        return self._states[number]

    def check_vocabulary(self, size: int) -> None:
        """Windows that hold a token beyond so many will be errors."""
        self.vocabulary = size

    def identity(self) -> str:
        """Changes with the names and sizes of the sources, and with what is made of them."""
        sources = [(source, source.size()) for source in self.sources]
        facts = sources, self.weights, self.encoder.digest(), SIZE  # places count blocks
        return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()

    def sample(self) -> str:
        """Changes with a few bytes of each source."""
        count = PIECES // max(1, len(self.sources))
        samples = (source.sample(count) for source in self.sources)
        return hashlib.blake2b(b"".join(samples), digest_size=16).hexdigest()

    def close(self) -> None:
        """End the tokenising and delete what it has left; who waits for a window gets an error."""
        self._closed.set()
        if self._producer is not None:
            self._producer.stop()

    def _read(self, path: Path) -> tuple[dict[str, Any], Corpus] | None:
        """None if it is not made yet, or is being deleted. Its files are opened here: they may be
        deleted before they are read."""
        try:
            facts = read_json(path / WINDOW)
            parts = [Stored.at(path / str(i)) for i in range(facts["parts"])]
            found = [part for part in parts if part is not None]
            if len(found) < len(parts):
                return None
            corpus = Corpus(found, always=self.encoder.per_token, most=len(found))
            for i, part in enumerate(found):
                if part.count:
                    corpus.open(i)
        except FileNotFoundError:
            return None
        return facts, corpus


class _Producer(threading.Thread):
    """Makes the windows that the ranks of this host need soon."""

    def __init__(
        self,
        stream: Stream,
        entries: Sequence[Sequence[Source]],
        start: State,
        workers: int,
        ranks: int,
    ) -> None:
        super().__init__(daemon=True, name="tigon stream")
        self.directory, self.encoder, self.size = stream.directory, stream.encoder, stream.size
        self.pattern = stream.pattern
        self.entries = [[self.encoder.open(s) for s in sources] for sources in entries]
        self.workers, self.ranks = workers, ranks
        self.states = {0: start}
        self.stopped = threading.Event()
        self.error: BaseException | None = None
        atexit.register(self.stop)

    def stop(self) -> None:
        atexit.unregister(self.stop)
        self.stopped.set()
        if self.is_alive():
            self.join(PATIENCE)  # it may be reading from a pipe or a network that gives nothing
        shutil.rmtree(self.directory, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if (held := _held.pop(self.directory, None)) is not None:
            held.close()

    def run(self) -> None:
        try:
            with Pool(self.encoder, self.workers) as pool, disk_errors(self.directory):
                self._produce(pool)
        except BaseException as error:  # of any kind: the ranks are waiting
            self.error = error
            if not self.stopped.is_set():
                with suppress(OSError):
                    write(self.directory / FAILED, str(error) or repr(error))
                self._unlock()

    def _produce(self, pool: Pool) -> None:
        made: set[int] = set()
        number, readers = -1, self._readers(pool, self.states[0])
        while not self.stopped.is_set():
            need, wanted = self._needs()
            for old in [n for n in made if n < need]:
                made.remove(old)
                (self.directory / f"{old:08d}" / WINDOW).unlink()
                shutil.rmtree(self.directory / f"{old:08d}")
            missing = (n for n in range(need, wanted + AHEAD + 1) if n not in made)
            if (after := next(missing, None)) is None:
                self.stopped.wait(WAIT)
                continue
            if after != number + 1:  # training has gone back
                readers = self._readers(pool, self.states[after])
            number = after
            self.states[number + 1] = self._make(number, readers)
            made.add(number)

    def _readers(self, pool: Pool, state: State) -> list[Reader]:
        places = zip(self.entries, state["places"], strict=True)
        return [Reader(sources, pool, place) for sources, place in places]

    def _needs(self) -> tuple[int, int]:
        """The first window that any rank needs, and the last that any reads."""
        said = [(0, 0)] * self.ranks
        for rank in range(self.ranks):
            path = self.directory / f"rank-{rank}"
            if path.exists():
                needed, wanted = map(int, path.read_text().split())
                said[rank] = needed, wanted
        return min(needed for needed, _ in said), max(wanted for _, wanted in said)

    def _make(self, number: int, readers: Sequence[Reader]) -> State:
        """Write a window; the state of the next one."""
        state, path = self.states[number], self.directory / f"{number:08d}"
        start, counts = state["window"] * self.size, [self.size]
        if self.pattern is not None:
            drawn = self.pattern.drawn(start + self.size) - self.pattern.drawn(start)
            counts = drawn.tolist()
        last = False
        for i, (reader, count) in enumerate(zip(readers, counts, strict=True)):
            store = Store(path / str(i))
            while (count := count - reader.take(count, store)) or self.pattern is None:
                if self.pattern is None:
                    last = reader.ended()
                    break
                reader.restart()
            store.finish(str(number), durable=False)
        after = {"epoch": state["epoch"] + last, "window": 0 if last else state["window"] + 1}
        if last:
            readers[0].restart()
        after["places"] = [reader.place for reader in readers]
        facts = {"state": state, "last": last, "parts": len(readers)}
        write(path / WINDOW, json.dumps(facts))
        return after


_held: dict[Path, IO[str]] = {}  # locks of this process' streams


def root() -> Path:
    """Of this host alone, also where others share the cache: whether a process that has a directory
    is alive is known on its host only, and names have the number of a process."""
    return cache_root() / "streams" / socket.gethostname()


def stream_directory(name: str = "") -> Path:
    """A new directory for the windows of a stream; those of killed processes are deleted."""
    with disk_errors(root()):
        make_directory(root())
        with lock(root() / ".lock"):
            for other in root().iterdir():
                if other.is_symlink() or not (other / LOCK).is_file():
                    continue  # no stream has made it
                with lock(other / LOCK, wait=False) as free:
                    if free:
                        shutil.rmtree(other, ignore_errors=True)
            path = root() / name if name else Path(tempfile.mkdtemp(dir=root()))
            path.mkdir(exist_ok=not name)
            file = _held[path] = (path / LOCK).open("a")
            fcntl.flock(file, fcntl.LOCK_EX)
    return path
