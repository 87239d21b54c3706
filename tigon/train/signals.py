"""SIGTERM, SIGINT and SIGHUP, from the start of a run to its end."""

import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, Self

# SIGHUP: the terminal is gone, unless nohup has it ignored
NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
REPEAT_SECONDS = 0.5  # seconds; launchers that forward a signal may send the same one twice
PATIENCE = 5.0  # seconds for an orderly exit, before the process is ended
STOP, DEFER, END_DEFERRAL = 0, 254, 255  # what the announcer reads, besides numbers of signals


class Signals:
    """Ends the process on a signal, or, while `deferred`, keeps it in `received` for the loop.

    The loop stops after its step; a second SIGINT ends the process even then.

    Python runs no handlers while the main thread waits for a GPU, so a thread announces at once
    what a signal is going to do.
    """

    installed: ClassVar[list["Signals"]] = []  # whose handlers are in place

    def __init__(self, *, silent: bool = False):
        self.received = 0
        self.phase = "before the first step: nothing was trained"  # that a signal would end
        self.silent = silent
        self._deferred = False
        self._first = 0.0
        self._depth = 0

    def __enter__(self) -> Self:
        """Installs the handlers, once, if this is the main thread."""
        self._depth += 1
        if self._depth > 1 or threading.current_thread() is not threading.main_thread():
            return self
        read, write = os.pipe()
        os.set_blocking(write, False)
        self._fds = read, write
        self._before: dict[int, Any] = {
            n: signal.signal(n, self._handle) for n in handled_signals()
        }
        self._wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self._timers: list[threading.Timer] = []
        self._thread = threading.Thread(target=self._announce, args=(read,), daemon=True)
        self._thread.start()
        Signals.installed.append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth or self not in Signals.installed:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.set_blocking(self._fds[1], True)  # the thread has to hear of the end
        self._tell(STOP)
        Signals.installed.remove(self)
        self._thread.join()
        for timer in self._timers:  # who catches SystemExit, as a notebook does, goes on
            timer.cancel()
        for descriptor in self._fds:
            os.close(descriptor)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Keeps a signal in `received` during the `with` block; else it would end the process."""
        self._tell(DEFER)
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
            self._tell(END_DEFERRAL)

    def _tell(self, message: int) -> None:
        """Sends a byte to the announcer, which reads it in order with the signals, however late."""
        if self in Signals.installed:
            with suppress(BlockingIOError):  # the pipe is full: the run matters more
                os.write(self._fds[1], bytes([message]))

    def left(self, seconds: float) -> float:
        """Returns how many of the `seconds` after SIGTERM are left; inf without it, or for 0."""
        if self.received != signal.SIGTERM or not seconds:
            return math.inf
        return self._first + seconds - time.monotonic()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Notes the first signal in `received`; raises SystemExit unless signals are deferred, and
        on a second Ctrl-C even then."""
        late = time.monotonic() - self._first > REPEAT_SECONDS
        again = self.received == signal.SIGINT and number in repeats() and late
        if not self.received:
            self.received, self._first = number, self._first or time.monotonic()
        if again or not self._deferred:
            raise SystemExit(128 + number)

    def _announce(self, descriptor: int) -> None:
        """Says, in a thread, what each signal will do; a second Ctrl-C ends the process."""
        first, interrupted, deferred = 0.0, False, False
        while (number := os.read(descriptor, 1)[0]) != STOP:
            if number in (DEFER, END_DEFERRAL):
                deferred = number == DEFER
            if number not in NUMBERS:
                continue
            if number == signal.SIGTERM and peer_failed():
                os._exit(1)  # the main thread may be waiting for that rank
            name, now = signal.Signals(number).name, time.monotonic()
            if not (deferred or first):
                self._say(f"stopped by {name} {self.phase}")
            elif not first:
                more = "; again to stop now" if number == signal.SIGINT else ""
                self._say(f"{name}: stopping after this step, with a checkpoint{more}")
                first = now
                self._first = self._first or now  # the main thread may hear of it much later
                interrupted = number == signal.SIGINT
                continue
            elif interrupted and number in repeats() and now - first > REPEAT_SECONDS:
                self._say("stopped now; what was saved last is in run_dir/checkpoints")
            else:
                continue
            timer = threading.Timer(PATIENCE, os._exit, (128 + number,))
            timer.daemon = True
            timer.start()
            self._timers.append(timer)

    def _say(self, text: str) -> None:
        """Writes a line to standard error, unless this rank is silent."""
        if not self.silent:
            with suppress(OSError):
                os.write(2, f"\ntigon.train: {text}\n".encode())


def reset_in_child() -> None:
    """Lets SIGTERM end a process that was just forked, as pools end their workers, and leaves the
    pipe to the parent, which would announce, and obey, the signals of its children."""
    if Signals.installed:
        Signals.installed.clear()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ctrl-C waits as it does in the parent


os.register_at_fork(after_in_child=reset_in_child)


def peer_failed() -> bool:
    """Returns whether another rank of this host has written its error file."""
    if (name := os.environ.get("TORCHELASTIC_ERROR_FILE")) is None:
        return False
    return any(path != Path(name) for path in Path(name).parents[1].glob("*/error.json"))


def repeats() -> tuple[int, ...]:
    """Returns the signals that stop an interrupted run at once: torch's agent sends SIGTERM to its
    ranks at a second Ctrl-C."""
    agent = "TORCHELASTIC_RUN_ID" in os.environ
    return (signal.SIGINT, signal.SIGTERM) if agent else (signal.SIGINT,)


def handled_signals() -> list[int]:
    """Returns the signals that end a run: all but a SIGHUP that is ignored already."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in NUMBERS if number != signal.SIGHUP or not ignored]
