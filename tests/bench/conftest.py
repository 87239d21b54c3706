"""A clock and a memory for benchmarks without a GPU: every run takes the same."""

import gc
from typing import Any

import pytest
import torch

from bench import harness, measure, timing
from tests.bench.small import Patch

for name in ("kernel_runs", "training_runs", "generation_runs"):  # failed checks show the values
    pytest.register_assert_rewrite(f"tests.bench.{name}")


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: Patch) -> None:
    monkeypatch.setattr(gc, "collect", int)  # 0.2 s in a process this large


@pytest.fixture
def clock(monkeypatch: Patch) -> None:
    """Everything takes 2 ms and 2 MiB."""

    def times(run: timing.Run, before: Any = None, **_: Any) -> list[float]:
        if callable(before):
            before()
        run()
        return [3.0, 1.0, 2.0]

    stamp = harness.stamp
    monkeypatch.setattr(harness, "stamp", lambda commit: stamp(commit) | {"gpu": "NVIDIA H200"})
    monkeypatch.setattr(timing, "wait", timing.nothing)
    monkeypatch.setattr(torch.cuda, "empty_cache", timing.nothing)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    monkeypatch.setattr(torch, "set_default_device", lambda _: None)
    monkeypatch.setattr(timing, "milliseconds", times)
    monkeypatch.setattr(timing, "peak_mib", lambda *given: times(*given)[2])
    monkeypatch.setattr(timing, "host_microseconds", lambda run, *_, **__: times(run))
    monkeypatch.setattr(measure.Effort, "copy", lambda *_: [1.0, 2.0, 3.0])
