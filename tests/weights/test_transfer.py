"""Reads as they are planned: merged, split, bounded; tensors that are decoded; threads."""

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.weights.saved import save
from tigon.weights import (
    Checkpoint,
    DecodedTensor,
    Layout,
    RowSpan,
    TensorSlice,
    load,
    load_into,
    read,
)
from tigon.weights.layout import LocalShard, ShardLines
from tigon.weights.read import Reader, ReadSpan, merge_reads, parallel_for


def test_neighbours_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"{i:02}": torch.randn(3, 4) for i in range(20)}
    checkpoint = save(tmp_path, tensors)
    layout = {name: (TensorSlice.whole(name, (3, 4)),) for name in tensors}
    reads: list[int] = []
    preadv = Reader._preadv

    def counted(self: Reader, path: Path, offset: int, buffers: Any) -> None:
        reads.append(sum(map(len, buffers)))
        preadv(self, path, offset, buffers)

    monkeypatch.setattr(Reader, "_preadv", counted)
    for dtype in (torch.float32, torch.bfloat16):
        parameters = {name: torch.full((3, 4), torch.nan, dtype=dtype) for name in tensors}
        load_into(parameters, layout, checkpoint)
        assert reads == [20 * 48]
        assert all(torch.equal(p, tensors[name].to(dtype)) for name, p in parameters.items())
        reads.clear()
    monkeypatch.setattr(read, "IOV_MAX", 3)
    parameters = {name: torch.full((3, 4), torch.nan) for name in tensors}
    load_into(parameters, layout, checkpoint)
    assert reads == [3 * 48] * 6 + [2 * 48]
    assert all(torch.equal(p, tensors[name]) for name, p in parameters.items())


def run(offset: int, lines: int, dtype: torch.dtype, out: torch.dtype = torch.float32) -> ReadSpan:
    return ReadSpan(Path("f"), offset, dtype, 4, 0, torch.empty(lines, 4, dtype=out))


def test_cut_and_merged() -> None:
    half = torch.float16
    runs = [run(80, 2, half), run(0, 10, half), run(96, 1, torch.float32), run(300, 30, half)]
    found = merge_reads(runs, lambda _: 100)
    assert [(t.offset, t.nbytes, len(t.spans)) for t in found] == [
        *((0, 96, 2), (96, 16, 1)),  # of another dtype: it is not converted
        *((300, 96, 1), (396, 96, 1), (492, 48, 1)),  # by lines
    ]
    found = merge_reads([run(0, 2, half)], lambda _: 4)  # less than a line
    assert [(t.offset, t.nbytes) for t in found] == [(4 * i, 4) for i in range(4)]


def test_bytes_that_need_no_conversion_are_cut_anywhere() -> None:
    short = run(160, 4, torch.float16, torch.float16)
    runs = [short, run(0, 10, torch.float32), run(300, 30, torch.float32)]
    found = merge_reads(runs, lambda _: 200)
    assert [(t.offset, t.nbytes, len(t.spans)) for t in found] == [
        *((0, 192, 2), (300, 200, 1), (500, 200, 1), (700, 80, 1))
    ]
    first, second = found[0].spans
    assert second.out.data_ptr() == short.out.data_ptr() and len(second.out) == 32
    assert first.out.data_ptr() == runs[1].out.data_ptr() and first.out.dtype == torch.uint8


@pytest.mark.parametrize("shape", [(6,), (6, 4), (3, 6, 4)])
def test_a_rank_outside_the_mesh_has_no_lines(shape: tuple[int, ...]) -> None:
    outside = LocalShard(torch.empty(0), shape, ())
    assert not [*ShardLines(outside, single=len(shape) < 2).within(0, 100)]


@dataclass(frozen=True)
class Counting(DecodedTensor):
    """Values that count up, decoded in groups of `group` rows."""

    group: int = 1

    @property
    def unit(self) -> int:
        return self.group

    def rows(self, reader: Reader, first: int, count: int) -> Tensor:
        assert isinstance(reader, Reader) and 0 <= first <= first + count <= self.shape[0]
        assert count and count * math.prod(self.shape[1:]) * 4 <= LARGEST
        asked.append((first, count))
        return counting(self.shape).narrow(0, first, count)


LARGEST = 1 << 20
asked: list[tuple[int, int]] = []


def counting(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).view(shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decoded_tensors(dtype: torch.dtype) -> None:
    shapes = {"a": (1000, 700), "b": (77, 700), "s": (3, 5, 8), "v": (9,)}
    infos = {n: Counting(n, shape, Path("x"), 0, group=32) for n, shape in shapes.items()}
    layout: Layout = {
        "ab": (
            TensorSlice("a", (1000, 700), (RowSpan(40, 0, 960), RowSpan(0, 960, 40))),
            TensorSlice.whole("b", (77, 700), 1000),
        ),
        "s": (TensorSlice.whole("s", (3, 5, 8)),),
        "v": (TensorSlice.whole("v", (9,)),),
    }
    parameters = {
        "ab": torch.full((1077, 700), torch.nan, dtype=dtype),
        "s": torch.full((3, 5, 8), torch.nan, dtype=dtype),
        "v": torch.full((9,), torch.nan, dtype=dtype),
    }
    asked.clear()
    load_into(parameters, layout, Checkpoint("x", infos), staging_bytes=2 * LARGEST)
    a = counting((1000, 700))
    expected = torch.cat([a[40:], a[:40], counting((77, 700))])
    assert torch.equal(parameters["ab"], expected.to(dtype))
    assert torch.equal(parameters["s"], counting((3, 5, 8)).to(dtype))
    assert torch.equal(parameters["v"], counting((9,)).to(dtype))
    assert all(first % 32 == 0 for first, _ in asked if first not in (40, 0))


def test_staging_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = torch.randn(3000, 1000)
    checkpoint = save(tmp_path, {"w": stored})
    empty, sizes = torch.empty, []

    def counted(*size: Any, **options: Any) -> Tensor:
        sizes.append(size[0])
        return empty(*size, **options)

    out, layout = (
        empty(3000, 1000, dtype=torch.bfloat16),
        {"w": (TensorSlice.whole("w", (3000, 1000)),)},
    )
    monkeypatch.setattr(load, "count_rank_cpus", lambda: 8)
    monkeypatch.setattr(read.torch, "empty", counted)
    load_into({"w": out}, layout, checkpoint, staging_bytes=2 << 20)
    monkeypatch.undo()
    assert torch.equal(out, stored.bfloat16())
    assert 0 < sum(sizes) <= 2 << 20
    with pytest.raises(ValueError, match="staging_bytes=1000: at least 1048576 are needed"):
        load_into({"w": out}, layout, checkpoint, staging_bytes=1000)


def test_after_an_error_of_any_thread_no_more_is_begun() -> None:
    begun: list[int] = []
    failed = threading.Event()

    @contextmanager
    def tool() -> Iterator[None]:
        yield

    def work(job: int, _: None) -> None:
        begun.append(job)
        if job == 1:
            failed.set()
            raise OSError("gone")
        assert failed.wait(60)  # the first thread goes on only when the other has failed
        time.sleep(0.01)

    with pytest.raises(OSError, match="gone"):
        parallel_for(range(1000), work, tool, 2)
    assert len(begun) < 500
