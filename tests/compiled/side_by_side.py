"""python -m tests.compiled.side_by_side MODEL...: which kernels a pass still has to compile.

Kernels of a tiny model's pass are compiled side by side as for a GPU, and then those of the same
pass with numbers. Prints as JSON, of each model, how many were found, and names of those that the
second pass has not found in the cache.
"""

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.compiled import compiling
from tests.compiled.specializations import MODELS, SIZES, fill_memory
from tigon.kernels import precompile, use
from tigon.models import CausalLM
from tigon.train.compile_step import allocate


class Driver(compiling.Driver):
    """With which launchers are not built."""

    utils = SimpleNamespace(get_device_properties=lambda _: {"max_shared_mem": 227 << 10})
    launcher_cls = staticmethod(lambda source, metadata: None)


def compute_gradients(model: CausalLM) -> None:
    ids = torch.zeros(1, 64, dtype=torch.long)
    with use("triton"):
        model(ids, labels=ids).loss.backward()


def compute_on_fakes(model: CausalLM) -> None:
    allocate(model, torch.device("cpu"))
    compute_gradients(model)


def look_at(name: str) -> dict[str, Any]:
    """Compiles for a model, and runs its pass."""
    family, changes = MODELS[name]
    build = partial(family.from_config, SIZES | changes, dtype=torch.bfloat16)
    found: list[int] = []
    start = precompile.side_by_side

    def count(jobs: Sequence[Any], environment: Mapping[str, str]) -> list[Any]:
        found.append(len(jobs))
        return start(jobs, environment)

    precompile.side_by_side = count
    with precompile.compile_kernels(partial(compute_on_fakes, build(device="meta"))) as compilation:
        pass
    precompile.side_by_side = start
    assert compilation.complete
    missed: list[str] = []

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            missed.append(src.name)

    triton.knobs.compilation.listener = listen
    getitem = JITFunction.__getitem__
    JITFunction.__getitem__ = lambda kernel, grid: partial(kernel.warmup, grid=grid)
    compute_gradients(build(device="cpu"))
    JITFunction.__getitem__ = getitem
    triton.knobs.compilation.listener = None
    return {"found": sum(found), "missed": missed}


def main() -> None:
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        launch = JITFunction.__getitem__
        compiling.pretend()
        JITFunction.__getitem__ = launch
        driver.set_active(Driver())
        fill_memory()
        json.dump({name: look_at(name) for name in sys.argv[1:]}, sys.stdout)


if __name__ == "__main__":
    main()
