"""Two GPUs and curves beside transformers, at tiny size on the CPU."""

import gc
import json
import math
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import (
    estimates,
    generate_multi,
    harness,
    parallel,
    train_curves,
    train_multi,
    train_multi_side,
    two_gpus,
)
from bench.harness import Record
from bench.train_cases import PEER

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tells of the CPU's run")
KEEPS, RESHARDS = f"{PEER}, FSDP2 without resharding", f"{PEER}, FSDP2"


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "collect", int)  # 0.2 s in a process this large


@on_cpu
def test_the_sides_of_several_ranks_compute_the_same(tmp_path: Path) -> None:
    """On one rank, where FSDP2 shards nothing: the same rows and weights, so the same loss."""
    pytest.importorskip("transformers")
    train_multi.write_inputs(tmp_path, tiny=True)
    found: dict[str, Any] = {}
    for kind in ("tigon", "peer-keep"):
        side = train_multi.Side(kind, gpus=1)
        out = tmp_path / f"{kind}.json"
        train_multi_side.main(str(out), kind, "sdpa", *train_multi.settings(tmp_path, side, True))
        found[kind] = json.loads(out.read_text())
    mine, theirs = found.values()
    assert mine["losses"][0] == pytest.approx(theirs["losses"][0], rel=1e-3)
    assert len(mine["losses"]) == len(theirs["losses"]) == train_multi_side.FIRST
    assert mine["ms"] > 0 < theirs["ms"]


def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    """The time of several GPUs is short: they would wait for it to the limit."""
    side = tmp_path / "side.py"
    lines = ("import os, time", "assert os.environ['RANK'] == '0', 'no memory'", "time.sleep(60)")
    side.write_text("\n".join(lines))
    began = time.monotonic()
    found = estimates.run_ranks(side, 2, tmp_path, [], 50)
    assert time.monotonic() - began < 20
    assert found["error"] == "AssertionError: no memory"
    side.write_text("import time; print('at work', flush=True); time.sleep(60)")
    found = estimates.run_ranks(side, 2, tmp_path, [], 1.0)
    assert found["error"] == "not at its end after 1 s: at work"


def test_first_losses_of_one_run_are_compared() -> None:
    rows = {parallel.FSDP: [{"ms": 1.0, "run": "a", "losses": [12.3]}]}
    rows[parallel.EXPERT] = [{"ms": 1.0, "run": "b", "losses": [12.4]}]
    assert not [said for said in parallel.verdicts({"sides": rows}) if said.startswith("WRONG")]
    rows[parallel.EXPERT][0]["run"] = "a"
    assert parallel.verdicts({"sides": rows})[-1].startswith("WRONG: losses of step 1 differ")
    assert parallel.differences({"sides": rows | {parallel.EXPERT: rows[parallel.FSDP]}}) == []


@pytest.mark.parametrize("wrong", [9.9, math.nan])
def test_later_losses_of_the_same_side_s_layouts_are_compared(wrong: float) -> None:
    """As wrong gradients or updates would make them; the peer's updates are rounded otherwise."""

    def differ(*seconds: float) -> list[str]:
        names = parallel.ONE, "tigon, tensor", parallel.TORCH
        rows = [[{"ms": 1.0, "run": "a", "losses": [12.7, loss]}] for loss in seconds]
        return parallel.differences({"sides": dict(zip(names, rows, strict=True))})

    assert differ(1.9345, 1.9368, 9.04) == []
    (said,) = differ(1.9345, wrong, 9.04)
    assert said.startswith("losses of step 2 differ: {'tigon, one GPU': 1.9345, 'tigon, tensor'")


def test_tokens_that_differ_from_the_first_are_no_speed() -> None:
    sides = [{"ms": 2.0, "tokens": [1, 2]}, {"ms": 1.0, "tokens": [1, 3]}]
    record: Record = {"machine": "m", "torch": "1", "commit": "c", "date": "2026-11-28"}
    record |= {"uncommitted_changes": False, "cases": {"decode 1 x 1024": sides}}
    assert "met: decode 1 x 1024" in generate_multi.show(record)
    sides[1]["tokens"] = [3, 3]
    assert "WRONG: decode 1 x 1024: no token is equal" in generate_multi.show(record)
    assert "met" not in generate_multi.show(record)


def test_what_two_gpus_are_still_needed_for(tmp_path: Path) -> None:
    side, peer = "tigon, tensor", parallel.TORCH
    row = a_row(500.0) | {"run": "a", "commit": "c"}
    known = {"sides": {side: [row], peer: [row], parallel.CONTEXT: [row]}}
    missing = parallel.missing(known)
    assert parallel.CONTEXT in missing and parallel.CONTEXT_TORCH in missing
    assert not {side, peer, parallel.ONE} & set(missing)
    given = dict(two_gpus.steps("abc", known, tiny=False))
    assert [*given][:4] == ["test_sums", "generate_multi", "one_shot_sum", "parallel"]
    assert given["parallel"][3:] == missing
    log = tmp_path / "log"
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background job ignores
    assert two_gpus.run(["-c", "print('well')"], log, 20) == 0 and log.read_text() == "well\n"
    said = "import time\ntry: time.sleep(60)\nexcept KeyboardInterrupt: print('so far')"
    assert two_gpus.run(["-c", said], log, 5) is None and log.read_text() == "so far\n"


def a_row(ms: float, loss: float = 11.8) -> Record:
    return {"ms": ms, "allocated_gib": 60.0, "losses": [loss], "attention": ["fa4"]}


def test_several_gpus_are_judged_by_the_better_of_each_kind(tmp_path: Path) -> None:
    stamp = {"machine": "2 x G", "torch": "2", "commit": "c", "date": "2026-11-23T"}
    record = stamp | {"uncommitted_changes": False, "libraries": {}, "rounds": 1, "tokens": 8192}
    record["sides"] = {
        RESHARDS: [a_row(820.0)],
        KEEPS: [a_row(800.0)],
        "tigon, FSDP2": [a_row(790.0)],
        "tigon, sharding=gradients": [a_row(720.0)],
        train_multi.ONE: [a_row(700.0, 9.0)],
    }
    assert train_multi.verdicts(record) == [
        f"met: tok/s/GPU of tigon, sharding=gradients over {KEEPS}: 1.111, target ≥ 1.09",
        "met: tok/s/GPU of tigon, sharding=gradients over tigon, one GPU: 0.972, target ≥ 0.97",
    ]
    shown = train_multi.show(record)
    assert f"| {KEEPS} | 10,240 | 800.0 | 60.0 | 1.00 | 0.875 | fa4 |" in shown
    train_multi.plot(record, tmp_path / "bars.svg")
    assert "> 10,240<" in (tmp_path / "bars.svg").read_text()
    record["sides"]["tigon, FSDP2"] = [a_row(790.0, 11.0)]
    assert train_multi.verdicts(record)[-1].startswith("WRONG: the sides' first losses differ")
    record["sides"] = {RESHARDS: [{"error": "RuntimeError: no"}]}
    assert train_multi.verdicts(record) == [
        f"not measured: tok/s/GPU of tigon over {PEER}",
        f"not measured: tok/s/GPU of tigon over {train_multi.ONE}",
    ]
    assert f"| {RESHARDS} | RuntimeError: no |" in train_multi.show(record)


def test_sides_run_once_a_round(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And the peer goes on with SDPA where flash-attn-4 fails."""
    runs: list[tuple[str, str]] = []

    def run_ranks(_: Any, gpus: int, root: Path, arguments: list[str], seconds: float) -> Record:
        runs.append((arguments[0], arguments[1]))
        fails = arguments[0] != "tigon" and arguments[1] != "sdpa"
        return {"error": "ImportError: flash_attn"} if fails else a_row(500.0 + gpus)

    monkeypatch.setattr(train_multi, "run_ranks", run_ranks)
    monkeypatch.setattr(train_multi, "libraries", lambda tiny: {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "G")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    out = tmp_path / "multi.json"
    arguments = ["--out", str(out), "--commit", "abc1234", "--rounds"]
    harness.main(train_multi.BENCH, [*arguments, "1", "--only", "FSDP2"])
    assert runs == [
        ("peer-reshard", "flash_attention_4"),
        ("peer-reshard", "sdpa"),
        ("peer-keep", "sdpa"),
        ("tigon", "sdpa"),
    ]
    assert json.loads(out.read_text())["complete"] is False
    harness.main(train_multi.BENCH, [*arguments, "1"])
    assert runs[4:] == [("tigon", "sdpa")] * (len(train_multi.offered()) - 3)
    record = json.loads(out.read_text())
    assert record["complete"] is True and record["attention"] == "sdpa"
    harness.main(train_multi.BENCH, [*arguments, "1"])
    assert len(runs) == 1 + len(train_multi.offered())


@on_cpu
def test_curves_begin_alike_and_are_judged_by_the_noise(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    out = tmp_path / "curves.json"
    harness.main(train_curves.BENCH, ["--tiny", "--out", str(out)])
    record = json.loads(out.read_text())
    curves = record["curves"]
    assert list(curves) == list(train_curves.SIDES)
    for side, losses in curves.items():
        assert len(losses) == (6 if "longer" in side else 4) and losses[3] < losses[0]
        fresh = side in (train_curves.LONG, train_curves.FP8, train_curves.FP8_APART)
        like = curves[train_curves.LONG if fresh else train_curves.TRUTH]
        assert losses[:4] == pytest.approx(like[:4], rel=3e-3)
    assert curves[train_curves.LONG] != curves[train_curves.FP8] != curves[train_curves.FP8_AGAIN]
    assert 0 < train_curves.distance(record, train_curves.OURS) < 0.01
    shown = train_curves.show(record)
    assert f"| {PEER} | {curves[PEER][0]:.4f} |" in shown and "random weights" in shown


def test_a_curve_far_from_the_truth_is_a_miss() -> None:
    record = {
        "curves": {
            train_curves.TRUTH: [5.0, 4.0],
            PEER: [5.01, 4.01],
            train_curves.OURS: [5.02, 3.98],
            train_curves.ROUNDED: [5.0, 4.018],
            train_curves.LONG: [5.0, 3.0],
            train_curves.FP8: [5.0, 2.92],
        }
    }
    off = "difference of the last losses from those of"
    assert train_curves.verdicts(record) == [
        "MISSED: tigon: distance from transformers, float32 over that of "
        f"{PEER}: 2.000, target ≤ 1.50",
        f"met: tigon, adamw_bf16: {off} transformers, float32, %: 0.200, target ≤ 0.50",
        f"MISSED: tigon, fp8, longer: {off} tigon, longer, %: 1.000, target ≤ 0.50",
        f"not measured: {train_curves.FP8_APART}: {off} tigon, longer, %",
        f"not measured: {train_curves.FP8_AGAIN}: {off} {train_curves.AGAIN}, %",
    ]
