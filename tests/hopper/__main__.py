"""python -m tests.hopper [--quick] [TEXT...]: compiles kernels of forms whose names have each TEXT.

With the Triton that is installed, or one in a folder that PYTHONPATH names. Says on stderr what did
not compile, and prints how each kernel reads and writes, as JSON. With --quick, kernels are
compiled to the end where tests look at their code; the others go through the front end alone.
"""

import json
import multiprocessing
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from tests.hopper import (
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
    quick = "--quick" in sys.argv
    texts = [argument for argument in sys.argv[1:] if argument != "--quick"]
    names = [[name for name in forms if all(text in name for text in texts)] for forms in FORMS]
    compiled: dict[str, Any] = {}
    failed: dict[str, str] = {}
    taken: set[branches.Way] = set()
    compiling.pretend()
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
    if not texts and not failed:
        launched = {name.rpartition(": ")[2] for name in compiled}
        failed |= branches.missing(taken, launched)
    for name, problem in failed.items():
        print(f"{name}\n    {problem}", file=sys.stderr)
    json.dump({"compiled": compiled, "failed": failed}, sys.stdout)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
