"""A CUDA graph of a step: what it costs to launch is one launch."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from tigon.generation.loop import FEW
from tigon.kernels._triton import runs_triton

WARM_UP = 2  # steps that compile kernels and make handles before one is captured


class Replay:
    """Runs a step eagerly at first, then from a CUDA graph of it, with the same result.

    The step changes tensors in place and returns one, and neither it nor its launches depend on
    what is in them. Every run is a real one: nothing is computed twice. Without Triton, and on
    the CPU, all steps are eager, since definitions in plain torch may ask the device something.
    """

    def __init__(self, weight: Tensor, generator: torch.Generator | None):
        self._device, self._generator = weight.device, generator
        self._possible = self._device.type == "cuda" and runs_triton(weight)
        self._warm = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Tensor | None = None

    def __call__(self, step: Callable[[], Tensor], remaining: int) -> Tensor:
        """The next of at most `remaining` steps; its result is overwritten by the one after it."""
        if self._graph is None:
            if not self._possible or remaining <= FEW:
                return step()
            if self._warm < WARM_UP:
                return self._warm_up(step)
            self._capture(step)
        assert self._graph is not None and self._result is not None
        self._graph.replay()
        return self._result

    def _warm_up(self, step: Callable[[], Tensor]) -> Tensor:
        """On the stream of the capture, whose workspaces must not come from the graph's memory."""
        self._warm += 1
        here, side = torch.cuda.current_stream(self._device), side_stream(self._device)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            result = step()
        here.wait_stream(side)
        return result

    def _capture(self, step: Callable[[], Tensor]) -> None:
        graph = torch.cuda.CUDAGraph()
        inference = torch.is_inference_mode_enabled()
        # Generators keep their state for graphs in tensors that are made now, and others' graphs,
        # outside of inference mode, may come to use them
        with torch.inference_mode(False):
            if self._generator is not None:
                graph.register_generator_state(self._generator)
            stream = side_stream(self._device)
            # What other threads allocate and wait for is none of the graph's business
            capture = torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local")
            with capture, torch.inference_mode(inference):
                self._result = step()
        self._graph = graph


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures on a device, since each stream has workspaces of its own."""
    return torch.cuda.Stream(device=device)
