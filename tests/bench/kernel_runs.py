"""Benchmarks of kernels and layers at tiny size.

A function makes each tiny and says with which arguments it runs; another checks its record.
"""

import itertools
import json
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench import adapters, attention, epilogues, fp8, kernels, moe, peers, timing
from bench.harness import Record
from tests.bench.small import RAGGED_ATTENTION, SMALL_KERNELS, Patch, Runs, pass_tiny


def tiny_kernels(patch: Patch, root: Path) -> list[str]:
    build = kernels.build
    patch.setattr(kernels, "build", lambda case, _, libraries: build(case, "cpu", libraries))
    patch.setattr(peers, "compiled", lambda f: f)
    patch.setattr(kernels, "CASES", SMALL_KERNELS)
    patch.setattr(kernels, "HOST_SHAPE", (4, 8))
    patch.setattr(kernels, "installed", lambda _: None)
    return []


def tiny_adapters(patch: Patch, root: Path) -> list[str]:
    patch.setattr(adapters, "LINEARS", {"o": (64, (24,)), "qkv": (64, (16, 8, 8))})
    patch.setattr(adapters, "ROWS", 40)
    steps = {
        name: {"ms": [1.0, 4.0, 5.0], "peak_mib": 2.0, "loss": 3.0} for name in adapters.MODELS
    }
    patch.setattr(adapters, "training_steps", lambda *_: steps)
    return ["--only", "o,o with dropout,qkv,nf4,steps"]


def tiny_attention(patch: Patch, root: Path) -> list[str]:
    patch.setattr(attention, "CASES", (RAGGED_ATTENTION,))
    patch.setattr(attention, "measured", partial(attention.measured, device="cpu"))
    patch.setattr(attention, "on_the_host", dict)
    patch.setattr(attention, "verdicts", lambda _: [])
    return ["--quick"]


def tiny_moe(patch: Patch, root: Path) -> list[str]:
    name = next(iter(moe.SHAPES))
    patch.setattr(moe, "SHAPES", {name: (24, 16, 8, 4, 2)})
    ticks = itertools.count(1)  # forward takes 1 ms, both 2, and so on
    patch.setattr(timing, "milliseconds", lambda run, *_, **__: (run(), [next(ticks)])[1])
    for part in ("layer", "measure_parts"):
        patch.setattr(moe, part, partial(getattr(moe, part), device="cpu"))
    return ["--quick", "--only", f"{name},{moe.PARTS}"]


def tiny_epilogues(patch: Patch, root: Path) -> list[str]:
    class Here(ThreadPoolExecutor):
        """Its processes are this one."""

        def __init__(self, *_: Any) -> None:
            super().__init__(1)

        def submit(self, run: Any, *given: Any) -> Any:
            return SimpleNamespace(result=partial(run, *given))

    patch.setattr(epilogues, "ProcessPoolExecutor", Here)
    return ["--tiny"]


def check_providers(record: Record) -> None:
    for case in record["cases"]:
        *_, eager = case["providers"]
        for provider in case["providers"]:
            if "error" not in provider:
                errors = provider["errors"]
                assert set(errors) == set(eager["errors"]) and max(errors.values()) < 0.02, provider


def check_adapters(record: Record) -> None:
    found = json.dumps(record)
    assert '"other_share": 0' in found  # numbers of NF4 that are not the definition's
    for rows in re.findall(r'"errors": (\{[^}]*\})', found):
        assert 0 < max(json.loads(rows).values()) < 0.02


def check_moe(record: Record) -> None:
    (layer,) = record["layers"].values()
    assert layer["flops_forward"] == 6 * 24 * 2 * 16 * 8
    for name in ("tigon", "transformers eager"):
        assert 0 < max(layer["providers"][name]["errors"].values()) < 0.02
    assert {row.get("bound") for row in record["parts"]["parts"]} == {None, "bytes", "dense GEMM"}


def check_epilogues(record: Record) -> None:
    for case, ways in record["cases"].items():
        for name, way in ways.items():
            assert "error" in way or max(way["errors"], default=0.0) < 1e-2, (case, name)
    assert epilogues.saved_ms(record, epilogues.PAIRS[:2], epilogues.ALONE) is not None


def check_fp8(record: Record) -> None:
    assert [row["name"] for row in record["products"]] == list(fp8.PRODUCTS)
    for row in record["products"]:
        for what in ("dx", "dw"):
            assert 0.02 < row[what]["errors"]["exact"] < 0.06 and row[what]["factor"] > 0.99
    assert len(record["passes"]) == 6
    assert all({*row["ms"]} >= {fp8.FUSED} for row in record["passes"])


RUNS: Runs = {
    kernels: (tiny_kernels, check_providers),
    adapters: (tiny_adapters, check_adapters),
    attention: (tiny_attention, check_providers),
    moe: (tiny_moe, check_moe),
    epilogues: (tiny_epilogues, check_epilogues),
    fp8: (pass_tiny, check_fp8),
}
