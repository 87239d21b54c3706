"""Work that threads share."""

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
    """`work` on each job, begun in this order, by threads that each have a tool of their own.

    What one raises is raised here; after it no more jobs are begun.
    """
    queue = deque(jobs)

    def run() -> None:
        try:
            with tool() as own:
                while True:
                    try:
                        job = queue.popleft()
                    except IndexError:
                        return
                    work(job, own)
        except BaseException:
            queue.clear()
            raise

    with ThreadPoolExecutor(workers) as pool:
        try:
            for done in [pool.submit(run) for _ in range(workers)]:
                done.result()
        except BaseException:  # an interrupt: the threads end after what they have in hand
            queue.clear()
            raise


# Reads of files: which bytes go where.
#
# A line is a row of a tensor's last dimension, or an element where a tensor has one dimension.
# Lines that follow each other in a file and in memory are a `Run`; runs that follow each other in
# a file are read at once, as a `Transfer`.


@dataclass(frozen=True, slots=True)
class ReadSpan:
    """Lines of a file, `width` elements each, and the memory [lines, columns] they go to.

    Of each line it takes as many columns as `out` has, from `column` on. Bytes that go there as
    they are may also be lines of one byte, `out` [bytes].
    """

    path: Path
    offset: int  # of the first line's first byte
    dtype: torch.dtype
    width: int
    column: int
    out: Tensor

    @property
    def line_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return len(self.out) * self.line_bytes

    @property
    def direct(self) -> bool:
        """Whether the bytes are those of `out` as they are."""
        if self.out.dim() == 1:
            return True
        whole = self.out.shape[1] == self.width and self.out.is_contiguous()
        return whole and self.out.dtype == self.dtype

    def plain(self) -> "ReadSpan":
        """The same as bytes, which can be cut anywhere, if they go to `out` as they are."""
        if not self.direct:
            return self
        flat = self.out.view(-1).view(torch.uint8)
        return ReadSpan(self.path, self.offset, torch.uint8, 1, 0, flat)

    def pieces(self, most: int) -> Iterator["ReadSpan"]:
        """The run in pieces of at most that many bytes, or of one element."""
        if self.nbytes <= most:
            yield self
            return
        if self.line_bytes > most and self.width > 1:
            for i, line in enumerate(self.out):  # of a matrix with very long rows
                begin = self.offset + i * self.line_bytes + self.column * self.dtype.itemsize
                yield from ReadSpan(self.path, begin, self.dtype, 1, 0, line.unsqueeze(1)).pieces(
                    most
                )
            return
        step = max(1, most // max(1, self.line_bytes))
        begin = self.offset
        for out in self.out.split(step):
            yield ReadSpan(self.path, begin, self.dtype, self.width, self.column, out)
            begin += step * self.line_bytes


@dataclass(slots=True)
class Transfer:
    """One read of a file: runs that follow each other in it."""

    path: Path
    offset: int
    nbytes: int
    runs: list[ReadSpan]


def merge_reads(runs: Iterable[ReadSpan], most: Callable[[ReadSpan], int]) -> list[Transfer]:
    """The runs in the order of the files, cut and merged into reads of at most `most` bytes.

    Only runs that are read in one way and to one device are merged. What goes to memory as it is
    has become plain bytes.
    """
    found: list[Transfer] = []
    kind = None
    for run in sorted(runs, key=lambda run: (str(run.path), run.offset)):
        run, limit = run.plain(), most(run)
        its_kind = (run.path, run.out.device, run.dtype, run.direct)
        for piece in run.pieces(limit):
            nbytes = piece.nbytes
            last = found[-1] if found and its_kind == kind else None
            if (
                last is not None
                and last.offset + last.nbytes == piece.offset
                and last.nbytes + nbytes <= limit
            ):
                last.runs.append(piece)
                last.nbytes += nbytes
            else:
                found.append(Transfer(piece.path, piece.offset, nbytes, [piece]))
            kind = its_kind
    return found


# Reads ranges of files into tensors of any dtype, on any device, with small buffers only.

DIRECT = 16 << 20  # bytes of a read into the memory that is to be filled
STAGING = 1 << 20  # of a read that is converted on the CPU: it stays in the processor's cache
PINNED = 8 << 20  # of a read that goes to a GPU
BUFFERS = 2  # of a thread for a GPU
SHARE = BUFFERS * PINNED  # of all buffers of a thread
IOV_MAX = 1024  # pieces of memory that the system fills at once


class Reader:
    """Open files and staging buffers of one thread; done with all copies when it is left.

    Its buffers take at most `staging` bytes, of the host's memory and as many of the device's.
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
        """Fills `out` with as many `dtype` elements from the file's byte `offset` on."""
        if not out.is_contiguous() and out.dim() > 1:
            for row in out:
                self.read(path, offset, dtype, row)
                offset += row.numel() * dtype.itemsize
            return
        run = ReadSpan(
            path, offset, dtype, 1, 0, out.reshape(-1, 1) if out.dim() != 1 else out[:, None]
        )
        for transfer in merge_reads([run], self.most):
            self.fill(transfer)

    def most(self, run: ReadSpan) -> int:
        """The bytes of the run that are read at once."""
        if run.out.is_cuda:
            return pinned_bytes(self._staging)
        return DIRECT if run.direct else min(STAGING, self._staging)

    def fill(self, transfer: Transfer) -> None:
        """One read of a file, and what it is for."""
        first = transfer.runs[0]
        if first.out.is_cuda:
            staging = self._cuda_staging(first.out.device)
            turn = staging.next_buffer()
            self._preadv(transfer.path, transfer.offset, [turn.memory[: transfer.nbytes]])
            staging.send(turn, transfer)
        elif first.direct:
            self._read_directly(transfer)
        else:
            if self._buffer is None or len(self._buffer) < transfer.nbytes:
                self._buffer = torch.empty(
                    max(transfer.nbytes, min(STAGING, self._staging)), dtype=torch.uint8
                )
            buffer = self._buffer[: transfer.nbytes]
            self._preadv(transfer.path, transfer.offset, [buffer.numpy().data])
            _copy(buffer, transfer.runs)

    def _read_directly(self, transfer: Transfer) -> None:
        offset = transfer.offset
        for i in range(0, len(transfer.runs), IOV_MAX):
            some = [run.out.numpy().data for run in transfer.runs[i : i + IOV_MAX]]
            self._preadv(transfer.path, offset, some)
            offset += sum(map(len, some))

    def _preadv(self, path: Path, offset: int, buffers: Sequence[memoryview]) -> None:
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
    pinned: Tensor
    memory: memoryview  # the same
    copied: torch.cuda.Event


class _PinnedStaging:
    """Pinned buffers of one thread: one is filled from a file while others are copied to a device.

    Most calls into torch, slices too, release the interpreter's lock, and getting it back from the
    other threads takes longer than the call. So a transfer makes few of them.
    """

    def __init__(self, device: torch.device, size: int) -> None:
        torch.cuda.synchronize(device)  # the memory we fill may still be in use by its last owner
        self.stream = torch.cuda.Stream(device)
        buffers = [pinned_buffer(size) for _ in range(BUFFERS)]
        self._turns = itertools.cycle(
            _Buffer(pinned, pinned.numpy().data, torch.cuda.Event()) for pinned in buffers
        )

    def next_buffer(self) -> _Buffer:
        buffer = next(self._turns)
        buffer.copied.synchronize()
        return buffer

    def send(self, buffer: _Buffer, transfer: Transfer) -> None:
        """To be called with `stream` as the current one."""
        source = buffer.pinned
        if not transfer.runs[0].direct:
            # The bytes travel as they are: copy_ would convert them on the CPU, unpinned
            source = source[: transfer.nbytes].to(self.stream.device, non_blocking=True)
        _copy(source, transfer.runs)
        buffer.copied.record(self.stream)


def pinned_bytes(staging: int) -> int:
    """The size of one of the pinned buffers of a thread that may have `staging` bytes.

    A power of two: torch rounds pinned memory up to one.
    """
    most = max(1, min(PINNED, staging // BUFFERS))
    return 1 << (most.bit_length() - 1)


def pinned_buffer(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _copy(buffer: Tensor, runs: Sequence[ReadSpan]) -> None:
    """What was read, each run converted to where it belongs."""
    begin = 0
    for run in runs:
        end = begin + run.nbytes
        source = buffer if end - begin == len(buffer) else buffer[begin:end]
        if not run.direct:
            lines = source.view(run.dtype).view(-1, run.width)
            source = lines[:, run.column : run.column + run.out.shape[1]]
        run.out.copy_(source, non_blocking=True)
        begin = end
