"""Prefetches micro-batches to the device.

A thread collates the next steps' micro-batches, pins their memory and copies them on a separate
CUDA stream: a step waits for data only if making it takes longer than training on it.
"""

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import torch

from tigon.data import Loader, MicroBatch

QUEUE_SIZE = 3  # steps that are made ahead of training
Prepared = tuple[list[MicroBatch], torch.cuda.Event | None]


class Prefetcher:
    """Returns each step's micro-batches; leaving its context ends the thread and closes the data.

    A call may name any step of the data (the optimizer's plus `TrainState.offset`), but only the
    next ones are ready. It raises the errors of the thread.
    `seconds` is how long the last call waited.
    """

    def __init__(self, data: Loader, device: torch.device):
        self.data, self.device = data, device
        self.seconds = 0.0
        self._executor: ThreadPoolExecutor | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._next = 0  # the step of the first future
        self._pending: deque[Future[Prepared]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._cancel()
        self.data.close()  # the thread may be waiting for data that does not come
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None  # a later call starts another

    def __call__(self, step: int) -> list[MicroBatch]:
        """Returns this rank's micro-batches of a data step, on the device; sets `seconds`."""
        start_time = time.perf_counter()
        if self._next != step:
            self._cancel()
            self._next = step
        self._fill()
        batches, copied = self._pending[0].result()  # a failed step stays first
        self._pending.popleft()
        self._next += 1
        self._fill()
        if copied is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(copied)
            for batch in batches:
                batch.record_stream(stream)  # allocated on the copy stream
        self.seconds = time.perf_counter() - start_time
        return batches

    def _fill(self) -> None:
        """Submits the next steps until QUEUE_SIZE are queued; starts the thread first."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="feed")
        for step in range(self._next + len(self._pending), self._next + QUEUE_SIZE):
            self._pending.append(self._executor.submit(self._prepare, step))

    def _cancel(self) -> None:
        """Forgets the steps in the queue."""
        for future in self._pending:
            future.cancel()
        self._pending.clear()

    def _prepare(self, step: int) -> Prepared:
        """Begins to copy a step's micro-batches to the device; returns them and the event after."""
        batches = self.data.micro_batches(step)
        if self._stream is None:
            return [batch.to(self.device) for batch in batches], None
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            # The allocator reuses pinned memory only after the copies from it
            batches = [batch.pin_memory().to(self.device) for batch in batches]
            return batches, self._stream.record_event()
