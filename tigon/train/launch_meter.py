"""Measures whether a GPU waits for Python to launch the kernels of a forward pass.

The host's time to launch a pass is compared with the GPU's from its first kernel to its last. If
the GPU were never short of work, it would take longer than the launches, which go ahead of it; if
it waits for each launch, both take the same time. Only a pass that begins with a nearly empty queue
tells, as the first of a step does: a full queue holds launches up.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

WARM_UP = 2  # passes that compile and allocate
PASSES = 3  # of which the shortest counts: others may have compiled for a new shape
BOUND = 0.9  # of the GPU's time, from which launches are what a pass waits for


class LaunchMeter:
    """Measures the first passes and then says whether launches are what they wait for."""

    def __init__(self) -> None:
        self.seen = 0
        # Seconds of launching; begin and end
        self.times: list[tuple[float, torch.cuda.Event, torch.cuda.Event]] = []
        self.host = self.device = 0.0  # seconds of the shortest pass, once known

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measures the pass that the `with` block launches; does not wait for it."""
        self.seen += 1
        if self.seen <= WARM_UP:
            yield
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        began = time.perf_counter()
        yield
        host = time.perf_counter() - began
        end.record()
        self.times.append((host, begin, end))

    def is_launch_bound(self) -> bool | None:
        """Returns whether the GPU waits for launches; None while too few passes are done."""
        passes = self.times[:PASSES]
        if len(passes) < PASSES or not all(end.query() for _, _, end in passes):
            return None
        seconds = [(begin.elapsed_time(end) / 1000, host) for host, begin, end in passes]
        self.device, self.host = min(seconds)
        return self.host >= BOUND * self.device
