"""Micro-batches on the device before the step that needs them.

A thread collates those of the next steps, pins their memory and copies them on a stream of their
own, so that a step waits for data only if making it takes longer than training on it.
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

AHEAD = 2  # steps that are ready, besides the one in training
POLL = 0.1  # seconds between two looks at whether it is over


class Feed:
    """The micro-batches of one step after the other; a context that ends its thread and the data.

    `feed(step)` may ask for any step, but only the next one is ready. What goes wrong in the
    thread is raised there. `seconds` is how long the last call has waited.
    """

    def __init__(self, data: Loader, device: torch.device):
        self.data, self.device = data, device
        self.seconds = 0.0
        self._run: _Run | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._run is not None:
            self._run.over.set()
        self.data.close()  # the thread may be waiting for data that does not come
        self.stop()

    def __call__(self, step: int) -> list[MicroBatch]:
        """This rank's micro-batches of the step, on the device."""
        began = time.perf_counter()
        if self._run is None or self._run.next != step:
            self.stop()
            self._run = _Run(self.data, self.device, step)
        batches, copied = self._run.take()
        if copied is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(copied)
            for tensor in (t for batch in batches for t in tensors(batch)):
                tensor.record_stream(stream)  # it was allocated on the other one
        self.seconds = time.perf_counter() - began
        return batches

    def stop(self) -> None:
        if self._run is not None:
            self._run.stop()
            self._run = None


class _Run:
    """A thread that goes from one step to the next."""

    def __init__(self, data: Loader, device: torch.device, step: int):
        self.data, self.device, self.next = data, device, step
        self.cuda = device.type == "cuda"
        self.ready: Queue[Any] = Queue(AHEAD)
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._work, args=(step,), daemon=True, name="feed")
        self.thread.start()

    def take(self) -> tuple[list[MicroBatch], torch.cuda.Event | None]:
        found = self.ready.get()
        if isinstance(found, BaseException):
            self.ready.put(found)  # for whoever asks again
            raise found
        self.next += 1
        return found

    def stop(self) -> None:
        self.over.set()
        while self.thread.is_alive():
            try:
                self.ready.get_nowait()  # it may be waiting for room
            except Empty:
                self.thread.join(POLL)

    def _work(self, step: int) -> None:
        try:
            if self.cuda:
                torch.cuda.set_device(self.device)
            stream = torch.cuda.Stream(self.device) if self.cuda else None
            while not self.over.is_set():
                self._put(self._copied(self.data.micro_batches(step), stream))
                step += 1
        except BaseException as error:  # whatever it is, the step raises it
            self._put(error)

    def _copied(
        self, batches: list[MicroBatch], stream: torch.cuda.Stream | None
    ) -> tuple[list[MicroBatch], torch.cuda.Event | None]:
        if not self.cuda:
            return [batch.to(self.device) for batch in batches], None
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            # Pinned memory is given back only when the copies from it are done
            batches = [batch.pin_memory().to(self.device) for batch in batches]
            copied = torch.cuda.Event()
            copied.record(stream)
        return batches, copied

    def _put(self, item: Any) -> None:
        while not self.over.is_set():
            try:
                self.ready.put(item, timeout=POLL)
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
