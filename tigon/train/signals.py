"""SIGTERM and SIGINT, which end a run after a checkpoint."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def signals() -> Iterator[list[int]]:
    """The SIGTERM and SIGINT that came; the second of a kind interrupts at once."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if number in received:
            raise KeyboardInterrupt
        received.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
