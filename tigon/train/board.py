"""What ranks tell each other outside of collectives, which a rank that has failed never joins."""

import json
import multiprocessing
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

from tigon.utils.terminal import one_line

LAUNCHED = "TIGON_LAUNCHED"  # in the environment of ranks, the PID of the parent that reports
POLL = 1.0  # seconds between two signs of life, and two looks for a failure of another rank
SILENT = 45.0  # seconds without a sign of life after which a rank counts as dead
ENDED = "ended"  # the last sign of a rank that does not need the others any more
GRACE = 3.0  # seconds that a rank has to end by itself after another one failed
LINGER = 10.0  # seconds for a failed rank to leave the process group
LATE = timedelta(seconds=10)  # for other ranks to arrive where one has failed already
FOREVER = timedelta(days=365)
ORPHANED = "the process that started the ranks was killed"


@dataclass(frozen=True)
class Failure:
    text: str
    code: int = 1
    rank: int | None = None
    killed: bool = False  # so that it says nothing itself


class Board:
    """A store that all ranks reach: the server that they found each other with.

    Each rank leaves signs of life there, and looks for those of the next one: one that was killed
    with its host tells nobody, and over NCCL the others would wait for it for ten minutes.
    """

    def __init__(self, rank: int = 0, size: int = 1):
        self.rank, self.size = rank, size
        self.poll = max(POLL, size / 1000)  # the server answers some thousand requests a second
        self.step = 0  # the last that this rank has begun
        self.who = "tigon.train"  # begins what is said
        self.before_end: Callable[[], object] = lambda: None  # of a process that another rank ends
        self._signs = self._round = 0
        self._closed, self._wake = threading.Event(), threading.Event()
        self._lock, self._saying = threading.Lock(), threading.Lock()
        self._said = False
        if size > 1:
            self.store = connect()
            self._leave_sign(self.store)  # at once: it may be killed before the first poll
            thread = threading.Thread(target=self._watch, args=(connect(),), daemon=True)
            thread.start()

    def begin_step(self, step: int) -> None:
        """So that the others know, if this rank is killed."""
        self.step = step
        self._wake.set()

    def gather(self, text: str, *, late: timedelta = FOREVER) -> list[str | None]:
        """The text of every rank, in their order; None for those that are `late`."""
        if self.size == 1:
            return [text]
        self._round += 1
        keys = [f"{self._round}/{rank}" for rank in range(self.size)]
        # Names of files may hold any byte
        self.store.set(keys[self.rank], text.encode(errors="backslashreplace").decode())
        with suppress(RuntimeError):  # dist.DistStoreError is one
            self.store.wait(keys, late)
        return [self.store.get(key).decode() if self.store.check([key]) else None for key in keys]

    def fail(self, text: str, code: int = 1) -> bool:
        """Tell all ranks to end; False if another one has told them before."""
        self.close()
        if self.size == 1:
            return True
        value = json.dumps(asdict(Failure(text, code, self.rank)))
        with suppress(RuntimeError):  # the server is gone
            return self.store.compare_set("failure", "", value).decode() == value
        return True

    def failure(self) -> Failure | None:
        """Of another rank, after what looks like it from here: one that ends tells the others
        within a second, and one that leaves no more signs of life has been killed. If the store
        is gone, that: another rank may have ended of it before this one has."""
        if self.size == 1:
            return None
        try:
            before = self._all_signs()
            until = time.monotonic() + 3 * self.poll
            while time.monotonic() < until:
                if found := read_failure(self.store):
                    return found if found.rank != self.rank else None
                time.sleep(0.1)
            now = self._all_signs()
            for rank, sign in before.items():
                if sign == now[rank] != ENDED and rank != self.rank:
                    return tell_silence(self.store, rank, "ended without a word")
        except RuntimeError:
            return self._without_store()
        return None

    def say(self, failure: Failure) -> None:
        """By a rank that another one ends: once on each host, unless a parent has the last word."""
        with self._saying:  # the main thread and the one that watches may both find it
            if self._said:
                return
            self._said = True
            report(failure)
            alone = LAUNCHED not in os.environ or orphaned()
            if alone and os.environ.get("LOCAL_RANK", "0") == first_left(failure):
                print(f"{self.who}: {one_line(failure.text)}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """This rank is ending: nobody else needs to end it."""
        with self._lock:
            self._closed.set()
            self._wake.set()
            if self.size > 1:
                with suppress(RuntimeError):
                    self.store.set(sign_of(self.rank), ENDED)

    def _all_signs(self) -> dict[int, str]:
        """Of the ranks that have left any."""
        keys = {rank: sign_of(rank) for rank in range(self.size)}
        return {
            rank: self.store.get(key).decode()
            for rank, key in keys.items()
            if self.store.check([key])
        }

    def _leave_sign(self, store: dist.Store) -> None:
        self._signs += 1
        sign = json.dumps([self._signs, self.step, socket.gethostname()])
        store.set(sign_of(self.rank), sign)

    def _watch(self, store: dist.Store) -> None:
        silence = Silence(store, (self.rank + 1) % self.size, 2 * self.poll)
        while not self._closed.is_set():
            self._wake.wait(self.poll)
            self._wake.clear()
            try:
                with self._lock:
                    if self._closed.is_set():
                        return
                    self._leave_sign(store)
                failure = read_failure(store) or silence.look()
                lost = False
            except RuntimeError:
                failure, lost = None, True
            if (failure or lost) and not self._closed.wait(GRACE):
                failure = failure or self._without_store()  # steps may have ended meanwhile
                self.before_end()
                self.say(failure)
                end_process(failure.code)

    def _without_store(self) -> Failure:
        where = os.environ["MASTER_ADDR"]
        text = f"the process on {where} that ranks meet in is gone, or cannot be reached"
        text = ORPHANED if orphaned() else text
        return Failure(f"{text}; the last step of rank {self.rank} was {self.step}")


def orphaned() -> bool:
    """Whether the process that has started the ranks of this host was killed."""
    parent = os.environ.get(LAUNCHED, "")
    # A command that a rank's hook starts inherits LAUNCHED, but without WORLD_SIZE is not a rank
    return "WORLD_SIZE" in os.environ and parent.isdecimal() and os.getppid() != int(parent)


@contextmanager
def ended_with_parent() -> Iterator[None]:
    """Ends this process if its parent is killed, while there is no board that would: the parent is
    the server of the store that ranks connect to."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(POLL):
            if orphaned():
                if os.environ.get("LOCAL_RANK") == "0":
                    print(f"tigon: {ORPHANED} before the first step", file=sys.stderr, flush=True)
                end_process(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()


class Silence:
    """How long a rank has left no sign of life."""

    def __init__(self, store: dist.Store, rank: int, most: float) -> None:
        self.store, self.rank, self.most = store, rank, most
        self.sign, self.seconds, self.looked = "", 0.0, time.monotonic()

    def look(self) -> Failure | None:
        """What all ranks are told if it was too long. A look counts `most` seconds at most, so that
        after a pause of this process, too, the other one has the time to leave one."""
        before, self.looked = self.looked, time.monotonic()
        key = sign_of(self.rank)
        sign = self.store.get(key).decode() if self.store.check([key]) else ""
        if sign != self.sign or sign in ("", ENDED):
            self.sign, self.seconds = sign, 0.0
            return None
        self.seconds += min(self.looked - before, self.most)
        if self.seconds < SILENT:
            return None
        return tell_silence(self.store, self.rank, f"has not answered for {SILENT:.0f} s")


def sign_of(rank: int) -> str:
    return f"alive/{rank}"


def place_of(store: dist.Store, rank: int) -> tuple[str, str]:
    """Of a rank's last sign, its host and its step, as parts of a sentence."""
    key = sign_of(rank)
    sign = store.get(key).decode() if store.check([key]) else ENDED
    if sign == ENDED:
        return "", ""
    _, step, host = json.loads(sign)
    return f" on {host}", f"; its last step was {step}" if step else "; it had not begun a step"


def tell_silence(store: dist.Store, rank: int, what: str) -> Failure:
    """Tell all ranks that one is gone, unless they were told something else before: that."""
    where, step = place_of(store, rank)
    failure = Failure(f"rank {rank}{where} {what}{step}", rank=rank, killed=True)
    value = store.compare_set("failure", "", json.dumps(asdict(failure)))
    return Failure(**json.loads(value))


def connect() -> dist.Store:
    """A client of the server of MASTER_ADDR and MASTER_PORT."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return prefixed(dist.TCPStore(host, port, is_master=False, wait_for_workers=False))


def prefixed(store: dist.Store) -> dist.Store:
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    return dist.PrefixStore("/".join(["tigon", *(os.environ.get(n, "") for n in names)]), store)


def read_failure(store: dist.Store) -> Failure | None:
    if not store.check(["failure"]):
        return None
    return Failure(**json.loads(store.get("failure")))


def report(failure: Failure) -> None:
    """For torchrun, whose last lines then have the failure's text."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        message = {"message": failure.text, "timestamp": int(time.time())}
        with suppress(OSError), open(path, "w") as file:
            json.dump(message, file)


def first_left(failure: Failure) -> str:
    """Of the ranks of this host the first, or the next one if that is the one that was killed."""
    own, place = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
    return "1" if failure.killed and failure.rank == own - place else "0"


def end_soon(code: int) -> None:
    """At the latest after LINGER: leaving a group of which a rank is dead may take for ever."""
    ending = threading.Timer(LINGER, end_process, (code,))
    ending.daemon = True
    ending.start()


def end_process(code: int) -> None:
    """Now, though the main thread may be waiting for another rank for ever."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(code)


def told(answers: Sequence[str | None]) -> str:
    """The problems of ranks as lines; "" and None are none. The same of all ranks is said once."""
    by_text: dict[str, list[int]] = {}
    for rank, text in enumerate(answers):
        if text:
            by_text.setdefault(text, []).append(rank)
    if len(by_text) == 1 and len(next(iter(by_text.values()))) == len(answers):
        return next(iter(by_text))
    return "\n  ".join(
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {text}"
        for text, ranks in by_text.items()
    )
