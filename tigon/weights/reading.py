"""Reads ranges of files into tensors of any dtype, on any device, with small buffers only."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tigon.weights.transfer import Run, Transfer, transfers

DIRECT = 16 << 20  # bytes of a read into the memory that is to be filled
STAGING = 1 << 20  # of a read that is converted on the CPU: it stays in the processor's cache
PINNED = 16 << 20  # of a read that goes to a GPU
SHARE = 2 * PINNED  # of all buffers of a thread
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

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for staging in self._cuda.values():
                staging.stream.synchronize()
        finally:
            for file in self._files.values():
                os.close(file)

    def read(self, path: Path, offset: int, dtype: torch.dtype, out: Tensor) -> None:
        """Fills `out` with as many `dtype` elements from the file's byte `offset` on."""
        if not out.is_contiguous() and out.dim() > 1:
            for row in out:
                self.read(path, offset, dtype, row)
                offset += row.numel() * dtype.itemsize
            return
        run = Run(path, offset, dtype, 1, 0, out.reshape(-1, 1) if out.dim() != 1 else out[:, None])
        for transfer in transfers([run], self.most):
            self.fill(transfer)

    def most(self, run: Run) -> int:
        """The bytes of the run that are read at once."""
        if run.out.is_cuda:
            return min(PINNED, self._staging // 2)
        return DIRECT if run.direct else min(STAGING, self._staging)

    def fill(self, transfer: Transfer) -> None:
        """One read of a file, and what it is for."""
        first = transfer.runs[0]
        if first.out.is_cuda:
            staging = self._cuda_staging(first.out.device)
            buffer = staging.next_buffer()[: transfer.nbytes]
            self._pread(transfer.path, transfer.offset, buffer)
            staging.send(buffer, transfer.runs)
        elif first.direct:
            self._read_directly(transfer)
        else:
            if self._buffer is None or len(self._buffer) < transfer.nbytes:
                self._buffer = torch.empty(
                    max(transfer.nbytes, min(STAGING, self._staging)), dtype=torch.uint8
                )
            buffer = self._buffer[: transfer.nbytes]
            self._pread(transfer.path, transfer.offset, buffer)
            _copy(buffer, transfer.runs)

    def _read_directly(self, transfer: Transfer) -> None:
        flat = [run.out.view(-1).view(torch.uint8) for run in transfer.runs]
        offset = transfer.offset
        for i in range(0, len(flat), IOV_MAX):
            some = flat[i : i + IOV_MAX]
            if len(some) == 1:
                self._pread(transfer.path, offset, some[0])
            else:
                self._preadv(transfer.path, offset, [out.numpy().data for out in some])
            offset += sum(map(len, some))

    def _pread(self, path: Path, offset: int, buffer: Tensor) -> None:
        self._preadv(path, offset, [buffer.numpy().data])

    def _preadv(self, path: Path, offset: int, buffers: Sequence[memoryview]) -> None:
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY)
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
            self._cuda[device] = _PinnedStaging(device, min(PINNED, self._staging // 2))
        return self._cuda[device]


class _PinnedStaging:
    """Two pinned buffers: one is filled from the file while the other is copied to the device."""

    def __init__(self, device: torch.device, size: int) -> None:
        torch.cuda.synchronize(device)  # the memory we fill may still be in use by its last owner
        self.stream = torch.cuda.Stream(device)
        self._buffers = [
            (torch.empty(size, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())
            for _ in range(2)
        ]

    def next_buffer(self) -> Tensor:
        self._buffers.reverse()
        buffer, copied = self._buffers[0]
        copied.synchronize()
        return buffer

    def send(self, source: Tensor, runs: Sequence[Run]) -> None:
        # The device too, or leaving the stream would make a context on this thread's, the first GPU
        with torch.cuda.device(self.stream.device), torch.cuda.stream(self.stream):
            if len(runs) == 1 and runs[0].direct:
                target = runs[0].out.view(-1).view(torch.uint8)
                target.copy_(source, non_blocking=True)
            else:
                # The bytes travel as they are: copy_ would convert them on the CPU, unpinned
                _copy(source.to(self.stream.device, non_blocking=True), runs)
            self._buffers[0][1].record()


def _copy(buffer: Tensor, runs: Sequence[Run]) -> None:
    """What was read, each run converted to where it belongs."""
    begin = 0
    for run in runs:
        lines = buffer[begin : begin + run.nbytes].view(run.dtype).view(-1, run.width)
        run.out.copy_(lines[:, run.column : run.column + run.out.shape[1]])
        begin += run.nbytes
