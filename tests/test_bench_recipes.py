"""The recipes, through the command line of training, on a tiny model; and how they are judged."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import harness, recipes
from bench.harness import Record
from tests.small import write_chats, write_model
from tests.train import preferences

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tells of the CPU's run")


@on_cpu
def test_recipes_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two parts of the pairs, an adapter, and all parameters; the runs' files go."""
    model = write_model(tmp_path / "model")
    for name, count in (("train", 16), ("eval", 4)):
        for folder in ("pairs", "chats"):
            (tmp_path / folder).mkdir(exist_ok=True)
        rows = preferences.pairs(count, seed=count)
        preferences.write(tmp_path / f"pairs/{name}.jsonl", rows)
        write_chats(tmp_path / f"chats/{name}.jsonl", count)
    out = tmp_path / "recipes.json"
    given = {"model": model, "preferences": tmp_path / "pairs", "gsm8k": tmp_path / "chats"}
    given |= {"runs": tmp_path / "runs", "out": out}
    options = [x for name, value in given.items() for x in (f"--{name}", str(value))]
    changes = [
        "epochs=null",
        "steps=2",
        "seq_len=256",
        "batch_size=2",
        "micro_batch_size=2",
        "device=cpu",
    ]
    changes += ["dtype=float32", "eval_every=2"]
    options += [x for change in changes for x in ("--set", change)]
    harness.main(recipes.BENCH, ["--tiny", "--quick", "--commit", "abc1234", *options])
    record = json.loads(out.read_text())
    dpo, lora = record["dpo"], record["lora"]
    assert [(row["part"], row["pairs"], row["usual"]) for row in dpo] == [
        (0, 4, True),
        (1, 4, True),
    ]
    assert [row["kind"] for row in lora] == list(recipes.RATES)
    for row in [*dpo, *lora]:
        assert row["steps"] == 2 and len(row["curve"]) == 2
        assert row["last"]["eval_loss"] < row["first"]["eval_loss"]
    assert dpo[0]["first"]["eval_rewards/margins"] == 0.0
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["pairs"]
    said = capsys.readouterr()
    assert "tigon train configs/recipe_lora.yaml model=" in said.err
    assert "| LoRA | 5.0e-4 | 2 | " in said.out


def test_each_pair_is_held_out_once(tmp_path: Path) -> None:
    for name, numbers in (("train", range(17)), ("eval", range(17, 23))):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{n}\n" for n in numbers))
    held_out: list[int] = []
    for train, part, count in recipes.write_parts(tmp_path, tmp_path / "parts"):
        sides = [[int(line) for line in path.read_text().split()] for path in (train, part)]
        assert sorted(sides[0] + sides[1]) == list(range(23)) and len(sides[1]) == count
        held_out += sides[1]
    assert sorted(held_out) == list(range(23))


def a_run(loss: float, **more: Any) -> Record:
    last = {"eval_loss": loss, "eval_rewards/margins": 0.5}
    return {"first": {"eval_loss": 1.0}, "last": last, "steps": 9, "seconds": 7.0, **more}


def test_recipes_are_judged_by_all_held_out_pairs_and_by_both_sides_best() -> None:
    record: Record = {"machine": "G", "torch": "2", "commit": "c", "date": "2026-11-23T"}
    record |= {"uncommitted_changes": False, "libraries": {}, "dpo": []}
    for part, (right, pairs) in enumerate([(0.5, 60), (0.75, 60), (0.75, 60), (0.6, 60), (1, 20)]):
        row = a_run(0.6, part=part, lr="1.0e-05", pairs=pairs, usual=True)
        row["last"][recipes.ACCURACY] = right
        record["dpo"].append(row)
    other = a_run(0.6, part=0, lr="1", pairs=60, usual=False)
    other["last"][recipes.ACCURACY] = 0.0
    assert recipes.accuracy(record["dpo"]) == pytest.approx(
        (0.5 + 0.75 + 0.75 + 0.6 + 1 / 3) / 4.333333
    )
    record["dpo"].append(other)
    assert list(recipes.verdicts(record, "dpo")) == [
        "met: held-out reward accuracy: 0.677, target ≥ 0.60"
    ]
    assert "0.677 of 260 held-out pairs have" in recipes.show(record)
    record["lora"] = [
        a_run(loss, kind=kind, lr="1")
        for kind, losses in (("LoRA", (0.5, 0.43)), ("all parameters", (0.4, 0.9)))
        for loss in losses
    ]
    assert list(recipes.verdicts(record, "lora")) == [
        "MISSED: held-out perplexity of LoRA over full fine-tuning: 1.030, target ≤ 1.02"
    ]
    assert set(recipes.blocks(record)) == {"docs/preference.md", "docs/adapters.md"}
    del record["dpo"][0]
    assert list(recipes.verdicts(record, "dpo")) == ["not measured: held-out reward accuracy"]
