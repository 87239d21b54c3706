"""python -m tests.fuzz --cases 100000 --jobs 2 --out FILE: the long run, its result as JSON."""

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported

from tests.fuzz import adapters, config, runs, text, weights
from tests.fuzz.harness import Fuzzer

TARGETS = {
    target.name: target
    for module in (adapters, config, runs, text, weights)
    for target in module.TARGETS
}
TURNS = 20  # of each target


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=2000, help="of all targets together")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9, help="of a clock: no case after them")
    parser.add_argument("--only", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--out", type=Path, help="where the result is written")
    parser.add_argument("--job", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def apportion(total: int, shares: list[float]) -> list[int]:
    """Split a total into whole numbers in proportion to the shares."""
    ends = [round(total * sum(shares[:i]) / sum(shares)) for i in range(len(shares) + 1)]
    return [end - begin for begin, end in pairwise(ends)]


def work(args: argparse.Namespace) -> dict[str, Any]:
    """Run the cases of one process.

    The targets take turns, so that each has run its share when the time is over.
    """
    until, job = time.monotonic() + args.seconds, args.job or 0
    cases = apportion(args.cases, [TARGETS[name].share for name in args.only])
    with TemporaryDirectory(prefix="tigon-fuzz-", ignore_cleanup_errors=True) as root:
        os.environ["TIGON_CACHE"] = f"{root}/cache"
        fuzzers = {name: Fuzzer(TARGETS[name], Path(root)) for name in args.only}
        seconds, faults = dict.fromkeys(args.only, 0.0), dict.fromkeys(args.only, "")
        for turn, (name, all_cases) in itertools.product(
            range(TURNS), zip(args.only, cases, strict=True)
        ):
            begun, parts = time.monotonic(), apportion(all_cases, [1] * (args.jobs * TURNS))
            if faults[name] or begun > until:
                continue
            seed = 10**7 * args.seed + 10**5 * job + 10**3 * turn
            try:
                fuzzers[name].run(parts[TURNS * job + turn], seed=seed, until=until)
            except AssertionError as error:
                faults[name] = "\n".join([str(error), *getattr(error, "__notes__", [])])[:5000]
                print(faults[name], file=sys.stderr, flush=True)
            seconds[name] += time.monotonic() - begun
        return {
            name: {"cases": fuzzer.count, "seconds": seconds[name], "fault": faults[name]}
            for name, fuzzer in fuzzers.items()
        }


def join(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Add up the results of all processes, by target."""
    results = {}
    for name in parts[0]:
        cases, seconds = (sum(part[name][key] for part in parts) for key in ("cases", "seconds"))
        results[name] = {
            "cases": cases,
            "seconds": round(seconds, 1),
            "per_second": round(cases / seconds, 1) if seconds else None,
            "faults": [part[name]["fault"] for part in parts if part[name]["fault"]],
        }
    return results


def main() -> int:
    args = arguments()
    if args.job is not None:
        print(json.dumps(work(args)))
        return 0
    begin = time.monotonic()
    command = [sys.executable, "-m", "tests.fuzz", *sys.argv[1:]]
    jobs = [
        subprocess.Popen([*command, "--job", str(job)], stdout=subprocess.PIPE, text=True)
        for job in range(args.jobs)
    ]
    outputs = [job.communicate()[0] for job in jobs]
    died = [job.returncode for job in jobs if job.returncode]
    targets = join([json.loads(output.splitlines()[-1]) for output in outputs if output])
    result = {
        "command": " ".join(["python -m tests.fuzz", *sys.argv[1:]]),
        "seed": args.seed,
        "python": platform.python_version(),
        "cases": sum(target["cases"] for target in targets.values()),
        "seconds": round(time.monotonic() - begin, 1),
        "died": died,
        "targets": targets,
    }
    print(json.dumps(result, indent=2))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    return int(bool(died) or any(target["faults"] for target in targets.values()))


if __name__ == "__main__":
    sys.exit(main())
