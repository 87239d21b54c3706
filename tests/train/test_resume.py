"""Checkpoints: a run that is stopped, killed or moved goes on exactly where it was."""

import json
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

from tests.small import write_chats
from tests.train.ranks import Ranks, main_after
from tigon.train import checkpoint, load, main
from tigon.train.build import load_tokenizer
from tigon.train.logging import RunLog

STEPS = {"steps": 7, "save_every": 2, "warmup_steps": 2}
KEYS = ("step", "loss", "grad_norm", "lr", "tokens", "supervised_tokens", "eval_loss")


def saved(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def whole(workspace):
    """A run without interruption."""
    main(workspace.settings("whole", eval_data=workspace.held_out, eval_every=3, **STEPS))
    return workspace.root / "whole"


def assert_same_curve(workspace, run: str) -> None:
    for key in KEYS:
        assert workspace.metrics(run, key) == workspace.metrics("whole", key), key


def test_stopped_by_a_signal_and_resumed_is_the_same_curve(workspace, whole, monkeypatch):
    settings = workspace.settings("stopped", eval_data=workspace.held_out, eval_every=3, **STEPS)
    log = RunLog.log

    def interrupt(self, row, samples=()):
        log(self, row, samples)
        if row["step"] == 3 and "loss" in row:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(RunLog, "log", interrupt)
    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        main(settings)
    monkeypatch.undo()
    run = workspace.root / "stopped"
    # It came in the evaluation after step 3, which is left to the run that goes on
    assert saved(run)[-1] == "step-00000003"
    assert workspace.metrics("stopped", "eval_loss") == workspace.metrics("whole", "eval_loss")[:1]
    with (run / "metrics.jsonl").open("a") as file:
        file.write(
            '{"step": 4, "loss": 0}\n{"step": 5, "lo'
        )  # as a kill in the next step leaves it
    main([*settings, "resume=auto"])
    assert_same_curve(workspace, "stopped")
    assert saved(run) == ["step-00000006", "step-00000007"]  # keep_last=2


KILLED = """
import os, signal
from tigon.train.checkpoint import saver
write_sums = saver.write_sums
def killed(directory, known):
    write_sums(directory, known)
    if "00000004" in directory.name:
        os.truncate(directory / "weights-00000.safetensors", 1000)
        os.kill(os.getpid(), signal.SIGKILL)
saver.write_sums = killed
"""


def test_killed_during_a_save_resumes_from_the_one_before(workspace, whole):
    settings = workspace.settings("killed", eval_data=workspace.held_out, eval_every=3, **STEPS)
    killed = Ranks(1, main_after, KILLED, settings)
    with pytest.raises(AssertionError, match=rf"exit codes \[-{int(signal.SIGKILL)}\]"):
        killed.finish()
    run = workspace.root / "killed"
    assert saved(run) == [".step-00000004.partial", "step-00000002"]
    newest = checkpoint.latest(run / "checkpoints")
    assert newest is not None and newest.name == "step-00000002"
    main([*settings, "resume=auto"])
    assert_same_curve(workspace, "killed")
    assert saved(run) == ["step-00000006", "step-00000007"]


def test_a_run_may_be_made_longer_and_finished_ones_are_left_alone(workspace, capsys):
    settings = workspace.settings("longer", schedule="constant", epochs=1, export="true")
    main(settings)
    steps = len(workspace.metrics("longer", "loss"))
    main([*settings, "resume=auto"])
    assert "is finished: nothing left to do" in capsys.readouterr().out
    main([*settings, "resume=auto", "epochs=2", "lr=1e-3"])
    printed = capsys.readouterr().out
    assert "epochs 1 -> 2" in printed and "lr 0.003 -> 0.001" in printed
    assert workspace.metrics("longer", "step") == list(range(1, 2 * steps + 1))
    assert workspace.metrics("longer", "lr")[-1] == 1e-3
    assert (workspace.root / "longer/hf/model.safetensors").exists()


def test_the_tokenizer_of_a_checkpoint_is_saved_when_that_is_gone(
    workspace, whole, tmp_path, monkeypatch
):
    """And leaves nothing elsewhere, as ranks may end without cleaning up."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    source = shutil.copytree(sorted((whole / "checkpoints").iterdir())[-1], tmp_path / "step-7")
    config = load(None, workspace.settings("whole", **STEPS))
    tokenizer = load_tokenizer(config, source)
    expected = (source / "tokenizer.json").read_bytes()
    shutil.rmtree(source)
    tokenizer.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved/tokenizer.json").read_bytes() == expected
    assert not list((tmp_path / "tmp").iterdir())


def test_another_data_stream_is_refused(workspace, whole, tmp_path):
    settings = workspace.settings("whole", **STEPS)
    with pytest.raises(SystemExit, match=r"another order of the data: batch_size 4 -> 2"):
        main([*settings, "resume=auto", "batch_size=2"])
    other = write_chats(tmp_path / "other.jsonl", 43, seed=9)
    with pytest.raises(SystemExit, match=r"made with other data than .*other\.jsonl"):
        main([*settings, "resume=auto", f"data={other}"])


def test_an_existing_run_is_never_overwritten(workspace, whole, tmp_path):
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    settings = workspace.settings("whole", **STEPS)
    with pytest.raises(SystemExit, match="whole is not empty: continue the run"):
        main(settings)
    main([*settings, "resume=auto", "export=false"])  # all steps are done
    first = whole / "checkpoints/step-00000006"
    with pytest.raises(SystemExit, match=r"already has step-00000007: to go on from .*00006"):
        main([*settings, f"resume={first}"])
    with pytest.raises(SystemExit, match="is not a checkpoint"):
        main([*workspace.settings("fresh"), f"resume={tmp_path}"])
    assert not (workspace.root / "fresh").exists()
    changed = {path for path, content in before.items() if path.read_bytes() != content}
    assert {path.name for path in changed} <= {".lock"}
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(SystemExit, match="is not empty"):
        main([*workspace.settings("x"), f"run_dir={tmp_path}", "resume=auto"])


def test_a_loss_that_is_not_finite_stops_the_run_before_it_touches_anything(workspace):
    settings = workspace.settings("diverged", steps=9, save_every=2)
    main([*settings, "steps=2"])
    newest = workspace.root / "diverged/checkpoints/step-00000002"
    before = {path: path.read_bytes() for path in newest.iterdir()}
    with pytest.raises(
        SystemExit,
        match=r"step 4: loss .*, gradient norm nan, with weights up to .*e\+29 from .*00002",
    ):
        main([*settings, "resume=auto", "lr=1e30"])
    assert saved(workspace.root / "diverged") == ["step-00000002"]
    assert {path: path.read_bytes() for path in newest.iterdir()} == before
    assert json.loads((newest / "run.json").read_text())["step"] == 2
