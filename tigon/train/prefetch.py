"""Prefetches micro-batches to the device.

A thread collates the next steps' micro-batches, pins their memory and copies them on a separate
CUDA stream: a step waits for data only if making it takes longer than training on it.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields
from queue import Empty, Full, Queue
from typing import Any, Self

import torch
from torch import Tensor

from tigon.data import Loader, MicroBatch

QUEUE_SIZE = 2  # steps that are ready ahead of training
POLL_SECONDS = 0.1  # how often the thread looks whether it must stop


class Prefetcher:
    """Returns each step's micro-batches; leaving its context ends the thread and closes the data.

    A call may name any step, but only the next one is ready. It raises the errors of the thread.
    `seconds` is how long the last call waited.
    """

    def __init__(self, data: Loader, device: torch.device):
        self.data, self.device = data, device
        self.seconds = 0.0
        self._worker: _Worker | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._worker is not None:
            self._worker.stopping.set()
        self.data.close()  # the thread may be waiting for data that does not come
        self.stop()

    def __call__(self, step: int) -> list[MicroBatch]:
        """Returns this rank's micro-batches of the step, on the device."""
        start_time = time.perf_counter()
        if self._worker is None or self._worker.next != step:
            self.stop()
            self._worker = _Worker(self.data, self.device, step)
        batches, copied = self._worker.take()
        if copied is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(copied)
            for tensor in (t for batch in batches for t in tensors(batch)):
                tensor.record_stream(stream)  # allocated on the copy stream
        self.seconds = time.perf_counter() - start_time
        return batches

    def stop(self) -> None:
        if self._worker is not None:
            self._worker.stop()
            self._worker = None


class _Worker:
    """A thread that prepares one step after the other."""

    def __init__(self, data: Loader, device: torch.device, step: int):
        self.data, self.device, self.next = data, device, step
        self.cuda = device.type == "cuda"
        self.ready: Queue[Any] = Queue(QUEUE_SIZE)
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self._work, args=(step,), daemon=True, name="feed")
        self.thread.start()

    def take(self) -> tuple[list[MicroBatch], torch.cuda.Event | None]:
        item = self.ready.get()
        if isinstance(item, BaseException):
            self.ready.put(item)  # a later call raises it too
            raise item
        self.next += 1
        return item

    def stop(self) -> None:
        self.stopping.set()
        while self.thread.is_alive():
            try:
                self.ready.get_nowait()  # the thread may be waiting for room
            except Empty:
                self.thread.join(POLL_SECONDS)

    def _work(self, step: int) -> None:
        try:
            if self.cuda:
                torch.cuda.set_device(self.device)
            stream = torch.cuda.Stream(self.device) if self.cuda else None
            while not self.stopping.is_set():
                self._put(self._copy(self.data.micro_batches(step), stream))
                step += 1
        except BaseException as error:  # the step raises it
            self._put(error)

    def _copy(
        self, batches: list[MicroBatch], stream: torch.cuda.Stream | None
    ) -> tuple[list[MicroBatch], torch.cuda.Event | None]:
        if not self.cuda:
            return [batch.to(self.device) for batch in batches], None
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            # The allocator reuses pinned memory only after the copies from it
            batches = [batch.pin_memory().to(self.device) for batch in batches]
            copied = torch.cuda.Event()
            copied.record(stream)
        return batches, copied

    def _put(self, item: Any) -> None:
        while not self.stopping.is_set():
            try:
                self.ready.put(item, timeout=POLL_SECONDS)
                return
            except Full:
                continue


def tensors(batch: MicroBatch) -> Iterator[Tensor]:
    """All tensors of a micro-batch."""
    for f in fields(batch):
        value = getattr(batch, f.name)
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from value.values()
