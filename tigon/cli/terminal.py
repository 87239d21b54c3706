"""Reads typed lines, and restores the terminal where a signal ends the process."""

import signal
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

with suppress(ImportError):  # input() then has editing and history
    import readline  # noqa: F401


def read_lines(terminal: bool) -> Iterator[str]:
    """Yields lines of standard input, with a prompt, editing and history in a `terminal`, where
    Ctrl-C drops the line that is being typed."""
    if not terminal:
        yield from (line.rstrip("\r\n") for line in sys.stdin)
        return
    while True:
        try:
            with terminal_restored_on_signal():
                line = input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:  # an empty line again
            print()
        else:
            yield line


def save_terminal() -> Callable[[], None]:
    """Returns a function that restores the present modes of the terminal."""
    modes = termios.tcgetattr(sys.stdin)

    def restore() -> None:
        with suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(sys.stdin, termios.TCSANOW, modes)

    return restore


@contextmanager
def terminal_restored_on_signal() -> Iterator[None]:
    """Restores the echo, which is off while a line is edited, if a signal ends the process."""
    restore = save_terminal()

    def restore_and_end(number: int, frame: FrameType | None) -> None:
        restore()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) == signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, restore_and_end)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
