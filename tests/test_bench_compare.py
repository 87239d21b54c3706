"""The comparison of two checkouts: its children, its ratios, what it says of the results."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import compare, harness
from bench.harness import ROOT

STEP, DECODE, HOST = "Llama-3.2-1B 2 x 8192", "decode 1 x 1024", "host time 1 x 512"


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells of the CPU's run")
def test_two_trees_are_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A whole run at tiny size, of this tree against itself."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # the kernels' own tests run them
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = tmp_path / "compare.json"
    cases = ["Llama", "decode 1 ", "host"]
    options = ["--base", str(ROOT), "--tiny", "--rounds", "1", "--out", str(out)]
    harness.main(compare.BENCH, [*options, *cases])
    record = json.loads(out.read_text())
    assert [case["name"] for case in record["cases"]] == [STEP, DECODE, HOST]
    for case in record["cases"]:
        assert [len(case[side]) for side in compare.SIDES] == [1, 1]
    step, decode, host = record["cases"]
    assert step["base"][0]["loss"] == step["new"][0]["loss"] > 6.0
    assert step["new"][0]["ms"] > 0 and host["base"][0]["ms"] > 0
    assert decode["base"][0]["tokens_crc"] == decode["new"][0]["tokens_crc"]
    assert f"same loss {step['base'][0]['loss']}; same gradient norm " in capsys.readouterr().out


def test_a_child_that_takes_too_long_is_ended() -> None:
    found = compare.run_side(ROOT, [STEP], tiny=True, limit=0.05)
    assert found == {STEP: {"error": "not done after 0.05 s"}}


def test_another_tree_than_the_one_asked_for_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="was to be measured, but"):
        compare.run_side(tmp_path, [], tiny=True, limit=100.0)


def record(**more: Any) -> dict[str, Any]:
    base = [{"ms": ms, "loss": 2.5, "gradient_norm": 1.0, "peak_mib": 64.0} for ms in (8, 10, 12)]
    new = [{"ms": ms, "loss": 2.5, "gradient_norm": 1.5, "peak_mib": 32.0} for ms in (4, 20, 12.5)]
    broken = [{"error": "RuntimeError: no"}] * 3
    tried = {"compile_s": 12.0, "graphs": 2, "ms": 3.0, "eager_ms": 4.0}
    tried |= {"loss": 2.5, "eager_loss": 2.5}
    late = {"error": "not done after 200 s"}
    return {
        "cases": [
            {"name": STEP, "kind": "step", "base": base, "new": new},
            {"name": DECODE, "kind": "decode", "base": broken, "new": new},
            {"name": "compile blocks", "kind": "compile_blocks", "base": [late], "new": [tried]},
        ]
    } | more


def test_medians_ratios_and_results_are_shown() -> None:
    lines = compare.table(record()).splitlines()
    assert lines[2] == (
        f"| {STEP} | 10.00 | 12.50 | 0.8000 | 2.000, 0.500, 0.960 | 64.0 | 32.0 "
        "| same loss 2.5; gradient norm 1.0 -> 1.5 |"
    )
    assert lines[3].endswith("|  | 32.0 | base: RuntimeError: no |")
    assert "| compile blocks | base |  |  |  |  |  |  | not done after 200 s |" in lines
    assert "| compile blocks | new | 12 | 2 | 3 | 4 | 2.5 | 2.5 |  |" in lines
    assert list(compare.verdicts(record())) == [
        f"MISSED: {STEP}, base / new: 0.800, target ≥ 0.99",
        f"not measured: {DECODE}, base / new",
    ]


def test_bad_arguments_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, message in {
        ("--base", str(tmp_path)): f"{tmp_path} holds no tigon/",
        ("--base", str(ROOT), "decoding"): "no case decoding; there are Llama-3.2-1B 2 x 8192",
        ("--base", str(ROOT)): "measuring needs a CUDA GPU, or --tiny",
    }.items():
        with pytest.raises(SystemExit):
            harness.main(compare.BENCH, arguments)
        assert message in capsys.readouterr().err
