"""Captures CUDA graphs on a stream of their own, beside threads that allocate and copy."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor


@functools.cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream for all captures on a device, shared since each stream has workspaces."""
    return torch.cuda.Stream(device=device)


@contextmanager
def capture_graph(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any) -> Iterator[None]:
    """Captures what the `with` block launches, into a graph whose memory is in `pool`; after an
    error torch is as before."""
    stream = capture_stream(device)
    capture = torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local")
    try:
        with torch.cuda.stream(stream), capture:  # which leaves its stream only at a good end
            yield
    except BaseException:
        _leave_failed_capture(device, pool)
        raise


def _leave_failed_capture(device: torch.device, pool: Any) -> None:
    """Undoes what torch leaves of a capture that failed, whose end raises before it has ended all:
    random numbers of the GPU raise, and memory that another stream has used is never free again."""
    generator = torch.cuda.default_generators[device.index]
    generator.graphsafe_set_state(generator.clone_state())
    with suppress(RuntimeError):  # torch has ended this
        torch._C._cuda_endAllocateToPool(device.index, pool)


@contextmanager
def on_capture_stream(device: torch.device, *tensors: Tensor | None) -> Iterator[None]:
    """Runs the `with` block on the capture stream, after the current one and before what this gets
    next, so that its workspaces do not come from a graph's memory; on a CPU changes nothing.

    `tensors` were made on the current stream.
    """
    if device.type != "cuda":
        yield
        return
    current, side = torch.cuda.current_stream(device), capture_stream(device)
    side.wait_stream(current)
    for tensor in tensors:
        if tensor is not None:
            tensor.record_stream(side)
    with torch.cuda.stream(side):
        yield
    current.wait_stream(side)
