"""Whether a target is met: judged by the best peer, of one record, with digits enough."""

from bench import (
    end_to_end,
    end_to_end_side,
    harness,
    killed_run,
    layouts,
    scaling,
    train_cases,
    train_report,
)
from bench.harness import Record


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
    assert "2.000" in said[0] and "0.500" in said[1] and "6.000" in said[2]
    last = {"phases": {"start": 6.0, "data": 3.0}, "phase": "data", "steps": 0}
    late = {"error": "not done after 10 s"} | end_to_end.read_progress(last, 10.0)
    assert (
        end_to_end.row("c", "s", late)[2] == "not done after 10 s; start 6.00; data 4.00, 0 steps"
    )
    sides[end_to_end.TRL]["eval_loss"] = 9.5
    assert len(end_to_end.verdicts("8B LoRA", sides)) == 3
    sides[end_to_end.OURS]["eval_loss"] = 9.5
    assert end_to_end.verdicts("8B LoRA", sides)[3].startswith("WRONG")


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
