"""Keeps activations in host memory between forward and backward.

What autograd saves of a block is copied to the host while the next block computes, and back while
the block after it is differentiated. The values are the same bits.
"""

import functools
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

MIN_BYTES = 2**20  # bytes; what is smaller stays


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream on which activations are copied."""
    return torch.cuda.Stream(device)


class _OffloadedStorage:
    """The memory of one or more saved tensors, in host memory and perhaps again on the device."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.device = size, device
        self.host: Tensor | None = None  # uint8; None on meta, where there is nothing to copy
        self.fetched: Tensor | None = None  # uint8
        self.ready: torch.cuda.Event | None = None  # when it is

    def take(self, x: Tensor) -> None:
        """Starts to copy the storage of x to `host`; does nothing on meta."""
        if self.device.type == "meta":
            return
        source = torch.empty(0, dtype=torch.uint8, device=self.device).set_(x.untyped_storage())
        gpu = self.device.type == "cuda"
        self.host = torch.empty(self.size, dtype=torch.uint8, pin_memory=gpu, device="cpu")
        self.host.copy_(source, non_blocking=gpu)

    def fetch(self) -> None:
        """Copies `host` to `fetched`, if there are both; call it on the side stream."""
        if self.fetched is not None and self.host is not None:
            self.fetched.copy_(self.host, non_blocking=self.device.type == "cuda")


Live = dict[Any, tuple[Tensor, _OffloadedStorage]]  # by memory and version of the tensor


class _SavedTensor(NamedTuple):
    """A tensor that autograd has saved: a view of an offloaded storage."""

    block: int  # that saved it
    stored: _OffloadedStorage  # perhaps what the block before saved, too
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class ActivationOffload:
    """Offloads a forward pass: `with offload.of(block):` around each block in order, then `end()`.

    `shared`: tensors that all blocks use, which stay on the device, as parameters do.
    """

    def __init__(self, device: torch.device, shared: Iterable[Tensor]) -> None:
        self.device = device
        self.gpu = device.type == "cuda"
        self._shared = {_key(x) for x in shared}
        self._blocks: list[list[_OffloadedStorage]] = []
        self._current: int | None = None  # the block that backward differentiates
        # Being copied: the memory may be used anew only when the copy is done
        self._copying: deque[tuple[torch.cuda.Event | None, Live]] = deque()

    @contextmanager
    def of(self, block: nn.Module) -> Iterator[None]:
        """Offloads what the block saves for backward inside of the context.

        Its parameters, `shared` tensors, storages of less than 1 MiB and tensors on other devices
        stay.
        """
        while len(self._copying) > 1:
            self._finish_copies()
        index = len(self._blocks)
        self._blocks.append([])
        live: Live = {}
        self._copying.append((None, live))
        parameter_keys: set[int] = set()

        def pack(x: Tensor) -> Tensor | _SavedTensor:
            if not parameter_keys:  # now they are gathered, where they are sharded
                parameter_keys.update(_key(p) for p in block.parameters())
            memory, nbytes = _key(x), x.untyped_storage().nbytes()
            stays = memory in parameter_keys or memory in self._shared or x.device != self.device
            if stays or nbytes < MIN_BYTES:
                return x.detach()
            key = memory, x._version
            stored = next((held[key][1] for _, held in self._copying if key in held), None)
            if stored is None:
                stored = _OffloadedStorage(nbytes, x.device)
                with self._side_stream():
                    stored.take(x)
                self._blocks[index].append(stored)
                live[key] = x.detach(), stored
            offset = int(x.storage_offset())
            return _SavedTensor(index, stored, x.dtype, x.shape, x.stride(), offset)

        with saved_tensors_hooks(pack, self._unpack):
            yield
        if self.gpu:
            copied = torch.cuda.Event()
            copied.record(_stream(self.device))
            self._copying[-1] = copied, live

    def end(self) -> None:
        """Waits, after the last block, for all copies to the host, and frees what was copied."""
        while self._copying:
            self._finish_copies()

    def _finish_copies(self) -> None:
        """Lets the current stream wait for the oldest block's copies, and drops its tensors."""
        copied, live = self._copying.popleft()
        if copied is not None:
            torch.cuda.current_stream(self.device).wait_event(copied)
        live.clear()  # autograd keeps `pack`, which has it

    def _side_stream(self) -> Any:
        """Returns a context of the side stream after the current one; a null one on a CPU."""
        if not self.gpu:
            return nullcontext()
        side = _stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(side)

    def _unpack(self, saved: Tensor | _SavedTensor) -> Tensor:
        """Returns a saved tensor to autograd, fetched back if it was offloaded."""
        if isinstance(saved, Tensor):
            return saved
        if saved.block != self._current:
            self._enter(saved.block)
        stored = saved.stored
        if stored.fetched is None:
            self._fetch([stored])
        if stored.ready is not None:
            torch.cuda.current_stream(self.device).wait_event(stored.ready)
        assert stored.fetched is not None
        values = stored.fetched.view(saved.dtype)
        return values.as_strided(saved.shape, saved.stride, saved.offset)

    def _enter(self, block: int) -> None:
        """Fetches the block that backward starts and the one before; frees those after it."""
        self._current = block
        for stored in (s for later in self._blocks[block + 1 :] for s in later):
            stored.fetched = None
        for candidates in self._blocks[max(0, block - 1) : block + 1][::-1]:
            self._fetch([stored for stored in candidates if stored.fetched is None])

    def _fetch(self, missing: list[_OffloadedStorage]) -> None:
        """Starts to copy offloaded storages back to the GPU."""
        for stored in missing:
            stored.fetched = torch.empty(stored.size, dtype=torch.uint8, device=self.device)
        with self._side_stream():
            for stored in missing:
                stored.fetch()
        if not (self.gpu and missing):
            return
        ready = torch.cuda.Event()
        ready.record(_stream(self.device))
        for stored in missing:
            assert stored.fetched is not None
            stored.fetched.record_stream(_stream(self.device))
            stored.ready = ready


def _key(x: Tensor) -> int:
    """Identifies the memory of x."""
    return x.untyped_storage()._cdata
