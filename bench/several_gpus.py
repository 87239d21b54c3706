"""What needs several GPUs and is in no record of theirs yet, in less than ten minutes.

In this order, each step with what is left of the time. On two GPUs: the test of sums through memory
that GPUs share; a token's time with tensor=2, and that of its sums; the sides of bench/parallel.py
whose ratios are not measured; the tests of ranks that share a model, those in bfloat16 first. On
four: bench/scaling.py; the run whose rank is killed; the same tests. Records and logs go to a
folder, whatever ends the run; the same command goes on with what is missing.

    python -m bench several_gpus --to DIRECTORY --seconds 570
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from bench import harness, parallel, scaling
from bench.harness import RESULTS, ROOT, Record, progress
from bench.processes import python_command

SUMS, TESTS = "tests/parallel/test_one_shot_sum.py", "tests/gpu/test_tensor_cuda.py"
FIRST = "bfloat16 or test_tokens or backward or zero or muon"
LEAST = 20.0  # seconds that a step is begun with


def steps(
    gpus: int, commit: str | None, known: Record, *, tiny: bool
) -> Iterator[tuple[str, list[str]]]:
    """The name and the arguments of Python of each. `known`: bench/parallel.py's record here."""
    more = [f"--commit={commit}"] * (commit is not None) + ["--tiny"] * tiny
    pytest = ["-m", "pytest", "-q", "-rfE", "--durations=0", "-m", "gpu"]
    two = gpus < scaling.GPUS
    if two:
        yield "test_sums", [*pytest, SUMS]
    for name in ("generate_multi", "one_shot_sum") if two else ("scaling", "killed_run"):
        yield name, ["-m", "bench", name, *more]
    # As arguments, since some names have commas
    if two and (missing := parallel.missing(known)):
        yield "parallel", ["-m", "bench", "parallel", "--rounds=1", *more, *missing]
    for name, chosen in (("tests", FIRST), ("tests-others", f"not ({FIRST})")):
        yield name, [*pytest, TESTS, "-k", chosen]


def record_of(machine: str) -> Record:
    """bench/parallel.py's of these GPUs, if there is one."""
    found = harness.records("parallel") if list(RESULTS.glob("parallel-*.json")) else []
    return next((record for record in found if record.get("gpu") == machine), {"sides": {}})


def run(arguments: Sequence[str], log: Path, seconds: float) -> int | None:
    """Its exit code; None: it was not at its end after so many seconds."""
    with log.open("w") as out:
        process = subprocess.Popen(
            python_command(*arguments), cwd=ROOT, stdout=out, stderr=out, start_new_session=True
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)  # its ranks too; pytest says what it has found
        with suppress(subprocess.TimeoutExpired):
            process.wait(5.0)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return None


def keep(to: Path, since: float) -> None:
    """Copies of the records that were written since then."""
    for folder in (RESULTS, ROOT / "bench/out"):
        for file in folder.glob("*.json"):
            if file.stat().st_mtime >= since:
                shutil.copy(file, to)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=harness.KEEP_LINES)
    parser.add_argument("--to", type=Path, required=True, help="the folder of records and logs")
    parser.add_argument("--seconds", type=float, default=570.0, help="for all of it")
    parser.add_argument("--commit", help="as the other benchmarks have it")
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU")
    options = parser.parse_args(arguments)
    gpus, machine = torch.cuda.device_count(), "CPU"
    if not options.tiny:
        if gpus < parallel.GPUS:
            parser.error(f"needs {parallel.GPUS} GPUs, and there are {gpus}; or --tiny")
        machine = torch.cuda.get_device_name()
    # A background job ignores SIGINT, and so would the steps that it starts
    signal.signal(signal.SIGINT, signal.default_int_handler)
    options.to.mkdir(parents=True, exist_ok=True)
    began, since = time.monotonic(), time.time()
    for name, given in steps(gpus, options.commit, record_of(machine), tiny=options.tiny):
        left = options.seconds - (time.monotonic() - began)
        if left < LEAST:
            progress(f"{name}: no time is left")
            continue
        progress(f"{name}: {' '.join(given)}")
        log = options.to / f"{name}.log"
        code = run(given, log, left - 10)
        keep(options.to, since)
        text = log.read_text(errors="replace").rstrip()
        print(f"{name}, {'cut off' if code is None else f'exit code {code}'}:\n{text[-3000:]}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
