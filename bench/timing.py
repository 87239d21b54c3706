"""How the benchmarks measure: device time, memory, host time, error."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from signal import ITIMER_REAL, SIGALRM, setitimer, signal
from statistics import median
from typing import Any

import torch
from torch import Tensor

Run = Callable[[], Any]
FLUSH_BYTES = 2**28  # as triton.testing.do_bench: more than any L2
MIB, GIB = 2**20, 2**30


def nothing() -> None:
    """Prepares nothing."""


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def now() -> float:
    """Seconds on the host's clock, when the device has done what was asked of it."""
    wait()
    return time.perf_counter()


def allocated() -> int:
    """Bytes on the device."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def reset_peaks() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peaks() -> dict[str, float]:
    """The most GiB since the last reset, of tensors and of what the allocator holds for them;
    nothing where there is no GPU."""
    if not torch.cuda.is_available():
        return {}
    most = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"allocated_gib": most[0] / GIB, "reserved_gib": most[1] / GIB}


@torch.no_grad()
def milliseconds(
    run: Run, before: Run = nothing, *, total: float, least: int, most: int
) -> list[float]:
    """Device time of every one of several runs that together take about `total` ms.

    What `triton.testing.do_bench` does (a 256 MiB fill before each run empties the L2, events
    around it), with two additions. `before` runs untimed, so that an operator that overwrites what
    it was given gets it fresh. And the device spins until the host has enqueued the run, at most
    1 ms: in a training step the host is ahead, and what it costs `host_microseconds` measures.
    """
    flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    spin = 0

    def timed() -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before()
        flush.zero_()
        if spin:
            torch.cuda._sleep(spin)
        start.record()
        with torch.enable_grad():
            result = run()
        end.record()
        del result
        return start, end

    def elapsed(events: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> list[float]:
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]

    timed()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    first = timed()
    host = time.perf_counter() - begin
    spin = int(2e9 * min(1e-3, 1.5 * host + 2e-5))  # cycles, at about 2 GHz
    estimate = elapsed([first])[0]
    count = max(least, min(most, int(total / max(estimate, 1e-3))))
    return elapsed([timed() for _ in range(count)])


def took(run: Run, total: float = 60.0) -> float:
    """Milliseconds of one run, the median of several."""
    if torch.cuda.is_available():
        return median(milliseconds(run, total=total, least=3, most=30))
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)


def copy_bandwidth(device: str, moved: int = 2**32) -> float:
    """Bytes a second of a copy that reads and writes so many in all."""
    source = torch.zeros(moved // 4, dtype=torch.bfloat16, device=device).normal_()
    target = torch.empty_like(source)
    return 1e3 * moved / took(lambda: target.copy_(source))


def block_ms(run: Run, count: int) -> float:
    """Milliseconds of one run, of so many back to back, where the GPU is at its power limit."""
    if not torch.cuda.is_available():
        begin = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - begin)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / count


def in_blocks(runs: dict[str, Run], seconds: float, block: float = 0.12) -> dict[str, list[float]]:
    """Milliseconds of each run for so many seconds, in blocks, each of one run, that take turns."""
    counts = {name: max(1, round(1e3 * block / block_ms(run, 5))) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(max(1, round(seconds / block))):
        for name, run in runs.items():
            times[name].append(block_ms(run, counts[name]))
    return times


def peak_mib(run: Run, before: Run = nothing) -> float:
    """MiB that one run allocates at most beyond what was there, its results included; 0 where there
    is no GPU, and nothing counts them."""
    before()
    if not torch.cuda.is_available():
        run()
        return 0.0
    gc.collect()
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = run()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    del result
    return (peak - base) / MIB


def host_microseconds(run: Run, *, calls: int = 50, batches: int = 20) -> list[float]:
    """Host time per call, one value per batch: waits between batches, so no queue fills up."""
    out = []
    for _ in range(batches):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        out.append(1e6 * (time.perf_counter() - start) / calls)
    torch.cuda.synchronize()
    return out


def relative_l2(value: Tensor, truth: Tensor) -> float:
    """|value - truth| / |truth| over all elements, summed in fp64 a few rows at a time."""
    if value.shape != truth.shape:
        raise ValueError(f"shape {tuple(value.shape)} is not {tuple(truth.shape)}")
    if value.dim() == 0:
        value, truth = value[None], truth[None]
    rows = max(1, 2**26 * value.shape[0] // max(1, value.numel()))
    wrong = total = 0.0
    for a, b in zip(value.detach().split(rows), truth.split(rows), strict=True):
        wrong += (a.double() - b.double()).square().sum().item()
        total += b.double().square().sum().item()
    return (wrong / total) ** 0.5 if total else wrong**0.5


def quantiles(samples: list[float]) -> list[float]:
    """The 20th, 50th and 80th percentile."""
    ordered = sorted(samples)
    at = [ordered[round(q * (len(ordered) - 1))] for q in (0.2, 0.8)]
    return [at[0], median(ordered), at[1]]


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """TimeoutError from whatever takes longer, so that one peer cannot eat the others' time."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"not ready after {seconds:g} s")

    previous = signal(SIGALRM, late)
    setitimer(ITIMER_REAL, seconds)
    try:
        yield
    finally:
        setitimer(ITIMER_REAL, 0)
        signal(SIGALRM, previous)
