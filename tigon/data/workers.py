"""Blocks to examples in worker processes, in order, never many at once."""

import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import connection, get_context, parent_process
from typing import Self

from tigon.data.blocks import Block
from tigon.data.examples import Encoder, Examples

MOST = 32  # workers, unless a setting says more
FEW = 4  # blocks that are encoded sooner than processes start

_encoder: Encoder | None = None  # of a worker process


def cpus() -> int:
    """CPUs that this process may use."""
    count = getattr(os, "sched_getaffinity", None)
    return len(count(0)) if count else os.cpu_count() or 1


class Pool:
    """Encodes blocks: in `workers` processes, or with 0 in this one.

    With workers None, in as many as there are CPUs, unless there are only a few blocks. The
    processes start with the first block and end with the context.
    """

    def __init__(self, encoder: Encoder, workers: int | None = None):
        self.encoder = encoder
        self.patience = FEW if workers is None else 0
        self.workers = min(cpus(), MOST) if workers is None else workers
        self._executor: Executor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def encode(self, blocks: Iterable[Block]) -> Iterator[Examples]:
        """The examples of each block, in order.

        At most three blocks a worker are in memory. RuntimeError if a worker dies.
        """
        blocks = iter(blocks)
        first = list(islice(blocks, self.patience))
        if self.workers == 0 or (self.patience and len(first) < self.patience):
            for block in first:
                yield self.encoder(block)
            for block in blocks:  # none, unless there are no workers
                yield self.encoder(block)
            return
        try:
            yield from self._ahead(first, blocks)
        except BrokenProcessPool:
            raise RuntimeError(
                "a worker process that tokenised data has died, perhaps for want of memory: "
                f"try fewer than workers={self.workers}. A script that starts training needs "
                'its `if __name__ == "__main__":`'
            ) from None

    def _ahead(self, first: Iterable[Block], rest: Iterator[Block]) -> Iterator[Examples]:
        waiting: deque[Future[Examples]] = deque()
        try:
            for some in (first, rest):
                for block in some:
                    waiting.append(self._submit(block))
                    if len(waiting) > 2 * self.workers:
                        yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

    def _submit(self, block: Block) -> Future[Examples]:
        if self._executor is None:
            # spawn: a copy of a process with threads and a GPU would be unsafe
            self._executor = ProcessPoolExecutor(
                self.workers,
                mp_context=get_context("spawn"),
                initializer=_begin,
                initargs=(self.encoder,),
            )
        return self._executor.submit(_encode, block)


def _begin(encoder: Encoder) -> None:
    global _encoder
    _encoder = encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process is one worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that is killed tells nobody."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _encode(block: Block) -> Examples:
    assert _encoder is not None
    return _encoder(block)
