"""A side of a benchmark in a process of its own, or in one for each rank."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from threading import Timer
from typing import Any

from bench.harness import ROOT, Job, Record

GRACE = 5.0  # seconds that ranks have to end after one has failed
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": 1}


def environment(tree: Path = ROOT, **more: object) -> dict[str, str]:
    """That of a process which imports a checkout, before what is on PYTHONPATH here."""
    path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
    own = {"PYTHONPATH": path, "PYTHONSAFEPATH": 1, "HF_HUB_OFFLINE": 1} | more
    return os.environ | {name: str(value) for name, value in own.items()}


def python_command(*arguments: str) -> list[str]:
    """Returns the command of a Python that Linux kills when its parent ends, however it does: a
    side that outlives its benchmark takes the GPU's time from the next one.

    By a program before Python, as a `preexec_fn` waits forever for a lock that another thread held
    when the process was forked.
    """
    setpriv = shutil.which("setpriv")
    before = [setpriv, "--pdeathsig", "KILL"] if setpriv else []
    return [*before, sys.executable, *arguments]


def say(kind: str, **found: Any) -> None:
    """A line of a side's process, for `lines`."""
    print(json.dumps({"kind": kind, **found}), flush=True)


def lines(
    arguments: Sequence[str], seconds: float, log: Path | None = None, **options: Any
) -> Iterator[Record]:
    """The lines that a process of Python says; the last one has an error if it did not end well.

    They come as they are said, or with a `log`, a file for all that it prints, at its end.
    """
    options = {"env": environment()} | options
    with (log or Path(os.devnull)).open("w") as file:
        process = subprocess.Popen(
            python_command(*arguments),
            stdout=file if log else subprocess.PIPE,
            stderr=file if log else None,
            text=True,
            start_new_session=True,
            **options,
        )
    timer = Timer(seconds, end, [process])
    timer.start()
    try:
        yield from said(process.stdout or ())
        status = process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:
            end(process)
    text = log.read_text().splitlines() if log else []
    yield from said(text)
    if status == -signal.SIGKILL:
        yield {"kind": "ended", "error": f"not done after {seconds:g} s"}
    elif status:
        errors = [line.strip() for line in text if "Error" in line] or [""]
        yield {
            "kind": "ended",
            "error": f"it ended with status {status} {errors[-1][:300]}".strip(),
        }


def said(text: Iterable[str]) -> Iterator[Record]:
    """What was said, among other lines."""
    return (json.loads(line) for line in text if line.startswith('{"kind"'))


def end(process: subprocess.Popen[str]) -> None:
    """Ends a process and those that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def spawn(request: Any, seconds: float, script: Path) -> Iterator[Record]:
    """The lines of a script that is given a request: a dataclass that says whether it is `tiny`."""
    more = NO_GPU if request.tiny else {}
    arguments = [str(script), json.dumps(asdict(request))]
    return lines(arguments, seconds, env=environment(**more))


def side_lines(job: Job, request: Callable[..., Any], script: Path) -> Iterator[tuple[str, Record]]:
    """Each side of a job with each line that its process says, all within --limit seconds; a
    `request` has the side, whether Liger is there, the steps, and whether it is tiny."""
    until = time.monotonic() + job.options.limit
    liger = job.record["libraries"]["Liger"] is not None and not job.tiny
    steps = 2 if job.tiny or job.quick else job.options.steps
    for side in job.only:
        seconds = max(1.0, until - time.monotonic())
        for line in spawn(request(side, liger, steps, job.tiny), seconds, script):
            yield side, line


def run_ranks(script: Path, gpus: int, root: Path, arguments: list[str], seconds: float) -> Record:
    """What the first of `gpus` processes of this script writes to its first argument; or an error,
    and the end of what the first one said that failed."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    shared: dict[str, object] = {}
    if gpus > 1:
        shared |= {"WORLD_SIZE": gpus, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        shared |= {"LOCAL_WORLD_SIZE": gpus, "TIGON_CACHE": root / "cache"}
    out, ranks = root / "found.json", []
    out.unlink(missing_ok=True)
    for rank in range(gpus):
        own = shared | ({"RANK": rank, "LOCAL_RANK": rank} if gpus > 1 else {})
        command = python_command(str(script), str(out), *arguments)
        with (root / f"rank-{rank}.txt").open("w") as log:
            env = environment(**own)
            ranks.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
    first = failed(ranks, seconds)
    if first is None and out.exists():
        return json.loads(out.read_text())
    printed = (root / f"rank-{first or 0}.txt").read_text()
    text = printed.replace(f"{ROOT}/", "").splitlines()  # a record is not about where it was made
    last = (text or ["nothing was said"])[-1]
    if first is not None and ranks[first].returncode == -signal.SIGKILL:
        last = f"not at its end after {seconds:.0f} s: {last}"
    return {"error": last, "log": text[-25:]}


def failed(ranks: list[subprocess.Popen[bytes]], seconds: float) -> int | None:
    """Wait for all to end, at most so many seconds; the first that failed. The others, which would
    wait for it, are ended too."""
    first, until = None, time.monotonic() + seconds
    while None in (codes := [process.poll() for process in ranks]):
        if first is None and any(codes):
            first = next(rank for rank, code in enumerate(codes) if code)
            until = min(until, time.monotonic() + GRACE)
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    for process in ranks:
        process.kill()
    ended = [process.wait() for process in ranks]
    return next((rank for rank, code in enumerate(ended) if code), None) if first is None else first
