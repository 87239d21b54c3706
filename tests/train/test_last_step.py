"""What follows the last step: its checkpoint during the evaluation, and an export that links it."""

import errno
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import tigon
from tests.support.small import EXPERTS, write_model
from tests.train.checkpoints import assert_equal
from tigon.train import checkpoint, main, trainer
from tigon.train.checkpoint import format
from tigon.train.export import convert_checkpoint


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def no_links(*_: object) -> None:
    raise OSError(errno.EXDEV, "Invalid cross-device link")


LINKED = {  # settings of a run -> how many files of its export are those of its checkpoint
    "one-file": ({}, 1),
    "several": ({}, 4),
    "average": ({"ema_decay": 0.5}, 1),
    "rounded": ({"export_dtype": "bfloat16"}, 0),
    "experts": ({"model": "mixture"}, 0),  # one tensor each, which a checkpoint has stacked
    "other-disk": ({}, 0),
}


@pytest.mark.parametrize("name", LINKED)
def test_weights_are_written_once(name, workspace, monkeypatch):
    """The export has the files of the last checkpoint where they are what it would write."""
    changes, linked = LINKED[name]
    if "model" in changes:
        changes = {"model": write_model(workspace.root / "mixture", **EXPERTS)}
    if name == "several":
        monkeypatch.setattr(format, "FILE", 100_000)
    if name == "other-disk":
        monkeypatch.setattr(os, "link", no_links)
    settings = workspace.settings(name, steps=1, export="true", lr=1e-2, **changes)
    main(settings)
    run = workspace.root / name
    last, exported = checkpoint.latest(run / "checkpoints"), run / "hf"
    stored = {path.stat().st_ino for path in last.glob("weights-*")}
    shards = sorted(exported.glob("*.safetensors"))
    assert len(stored & {path.stat().st_ino for path in shards}) == linked
    convert_checkpoint(last, str(run / "converted"), dtype=dtype_of(exported))
    expected = tigon.from_pretrained(run / "converted").state_dict()
    assert_equal(tigon.from_pretrained(exported).state_dict(), expected)
    transformers = AutoModelForCausalLM.from_pretrained(exported).state_dict()
    assert len(transformers) >= len(expected) or name == "experts"
    if (run / "hf-ema").exists():
        average = tigon.from_pretrained(run / "hf-ema").state_dict()
        assert not any(torch.equal(average[key], expected[key]) for key in expected)
    before = [path.read_bytes() for path in shards]
    main([*settings, "steps=2", "resume=auto", "keep_last=0"])  # exports again
    checkpoint.verify(last)
    assert [path.read_bytes() for path in sorted(exported.glob("*.safetensors"))] != before
    shutil.rmtree(run / "checkpoints")
    tigon.from_pretrained(exported)


def dtype_of(exported: Path) -> torch.dtype:
    return tigon.from_pretrained(exported).dtype


def test_the_last_checkpoint_is_written_during_the_evaluation(workspace, monkeypatch, capsys):
    """And is whole before a signal that comes meanwhile ends the run."""
    evaluate, written, evaluated = trainer.evaluate, format._write, threading.Event()

    def wait(*arguments):
        assert evaluated.wait(60)
        return written(*arguments)

    def stopped(run, step):
        if step:
            assert checkpoint.latest(run.saver.directory) is None
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Timer(0.5, evaluated.set).start()
        return evaluate(run, step)

    def load() -> None:
        assert checkpoint.latest(workspace.root / "meanwhile/checkpoints") is None
        loaded.append("matplotlib")

    monkeypatch.setattr(format, "_write", wait)
    monkeypatch.setattr(trainer, "evaluate", stopped)
    loaded: list[str] = []
    monkeypatch.setattr(trainer.report, "load_matplotlib", load)
    changes = {"steps": 1, "eval_data": workspace.held_out, "export": "true"}
    settings = workspace.settings("meanwhile", **changes)
    with pytest.raises(SystemExit, match="143"):
        main(settings)
    run = workspace.root / "meanwhile"
    checkpoint.verify(run / "checkpoints/step-00000001")
    assert loaded == ["matplotlib"]
    assert "resume=auto goes on from step-00000001" in capsys.readouterr().out
    assert not (run / "hf").exists() and not workspace.metrics("meanwhile", "eval_loss")[1:]
    monkeypatch.undo()
    main([*settings, "resume=auto"])
    assert (run / "hf/model.safetensors").exists()
    assert len(workspace.metrics("meanwhile", "eval_loss")) == 1


def test_an_error_in_the_last_evaluation_keeps_the_checkpoint(workspace, monkeypatch):
    monkeypatch.setattr(trainer, "evaluate", full_disk)
    with pytest.raises(SystemExit, match="No space left"):
        main(workspace.settings("failed", steps=1, eval_data=workspace.held_out))
    checkpoint.verify(workspace.root / "failed/checkpoints/step-00000001")
