"""Whether a target is met: judged by the best peer, of one record, with digits enough."""

import re
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bench import (
    choices,
    cost_curves,
    end_to_end,
    end_to_end_side,
    fp8_curves,
    harness,
    killed_run,
    layouts,
    scaling,
    train_cases,
    train_report,
)
from bench.harness import Record
from bench.train_cases import PEER

WIDER = ", chunk_mem_const=32"


def test_ends_beside_the_best_peer() -> None:
    """The fastest over all; a side that failed is none, and warm-up is beyond usual steps."""
    phases = dict.fromkeys(end_to_end_side.PHASES, 1.0) | {"steps": 9.0}
    side = {"wall": 20.0, "first_step": 6.0, "phases": phases, "steps": 4, "gaps": [2.0, 1.0, 1.0]}
    side |= {"tokens": 4000, "learned": 2000, "allocated_gib": 10.0, "asked": 4, "eval_loss": 9.0}
    parts = end_to_end.seconds_of(side)
    assert (parts["steps"], parts["warm-up"]) == (4.0, 6.0)
    assert parts["other"] == 20 - 3 - 10 - 2  # the rest of the process too
    peers = {"TRL": side | {"wall": 40.0}, end_to_end.TRL: side | {"allocated_gib": 20.0}}
    sides: Record = {end_to_end.OURS: side | {"wall": 10.0}, **peers, "other": {"error": "no"}}
    said = end_to_end.verdicts("8B LoRA", sides)
    assert [line.partition(":")[0] for line in said] == ["met"] * 3
    assert (
        f"over that of {end_to_end.TRL}: 2.000" in said[0]
        and "0.500" in said[1]
        and "6.000" in said[2]
    )
    last = {"phases": {"start": 6.0, "data": 3.0}, "phase": "data", "steps": 0}
    late = {"error": "not done after 10 s"} | end_to_end.read_progress(last, 10.0)
    (said,) = end_to_end.row("c", "s", late)[3:]
    assert said == "not done after 10 s; start 6.00; data 4.00, 0 steps"
    sides[end_to_end.TRL]["eval_loss"] = 9.5
    assert len(end_to_end.verdicts("8B LoRA", sides)) == 3
    sides[end_to_end.OURS]["eval_loss"] = 9.5
    assert end_to_end.verdicts("8B LoRA", sides)[3].startswith("WRONG")


def test_ends_have_the_median_of_rounds() -> None:
    phases = dict.fromkeys(end_to_end_side.PHASES, 1.0)
    side = {"tokens": 60, "allocated_gib": 1.0, "first_step": 1.0, "phases": phases, "gaps": []}
    job: Any = SimpleNamespace(
        options=SimpleNamespace(steps=4), record={"commit": "a", "cases": {}}
    )
    sides = job.record["cases"].setdefault("1B full", {})
    for wall in (20.0, 12.0, 15.0):
        known = end_to_end.rounds_of(job, "1B full", "TRL")
        found = side | {"wall": wall, "commit": "a", "asked": 4}
        sides["TRL"] = end_to_end.middle([*known, found])
    assert len(end_to_end.rounds_of(job, "1B full", "TRL")) == 3
    row = end_to_end.row("1B full", "TRL", sides["TRL"])
    assert row[3] == "4" and row[6] == "15.0 (12.0 to 20.0 in 3 rounds)"
    late = {"error": "not done", "commit": "a", "asked": 4}
    sides["TRL"] = end_to_end.middle([*end_to_end.rounds_of(job, "1B full", "TRL"), late])
    assert end_to_end.row("1B full", "TRL", sides["TRL"])[3] == "not done"
    assert len(end_to_end.rounds_of(job, "1B full", "TRL")) == 3
    job.record["commit"] = "b"
    assert end_to_end.rounds_of(job, "1B full", "TRL") == []


def test_ends_say_what_their_rows_are_of() -> None:
    """The commit of each row, sides without figures, and steps of the peer that are held up."""
    record = harness.newest(harness.records("end_to_end"))
    ours, theirs = (record["cases"]["1B LoRA"][side] for side in (end_to_end.OURS, end_to_end.TRL))
    theirs |= {"commit": "abc1234", "gaps": [1.0] * 30 + [2.0] * 9}
    record["cases"] = {"1B LoRA": {end_to_end.OURS: ours, end_to_end.TRL: theirs}}
    record["cases"]["1B full"] = {side: {"error": "no", "asked": 60} for side in end_to_end.SIDES}
    shown = end_to_end.show(record)
    assert f"| 1B LoRA | {end_to_end.TRL} | abc1234 | " in shown
    assert "9 of 39 of the peer take more than 1.2 times the median, 9.0 s in all." in shown
    assert "Not measured: 1B full; 8B LoRA; 8B full; Qwen3-MoE full; 1B LoRA: TRL, g" in shown
    assert "Libraries differ" not in shown
    theirs["libraries"] = record["libraries"] | {"TRL": "0"}
    assert "Libraries differ between rows" in end_to_end.show(record)


def test_a_ratio_over_less_than_the_best_peer_meets_no_target() -> None:
    record = harness.newest(harness.records("train_step"))
    case = next(case for case in record["cases"] if case["name"] == "Llama-3.2-1B 2 x 8192")
    case |= {"tried": {"sdpa": {"ms": 1.0}}, "settings": [*train_cases.IN_BACKWARD]}
    for row in case["rounds"][train_cases.OURS]:
        row |= {"ms": 1.0, "allocated_gib": 1.0}

    def met() -> list[str]:
        return [line.split(": ")[2] for line in train_report.verdicts(case) if line[:3] == "met"]

    assert train_report.lacks(case) == ["flash_attention_4"]
    assert met() == ["share of the composed limit"]
    first, second = train_report.notes([case])
    assert first.endswith("- Llama-3.2-1B 2 x 8192: flash_attention_4")
    assert "optimizer_in_backward=true" in second and second.endswith("Llama-3.2-1B 2 x 8192.")
    case["tried"]["flash_attention_4"] = {"ms": 1.0}
    assert len(met()) == 3
    case = {"name": "Qwen3.5-0.8B 1 x 8192", "libraries": {"FLA": "1", "causal-conv1d": "1"}}
    lacking = [train_report.lacks(case | {"tried": {f"sdpa{more}": {}}}) for more in ("", WIDER)]
    assert lacking == [[f"{WIDER[2:]} of Liger's head"], []]


def test_costs_say_what_the_peer_lacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every attention is tried; the losses compared are those of the first, on new weights."""
    ms = {"flash_attention_4": 9.0, "sdpa": 8.0}

    def guarded(*how: Any) -> Record:
        return {"ms": ms[how[-1]], "losses": [12.0 - (how[-1] == "sdpa")], "steps": 1}

    monkeypatch.setattr(cost_curves, "guarded", guarded)
    rows = [
        {"name": point.name, "side": PEER}
        | cost_curves.measure_peer(cast(Any, None), point, "cuda", False)
        for point in cost_curves.POINTS
    ]
    by_name = {row["name"]: row for row in rows}
    short, longest = (by_name[f"Llama-3.2-1B 1 x {n}"] for n in (1024, 2**17))
    assert short["tried"] == ms and (short["attention"], short["losses"]) == ("sdpa", [12.0])
    assert longest["tried"] == {"flash_attention_4": 9.0}
    mine = [row | {"side": train_cases.OURS, "losses": [12.0], "ms": 8.0} for row in rows]
    record = {"machine": "H200", **harness.stamp("0"), "points": [*rows, *mine]}
    lines = {line.split(" | ")[0]: line for line in cost_curves.show(record).splitlines()}
    assert " | sdpa | " in lines["| Llama-3.2-1B 1 x 1024"]
    assert "1.00, peer not compiled" in lines["| Llama-3.2-1B 4 x 1024"]
    assert not re.search("not (compiled|tried)", lines["| Llama-3.2-1B 1 x 8192"])
    assert "(sdpa not tried)" in lines["| Llama-3.2-1B 1 x 131072"]
    assert "fitted to steps of these models, rows and tokens, but for Llama-3.2-3B 1 x 8192" in (
        cost_curves.misses(record)
    )
    same, *wrong = cost_curves.first_losses(record)
    assert same.count("12.00000 and 12.00000") == 4 and not wrong
    mine[0]["losses"] = [12.1]
    assert list(cost_curves.first_losses(record))[1].startswith("WRONG: Llama-3.2-1B 1 x 1024")
    for row in rows:  # as older records, which have the losses of the last attention
        del row["tried"]
    assert "Not compared: Llama-3.2-1B 1 x 1024," in " ".join(cost_curves.first_losses(record))


def test_curves_say_what_three_seeds_leave_open() -> None:
    """The interval is Student's for the mean of three paired differences."""
    record = harness.stamp("0") | {"machine": "H200", "checkpoint": False, "runs": {}}
    for seed, bf16, fp8 in zip(fp8_curves.SEEDS, (3.0, 3.1, 3.2), (3.04, 3.1, 3.26), strict=True):
        for kind, end in ((fp8_curves.BF16, bf16), (fp8_curves.FP8, fp8)):
            row = {"losses": [4.0], "held_out": end + 0.5, "held_out_bf16": end}
            record["runs"][f"{kind}, seed {seed}"] = row
    shown = fp8_curves.show(record)
    mean, error = 0.1 / 3, 4.302653 * 0.030551 / 3**0.5
    interval = f"{mean - error:+.4f} to {mean + error:+.4f}"
    assert f"| fp8 | in bf16 | +0.0333 | {interval} | +0.17 | " in shown
    assert "| fp8 | with the products of training | +0.5333 | " in shown
    assert "met: fp8: held-out loss above bf16's, over the spread of bf16's seeds: 0.167" in shown
    assert "not measured: fp8 except qkv_proj" in shown


def test_choices_show_reserved_memory_and_noise() -> None:
    """The pool of graphs is no tensor of the steps that count; equal steps differ by noise."""
    row = {"rows": 1, "graphs": 2, "allocated_gib": 11.4, "reserved_gib": 24.8, "steps": 8}
    row |= {"step_ms": 20.0, "warm_up_s": 1.0, "said": [], "loss_difference": 2e-6}
    rates = {choices.AUTO: 120.0, "graphs": 100.0, choices.SPOILED: 80.0, "no graphs": 50.0}
    ways = [row | {"name": name, "tokens_per_second": rate} for name, rate in rates.items()]
    ways[-1]["graphs"] = 0
    record = harness.stamp("0") | {"machine": "H200", "cases": [{"name": "1B", "ways": ways}]}
    shown = choices.show(record)
    assert "| reserved, GiB |" in shown and "| 1B | graphs | 100.00 | 20.0 | 24.8 | " in shown
    assert "two measurements differ: 1B, graphs: 1.200.\n" in shown
    assert "at most 2.0e-06" in shown and "over 8 to 8 steps" in shown


def test_verdict_has_digits_enough() -> None:
    for reached, aim, most, text in (
        (0.886, 0.87, True, "MISSED: x: 0.886, target ≤ 0.87"),
        (1.35008, 1.35, False, "met: x: 1.350, target ≥ 1.35"),
        (1.0004, 1.0, True, "MISSED: x: 1.0004, target ≤ 1.00"),
    ):
        assert harness.verdict("x", reached, aim, most=most) == text


def test_scaling_judges_sides_of_one_record() -> None:
    times = {"one GPU": 730.0, "fsdp 4": 820.0, "sharding=gradients": 760.0}
    times |= {scaling.PEERS[0]: 840.0, scaling.PEERS[1]: 830.0, scaling.EXPERT: 100.0}
    times |= {
        scaling.PEER_EXPERTS[0]: 300.0,
        scaling.PEER_EXPERTS[1]: 250.0,
        "context 4, a row of 32,768": 800.0,
    }
    row = {"allocated_gib": 40.0, "attention": ["fa4"], "losses": [12.0], "commit": "0"}
    record = {"machine": "4 x H200", "libraries": {}, **harness.stamp("0"), "sides": {}}
    record["sides"] = {name: [row | {"ms": ms}] for name, ms in times.items()}
    record["sides"]["fsdp 4"][0] |= {"losses": [12.5]}
    shown = scaling.show(record)
    assert "MISSED: tok/s and GPU of sharding=gradients over " + scaling.PEERS[1] in shown
    assert "met: tok/s and GPU of sharding=gradients over one GPU: 0.961" in shown
    assert f"met: tok/s and GPU of {scaling.EXPERT} over {scaling.PEER_EXPERTS[1]}: 2.500" in shown
    assert "not measured: tok/s and GPU of tigon over one GPU, fp8" in shown
    assert scaling.speed(record, "context 4, a row of 32,768") == 8192 / 0.8
    (wrong,) = layouts.differences(record, scaling.SIDES)
    assert wrong in shown
    for name in ("fsdp 4", "sharding=gradients", *scaling.PEERS):
        assert f"'{name}': 12." in wrong


def test_a_killed_run_is_judged_by_steps_made_again() -> None:
    losses = {str(step): 10.0 - step / 10 for step in range(1, killed_run.KILLED + 1)}
    ended = {"ranks": 4, "status": 137, "seconds": 50.0, "losses": losses}
    after = losses | {"16": losses["16"] * 1.01, "30": 7.0}
    resumed = {"ranks": 2, "status": 0, "seconds": 60.0, "losses": after, "eval_loss": 7.0}
    resumed["start"] = killed_run.SAVED
    record = {"machine": "4 x H200", **harness.stamp("0"), "killed": ended, "resumed": resumed}
    shown = killed_run.show(record | {"reloaded": {"loss": 7.01}})
    assert "MISSED: losses of 6 steps made again with half the ranks: apart by at most, %" in shown
    assert "met: loss of the exported model" in shown
    whole = killed_run.show(record | {"resumed": resumed | {"start": killed_run.KILLED}})
    assert "not measured: losses of 0 steps" in whole  # rows of the killed run prove nothing
