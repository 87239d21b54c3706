"""python -m tests.fuzz --cases 100000 --out FILE: the long run, its result as JSON."""

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported

from tests.fuzz import config, text, weights
from tests.fuzz.harness import Fuzzer

TARGETS = {target.name: target for module in (config, text, weights) for target in module.TARGETS}
SHARES = sum(target.share for target in TARGETS.values())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=2000, help="of all targets together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where the result is written")
    args = parser.parse_args()
    results = {}
    with TemporaryDirectory(prefix="tigon-fuzz-", ignore_cleanup_errors=True) as root:
        os.environ["TIGON_CACHE"] = f"{root}/cache"
        for name, target in TARGETS.items():
            fuzzer, begun, fault = Fuzzer(target, Path(root)), time.monotonic(), ""
            try:
                fuzzer.run(round(args.cases * target.share / SHARES), seed=10**7 * args.seed)
            except AssertionError as error:
                fault = "\n".join([str(error), *getattr(error, "__notes__", [])])[:5000]
                print(fault, file=sys.stderr, flush=True)
            seconds = round(time.monotonic() - begun, 1)
            results[name] = {"cases": fuzzer.count, "seconds": seconds, "fault": fault}
    result = {
        "command": " ".join(["python -m tests.fuzz", *sys.argv[1:]]),
        "seed": args.seed,
        "python": platform.python_version(),
        "cases": sum(target["cases"] for target in results.values()),
        "targets": results,
    }
    print(json.dumps(result, indent=2))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    return int(any(target["fault"] for target in results.values()))


if __name__ == "__main__":
    sys.exit(main())
