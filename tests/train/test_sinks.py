"""TensorBoard and W&B have what metrics.jsonl has."""

import os
import shutil
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tigon.train import load, logging, main
from tigon.train.logging import Sinks, read_metrics, scalar_tags

AGAIN = {"steps": 6, "save_every": 2, "keep_last": 0, "eval_every": 2, "nonfinite": "rollback"}


class Offline:
    """In place of wandb: a server that takes rows as W&B does, for the processes of one run."""

    __spec__ = "of a module"
    Settings = SimpleNamespace

    def __init__(self, key=True):
        self.rows, self.runs, self.key = {}, [], key

    def setup(self):
        return SimpleNamespace(settings=SimpleNamespace(mode="online"))

    def login(self, prompt, verify):
        assert not prompt
        return self.key

    def init(self, **options):
        self.runs.append(options)
        return SimpleNamespace(step=max(self.rows, default=0), log=self.log, finish=lambda: None)

    def log(self, row, step):
        if step >= max(self.rows, default=0):  # W&B drops others
            self.rows.setdefault(step, {}).update(row)


def from_tensorboard(directory):
    """Tag -> [(step, value)]."""
    read = EventAccumulator(str(directory))
    read.Reload()
    tags = read.Tags()["scalars"]
    return {tag: [(e.step, e.value) for e in read.Scalars(tag)] for tag in tags}


def test_sinks_after_rollback_and_kill(workspace, poisoned, monkeypatch):
    fake = Offline()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run = workspace.root / "sunk"
    settings = workspace.settings(
        "sunk", log_to="[tensorboard, wandb]", eval_data=workspace.held_out, **AGAIN
    )
    poisoned(4)  # and back from the fifth step to the fourth
    main(settings)
    for step in (5, 6):  # as if it had been killed before it could save any more
        shutil.rmtree(run / f"checkpoints/step-{step:08d}", ignore_errors=True)
    main([*settings, "resume=auto"])
    rows = read_metrics(run / "metrics.jsonl")
    expected = {}
    for row in rows:
        for tag, value in scalar_tags(row).items():
            expected.setdefault(tag, []).append((row["step"], value))
    found = from_tensorboard(run / "tensorboard")
    assert found.keys() == expected.keys()
    assert {"train/loss", "train/accuracy", "speed/tokens_per_second", "eval/loss"} <= set(found)
    for tag, points in expected.items():
        assert found[tag] == [(s, pytest.approx(v, rel=1e-6)) for s, v in points], tag
    assert [step for step, _ in found["train/loss"]] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in found["eval/loss"]] == [0, 2, 4, 6]

    first, second = fake.runs
    assert first["id"] == second["id"] and first["resume"] == "allow" and len(first["id"]) == 8
    assert (first["name"], first["project"], first["config"]["lr"]) == ("sunk", "tigon", 3e-3)
    assert sorted(fake.rows) == [0, 1, 2, 3, 4, 5, 6]
    assert [s for s, row in fake.rows.items() if "eval/loss" in row] == [0, 2, 4, 6]
    assert [fake.rows[s]["train/loss"] for s in range(1, 7)] == workspace.metrics("sunk", "loss")


def test_a_sink_that_fails_ends_no_run(workspace, monkeypatch, capsys):
    class Failing:
        def __init__(self, *_):
            self.rows = 0

        def log(self, row):
            self.rows += 1
            if self.rows == 2:
                raise ConnectionError("no route to host")
            assert self.rows < 2, "it was left out"

    absent = Mock(side_effect=RuntimeError("api_key not configured"))
    monkeypatch.setitem(logging.SINKS, "tensorboard", Failing)
    monkeypatch.setitem(logging.SINKS, "wandb", absent)
    main(workspace.settings("unsunk", steps=4, log_to="[tensorboard, wandb]"))
    said = capsys.readouterr().out
    for name, problem in (
        ("wandb", "RuntimeError: api_key not configured"),
        ("tensorboard", "ConnectionError: no route to host"),
    ):
        text = f"log_to={name} has failed, and the run goes on without it: {problem}"
        assert said.count(text) == 1
    assert workspace.metrics("unsunk", "step") == [1, 2, 3, 4]


def test_an_id_that_is_none_is_made_again(monkeypatch, tmp_path):
    fake = Offline()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = load(None, ["model=m", "data=d", f"run_dir={tmp_path}", "seq_len=8", "lr=1"])
    file, other = tmp_path / ".wandb-id", tmp_path / "other"
    file.write_text("")  # as a crash of the machine leaves it
    logging.WandB(config)
    assert len(file.read_text()) == 8
    file.unlink()
    file.symlink_to(other)
    logging.WandB(config)
    assert not other.exists() and not file.is_symlink()
    assert [run["id"] for run in fake.runs][1] == file.read_text()


def test_names_and_packages_are_checked(workspace, monkeypatch):
    for names in ("comet", "tensorboard,wandb"):
        message = f"log_to='{names}' is not one of tensorboard, wandb or a list of them$"
        with pytest.raises(SystemExit, match=message):
            main(workspace.settings("x", log_to=names))
    monkeypatch.setattr(logging, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"log_to=wandb needs .*pip install 'tigon\[wandb\]'"):
        main(workspace.settings("x", log_to="wandb"))


def test_wandb_without_a_key_asks_nothing(workspace, monkeypatch, tmp_path, capsys):
    fake = Offline(key=False)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    made = Sinks(load(None, workspace.settings("x", run_dir=tmp_path, log_to="wandb")), [], print)
    assert not made.sinks and not fake.runs
    assert "without it: ValueError: no API key: run wandb login" in capsys.readouterr().out


@pytest.mark.slow
def test_wandb_itself_offline(workspace, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = load(None, workspace.settings("x", run_dir=tmp_path, log_to="wandb"))
    rows = [{"step": step, "loss": 1.0 / step, "tokens": 7} for step in (1, 2)]
    (tmp_path / ".wandb-id").write_text("12345678")  # of a process before this one
    made = Sinks(config, rows, print)
    run = made.sinks["wandb"].run
    assert (run.id, run.project, run.name) == ("12345678", "tigon", tmp_path.name)
    made.log({"step": 3, "loss": 0.5})
    assert run.summary["train/loss"] == 0.5
    made.close()
    assert "failed" not in capsys.readouterr().out
    (written,) = (n for n in os.listdir(tmp_path / "wandb") if n.startswith("offline-run"))
    assert written.endswith("12345678")
