"""What ranks tell each other outside of collectives, which a rank that has failed never joins."""

import json
import multiprocessing
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

LAUNCHED = "TIGON_LAUNCHED"  # in the environment of ranks whose parent says what ended them
POLL = 1.0  # seconds between two looks for a failure of another rank
GRACE = 3.0  # seconds that a rank has to end by itself after another one failed
LATE = timedelta(seconds=10)  # for other ranks to arrive where one has failed already
FOREVER = timedelta(days=365)


@dataclass(frozen=True)
class Failure:
    text: str
    code: int = 1
    rank: int | None = None


class Board:
    """A store that all ranks reach: the server that they found each other with."""

    def __init__(self, rank: int = 0, size: int = 1):
        self.rank, self.size = rank, size
        self._round, self._closed = 0, threading.Event()
        if size > 1:
            self.store = connect()
            thread = threading.Thread(target=self._watch, args=(connect(),), daemon=True)
            thread.start()

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

    def failure(self, wait: float = 0.0) -> Failure | None:
        """Of another rank."""
        until = time.monotonic() + wait
        while self.size > 1:
            with suppress(RuntimeError):
                if found := read_failure(self.store):
                    return found if found.rank != self.rank else None
            if time.monotonic() >= until:
                break
            time.sleep(0.1)
        return None

    def close(self) -> None:
        """This rank is ending: nobody else needs to end it."""
        self._closed.set()

    def _watch(self, store: dist.Store) -> None:
        while not self._closed.wait(POLL):
            try:
                failure = read_failure(store)
            except RuntimeError:
                failure = Failure("the process that ranks meet in is gone")
            if failure and not self._closed.wait(GRACE):
                end_process(failure.code)


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
    return "\n".join(
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {text}"
        for text, ranks in by_text.items()
    )
