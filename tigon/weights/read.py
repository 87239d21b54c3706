"""Reads ranges of files into tensors of any dtype, on any device, with several threads."""

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

Job = TypeVar("Job")
Tool = TypeVar("Tool")


def parallel_for(
    jobs: Iterable[Job],
    work: Callable[[Job, Tool], None],
    tool: Callable[[], AbstractContextManager[Tool]],
    workers: int,
) -> None:
    """Calls `work(job, tool())` for each job, in order, by threads with one tool each.

    Raises the error of a job; no more jobs begin after it.
    """
    queue = deque(jobs)

    def run() -> None:
        try:
            with tool() as thread_tool:
                while True:
                    try:
                        job = queue.popleft()
                    except IndexError:
                        return
                    work(job, thread_tool)
        except BaseException:
            queue.clear()
            raise

    with ThreadPoolExecutor(workers) as pool:
        try:
            for done in [pool.submit(run) for _ in range(workers)]:
                done.result()
        except BaseException:  # an interrupt: the threads end after their current jobs
            queue.clear()
            raise


# A line is a row of a tensor's last dimension, or an element of a tensor with one dimension. Lines
# that are consecutive in file and memory are a `ReadSpan`; consecutive spans of a file are read at
# once, as a `Transfer`.


@dataclass(frozen=True, slots=True)
class ReadSpan:
    """Lines of a file, `width` elements each, and the memory [lines, columns] that they fill.

    `out` gets its columns of each line, from `column` on. An `out` of bytes [n] gets n bytes.
    """

    path: Path
    offset: int  # of the first line's first byte
    dtype: torch.dtype
    width: int
    column: int
    out: Tensor

    @property
    def line_bytes(self) -> int:
        """The bytes of a full line in the file."""
        return self.width * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """The bytes of all lines in the file."""
        return len(self.out) * self.line_bytes

    @property
    def direct(self) -> bool:
        """Whether bytes go into `out` as they are: full lines of its dtype, contiguous."""
        if self.out.dim() == 1:
            return True
        whole = self.out.shape[1] == self.width and self.out.is_contiguous()
        return whole and self.out.dtype == self.dtype

    def as_bytes(self) -> "ReadSpan":
        """A direct span as bytes, which can be split anywhere; other spans unchanged."""
        if not self.direct:
            return self
        flat = self.out.view(-1).view(torch.uint8)
        return ReadSpan(self.path, self.offset, torch.uint8, 1, 0, flat)

    def split(self, max_bytes: int) -> Iterator["ReadSpan"]:
        """Yields spans of at most `max_bytes`, or of one element."""
        if self.nbytes <= max_bytes:
            yield self
            return
        if self.line_bytes > max_bytes and self.width > 1:
            for i, line in enumerate(self.out):  # of a matrix with very long rows
                begin = self.offset + i * self.line_bytes + self.column * self.dtype.itemsize
                span = ReadSpan(self.path, begin, self.dtype, 1, 0, line.unsqueeze(1))
                yield from span.split(max_bytes)
            return
        step = max(1, max_bytes // max(1, self.line_bytes))
        begin = self.offset
        for out in self.out.split(step):
            yield ReadSpan(self.path, begin, self.dtype, self.width, self.column, out)
            begin += step * self.line_bytes


@dataclass(slots=True)
class Transfer:
    """One read of a file: consecutive spans of it."""

    path: Path
    offset: int
    nbytes: int
    spans: list[ReadSpan]


def merge_reads(spans: Iterable[ReadSpan], max_bytes: Callable[[ReadSpan], int]) -> list[Transfer]:
    """Split and merge spans into reads of at most `max_bytes`, in the order of the files.

    Merges only spans of one dtype for one device, and direct ones as bytes.
    """
    transfers: list[Transfer] = []
    last_kind = None
    for span in sorted(spans, key=lambda span: (str(span.path), span.offset)):
        span, limit = span.as_bytes(), max_bytes(span)
        kind = (span.path, span.out.device, span.dtype, span.direct)
        for new in span.split(limit):
            nbytes = new.nbytes
            last = transfers[-1] if transfers and kind == last_kind else None
            if last and last.offset + last.nbytes == new.offset and last.nbytes + nbytes <= limit:
                last.spans.append(new)
                last.nbytes += nbytes
            else:
                transfers.append(Transfer(new.path, new.offset, nbytes, [new]))
            last_kind = kind
    return transfers


DIRECT = 16 << 20  # bytes of a direct read
STAGING = 1 << 20  # of a read that is converted on the CPU: it stays in its cache
PINNED = 8 << 20  # of a read that goes to a GPU
BUFFERS = 2  # of a thread for a GPU
SHARE = BUFFERS * PINNED  # of all buffers of a thread
IOV_MAX = 1024  # buffers that the system fills at once


class Reader:
    """The open files and staging buffers of one thread; `with` ends after all copies are done.

    Its buffers take at most `staging` bytes of host memory, and as many of the device's.
    """

    def __init__(self, staging: int = SHARE) -> None:
        self._staging = staging
        self._files: dict[Path, int] = {}
        self._buffer: Tensor | None = None
        self._cuda: dict[torch.device, _PinnedStaging] = {}
        self._at_exit = ExitStack()

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self._at_exit.close()

    def read(self, path: Path, offset: int, dtype: torch.dtype, out: Tensor) -> None:
        """Fills `out` with elements of `dtype` from byte `offset` of the file on."""
        if not out.is_contiguous() and out.dim() > 1:
            for row in out:
                self.read(path, offset, dtype, row)
                offset += row.numel() * dtype.itemsize
            return
        elements = out[:, None] if out.dim() == 1 else out.reshape(-1, 1)
        span = ReadSpan(path, offset, dtype, 1, 0, elements)
        for transfer in merge_reads([span], self.max_bytes):
            self.fill(transfer)

    def max_bytes(self, span: ReadSpan) -> int:
        """The number of bytes of the span that one read takes at most."""
        if span.out.is_cuda:
            return pinned_bytes(self._staging)
        return DIRECT if span.direct else min(STAGING, self._staging)

    def fill(self, transfer: Transfer) -> None:
        """Reads a transfer's bytes from its file and fills the memory of its spans."""
        first = transfer.spans[0]
        if first.out.is_cuda:
            staging = self._cuda_staging(first.out.device)
            pinned = staging.next_buffer()
            self._preadv(transfer.path, transfer.offset, [pinned.memory[: transfer.nbytes]])
            staging.send(pinned, transfer)
        elif first.direct:
            offset = transfer.offset
            for i in range(0, len(transfer.spans), IOV_MAX):
                buffers = [span.out.numpy().data for span in transfer.spans[i : i + IOV_MAX]]
                self._preadv(transfer.path, offset, buffers)
                offset += sum(map(len, buffers))
        else:
            if self._buffer is None or len(self._buffer) < transfer.nbytes:
                size = max(transfer.nbytes, min(STAGING, self._staging))
                self._buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
            buffer = self._buffer[: transfer.nbytes]
            self._preadv(transfer.path, transfer.offset, [buffer.numpy().data])
            _copy(buffer, transfer.spans)

    def _preadv(self, path: Path, offset: int, buffers: Sequence[memoryview]) -> None:
        """Reads into buffers at an offset; raises for a file that ends early."""
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY)
            self._at_exit.callback(os.close, self._files[path])
        rest = [buffer for buffer in buffers if buffer]
        while rest:
            count = os.preadv(self._files[path], rest, offset)
            if not count:
                raise ValueError(f"{path} ended at byte {offset}: it was shortened while read")
            offset += count
            while rest and count >= len(rest[0]):
                count -= len(rest.pop(0))
            if count:
                rest[0] = rest[0][count:]

    def _cuda_staging(self, device: torch.device) -> "_PinnedStaging":
        """Returns this thread's pinned buffers for a GPU."""
        if device not in self._cuda:
            # Until the reader is left. The device too, or leaving the stream would make a context
            # on this thread's, the first GPU
            self._at_exit.enter_context(torch.cuda.device(device))
            staging = _PinnedStaging(device, pinned_bytes(self._staging))
            self._at_exit.enter_context(torch.cuda.stream(staging.stream))
            self._at_exit.callback(staging.stream.synchronize)
            self._cuda[device] = staging
        return self._cuda[device]


class _Buffer(NamedTuple):
    """A pinned buffer, and the event after which it may be filled again."""

    pinned: Tensor
    memory: memoryview  # the same
    copied: torch.cuda.Event


class _PinnedStaging:
    """Pinned buffers of one thread: a file fills one while another is copied to the device.

    A transfer makes few calls into torch: getting the interpreter's lock back takes longer.
    """

    def __init__(self, device: torch.device, size: int) -> None:
        torch.cuda.synchronize(device)  # the memory we fill may still be in use by its last owner
        self.stream = torch.cuda.Stream(device)
        buffers = [pinned_buffer(size) for _ in range(BUFFERS)]
        self._buffers = itertools.cycle(
            _Buffer(pinned, pinned.numpy().data, torch.cuda.Event()) for pinned in buffers
        )

    def next_buffer(self) -> _Buffer:
        """Returns a buffer whose copy has ended."""
        buffer = next(self._buffers)
        buffer.copied.synchronize()
        return buffer

    def send(self, buffer: _Buffer, transfer: Transfer) -> None:
        """Copies the buffer to the spans' memory; `stream` must be the current one."""
        source = buffer.pinned
        if not transfer.spans[0].direct:
            # Convert on the device: copy_ would do it on the CPU, unpinned
            source = source[: transfer.nbytes].to(self.stream.device, non_blocking=True)
        _copy(source, transfer.spans)
        buffer.copied.record(self.stream)


def pinned_bytes(staging: int) -> int:
    """The size of each pinned buffer of a thread whose buffers have `staging` bytes in all.

    A power of two, to which torch rounds pinned memory up.
    """
    return 1 << (max(1, min(PINNED, staging // BUFFERS)).bit_length() - 1)


def pinned_buffer(size: int) -> Tensor:
    """Allocates pinned host memory of `size` bytes."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True, device="cpu")


def _copy(buffer: Tensor, spans: Sequence[ReadSpan]) -> None:
    """Copies bytes to the memory of their spans, converted; from pinned memory asynchronously."""
    begin = 0
    for span in spans:
        end = begin + span.nbytes
        source = buffer if end - begin == len(buffer) else buffer[begin:end]
        if not span.direct:
            lines = source.view(span.dtype).view(-1, span.width)
            source = lines[:, span.column : span.column + span.out.shape[1]]
        span.out.copy_(source, non_blocking=True)
        begin = end
