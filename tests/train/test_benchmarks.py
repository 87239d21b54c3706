"""Tasks of lm-eval at evaluations of a run."""

import json
import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.support.benchmarks import write_tasks
from tests.support.small import EXPERTS, write_model
from tests.train.layouts import assert_same_metrics, assert_same_run, train_once
from tigon.integrations.lm_eval import TigonLM
from tigon.integrations.tasks import evaluate_tasks, flatten_metrics, load_tasks
from tigon.train import main, trainer
from tigon.train.logging import RunLog, read_metrics, scalar_tags

NAMES = ["choices", "texts", "answers"]
STEPS = {"steps": 4, "eval_every": 2, "export": "true"}


@pytest.fixture(scope="module")
def tasks(workspace: Any) -> Path:
    return write_tasks(workspace.root / "tasks")


def measured(folder: Path, **changes: Any) -> dict[str, str]:
    settings = {"tasks": NAMES, "include_path": str(folder), "num_fewshot": 1, "limit": 4}
    return {"eval": json.dumps(settings | changes)}


@pytest.fixture(scope="module")
def with_and_without(workspace: Any, tasks: Path) -> None:
    settings = {**STEPS, "eval_data": workspace.held_out}
    train_once(1, workspace.settings("without", **settings))
    train_once(1, workspace.settings("with", **settings, **measured(tasks)))


def test_the_run_is_the_same_bits(workspace: Any, with_and_without: None) -> None:
    keys = ("loss", "grad_norm", "eval_loss", "eval_accuracy")
    assert_same_metrics(workspace, "without", "with", *keys, rel=0)
    assert len(workspace.metrics("with", "eval_loss")) == 3


def test_they_are_those_of_the_model(workspace: Any, tasks: Path, with_and_without: None) -> None:
    rows = [r for r in read_metrics(workspace.root / "with/metrics.jsonl") if "eval_loss" in r]
    assert [row["step"] for row in rows] == [0, 2, 4]
    found = load_tasks(NAMES, str(tasks))
    for row, model in ((rows[0], workspace.model), (rows[-1], workspace.root / "with/hf")):
        lm = TigonLM(str(model), dtype="float32")
        expected = flatten_metrics(evaluate_tasks(lm, found, num_fewshot=1, limit=4))
        values = {k.removeprefix("eval/"): v for k, v in row.items() if k.startswith("eval/")}
        assert values == pytest.approx(expected, rel=1e-5)
        assert {name.partition("/")[0] for name in values} == {*NAMES}
    assert rows[0]["eval/texts/bits_per_byte"] > rows[-1]["eval/texts/bits_per_byte"]
    assert "eval/texts/bits_per_byte" in scalar_tags(rows[0])


LAYOUTS = {
    "fsdp": {},
    "gradients": {"sharding": "gradients"},
    "tensor": {"parallel": "{tensor: 2}"},
    "context": {"parallel": "{context: 2}"},
}


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks(workspace: Any, tasks: Path, with_and_without: None, layout: str) -> None:
    settings = {**STEPS, "eval_data": workspace.held_out, **measured(tasks), **LAYOUTS[layout]}
    train_once(2, workspace.settings(f"on two, {layout}", **settings))
    # Word perplexity is exp of the loss times the tokens of a word
    assert_same_run(workspace, "with", f"on two, {layout}", tolerance=3e-4, weights=2e-4)


@pytest.mark.slow
def test_experts_on_two_ranks(workspace: Any, tasks: Path) -> None:
    """Ranks that are done go on exchanging tokens with the others."""
    write_model(workspace.root / "mixture", **EXPERTS | {"num_experts": 4})
    names = measured(tasks, tasks=["choices", "answers"])
    settings = {"model": workspace.root / "mixture", "steps": 1, **names}
    train_once(1, workspace.settings("mixture, one", **settings))
    train_once(2, workspace.settings("mixture, two", **settings, parallel="{expert: 2}"))
    assert_same_run(workspace, "mixture, one", "mixture, two", tolerance=1e-4, weights=1e-3)


@pytest.mark.slow
def test_an_adapter(workspace: Any, tasks: Path) -> None:
    """At first it adds nothing to its base; later it does."""
    settings = {"steps": 2, "eval_every": 2, "lora.rank": 4, **measured(tasks)}
    main(workspace.settings("adapter", **settings))
    main(workspace.settings("base", **settings, lr=0))
    one, other = (workspace.metrics(run, "eval/texts/bits_per_byte") for run in ("adapter", "base"))
    assert one[0] == other[0] and one[-1] < other[-1]


@pytest.mark.slow
def test_half_precision(workspace: Any, tasks: Path) -> None:
    """Weights in float32 that FSDP casts, and caches in the dtype of their keys."""
    main(workspace.settings("half", steps=1, dtype="bfloat16", **measured(tasks)))
    main(workspace.settings("full", steps=1, **measured(tasks)))
    one, other = (workspace.metrics(run, "eval/texts/bits_per_byte") for run in ("half", "full"))
    assert one == pytest.approx(other, rel=1e-2) and one != other


def test_without_held_out_data(workspace: Any, tasks: Path, monkeypatch: Any, capsys: Any) -> None:
    """Each row once, also over a kill, and a resumed run that has nothing left to do."""
    settings = {"steps": 2, "save_every": 1, "eval_every": 1, **measured(tasks, tasks=["choices"])}
    settings = workspace.settings("alone", **settings)
    save = RunLog.saved

    def killed(self: Any, step: int, seconds: float, *, whole: bool) -> None:
        save(self, step, seconds, whole=whole)
        raise KeyboardInterrupt

    monkeypatch.setattr(RunLog, "saved", killed)
    with pytest.raises(KeyboardInterrupt):
        main(settings)
    monkeypatch.setattr(RunLog, "saved", save)
    main([*settings, "resume=auto"])
    shown = capsys.readouterr().out
    assert "nothing comes of" not in shown and "choices: acc" in shown
    main([*settings, "resume=auto"])
    assert "nothing left to do" in capsys.readouterr().out
    rows = read_metrics(workspace.root / "alone/metrics.jsonl")
    assert [row["step"] for row in rows if "eval/choices/acc" in row] == [0, 1, 2]
    assert "choices" in (workspace.root / "alone/report.html").read_text()


def test_a_signal_ends_them(workspace: Any, tasks: Path, monkeypatch: Any) -> None:
    """At the next pass; the evaluation is made when the run resumes."""
    settings = {"steps": 2, "save_every": 1, "eval_every": 1, **measured(tasks, tasks=["choices"])}
    settings = workspace.settings("signaled", **settings)
    measure, sent = trainer.evaluate, []

    def signaled(run: Any, step: int) -> Any:
        if step == 1 and not sent:
            sent.append(os.kill(os.getpid(), signal.SIGTERM))
        return measure(run, step)

    monkeypatch.setattr(trainer, "evaluate", signaled)
    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        main(settings)
    rows = read_metrics(workspace.root / "signaled/metrics.jsonl")
    assert [row["step"] for row in rows if "eval/choices/acc" in row] == [0]
    main([*settings, "resume=auto"])
    rows = read_metrics(workspace.root / "signaled/metrics.jsonl")
    assert [row["step"] for row in rows if "eval/choices/acc" in row] == [0, 1, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"include_path": "none"}, "include_path=none: there is no such folder"),
        ({"limit": 0}, "eval.limit=0"),
        ({"num_fewshots": 1}, "num_fewshots"),
    ],
)
def test_bad_settings(workspace: Any, tasks: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        main(workspace.settings("bad", **measured(tasks, **changes)))


@pytest.mark.parametrize("option", [[], ["--dry-run"]])
def test_tasks_are_found_before_data_are_read(
    workspace: Any, tasks: Path, monkeypatch: Any, option: list[str]
) -> None:
    fail = Mock(side_effect=ValueError("lm-eval has no such task"))
    monkeypatch.setattr("tigon.integrations.tasks.load_tasks", fail)
    settings = workspace.settings("named", data="hf://nowhere", **measured(tasks))
    with pytest.raises(SystemExit, match="lm-eval has no such task"):
        main([*settings, *option])
