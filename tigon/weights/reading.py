"""Reads ranges of files into tensors of any dtype, on any device, with small buffers only."""

import os
from pathlib import Path

import torch
from torch import Tensor

STAGING = 4 << 20  # bytes
PINNED = 16 << 20


class Reader:
    """Open files and staging buffers of one thread; done with all copies when it is left."""

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}
        self._buffer: Tensor | None = None
        self._cuda: dict[torch.device, _PinnedStaging] = {}

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        for staging in self._cuda.values():
            staging.stream.synchronize()
        for file in self._files.values():
            os.close(file)

    def read(self, path: Path, offset: int, dtype: torch.dtype, out: Tensor) -> None:
        """Fills `out` with as many `dtype` elements from the file's byte `offset` on."""
        if not out.is_contiguous() and out.dim() > 1:
            for row in out:
                self.read(path, offset, dtype, row)
                offset += row.numel() * dtype.itemsize
            return
        out = out.view(-1) if out.is_contiguous() else out
        if out.device.type == "cpu" and out.dtype == dtype and out.is_contiguous():
            self._pread(path, offset, out.view(torch.uint8))
            return
        for target in out.split((PINNED if out.is_cuda else STAGING) // dtype.itemsize):
            nbytes = target.numel() * dtype.itemsize
            if out.is_cuda:
                staging = self._cuda_staging(out.device)
                source = staging.next_buffer()[:nbytes]
                self._pread(path, offset, source)
                staging.send(source.view(dtype), target)
            else:
                if self._buffer is None:
                    self._buffer = torch.empty(STAGING, dtype=torch.uint8)
                source = self._buffer[:nbytes]
                self._pread(path, offset, source)
                target.copy_(source.view(dtype))
            offset += nbytes

    def _pread(self, path: Path, offset: int, buffer: Tensor) -> None:
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY)
        rest = buffer.numpy().data
        while rest:
            count = os.preadv(self._files[path], [rest], offset)
            if not count:
                raise ValueError(f"{path} ended at byte {offset}: it was shortened while read")
            rest, offset = rest[count:], offset + count

    def _cuda_staging(self, device: torch.device) -> "_PinnedStaging":
        if device not in self._cuda:
            self._cuda[device] = _PinnedStaging(device)
        return self._cuda[device]


class _PinnedStaging:
    """Two pinned buffers: one is filled from the file while the other is copied to the device."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)  # the memory we fill may still be in use by its last owner
        self.stream = torch.cuda.Stream(device)
        self._buffers = [
            (torch.empty(PINNED, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())
            for _ in range(2)
        ]

    def next_buffer(self) -> Tensor:
        self._buffers.reverse()
        buffer, copied = self._buffers[0]
        copied.synchronize()
        return buffer

    def send(self, source: Tensor, target: Tensor) -> None:
        with torch.cuda.stream(self.stream):
            # The bytes travel as they are: copy_ would convert them on the CPU, unpinned
            target.copy_(source.to(target.device, non_blocking=True))
            self._buffers[0][1].record()
