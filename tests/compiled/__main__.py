"""python -m tests.compiled [--capability N] [--quick] [TEXT...]: compiles kernels of forms whose
names have each TEXT, for GPUs of this compute capability times ten, by default 90.

With the Triton that is installed, or one in a folder that PYTHONPATH names. Says on stderr what did
not compile or asks for more shared memory than there is, and prints how each kernel reads and
writes, as JSON. With --quick, kernels are compiled as far as tests look at them: for 90 to the end
or through the front end alone, otherwise to where shared memory is known, and only forms that may
take much.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from tests.compiled import (
    append,
    attention,
    branches,
    compiling,
    convolution,
    delta,
    head,
    mlp,
    norms,
    optim,
    rotations,
)

# What takes long comes first
MODULES = append, attention, delta, mlp, rotations, convolution, norms, head, optim
FORMS = [dict(module.forms()) for module in MODULES]
Found = tuple[dict[str, Any], dict[str, str], set[branches.Way]]


def compile_some(module: int, names: list[str], quick: bool) -> Found:
    found = compiling.compiled, compiling.failed, branches.taken
    for results in found:
        results.clear()
    for name in names:
        small = "large" not in name
        compiling.compile_form(name, FORMS[module][name], small=small, quick=quick)
    return found


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.compiled")
    parser.add_argument("--capability", type=int, choices=compiling.SHARED, default=90)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("texts", nargs="*", metavar="TEXT")
    options = parser.parse_args()
    hopper, quick, texts = options.capability == 90, options.quick, options.texts
    wanted = set().union(*FORMS) if hopper or not quick else compiling.LARGE
    names = [
        [name for name in forms if name in wanted and all(text in name for text in texts)]
        for forms in FORMS
    ]
    compiled: dict[str, Any] = {}
    failed: dict[str, str] = {}
    taken: set[branches.Way] = set()
    compiling.pretend(options.capability)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache  # of a kernel from a cache, no branches are seen
        processes, jobs = multiprocessing.get_context("fork"), len(os.sched_getaffinity(0))
        with ProcessPoolExecutor(min(4, jobs), processes) as pool:
            parts = [(*part, quick) for part in enumerate(names) if part[1]]
            for part, running in [(part, pool.submit(compile_some, *part)) for part in parts]:
                try:
                    done, errors, ways = running.result()
                except BrokenProcessPool:
                    first, last = part[1][0], part[1][-1]
                    failed[f"{first} to {last}"] = "were not compiled: the process ended"
                    continue
                compiled |= done
                failed |= errors
                taken |= ways
    if hopper and not texts and not failed:
        launched = {name.rpartition(": ")[2] for name in compiled}
        failed |= branches.missing(taken, launched)
    for name, problem in failed.items():
        print(f"{name}\n    {problem}", file=sys.stderr)
    json.dump({"compiled": compiled, "failed": failed}, sys.stdout)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
