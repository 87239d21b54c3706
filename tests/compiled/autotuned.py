"""python -m tests.compiled.autotuned: which configurations of an autotuned kernel are compiled.

Prints as JSON how many were found, how many of them the kernel itself then finds in the cache, and
how many times the autotuner keeps.
"""

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime import driver

from bench.peer_kernels import compile_configs
from tests.compiled.side_by_side import Driver
from tigon.kernels import precompile

CONFIGS = [triton.Config({"BLOCK": block}) for block in (16, 32, 64)]


@triton.autotune(CONFIGS, key=["N"], cache_results=True)
@triton.jit
def double_kernel(x, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, 2 * tl.load(x + at, at < N), at < N)


def step() -> None:
    x = torch.empty(64)
    double_kernel[(1,)](x, len(x) if x.sum().item() and torch.equal(x, x) else 0)


def main() -> None:
    hits: list[bool] = []
    found: list[int] = []
    start = precompile.side_by_side

    def count(jobs: Sequence[Any], environment: Mapping[str, str]) -> list[Any]:
        found.append(len(jobs))
        return start(jobs, environment)

    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        driver.set_active(Driver())
        precompile.side_by_side = count
        compile_configs(step)
        triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
        for config in CONFIGS:
            double_kernel.fn.warmup(torch.empty(64), 64, grid=(1,), **config.all_kwargs())
    times = len(double_kernel.cache)
    json.dump({"found": sum(found), "hits": sum(hits), "times": times}, sys.stdout)


if __name__ == "__main__":
    main()
