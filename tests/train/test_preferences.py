"""Preference objectives in the trainer: ranks, packing, resuming, references, refusals."""

import re
import shutil
from typing import Any

import numpy as np
import pytest
import torch

import tigon
from tests.support.small import write_model
from tests.train import preferences
from tigon.data import cache_root
from tigon.train import load, main, pack
from tigon.train.data import describe_stream_limits
from tigon.train.distributed import World
from tigon.train.memory import estimate
from tigon.train.model import meta_model
from tigon.train.tasks import TASKS

pytestmark = pytest.mark.usefixtures("empty_cache")

KEYS = (
    "loss",
    "grad_norm",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "logps/chosen",
)


@pytest.fixture
def settings(workspace):
    """13 pairs or labeled answers, and some held out."""
    made = {}
    for kind, make in (("pairs", preferences.pairs), ("labeled", preferences.labeled)):
        for name, count, seed in (("data", 13, 5), ("eval_data", 5, 9)):
            path = workspace.root / f"{kind}-{name}.jsonl"
            made[kind, name] = preferences.write(path, make(count, seed))

    def settings(run: str, task: str, **changes: Any) -> list[str]:
        kind = "labeled" if task == "kto" else "pairs"
        same = {name: made[kind, name] for name in ("data", "eval_data")}
        same |= {"task": task, "steps": 4, "eval_every": 2, "max_grad_norm": 0}
        return workspace.settings(run, **same | changes)

    return settings


def assert_same(workspace: Any, run: str, other: str, *, last: int = 4, rel: float = 0.0) -> None:
    for key in (*KEYS, *(f"eval_{key}" for key in KEYS if key != "grad_norm")):
        curve, expected = (
            [np.nan if value is None else value for value in workspace.metrics(name, key)]
            for name in (run, other)
        )
        assert len(expected) == (3 if key.startswith("eval") else 4)
        expected = expected[-last:]
        assert curve == pytest.approx(expected, rel=rel, abs=rel / 10, nan_ok=True), key


@pytest.mark.slow
def test_kto_of_pairs(workspace, settings, tmp_path):
    """As of the same answers with labels, where the mismatched ones do not matter."""
    rows = preferences.pairs(6, 5)
    apart = [
        {"prompt": row["prompt"], "completion": row[name], "label": name == "chosen"}
        for row in rows
        for name in ("chosen", "rejected")
    ]
    more = {"steps": 2, "packing": "false", "batch_size": 12}
    for name, data in (("of-pairs", rows), ("of-labels", apart)):
        file = preferences.write(tmp_path / f"{name}.jsonl", data)
        main(settings(name, "kto", data=file, eval_data=file, **more))
    for key in ("logps/chosen", "logps/rejected", "eval_logps/chosen", "eval_logps/rejected"):
        found, expected = (workspace.metrics(name, key)[0] for name in ("of-pairs", "of-labels"))
        assert found == pytest.approx(expected, rel=1e-5), key


def test_answers_of_one_kind_alone_have_no_margin(workspace, settings, tmp_path, capsys):
    """A mean of no answers is not 0."""
    rows = [row | {"label": False} for row in preferences.labeled(6)]
    main(
        settings("bad-alone", "kto", data=preferences.write(tmp_path / "bad.jsonl", rows), steps=2)
    )
    for key in ("rewards/chosen", "rewards/margins", "logps/chosen"):
        assert workspace.metrics("bad-alone", key) == [None, None], key
        assert None not in workspace.metrics("bad-alone", f"eval_{key}")
    assert workspace.metrics("bad-alone", "logps/rejected")[0] < 0
    told = "are not desired, by their label, and kto learns from the difference to the other kind"
    said = capsys.readouterr().out
    assert f"\ndata: all answers {told}" in said and "eval_data: all answers" not in said
    steps = [text for text in said.splitlines() if "lr " in text]
    assert len(steps) == 2
    for text in steps:
        assert re.search(r"rewards/chosen +-  .*rewards/margins +-  ", text) and "nan" not in text


@pytest.mark.slow
def test_kto_says_which_weights_balance_its_answers(workspace, settings, tmp_path, capsys):
    rows = preferences.labeled(9)
    files = {
        kind: preferences.write(
            tmp_path / f"{kind}.jsonl", [row | {"label": kind == "good"} for row in rows]
        )
        for kind in ("good", "bad")
    }
    rows[0]["label"] = False  # 5 of 9 are desired
    mixed = preferences.write(tmp_path / "mixed.jsonl", rows)

    def said(data: Any, **more: Any) -> str:
        pack(load(None, settings("balance", "kto", data=data, eval_data="[]", **more)))
        return "".join(x for x in capsys.readouterr().out.splitlines() if "desired" in x)

    assert said(mixed) == said(f"[{files['good']}, {files['bad']}]") == ""
    assert said(mixed, undesirable_weight=0) == ""
    told = "data: 5 answers are desired, 4 are not; with their weights, the former count "
    advice = "times as much as the latter, and arXiv 2402.01306 advises 1 to 1.33 times:"
    more = said(mixed, desirable_weight=2)
    assert more == f"{told}2.50 {advice} undesirable_weight from 1.88 to 2.5"
    less = said(mixed, undesirable_weight=2)
    assert less == f"{told}0.62 {advice} desirable_weight from 1.6 to 2.13"
    weighted = f"[{{path: {files['good']}, weight: 3}}, {{path: {files['bad']}, weight: 1}}]"
    assert f"3.00 {advice} undesirable_weight from 2.25 to 3" in said(weighted)
    assert "data: all answers are desired, by" in said(files["good"])


@pytest.mark.slow
def test_references_are_computed_once_and_checked(workspace, settings, capsys):
    def run(name: str, **changes: Any) -> list[str]:
        main(settings(name, "dpo", **changes))
        lines = capsys.readouterr().out.splitlines()
        return [line for line in lines if line.startswith("reference: ")]

    first = run("cached")
    assert len(first) == 2 and all("computed in" in line for line in first)
    assert all(", from " in line for line in run("cached-again"))
    assert all("computed in" in line for line in run("cached-length", max_length=20))
    assert all("computed in" in line for line in run("cached-rows", seq_len=64))
    path = min((cache_root() / "reference").glob("*.npy"))
    values = np.load(path)
    values[np.flatnonzero(values)[0]] += 1
    np.save(path, values)
    again = run("cached-damaged") + run("d2", max_length=20) + run("d3", seq_len=64)
    assert sum("computed in" in line for line in again) == 1
    for name in ("cached-again", "cached-damaged"):
        assert_same(workspace, name, "cached")


@pytest.mark.slow
def test_resuming_without_the_cache_asks_the_initial_model(
    workspace, settings, monkeypatch, tmp_path
):
    main(settings("kept", "dpo", save_every=2))
    monkeypatch.setenv("TIGON_CACHE", str(tmp_path / "another"))
    main(settings("lost", "dpo", resume=workspace.checkpoint("kept", 2)))
    assert_same(workspace, "lost", "kept", last=2)


@pytest.mark.slow
def test_resuming_with_another_reference_or_without_its_files(workspace, settings, tmp_path):
    model = write_model(tmp_path / "model")
    run = settings("begun", "dpo", model=model, steps=4, save_every=2, eval_data="[]")
    main([*run, "steps=2"])
    weights = model / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-4] + bytes(4))
    begun = workspace.root / "begun"
    elsewhere = [f"resume={begun}/checkpoints/step-00000002", f"run_dir={workspace.root}/apart"]
    for where in (["resume=auto"], elsewhere):
        with pytest.raises(SystemExit, match="is not the reference that the run began with"):
            main([*run, *where])
    weights.write_bytes(content)
    (model / "consolidated.safetensors").write_bytes(b"which no model is read from")
    main([*run, *elsewhere, "steps=3"])
    shutil.rmtree(model)
    main([*run, "resume=auto"])
    assert len(workspace.metrics("begun", "loss")) == 4


def test_another_model_as_the_reference(workspace, settings, tmp_path):
    other = write_model(tmp_path / "other", num_hidden_layers=1)
    rows = preferences.pairs(13, 5)
    models = [tigon.from_pretrained(path) for path in (workspace.model, other)]
    tokenizer = tigon.Tokenizer.from_pretrained(workspace.model)

    def logprob(model: Any, row: Any, answer: str) -> float:
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)
        ids = torch.tensor(tokenizer.apply_chat_template([*row["prompt"], *row[answer]]))
        with torch.no_grad():
            logits = model(ids[None]).logits[0].double().log_softmax(-1)
        return sum(logits[t - 1, ids[t]].item() for t in range(len(prompt), len(ids)))

    main(settings("other-all", "dpo", reference=other, steps=1, batch_size=64))
    rewards = [
        np.mean([0.1 * (logprob(models[0], r, a) - logprob(models[1], r, a)) for r in rows])
        for a in ("chosen", "rejected")
    ]
    found = [workspace.metrics("other-all", f"rewards/{a}")[0] for a in ("chosen", "rejected")]
    assert found == pytest.approx(rewards, rel=1e-4)


@pytest.mark.slow
def test_a_stream_asks_the_reference_at_each_step(workspace, settings):
    same = {"steps": 4, "batch_size": 64}
    main(settings("whole", "dpo", **same))
    main(settings("stream", "dpo", **same, streaming="true", shuffle_window=64))
    assert_same(workspace, "stream", "whole", rel=2e-4)


NEEDED = ["run_dir=a", "model=m", "data=a.jsonl"]


@pytest.mark.slow
def test_long_answers_are_cut_and_counted(workspace, settings, tmp_path, capsys):
    rows = preferences.pairs(3)
    long = rows[0] | {"chosen": preferences.message("assistant", "words " * 100)}
    asked = rows[1] | {"prompt": preferences.message("user", "words " * 100)}
    data = preferences.write(tmp_path / "long.jsonl", [*rows, long, asked])
    same = {"data": data, "max_length": 100, "seq_len": 256, "steps": 1}
    main(settings("cut", "dpo", **same))
    said = capsys.readouterr().out
    assert "data: 4 of 5 pairs, " in said and "1 cut, 1 left out" in said
    longer = "data: 2 pairs longer than max_length 100 (a prompt with one answer): "
    assert f"{longer}1 cut, 1 left out; the longest has " in said and "a row of" not in said
    held = re.search(r"data: each prompt is computed once.*: ([\d,]+) tokens in rows", said)
    assert held and f"pairs, {held[1]} tokens, " in said
    assert f"reference: {held[1]} tokens of data, computed in" in said
    main(settings("by-row", "dpo", data=data, seq_len=100, steps=1))
    said = capsys.readouterr().out
    found = re.search(
        r"data: 2 pairs longer than a row of seq_len 100: .*; seq_len=(\d+) takes", said
    )
    assert found
    main(settings("enough", "dpo", data=data, seq_len=found[1], steps=1))
    said = capsys.readouterr().out
    assert "data: 5 pairs, " in said and "longer than" not in said


@pytest.mark.slow
def test_answers_equal_once_cut_are_left_out(workspace, settings, tmp_path, capsys):
    """They would teach nothing, and count as pairs in which the rejected answer is as likely."""
    same = preferences.message("assistant", "words " * 100)
    late = preferences.pairs(1)[0] | {"chosen": same}
    late |= {"rejected": [same[0] | {"content": same[0]["content"] + "and more"}]}
    data = preferences.write(tmp_path / "late.jsonl", [*preferences.pairs(3), late])
    cut = {"data": data, "max_length": 100, "seq_len": 256, "steps": 2, "save_every": 1}
    for task, changes in (("dpo", {}), ("orpo", {"packing": "false"})):
        main(settings(f"late-{task}", task, **cut, **changes))
        said = capsys.readouterr().out
        assert "data: 3 of 4 pairs, " in said and "; 0 cut, 1 left out" in said
        assert "answer): 0 cut, 1 left out; the longest has " in said
        assert "data: 1 pair of those left out has equal answers once they are cut\n" in said
    source = workspace.checkpoint("late-dpo", 1)
    main(settings("late-resumed", "dpo", **cut, resume=source))
    assert "data: 3 of 4 pairs, " in capsys.readouterr().out


def test_stream_warns_of_pairs_that_may_not_fit(world):
    def said(*given: str) -> str | None:
        config = load(None, [*NEEDED, "task=dpo", "streaming=true", "steps=1", *given])
        return describe_stream_limits(TASKS[config.task](config, world))

    told = "pairs longer than a row of seq_len 512 are cut or left out"
    assert said("seq_len=512") == told
    more = f"{told}; seq_len=800 takes all that max_length 400 leaves"
    assert said("seq_len=512", "max_length=400") == more
    for fits in ("packing=false", "max_length=256", "task=sft", "task=grpo"):
        assert said("seq_len=512", fits) is None


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("task", ["reward", "dpo", "orpo", "kto"])
def test_dry_run_times_steps_and_estimates_memory(workspace, settings, task, capsys):
    main([*settings(f"dry-{task}", task), "--dry-run"])
    said = capsys.readouterr().out
    scores = re.search(r"the first has \d+ tokens in [2-9] pairs, whose scores are learned\n", said)
    assert "a step, measured: " in said and bool(scores) == (task == "reward")
    config = load(None, settings(f"estimated-{task}", task, micro_batch_size=1))
    objective = TASKS[task](config, World(0, 1, torch.device("cpu")))
    model = meta_model(config, torch.float32)
    found = estimate(model, objective, config, 1, torch.bfloat16)
    needed = {"activations"} if task == "reward" else {"activations", "logits and loss"}
    assert needed <= found.kinds.keys()  # which has those that are not 0
