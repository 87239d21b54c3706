"""`--nproc N`: the ranks of this host, as children of one process.

torchrun would end a rank that is still writing its checkpoint 30 s after a signal, and its own
report would be the last thing on the terminal.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from json import dumps
from types import FrameType

import torch
import torch.distributed as dist

from tigon.train.board import LAUNCHED, Failure, place_of, prefixed, read_failure
from tigon.train.signals import NUMBERS, heeded

POLL = 0.1  # seconds
GRACE = 15.0  # seconds that ranks have to end after one has failed
STOPPED = tuple(128 + number for number in NUMBERS)


def check_count(count: int, device: str) -> None:
    if count < 1:
        raise ValueError(f"--nproc {count} must be at least 1")
    if "WORLD_SIZE" in os.environ:
        raise ValueError(f"--nproc {count} inside torchrun, which starts the ranks: leave it out")
    gpus = torch.cuda.device_count()
    if count > gpus and (device == "cuda" or (device == "auto" and gpus)):
        raise ValueError(f"--nproc {count}, but torch sees {gpus} CUDA devices")


def run_ranks(
    count: int,
    arguments: Sequence[str],
    module: str = "tigon.train",
    stop_within: float | None = None,
) -> tuple[int, str | None]:
    """`python -m module arguments` on `count` ranks: the exit code, and what went wrong.

    `stop_within`: seconds that the other ranks have to end once a signal has ended one. None: as
    long as they need, to write a checkpoint.
    """
    # The children find each other here, so that no free port can be lost to another process
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = prefixed(server)
    threads = max(1, (os.cpu_count() or 1) // count)
    environment = {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(server.port),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        LAUNCHED: str(os.getpid()),
    }
    children: list[subprocess.Popen[bytes]] = []
    received: list[int] = []
    with ExitStack() as stack:
        # In sessions of their own, so that Ctrl-C comes from here alone
        for number in heeded():

            def forward(number: int, frame: FrameType | None) -> None:
                received.append(number)
                for child in children:
                    if child.poll() is None:
                        child.send_signal(number)

            stack.callback(signal.signal, number, signal.signal(number, forward))
        stack.callback(_kill, children)
        for rank in range(count):
            ranked = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, "-m", module, *arguments]
            children.append(subprocess.Popen(command, env=ranked, start_new_session=True))
            if received:  # before this one was there
                children[-1].send_signal(received[0])
        codes = _wait(children, store, stop_within)
    failure = read_failure(store)
    # Ranks say of themselves that they stop, but not one that a signal has ended at once
    quiet = bool(received) or not (failure and failure.killed)
    if failure is None or (failure.code in STOPPED and quiet):
        return max(codes), None
    return failure.code, failure.text


def _wait(
    children: Sequence[subprocess.Popen[bytes]], store: dist.Store, stop_within: float | None
) -> list[int]:
    """For all to end; after a failure of one not longer than GRACE. The exit codes of the ranks
    that ended by themselves."""
    until: float | None = None
    while None in (codes := [child.poll() for child in children]):
        bad = [(rank, code) for rank, code in enumerate(codes) if code and code not in STOPPED]
        if until is None and bad:
            until = time.monotonic() + GRACE
            _tell(store, *bad[0])
        elif until is None and stop_within is not None and any(codes):
            until = time.monotonic() + stop_within
        if until is not None and time.monotonic() > until:
            break
        time.sleep(POLL)
    late = {rank for rank, child in enumerate(children) if child.poll() is None}
    _kill(children)
    ended = [(rank, child.wait()) for rank, child in enumerate(children) if rank not in late]
    for rank, code in ended:
        if code and code not in STOPPED:
            _tell(store, rank, code)
            break
    return [128 - code if code < 0 else code for _, code in ended]


def _tell(store: dist.Store, rank: int, code: int) -> None:
    """The other ranks, unless a rank has told them why it ends."""
    text, killed = f"rank {rank} ended with exit code {code}", code < 0
    if killed:
        name = signal.Signals(-code).name
        memory = ", perhaps because memory ran out" if name == "SIGKILL" else ""
        text = f"rank {rank} was killed by {name} on {socket.gethostname()}{memory}"
        code = 128 - code
    text += place_of(store, rank)[1]
    store.compare_set("failure", "", dumps(asdict(Failure(text, code, rank, killed))))


def _kill(children: Sequence[subprocess.Popen[bytes]]) -> None:
    for child in children:
        if child.poll() is None:
            child.kill()
