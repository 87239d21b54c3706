"""What a test may change of its process is put back, as the next one may be any other.

Environment variables are not among it: libraries remember what they have set. Tests set theirs with
monkeypatch.
"""

import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)


def _set_handlers(handlers: list[Any]) -> None:
    for number, handler in zip(SIGNALS, handlers, strict=True):
        signal.signal(number, handler)


def _set_limits(limits: list[tuple[int, int]]) -> None:
    for what, limit in zip(LIMITS, limits, strict=True):
        resource.setrlimit(what, limit)


def _set_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


# What is read before and after, and what puts it back
STATE: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (os.getcwd, os.chdir),
    (lambda: [signal.getsignal(number) for number in SIGNALS], _set_handlers),
    (lambda: [resource.getrlimit(what) for what in LIMITS], _set_limits),
    (sys.getrecursionlimit, sys.setrecursionlimit),  # Inductor raises it
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_default_device, _set_device),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (_has_group, lambda _: dist.destroy_process_group()),
]


@contextmanager
def put_back() -> Iterator[None]:
    before = [read() for read, _ in STATE]
    try:
        yield
    finally:
        for (read, write), value in zip(STATE, before, strict=True):
            if read() != value:
                write(value)
        _forget_compiled()


def _forget_compiled() -> None:
    """Or a function that several tests compile comes to its limit of recompilations."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and dynamo.convert_frame.input_codes.seen:
        dynamo.reset()
