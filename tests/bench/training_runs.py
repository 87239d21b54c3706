"""Benchmarks of training at tiny size: steps, whole runs, and checkouts side by side.

A function makes each tiny and says with which arguments it runs; another checks its record.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import tigon
from bench import (
    compare,
    cost_curves,
    distillation,
    distillation_side,
    end_to_end,
    fp8_curves,
    fp8_recipes,
    padding,
    preference,
    preference_side,
    processes,
    recipes,
    train_cases,
    train_curves,
    train_report,
    train_side,
    train_step,
)
from bench.compare_side import LLAMA_1B
from bench.generate_cases import OURS
from bench.harness import ROOT, Record
from bench.train_cases import PEER
from tests.bench.small import TINY, Patch, Runs, pass_tiny
from tests.support.small import write_chats, write_model
from tests.train import preferences


def in_process(patch: Patch, side: ModuleType) -> Callable[..., Iterator[Record]]:
    """Processes are calls."""

    def spawn(request: Any, *_: Any) -> Iterator[Record]:
        lines: list[Record] = []
        patch.setattr(side, "say", lambda kind, **found: lines.append({"kind": kind, **found}))
        side.main(json.dumps(asdict(request)))
        yield from json.loads(json.dumps(lines))

    return spawn


def tiny_padding(patch: Patch, root: Path) -> list[str]:
    patch.setattr(padding, "LLAMA_1B", LLAMA_1B | TINY)
    patch.setattr(padding, "ROWS", 3)
    patch.setattr(padding, "MEAN", 7)
    return ["--quick"]


def tiny_compare(patch: Patch, root: Path) -> list[str]:
    patch.delenv("TRITON_INTERPRET", raising=False)  # the kernels' own tests run them
    patch.setenv("OMP_NUM_THREADS", "1")
    return ["--base", str(ROOT), "--tiny", "--rounds", "1", "Llama", "decode 1 ", "host"]


def tiny_train_step(patch: Patch, root: Path) -> list[str]:
    patch.setattr(train_side.Training, "profiled", lambda self: {"attention": 1.0})
    patch.setattr(train_step, "spawn", in_process(patch, train_side))
    ragged = ", Llama-3.1-8B, gpt-oss-20b"  # with the spaces of "ragged chats, NAME"
    only = f"1B 1 x 512{ragged},Qwen3-30B,E4B 1 x,35B,512 LoRA"
    return ["--tiny", "--rounds", "1", "--only", only]


def tiny_preference(patch: Patch, root: Path) -> list[str]:
    for name in ("trl", "peft", "datasets"):
        pytest.importorskip(name)
    way = preference_side.Way("sdpa", 2)
    patch.setattr(preference_side, "ways", lambda _, best=None: [way] * (not best))
    patch.setattr(processes, "spawn", in_process(patch, preference_side))
    return ["--tiny"]


def tiny_fp8_recipes(patch: Patch, root: Path) -> list[str]:
    given = tiny_recipes(patch, root)
    return [x.replace("float32", "bfloat16") for x in given]


def tiny_distillation(patch: Patch, root: Path) -> list[str]:
    patch.setattr(processes, "spawn", in_process(patch, distillation_side))
    return ["--tiny"]


def tiny_recipes(patch: Patch, root: Path) -> list[str]:
    for folder in ("pairs", "chats"):
        (root / folder).mkdir()
    for name, count in (("train", 16), ("eval", 4)):
        rows = preferences.pairs(count, seed=count)
        preferences.write(root / f"pairs/{name}.jsonl", rows)
        write_chats(root / f"chats/{name}.jsonl", count)
    paths = {"model": write_model(root / "model"), "preferences": root / "pairs"}
    paths |= {"gsm8k": root / "chats", "runs": root / "runs"}
    changes = "epochs=null steps=2 seq_len=256 batch_size=2 micro_batch_size=2 device=cpu"
    options = [x for name, path in paths.items() for x in (f"--{name}", str(path))]
    for change in f"{changes} dtype=float32 eval_every=2".split():
        options += ["--set", change]
    return ["--tiny", "--quick", *options]


def tiny_cost_curves(patch: Patch, root: Path) -> list[str]:
    """The longest row does not fit the peer's memory."""
    measured = cost_curves.measure

    def measure(training: Any, point: Any, *how: Any) -> Record:
        if point.tokens == 2**17 and not isinstance(training.model, tigon.Llama):
            raise torch.OutOfMemoryError("tried to allocate")
        return measured(training, point, *how) | {"allocated_gib": 2.0}

    patch.setattr(cost_curves, "measure", measure)
    return ["--tiny", "--only", "1B 1 x 1024,1B 1 x 131072,3B"]


def near(a: Record, b: Record, within: float, *names: str) -> None:
    for name in names:
        assert a[name] == pytest.approx(b[name], rel=within), name


def check_padding(record: Record) -> None:
    rows = record["providers"]
    assert record["real"] < math.prod(record["shape"])
    for row in (row for row in rows.values() if "error" not in row):
        near(row, rows[padding.WITH], 1e-3, "loss")
        assert row["gradient_off"] < 0.01


def check_compare(record: Record) -> None:
    step, decode, _ = record["cases"]
    near(step["base"][0], step["new"][0], 0, "loss", "gradient_norm")
    assert decode["base"][0]["tokens_crc"] == decode["new"][0]["tokens_crc"]


def check_train_step(record: Record) -> None:
    assert record["complete"] is False and len(record["cases"]) == 7
    for case in record["cases"]:
        (theirs,), (ours,) = (case["rounds"][side] for side in (PEER, train_cases.OURS))
        assert ours["losses"][0] == pytest.approx(theirs["losses"][0], rel=1e-3)
        # Scores that are not scaled see one token, and rounding decides which; equal in fp32
        near(ours, theirs, 0.15 if "Gemma4" in case["name"] else 1e-2, "gradient_norm")
        assert train_report.disagreement(case) == "" and ours["left_mib"] == 0.0


def check_preference(record: Record) -> None:
    sides = {name: row["first"] for name, row in record["sides"].items()}
    ours, exact = sides[preference_side.OURS], sides[preference_side.EXACT]
    near(sides[preference_side.PEER], ours, 1e-2, "logps/chosen", "grad_norm")
    near(sides[preference_side.TWICE], ours, 1e-4, "logps/rejected")
    near(sides[preference_side.HALF], ours, 1e-2, "loss", "grad_norm", "logps/chosen")
    near(exact, ours, 1e-4, "logps/chosen")
    for side in (sides[preference_side.PEER], exact):
        assert side["rewards/margins"] == pytest.approx(ours["rewards/margins"], abs=5e-4)
    assert abs(ours["rewards/margins"]) > 2e-3


def check_distillation(record: Record) -> None:
    for kind, within in (("step", 1e-3), ("head", 1e-5)):
        for name, ours in record[kind][distillation_side.OURS].items():
            theirs = record[kind][distillation_side.FORMULA][name]
            near(ours, theirs, within, "loss")
            near(ours, theirs, 1e-2, "gradient_norm")
    assert list(distillation.disagreements(record)) == []


def check_fp8_curves(record: Record) -> None:
    for seed in fp8_curves.SEEDS:
        plain, *others = (record["runs"][f"{kind}, seed {seed}"] for kind in fp8_curves.KINDS)
        for run in others:
            assert run["losses"] == pytest.approx(plain["losses"], rel=3e-3)
            assert 0 < abs(run["held_out"] - plain["held_out"]) < 0.05
    assert len({run["losses"][0] for run in record["runs"].values()}) > len(fp8_curves.SEEDS)


def check_recipes(record: Record) -> None:
    assert [row["part"] for row in record["dpo"]] == [0, 1]
    assert [row["kind"] for row in record["lora"]] == list(recipes.RATES)
    for row in [*record["dpo"], *record["lora"]]:
        assert row["steps"] == 2 and row["last"]["eval_loss"] < row["first"]["eval_loss"]


def check_fp8_recipes(record: Record) -> None:
    assert list(record["runs"]) == list(fp8_recipes.RUNS)
    for task in fp8_recipes.TASKS:
        known, own = (fp8_recipes.shares(record, task, kind) for kind in fp8_recipes.SETTINGS)
        assert len(own) == len(known) == len(fp8_recipes.SEEDS)
    losses = [run["sft"]["eval_loss"] for run in record["runs"].values()]
    assert len(set(losses)) == len(losses)
    assert losses[0] == pytest.approx(losses[1], rel=0.01)


def check_curves(record: Record) -> None:
    curves = record["curves"]
    assert list(curves) == list(train_curves.SIDES)
    for losses in curves.values():
        assert losses == pytest.approx(curves[train_curves.TRUTH], rel=3e-3)
        assert losses[3] < losses[0]
    assert 0 < train_curves.distance(record, train_curves.OURS) < 0.01


def tiny_end_to_end(_: Patch, path: Path) -> list[str]:
    sides = f"{end_to_end.OURS};{end_to_end.TRL}"
    more = ["--steps", "3", "--rounds", "1", "--root", str(path)]
    return ["--tiny", "--only", "1B LoRA", "--sides", sides, *more]


def check_end_to_end(record: Record) -> None:
    """Both train the same model on the same tokens, and learn those of answers."""
    ours, theirs = (record["cases"]["1B LoRA"][name] for name in (end_to_end.OURS, end_to_end.TRL))
    assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=3e-3)
    for found in (ours, theirs):
        assert found["steps"] == 3 and 1400 < found["tokens"] <= 3 * 2 * 256
        assert 0.4 < found["learned"] / found["tokens"] < 0.7
        parts = end_to_end.seconds_of(found)
        assert all(parts[name] > 0 for name in ("start", "data", "model", "steps", "evaluation"))
        assert sum(parts.values()) == pytest.approx(found["wall"]) and min(parts.values()) >= 0
        assert parts["start"] + parts["data"] < found["first_step"] < found["wall"]


def check_cost_curves(record: Record) -> None:
    rows = {(row["name"], row["side"]): row for row in record["points"]}
    assert len(rows) == 6
    short, long = "Llama-3.2-1B 1 x 1024", "Llama-3.2-1B 1 x 131072"
    near(*(dict(enumerate(rows[short, side]["losses"])) for side in (PEER, OURS)), 1e-3, 0)
    assert "ms" in rows[long, OURS] and "ms" not in rows[long, PEER]
    text = cost_curves.table(record)
    (line,) = (line for line in text.splitlines() if long in line)
    assert line.split(" | ")[1] == "out of memory" and ", 2.00 | " in line
    predicted = cost_curves.predict(cost_curves.POINTS[0])
    assert f"{1024e3 / predicted['ms']:,.0f}, {predicted['allocated_gib']:.1f}" in text


RUNS: Runs = {
    padding: (tiny_padding, check_padding),
    compare: (tiny_compare, check_compare),
    train_step: (tiny_train_step, check_train_step),
    preference: (tiny_preference, check_preference),
    distillation: (tiny_distillation, check_distillation),
    fp8_curves: (pass_tiny, check_fp8_curves),
    fp8_recipes: (tiny_fp8_recipes, check_fp8_recipes),
    recipes: (tiny_recipes, check_recipes),
    train_curves: (pass_tiny, check_curves),
    cost_curves: (tiny_cost_curves, check_cost_curves),
    end_to_end: (tiny_end_to_end, check_end_to_end),
}
