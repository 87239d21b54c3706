"""Copies to a device that are late: on a GPU without one, whose copies wait until they have to."""

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.weights.saved import save
from tigon.models import from_pretrained
from tigon.models.pretrained import load as load_module
from tigon.weights import TensorSlice, load, load_into, prepin_staging, read

here = threading.local()


class Stream:
    """Holds copies back until somebody waits for them."""

    made: list["Stream"] = []

    def __init__(self, device: torch.device) -> None:
        self.device, self.queued, self.done = device, [], 0
        Stream.made.append(self)

    def synchronize(self) -> None:
        self.run(len(self.queued))

    def run(self, count: int) -> None:
        for copy in self.queued[self.done : count]:
            copy()
        self.done = max(self.done, count)

    queued: list[Callable[[], object]]


class Event:
    stream: Stream | None = None

    def record(self, stream: Stream) -> None:
        self.stream, self.count = stream, len(stream.queued)

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.run(self.count)


class OnGpu(Tensor):
    is_cuda = True  # type: ignore[assignment]

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
        assert non_blocking
        here.stream.queued.append(lambda: Tensor.copy_(self, source))
        return self


@contextmanager
def current(stream: Stream) -> Iterator[None]:
    here.stream = stream
    yield
    assert stream.done == len(stream.queued)  # nothing is late that nobody waits for
    del here.stream


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    Stream.made.clear()
    for name, fake in {
        "Stream": Stream,
        "Event": Event,
        "stream": current,
        "device": nullcontext,
        "synchronize": lambda device: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(read, "pinned_buffer", lambda size: torch.empty(size, dtype=torch.uint8))


def on_gpu(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype).as_subclass(OnGpu)


@pytest.mark.parametrize("size", [600, 8192, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_no_buffer_is_filled_before_it_was_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: None, dtype: torch.dtype, size: int
) -> None:
    monkeypatch.setattr(read, "PINNED", size)
    shapes = {"a": (300, 50), "b": (7,), "c": (), "d": (3,), "e": (40, 33)}
    tensors = {n: torch.randn(shape).to(torch.bfloat16) for n, shape in shapes.items()}
    checkpoint = save(tmp_path, tensors)
    layout = {n: (TensorSlice.whole(n, shape),) for n, shape in shapes.items()}
    parameters = {n: on_gpu(*shape, dtype=dtype) for n, shape in shapes.items()}
    monkeypatch.setattr(load, "count_rank_cpus", lambda: 3)
    load_into(parameters, layout, checkpoint)
    assert 1 <= len(Stream.made) <= 3  # a thread may find that nothing is left
    assert sum(len(stream.queued) for stream in Stream.made) >= 34000 // size
    for name, tensor in tensors.items():
        found = parameters[name].as_subclass(Tensor)
        assert torch.equal(found, tensor.to(dtype)), name


def test_a_failing_read_waits_for_what_is_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: None
) -> None:
    monkeypatch.setattr(read, "PINNED", 4096)
    checkpoint = save(tmp_path, {"w": torch.randn(300, 50)})
    os.truncate(tmp_path / "model.safetensors", 30_000)
    closed: list[int] = []
    close = os.close

    def closing(file: int) -> None:
        closed.append(file)
        close(file)

    monkeypatch.setattr(os, "close", closing)
    out: dict[str, Any] = {"w": on_gpu(300, 50, dtype=torch.float32)}
    monkeypatch.setattr(load, "count_rank_cpus", lambda: 1)
    with pytest.raises(ValueError, match="ended at byte 30000"):
        load_into(out, {"w": (TensorSlice.whole("w", (300, 50)),)}, checkpoint)
    (stream,) = Stream.made
    assert stream.done == len(stream.queued) == 7 and len(closed) == 1


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch, gpu: None) -> Iterator[list[Any]]:
    """What was pinned: the threads that did it, and references to the memory."""
    found: list[Any] = []

    def one(size: int) -> Tensor:
        buffer = torch.empty(size, dtype=torch.uint8)
        found.append((size, threading.current_thread(), weakref.ref(buffer)))
        return buffer

    monkeypatch.setattr(load, "pinned_buffer", one)
    monkeypatch.setattr(load, "count_rank_cpus", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    yield found
    assert all(not thread.is_alive() and ref() is None for _, thread, ref in found)


def wait_for(found: list[Any], count: int) -> None:
    until = time.monotonic() + 60
    while len(found) < count:
        assert time.monotonic() < until
        time.sleep(0.001)


@pytest.mark.parametrize(
    ("staging", "each"), [(3 << 20, 1 << 19), (40 << 20, 4 << 20), (1 << 28, 8 << 20)]
)
def test_what_a_load_will_use_is_pinned_ahead(pinned: list[Any], staging: int, each: int) -> None:
    """In powers of two, which torch would round up to: it would take more than is allowed."""
    with prepin_staging(torch.device("cuda"), staging):
        wait_for(pinned, 6)
    assert [size for size, *_ in pinned] == [each] * 6


def test_pinning_ends_with_the_block(monkeypatch: pytest.MonkeyPatch, pinned: list[Any]) -> None:
    leaving, one = threading.Event(), load.pinned_buffer

    class Thread(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            leaving.set()
            super().join(timeout)

    def slow(size: int) -> Tensor:
        buffer = one(size)
        assert len(pinned) < 2 or leaving.wait(60)
        return buffer

    monkeypatch.setattr(threading, "Thread", Thread)
    monkeypatch.setattr(load, "pinned_buffer", slow)
    with pytest.raises(OSError, match="gone"), prepin_staging(torch.device("cuda:0")):
        wait_for(pinned, 2)
        raise OSError("gone")
    assert len(pinned) == 2


def test_memory_that_cannot_be_pinned_is_left_to_the_load(
    monkeypatch: pytest.MonkeyPatch, pinned: list[Any]
) -> None:
    one = load.pinned_buffer

    def lacking(size: int) -> Tensor:
        one(size)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(load, "pinned_buffer", lacking)
    with prepin_staging(torch.device("cuda:0")):
        wait_for(pinned, 1)
    assert len(pinned) == 1


def test_pinned_while_the_model_is_built_and_only_for_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pinned: list[Any]
) -> None:
    asked: list[Any] = []

    @contextmanager
    def ahead(device: torch.device, staging_bytes: int) -> Iterator[None]:
        asked.append((device, staging_bytes))
        with prepin_staging(device, staging_bytes):
            yield

    monkeypatch.setattr(load_module, "prepin_staging", ahead)
    with pytest.raises(FileNotFoundError):
        from_pretrained(tmp_path, staging_bytes=5 << 20)
    assert asked == [(torch.device("cpu"), 5 << 20)] and not pinned
