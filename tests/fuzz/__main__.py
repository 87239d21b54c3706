"""python -m tests.fuzz --cases 100000 --jobs 2 --out FILE: the long run, its result as JSON."""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported

from tests.fuzz.harness import Fuzzer, workspace
from tests.fuzz.targets import TARGETS


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


def work(args: argparse.Namespace) -> dict[str, Any]:
    """One process' share of the cases: each target's in turn."""
    whole = sum(TARGETS[name].share for name in args.only)
    begin, found = time.monotonic(), {}
    with workspace() as root:
        os.environ["TIGON_CACHE"] = str(root / "cache")
        for name in args.only:
            target, then = TARGETS[name], time.monotonic()
            left = begin + args.seconds - then
            fuzzer = Fuzzer(target, root)
            cases = round(args.cases / args.jobs * target.share / whole)
            # Where time is short, each target gets its share of what is left
            rest = sum(TARGETS[n].share for n in args.only[args.only.index(name) :])
            until = then + left * target.share / rest
            fault = None
            try:
                fuzzer.run(cases, seed=10**6 * args.seed + 10**4 * (args.job or 0), until=until)
            except AssertionError as error:
                fault = "\n".join([str(error), *getattr(error, "__notes__", [])])[:5000]
                print(fault, file=sys.stderr, flush=True)
            seconds = round(time.monotonic() - then, 1)
            found[name] = {"cases": fuzzer.count, "seconds": seconds, "fault": fault}
    return found


def join(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        name: {
            "cases": sum(part[name]["cases"] for part in parts),
            "seconds": round(sum(part[name]["seconds"] for part in parts), 1),
            "faults": [part[name]["fault"] for part in parts if part[name]["fault"]],
        }
        for name in parts[0]
    }


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
        "command": f"python -m tests.fuzz --cases {args.cases} --jobs {args.jobs}",
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
