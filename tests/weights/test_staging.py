"""Copies to a device that are late: on a GPU without one, whose copies wait until they have to."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tigon.weights import Checkpoint, Part, Repository, load_into, reading

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
    monkeypatch.setattr(reading, "_pinned", lambda size: torch.empty(size, dtype=torch.uint8))


def on_gpu(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype).as_subclass(OnGpu)


@pytest.mark.parametrize("size", [600, 8192, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_no_buffer_is_filled_before_it_was_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: None, dtype: torch.dtype, size: int
) -> None:
    monkeypatch.setattr(reading, "PINNED", size)
    shapes = {"a": (300, 50), "b": (7,), "c": (), "d": (3,), "e": (40, 33)}
    tensors = {n: torch.randn(shape).to(torch.bfloat16) for n, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(Repository(tmp_path))
    layout = {n: (Part.whole(n, shape),) for n, shape in shapes.items()}
    parameters = {n: on_gpu(*shape, dtype=dtype) for n, shape in shapes.items()}
    load_into(parameters, layout, checkpoint, workers=3)
    assert 1 <= len(Stream.made) <= 3  # a thread may find that nothing is left
    assert sum(len(stream.queued) for stream in Stream.made) >= 34000 // size
    for name, tensor in tensors.items():
        found = parameters[name].as_subclass(Tensor)
        assert torch.equal(found, tensor.to(dtype)), name


def test_a_failing_read_waits_for_what_is_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: None
) -> None:
    monkeypatch.setattr(reading, "PINNED", 4096)
    save_file({"w": torch.randn(300, 50)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(Repository(tmp_path))
    os.truncate(tmp_path / "model.safetensors", 30_000)
    closed: list[int] = []
    close = os.close

    def closing(file: int) -> None:
        closed.append(file)
        close(file)

    monkeypatch.setattr(os, "close", closing)
    out: dict[str, Any] = {"w": on_gpu(300, 50, dtype=torch.float32)}
    with pytest.raises(ValueError, match="ended at byte 30000"):
        load_into(out, {"w": (Part.whole("w", (300, 50)),)}, checkpoint, workers=1)
    (stream,) = Stream.made
    assert stream.done == len(stream.queued) == 7 and len(closed) == 1
