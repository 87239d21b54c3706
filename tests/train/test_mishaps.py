"""What befalls runs: kills between two files, damaged leftovers, logs that nobody reads."""

import json
import os
import shutil
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.train.checkpoints import full_disk
from tests.train.ranks import Ranks
from tigon.settings.config import Config
from tigon.train import callbacks, checkpoint, main, trainer
from tigon.train.checkpoint import files, saver
from tigon.train.checkpoint.files import KeepPolicy
from tigon.train.logging import RunLog, read_metrics


def test_predictions_on_a_full_disk_leave_no_file(tmp_path, monkeypatch, world):
    monkeypatch.setattr(os, "fsync", full_disk)
    said = r"became full while .*predictions-step-00000003.jsonl was"
    with pytest.raises(OSError, match=said), callbacks.PredictionsWriter(tmp_path, 3, None, world):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_at_the_start(tmp_path, monkeypatch, world):
    (tmp_path / "config.yaml").write_text("of the run before")
    monkeypatch.setattr(os, "fsync", full_disk)
    said = r"^the disk became full while .*/config.yaml was written: .* free$"
    with pytest.raises(OSError, match=said):
        RunLog(Config(model="m", data=("d",), run_dir=str(tmp_path)), world, 0, 1)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["of the run before"]


def test_a_disk_without_room_for_the_last_checkpoint(workspace, monkeypatch, capsys):
    """What was trained is exported all the same."""
    monkeypatch.setattr(saver, "write_blocks", full_disk)
    with pytest.raises(SystemExit, match=r"step-00000002 was not written: .* full"):
        main(workspace.settings("full", steps=2, export="true"))
    assert (workspace.root / "full/hf/model.safetensors").exists()
    assert "has the export, but no last checkpoint" in capsys.readouterr().out
    monkeypatch.undo()
    main(workspace.settings("full", steps=2, export="true", resume="auto"))
    assert workspace.checkpoint("full", 2).exists()


def test_a_rollback_does_not_read_a_damaged_checkpoint(workspace, poisoned, monkeypatch, capsys):
    poisoned(3)
    judge = trainer.guard.check_step

    def damage(run, step, values, local_loss):
        if step == 3:
            run.saver.wait()
            weights = run.saver.directory / "step-00000003/weights-00000.safetensors"
            content = bytearray(weights.read_bytes())
            content[-5] ^= 0x7F
            weights.write_bytes(content)
        return judge(run, step, values, local_loss)

    monkeypatch.setattr(trainer.guard, "check_step", damage)
    settings = {"steps": 4, "save_every": 1, "nonfinite": "rollback", "keep_last": 0}
    main(workspace.settings("rot", **settings))
    printed = capsys.readouterr().out
    assert "step-00000003/weights-00000.safetensors is damaged" in printed
    assert "step-00000002: step 3 takes the rows after" in printed
    assert workspace.metrics("rot", "step") == [1, 2, 3, 4]


def test_lock_file_is_no_link(workspace, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("as it was")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.lock").symlink_to(precious)
    settings = workspace.settings("x", run_dir=tmp_path / "run")
    with pytest.raises(SystemExit, match=r"\.lock"):
        main(settings)
    (tmp_path / "run/.lock").unlink()
    (tmp_path / "run/.lock").touch()
    main([*settings, "steps=1"])
    assert precious.read_text() == "as it was"


@pytest.mark.slow
def test_killed_export_of_the_best_is_repeated(workspace, monkeypatch):
    class Killed(BaseException):
        pass

    settings = workspace.settings(
        "best", steps=2, eval_data=workspace.held_out, hf_best="true", save_every=1, resume="auto"
    )

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(trainer, "export", Mock(side_effect=Killed))
        main(settings)
    main(settings)
    assert (workspace.root / "best/hf-best/model.safetensors").exists()
    assert len(workspace.metrics("best", "eval_loss")) == 1


def test_rows_that_a_crash_has_left_in_pieces(workspace, finished, tmp_path):
    """A machine that loses power may leave zeros where rows were."""
    run = shutil.copytree(finished, tmp_path / "run")
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b"\0" * 300 + b'\n{"step": 4, "lo\n\xff\n[4]\n{"step": 5}')
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [1, 2, 3]
    (run / ".exported").write_text("")
    main(workspace.settings("x", run_dir=run, steps=4, resume="auto", export="true"))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]


def test_old_checkpoint_that_cannot_be_removed(workspace, monkeypatch, capsys):
    def busy(path, **options):
        if "checkpoints" not in Path(path).parts:
            return rmtree(path, **options)
        raise OSError(16, "Device or resource busy", str(path))

    rmtree = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", busy)
    main(workspace.settings("busy", steps=4, save_every=1, keep_last=1))
    assert "could not be removed: [Errno 16]" in capsys.readouterr().out
    assert checkpoint.step_of(checkpoint.latest(workspace.root / "busy/checkpoints")) == 4


def test_a_checkpoint_that_was_moved_elsewhere_and_linked(tmp_path):
    (tmp_path / "disk/step-00000001").mkdir(parents=True)
    (tmp_path / "disk/step-00000001/run.json").write_text("{}")
    directory = tmp_path / "checkpoints"
    for step in (2, 3):
        (directory / f"step-{step:08d}").mkdir(parents=True)
    (directory / "step-00000001").symlink_to(tmp_path / "disk/step-00000001")
    (directory / "step-00000009").write_text("no directory")
    files.prune(directory, 3, KeepPolicy(last=1), {})
    assert sorted(path.name for path in directory.iterdir()) == ["step-00000003", "step-00000009"]
    assert (tmp_path / "disk/step-00000001/run.json").exists()
    assert checkpoint.latest(directory) == directory / "step-00000003"


def unread(how: str, settings: list[str]) -> None:
    read, write = os.pipe()
    os.dup2(os.open("/dev/full", os.O_WRONLY) if how == "full" else write, 1)
    os.close(read)
    os.close(write)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)  # a pipe has no position
    main(settings)


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("how", ["closed", "full"])
def test_closed_or_full_log_costs_no_step(workspace, how):
    """As with `| tee log`, which Ctrl-C ends before the run has saved its checkpoint."""
    run = f"unread-{how}"
    assert Ranks(1, unread, how, workspace.settings(run, steps=2, log_every=1)).finish() == ""
    assert checkpoint.latest(workspace.root / run / "checkpoints") is not None
