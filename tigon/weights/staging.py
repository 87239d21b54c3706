"""Rows of tensors of any dtype on any device as bytes in host memory, through one small buffer."""

import torch
from torch import Tensor


class Stage:
    """The buffers of one thread."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def __call__(self, rows: Tensor, dtype: torch.dtype) -> memoryview:
        """Row-major, little-endian, in `dtype`; what was given before is overwritten."""
        if rows.is_cuda:
            return self._from_gpu(rows, dtype)
        if rows.dtype == dtype and rows.is_contiguous():
            return _bytes_of(rows.view(-1).view(torch.uint8))
        staged = self._room(rows.numel() * dtype.itemsize, pinned=False)
        staged.view(dtype).view(rows.shape).copy_(rows)
        return _bytes_of(staged)

    def _from_gpu(self, rows: Tensor, dtype: torch.dtype) -> memoryview:
        if rows.device not in self._streams:
            torch.cuda.synchronize(rows.device)  # what was queued may still change the rows
            self._streams[rows.device] = torch.cuda.Stream(rows.device)
        stream = self._streams[rows.device]
        # The device too, or leaving the stream would make a context on this thread's, the first GPU
        with torch.cuda.device(rows.device), torch.cuda.stream(stream):
            # Converted there: copy_ to the host would do it here, unpinned
            converted = rows.to(dtype).contiguous().view(-1).view(torch.uint8)
            staged = self._room(converted.numel(), pinned=True)
            staged.copy_(converted, non_blocking=True)
        stream.synchronize()
        return _bytes_of(staged)

    def _room(self, nbytes: int, *, pinned: bool) -> Tensor:
        if len(self._buffer) < nbytes or (pinned and not self._buffer.is_pinned()):
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        return self._buffer[:nbytes]


def as_bytes(tensor: Tensor) -> memoryview:
    """Row-major, little-endian, on the host."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return _bytes_of(flat.view(torch.uint8))


def _bytes_of(flat: Tensor) -> memoryview:
    return flat.numpy().data
