"""Preferences and distillation beside their peers: sides, records and verdicts, at tiny size."""

import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from bench import distillation, distillation_side, harness, preference, preference_side
from bench.distillation_side import CHUNKED, DIVERGENCES, FORMULA, FUSED
from bench.harness import Record
from bench.preference_side import EXACT, HALF, OURS, PEER, TWICE, Way, lengths

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tells of the CPU's run")
STAMP = {"machine": "G", "torch": "2", "commit": "c", "date": "2026-11-23T"}
STAMP |= {"uncommitted_changes": False, "libraries": {}}


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "collect", int)  # 0.2 s in a process this large


def in_process(patch: pytest.MonkeyPatch, side: ModuleType) -> Callable[..., Iterator[Record]]:
    """Processes are calls."""

    def spawn(request: Any, *_: Any) -> Iterator[Record]:
        lines: list[Record] = []
        patch.setattr(side, "say", lambda kind, **found: lines.append({"kind": kind, **found}))
        side.main(json.dumps(asdict(request)))
        yield from json.loads(json.dumps(lines))

    return spawn


def test_lengths_are_those_that_the_record_names() -> None:
    rows = [n for prompt, *answers in lengths(False) for n in (prompt + a for a in answers)]
    assert len(rows) == 2 * preference_side.PAIRS and max(rows) <= preference_side.LONGEST
    assert 480 < sum(rows) / len(rows) < 544 and sum(rows) == preference.tokens(False)
    assert max(rows) > 1.5 * min(rows)


@on_cpu
def test_dpo_computes_the_same_as_trl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Micro-batches of two pairs there, one row here."""
    for name in ("trl", "peft", "datasets"):
        pytest.importorskip(name)
    monkeypatch.setattr(preference_side, "ways", lambda _, best=None: [Way("sdpa", 2)] * (not best))
    monkeypatch.setattr(preference, "spawn", in_process(monkeypatch, preference_side))
    out = tmp_path / "preference.json"
    harness.main(preference.BENCH, ["--tiny", "--out", str(out), "--commit", "abc1234"])
    record = json.loads(out.read_text())
    mine, theirs = (record["sides"][side] for side in (OURS, PEER))
    assert "error" not in mine and "error" not in theirs, record["sides"]
    copies = record["sides"][TWICE]["first"]
    assert copies["logps/rejected"] == pytest.approx(mine["first"]["logps/rejected"], rel=1e-4)
    assert theirs["first"]["logps/chosen"] == pytest.approx(mine["first"]["logps/chosen"], rel=1e-4)
    margins = [row["first"]["rewards/margins"] for row in (mine, theirs)]
    assert margins[0] == pytest.approx(margins[1], abs=1e-3) and abs(margins[0]) > 3e-3
    assert mine["first"]["grad_norm"] == pytest.approx(theirs["first"]["grad_norm"], rel=1e-2)
    assert mine["ms"] > 0 < theirs["ms"] and mine["steps"] == theirs["steps"] == 2
    half = record["sides"][HALF]["first"]  # gradients of two rows are added up
    for name in ("loss", "grad_norm", "logps/chosen", "rewards/margins"):
        assert half[name] == pytest.approx(mine["first"][name], rel=1e-2, abs=1e-3), name
    exact = record["sides"][EXACT]
    assert exact["first"]["logps/chosen"] == pytest.approx(mine["first"]["logps/chosen"], rel=1e-4)
    assert exact["first"]["rewards/margins"] == pytest.approx(margins[0], abs=1e-3)
    assert "ms" not in exact and list(record["tried"]) == [Way("sdpa", 2).name]
    assert f"| {PEER} | " in preference.show(record)


def test_trl_is_measured_with_its_fastest_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller micro-batches are tried with the attention that was faster."""
    times = {("flash_attention_4", 4): 90.0, ("flash_attention_4", 2): 70.0}

    def alone(request: Any, device: str, way: Way | None) -> Record:
        if way == Way("flash_attention_4", 1):
            raise RuntimeError("no")
        return {"ms": times.get((way.attention, way.pairs), 100.0) if way else 50.0}

    monkeypatch.setattr(preference_side, "alone", alone)
    monkeypatch.setattr(preference_side, "imported", lambda _: gc)
    monkeypatch.setattr(gc, "set_verbosity_error", int, raising=False)
    record: Record = {"tried": {}, "sides": {}}
    spawn = in_process(monkeypatch, preference_side)
    for side in (OURS, PEER):
        for line in spawn(preference_side.Request(side)):
            preference.add(record, side, line)
    assert list(record["tried"]) == [
        "flash_attention_4, micro-batches of 4",
        "sdpa, micro-batches of 4",
        "flash_attention_4, micro-batches of 2",
        "flash_attention_4, micro-batches of 1",
    ]
    assert record["sides"][OURS] == {"ms": 50.0}
    assert record["sides"][PEER] == record["tried"]["flash_attention_4, micro-batches of 2"]
    record["sides"][HALF] = {"ms": 56.0}
    assert preference.ratio(record, "ms") == 70 / 56  # as many pairs in a micro-batch


def test_preferences_are_judged_by_tokens_and_memory() -> None:
    first = {name: 1.0 for name in ("loss", "grad_norm", *preference_side.LOGGED)}
    sides = {OURS: {"ms": 100.0, "allocated_gib": 20.0, "first": first}}
    record = STAMP | {"sides": sides, "tokens": 4000, "tried": {"a": {"error": "E: no"}}}
    assert preference.verdicts(record).__next__().startswith("not measured")
    sides[PEER] = {"ms": 200.0, "allocated_gib": 25.0, "first": first}
    assert list(preference.verdicts(record)) == [
        f"met: tokens/s of tigon over {PEER}: 2.000, target ≥ 1.60",
        f"MISSED: peak memory of tigon over {PEER}: 0.800, target ≤ 0.70",
        "not measured: tigon, float32, with which first steps are compared",
    ]
    assert "| tigon | 40,000 | 100.0 | 20.0 | 1.0000 |" in preference.show(record)
    assert "| a | E: no |" in preference.show(record)
    assert preference.disagreement(record, OURS) == ""  # nothing to compare with
    sides[EXACT] = {"first": first}
    # What bf16 does is seen in the peer's settings: here margins are up to 0.1 away, all else 0
    for m in (0.9, 1.05):
        record["tried"][str(m)] = {"ms": 200.0, "first": first | {"rewards/margins": m}}
    sides[OURS] = sides[OURS] | {"first": first | {"rewards/margins": 1.29}}
    assert preference.disagreement(record, OURS) == ""
    sides[OURS] = sides[OURS] | {"first": first | {"rewards/margins": 1.31, "loss": 1.01}}
    assert preference.disagreement(record, OURS) == (
        f"loss is 1.01, in float32 1; {PEER} is at most 0 away; "
        f"rewards/margins is 1.31, in float32 1; {PEER} is at most 0.1 away"
    )
    sides[OURS] = sides[OURS] | {"first": first | {"loss": float("nan")}}
    assert preference.disagreement(record, OURS).startswith("loss is nan")
    assert "| tigon, float32 |  |  |  | 1.0000 |" in preference.show(record)
    preference.add(record, PEER, {"kind": "ended", "error": "status 1"})
    assert sides[PEER]["ms"] == 200.0  # what was measured before the process ended stays


@on_cpu
def test_distillation_computes_the_same_as_the_formula(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(distillation, "spawn", in_process(monkeypatch, distillation_side))
    out = tmp_path / "distillation.json"
    harness.main(distillation.BENCH, ["--tiny", "--out", str(out), "--commit", "abc1234"])
    record = json.loads(out.read_text())
    for kind, within in (("step", 1e-3), ("head", 1e-5)):
        for divergence in DIVERGENCES:
            mine, theirs = (record[kind][side][divergence] for side in (OURS, FORMULA))
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=within)
            assert mine["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=1e-2)
            assert mine["ms"] > 0 < theirs["ms"]
    assert list(distillation.disagreements(record)) == []


@on_cpu
@pytest.mark.parametrize("side", [FORMULA, CHUNKED])
@pytest.mark.parametrize("beta", [*DIVERGENCES.values(), 0.3])
def test_heads_compute_the_same_divergence(side: str, beta: float) -> None:
    if side == CHUNKED:
        pytest.importorskip("liger_kernel")
    x, w = torch.randn(21, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    given = x, w, torch.randn(21, 6), torch.randn(50, 6), beta
    ours, theirs = (distillation_side.HEADS[name](*given) for name in (OURS, side))
    torch.testing.assert_close(ours, theirs)
    gradients = (torch.autograd.grad(loss, (x, w)) for loss in (ours, theirs))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_distillation_is_judged_by_the_fastest_peer() -> None:
    def rows(ms: float, **more: Any) -> Record:
        return {name: {"ms": ms, "loss": 1.0, "gradient_norm": 2.0} | more for name in DIVERGENCES}

    step = {OURS: rows(100.0), FORMULA: rows(150.0), FUSED: rows(120.0)}
    head = {OURS: rows(10.0, gib=0.25), FORMULA: rows(30.0), CHUNKED: rows(14.0, loss=0.5)}
    record = STAMP | {"step": step, "head": head, "ended": {"peers": "status 1"}}
    record |= {"tokens": 2**14, "vocab": 2**15}  # 1 GiB of logits
    found = list(distillation.verdicts(record))
    assert len(found) == 9
    assert found[0] == (
        "MISSED: step, KL(teacher || student): speed over the fastest peer: 1.200, target ≥ 1.30"
    )
    assert found[5] == "met: head alone, JSD: speed over the fastest peer: 1.400, target ≥ 1.30"
    assert (
        found[8] == "met: head alone, JSD: memory over a model's bf16 logits: 0.250, target ≤ 1.00"
    )
    head[OURS]["JSD"]["gib"], step[FUSED]["JSD"]["loss"] = 1.5, 1.1
    again = list(distillation.verdicts(record))
    assert again[8].startswith("MISSED: head alone, JSD: memory")
    assert again[9] == f"WRONG: step, JSD, {FUSED}: loss 1.1 and 1"
    shown = distillation.show(record)
    assert "peers: status 1" in shown and f"| {distillation.LOGITS} |  | 1.00 |" in shown
