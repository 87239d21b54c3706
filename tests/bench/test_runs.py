"""Each benchmark runs at tiny size without a GPU.

What it computes is compared with a truth or with its peer; how its tables look is seen in docs/.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import compare, end_to_end, harness, preference, recipes, serve, train_curves
from tests.bench import generation_runs, kernel_runs, training_runs
from tests.bench.small import Patch

RUNS = kernel_runs.RUNS | training_runs.RUNS | generation_runs.RUNS
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tells of the CPU's run")
SLOW = (compare, preference, recipes, train_curves, end_to_end)  # several processes, or whole runs


def failures(record: Any) -> list[str]:
    if isinstance(record, dict):
        own = [str(record["error"])] if "error" in record else []
        return own + [e for x in record.values() for e in failures(x)]
    return [e for x in record for e in failures(x)] if isinstance(record, list) else []


@on_cpu
@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    "bench",
    [pytest.param(b, marks=[pytest.mark.slow] * (b in SLOW), id=b.BENCH.kind) for b in RUNS],
)
def test_benchmark_runs_at_tiny_size(bench: Any, monkeypatch: Patch, tmp_path: Path) -> None:
    make, check = RUNS[bench]
    threads, out = torch.get_num_threads(), tmp_path / "record" / "out.json"
    arguments = [*make(monkeypatch, tmp_path), "--out", str(out), "--commit", "abc1234-dirty"]
    harness.main(replace(bench.BENCH, needs_gpu=False), arguments)
    torch.set_num_threads(threads)
    record = json.loads(out.read_text())
    assert (record["commit"], record["uncommitted_changes"]) == ("abc1234", True)
    expected = r"(ModuleNotFound|Import|OutOfMemory)Error"
    missing = [e for e in failures(record) if not re.match(expected, e)]
    assert not missing
    assert "abc1234" in bench.BENCH.show(record)
    check(record)


@pytest.mark.slow
def test_serve(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Every request is answered whole, and all figures are there."""
    harness.main(serve.BENCH, ["--tiny", "--out", str(tmp_path / "out.json")])
    record = json.loads((tmp_path / "out.json").read_text())
    assert [case["name"] for case in record["cases"]] == serve.BENCH.cases
    *many, first = record["cases"]
    for case in many:
        assert case["steps"] >= case["new"] - 1
        assert case["tokens_per_s"] * min(case["served_s"]) == pytest.approx(6 * 24)
    assert min(first["step_s"], first["alone_s"]) > 0
    assert capfd.readouterr().out.count("share of generate's tokens/s") == 3
