"""Ranks in processes that are forked from one which has imported torch: they start at once.

Each has the environment that --nproc and torchrun would give it.
"""

import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # a second, and every run imports it late
import torch.distributed as dist

from tigon.train import main

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.train.preload"])
OUT, ERR = "stdout", "stderr"
VIEWS = "returned a view tensor"  # FSDP2 warns of it, and of wrong gradients
# What torchrun sets in the first of two processes, which it has on one host
TORCHRUN = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


class Ranks:
    """`function(*arguments)` on `count` ranks; without ranks around it where `count` is 1.

    `on_gpus`: each has a GPU. Where there is one GPU alone they share it, as hosts of one GPU each:
    by names of their own, NCCL takes them for such, and sends through sockets.
    """

    def __init__(
        self,
        count: int,
        function: Callable[..., None],
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
        on_gpus: bool = False,
    ):
        hosts = on_gpus and torch.cuda.device_count() < count
        self.directory = tempfile.TemporaryDirectory(prefix="tigon-ranks-")
        for name in (OUT, ERR):
            Path(self.directory.name, name).touch()
        # The ranks find each other here, so that no free port can be lost to another process
        self.server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        common = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.server.port),
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        self.processes = []
        for rank in range(count):
            own = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if count > 1 else {}
            if hosts:
                own |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NCCL_HOSTID": str(rank)}
                own |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket"}
            given = (
                os.environ | own | (environment or {}),
                torch.get_num_threads(),
                self.directory.name,
            )
            process = CONTEXT.Process(target=_rank, args=(*given, function, arguments))
            process.start()
            self.processes.append(process)

    @property
    def codes(self) -> list[int | None]:
        """Exit codes; None of a rank that runs."""
        return [process.exitcode for process in self.processes]

    def kill(self) -> None:
        """All ranks that run, and what they have started, as the loss of a machine does."""
        for process in self.processes:
            if process.exitcode is None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        for process in self.processes:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()

    def one_ended(self, seconds: float) -> bool:
        """Wait until any rank has ended, but not longer than so many seconds."""
        return bool(wait([process.sentinel for process in self.processes], seconds))

    def finish(self, seconds: float = 240) -> str:
        """Wait for all to end well; what they have printed."""
        codes = self._end(seconds)
        assert codes == [0] * len(codes), f"exit codes {codes}: {self.errors[-3000:]}"
        assert VIEWS not in self.errors, self.errors[-3000:]
        return self.printed

    def fail(self, *expected: int) -> list[str]:
        """Wait for all to end with these exit codes; the lines of their errors."""
        codes = self._end(240)
        assert codes == [*expected], f"exit codes {codes}: {self.errors[-3000:]}"
        return self.errors.splitlines()

    def _end(self, seconds: float) -> list[int | None]:
        """Wait until all have ended, if none fails; their exit codes."""
        until = time.monotonic() + seconds
        while not any(self.codes):
            running = [p.sentinel for p in self.processes if p.exitcode is None]
            left = max(0.0, until - time.monotonic())
            if not running or not wait(running, left):  # for none it would wait to its end
                break
        if any(self.codes):
            for process in self.processes:  # the others say why, if they know
                process.join(30)
        codes = self.codes
        self.kill()
        return codes

    @property
    def printed(self) -> str:
        return Path(self.directory.name, OUT).read_text()

    @property
    def errors(self) -> str:
        return Path(self.directory.name, ERR).read_text()


def train_on(count: int, settings: list[str], **environment: str) -> str:
    """A run on `count` ranks; what it prints."""
    return Ranks(count, main, settings, environment=environment).finish()


def train_on_gpus(settings: list[str]) -> str:
    """A run on two ranks, on two GPUs if there are as many; what it prints."""
    return Ranks(2, main, settings, on_gpus=True).finish()


def _rank(
    environment: dict[str, str],
    threads: int,
    directory: str,
    function: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    gc.freeze()  # what torch's import has made is not garbage
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # nohup and background jobs of shells
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # have these ignored
    os.environ.clear()
    os.environ.update(environment)
    for number, name in ((1, OUT), (2, ERR)):
        os.dup2(os.open(f"{directory}/{name}", os.O_WRONLY | os.O_APPEND), number)
    for stream in (sys.stdout, sys.stderr):  # lines are whole, also under PYTHONUNBUFFERED
        stream.reconfigure(line_buffering=True, write_through=False)
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    function(*arguments)
