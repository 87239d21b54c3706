"""python -m tests.hopper [TEXT...]: compiles the kernels, in the forms whose names have each TEXT.

With the Triton that is installed, or one in a folder that PYTHONPATH names. Says on stderr what did
not compile, and prints how each kernel reads and writes, as JSON.
"""

import json
import multiprocessing
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from tests.hopper import append, branches, compiling, head, mlp, norms, optim, rotations

MODULES = append, mlp, rotations, norms, head, optim  # what takes long comes first
FORMS = {name: launch for module in MODULES for name, launch in module.forms()}


def compile_one(name: str) -> tuple[dict[str, Any], dict[str, str], set[branches.Way]]:
    found = compiling.compiled, compiling.failed, branches.taken
    for results in found:
        results.clear()
    compiling.compile_form(name, FORMS[name], small="large" not in name)
    return found


def main() -> int:
    names = [name for name in FORMS if all(text in name for text in sys.argv[1:])]
    compiled: dict[str, Any] = {}
    failed: dict[str, str] = {}
    taken: set[branches.Way] = set()
    compiling.pretend()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache  # of a kernel from a cache, no branches are seen
        processes, jobs = multiprocessing.get_context("fork"), len(os.sched_getaffinity(0))
        with ProcessPoolExecutor(min(4, jobs), processes) as pool:
            for name, running in [(name, pool.submit(compile_one, name)) for name in names]:
                try:
                    done, errors, ways = running.result()
                except BrokenProcessPool:
                    failed[name] = "was not compiled: this form or one beside it ended the process"
                    continue
                compiled |= done
                failed |= errors
                taken |= ways
    if len(names) == len(FORMS) and not failed:
        launched = {name.rpartition(": ")[2] for name in compiled}
        failed |= branches.missing(taken, launched)
    for name, problem in failed.items():
        print(f"{name}\n    {problem}", file=sys.stderr)
    json.dump({"compiled": compiled, "failed": failed}, sys.stdout)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
