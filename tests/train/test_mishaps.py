"""What befalls runs: kills between two files, damaged leftovers, logs that nobody reads."""

import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.train.ranks import Ranks, train_on
from tigon.train import callbacks, checkpoint, logging, main, trainer
from tigon.train.checkpoint import files
from tigon.train.checkpoint.files import KeepPolicy, SavedStep
from tigon.train.config_file import load
from tigon.train.logging import read_metrics
from tigon.train.resume import claim

CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


@pytest.mark.slow
def test_rollback_ignores_later_checkpoints(workspace, finished, poisoned):
    """A damaged one of a later step was passed over when the run went on from one before it."""
    run = shutil.copytree(finished, workspace.root / "later")
    damaged = run / "checkpoints/step-00000003/weights-00000.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-5] ^= 0x7F
    damaged.write_bytes(content)
    poisoned(2)
    settings = {"steps": 4, "save_every": 10, "nonfinite": "rollback", "keep_last": 0}
    main(workspace.settings("later", **settings, resume="auto"))
    state = checkpoint.read_metadata(run / "checkpoints/step-00000004")["state"]
    assert (state["rollbacks"], state["offset"]) == (1, 1)
    assert workspace.metrics("later", "step") == [1, 2, 3, 4]


def test_last_checkpoint_is_not_a_damaged_one(workspace, finished, poisoned):
    run = shutil.copytree(finished, workspace.root / "passed-over")
    (run / "checkpoints/step-00000003/weights-00000.safetensors").write_bytes(b"damaged")
    poisoned(2)
    settings = workspace.settings("passed-over", steps=4, resume="auto", keep_last=0)
    with pytest.raises(SystemExit, match=r"step 3: .* last checkpoint: .*step-00000002"):
        main(settings)


def test_predictions_on_a_full_disk_leave_no_file(tmp_path, monkeypatch, world):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(callbacks.os, "fsync", full)
    said = r"became full while .*predictions-step-00000003.jsonl was"
    with pytest.raises(OSError, match=said), callbacks.PredictionsWriter(tmp_path, 3, None, world):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_rollback_does_not_read_a_damaged_checkpoint(workspace, poisoned, monkeypatch, capsys):
    poisoned(3)
    judge = trainer.guard.check_step

    def damage(run, step, values):
        if step == 3:
            run.saver.wait()
            weights = run.saver.directory / "step-00000003/weights-00000.safetensors"
            content = bytearray(weights.read_bytes())
            content[-5] ^= 0x7F
            weights.write_bytes(content)
        return judge(run, step, values)

    monkeypatch.setattr(trainer.guard, "check_step", damage)
    settings = {"steps": 4, "save_every": 1, "nonfinite": "rollback", "keep_last": 0}
    main(workspace.settings("rot", **settings))
    printed = capsys.readouterr().out
    assert "step-00000003/weights-00000.safetensors is damaged" in printed
    assert "step-00000002: step 3 takes the rows after" in printed
    assert workspace.metrics("rot", "step") == [1, 2, 3, 4]


def test_processes_with_equal_names_share_no_run(workspace, tmp_path):
    """In two containers both may be process 1 of one host."""
    config = load(None, workspace.settings("x", run_dir=tmp_path / "run"))
    code = (
        "import fcntl, os, sys, time\n"
        "f = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)\n"
        "fcntl.flock(f, fcntl.LOCK_EX)\n"
        "os.write(f, sys.argv[2].encode())\n"
        "print('held', flush=True)\n"
        "time.sleep(600)\n"
    )
    with claim(config):
        me = Path(config.run_dir, ".lock").read_text()
    Path(config.run_dir).mkdir()
    other = subprocess.Popen(
        [sys.executable, "-c", code, f"{config.run_dir}/.lock", me], stdout=subprocess.PIPE
    )
    try:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        with pytest.raises(FileExistsError, match=f"is in use by {me}"), claim(config):
            pass
    finally:
        other.kill()
        other.wait()


def test_lock_file_is_no_link(workspace, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("as it was")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.lock").symlink_to(precious)
    (tmp_path / "run/.config.yaml.partial").symlink_to(precious)
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

    def killed(run, target):
        raise Killed

    export = trainer.export_best.__globals__["export"]
    monkeypatch.setitem(trainer.export_best.__globals__, "export", killed)
    with pytest.raises(Killed):
        main(settings)
    monkeypatch.setitem(trainer.export_best.__globals__, "export", export)
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


def test_clock_that_was_put_back():
    hours = [900, 0, 1, 2]
    saved = [SavedStep(step, 3600.0 * hour) for step, hour in enumerate(hours)]
    assert KeepPolicy(last=1, hours=1).choose(saved) == {0, 1, 2, 3}


@pytest.mark.slow(first=2)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": [1]}, "its config is no JSON object"),
        ({"state": 3}, "its state is no JSON object"),
        ({"state": {"wisdom": 1}}, "the state of another version"),
        ({"state": {"best_loss": "low"}}, "the state of another version"),
        ({"config": None}, "its config is no JSON object"),
        ({"step": 2}, "is of step 2: give it its own name back"),
    ],
)
def test_facts_of_the_wrong_kind(change, message, workspace, finished, tmp_path):
    source = shutil.copytree(finished / "checkpoints/step-00000003", tmp_path / "step-00000003")
    facts = json.loads((source / "run.json").read_text()) | change
    (source / "run.json").write_text(json.dumps(facts))
    (source / "SHA256SUMS").unlink()
    known = {"run.json": files.checksum(source / "run.json")}
    files.write_sums(source, known)
    with pytest.raises(SystemExit, match=message):
        main(workspace.settings("x", run_dir=tmp_path / "run", resume=source))


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


def test_a_run_needs_no_git(workspace, world, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert "no git" in logging._versions(world)


def test_an_export_on_a_full_disk_leaves_nothing(workspace, monkeypatch):
    def full(descriptor, content, offset):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(SystemExit, match=r"/hf was not written: .* became full while .*/hf was"):
        main(workspace.settings("no-room", steps=1, export="true"))
    assert not list((workspace.root / "no-room").glob(".hf*"))
    assert torch.is_grad_enabled()


def test_tensor_file_without_checksum_is_refused(finished, tmp_path):
    source = shutil.copytree(finished / "checkpoints/step-00000003", tmp_path / "step-00000003")
    shutil.copy(source / "weights-00000.safetensors", source / "weights-00001.safetensors")
    with pytest.raises(ValueError, match=r"weights-00001.safetensors is not in SHA256SUMS"):
        checkpoint.verify(source)


def test_rows_that_no_file_has_are_missed(state, tmp_path):
    """Memory that nothing was read into would be taken for weights."""
    with checkpoint.Saver(tmp_path, state.world) as to:
        target = state.save(to, 1)
    name = "model.layers.0.mlp.down_proj.weight"
    file = target / "weights-00000.safetensors"
    tensors = load_file(file)
    offsets = {n: {"saved_offsets": [0] * t.dim()} for n, t in tensors.items()}
    tensors[name] = tensors[name][5:].contiguous()
    offsets[name] = {"saved_offsets": [5, 0]}
    save_file(tensors, file, {"format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets)})
    with pytest.raises(ValueError, match=f"lacks rows of {name}"):
        checkpoint.load(target, state.model)


@pytest.mark.slow(first=2)
@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"weight": 1e39}, r"'weight'=1e\+39 must be 0 or from 1e-30 to 1e\+30"),
        ({"weight": 1e-50}, "'weight'=1e-50 must be 0 or from"),
        ({"weight": 10**400}, "'weight'=1000.* must be 0 or from"),
        ({"tools": "[" * 100_000}, "is nested too deeply"),
        pytest.param(
            {"chat_template_kwargs": {"a": json.loads("[" * 900 + "]" * 900)}},
            "nested too deeply",
            marks=pytest.mark.skipif(sys.version_info >= (3, 12), reason="not too deep there"),
        ),
    ],
)
def test_row_out_of_bounds_is_named(row, message, workspace, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps(CHAT | row) + "\n")
    with pytest.raises(SystemExit, match=rf"rows.jsonl:1: .*{message}"):
        main(workspace.settings("x", run_dir=tmp_path / "run", data=data, steps=1))


def test_a_key_that_is_not_unicode_ends_nothing(workspace, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps(CHAT | {"k\ud800": 1}) + "\n")
    settings = workspace.settings("x", run_dir=tmp_path / "run", data=data, batch_size=1, steps=1)
    assert r"k\ud800" in train_on(1, settings)


@pytest.mark.slow
def test_cache_does_not_hide_bad_rows(workspace, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps(CHAT) + '\n{"messages": 5}\n')
    settings = workspace.settings("x", data=data, batch_size=1, steps=1)
    main([*settings, f"run_dir={tmp_path}/skip", "bad_rows=skip"])
    with pytest.raises(SystemExit, match=r"rows.jsonl:2: 'messages' must be a list"):
        main([*settings, f"run_dir={tmp_path}/error"])


@pytest.mark.slow
def test_endless_line_is_refused(workspace, tmp_path, monkeypatch):
    """A gigabyte of it may be a few kilobytes on the disk."""
    monkeypatch.setattr("tigon.data.sources.MAX_LINE_BYTES", 2**20)
    data = tmp_path / "rows.jsonl.gz"
    with gzip.open(data, "wb") as file:
        file.write(b'{"messages": "' + b"a" * 2**24)
    with pytest.raises(SystemExit, match=r"rows.jsonl.gz:1: has more than 1,048,576 bytes"):
        main(workspace.settings("x", run_dir=tmp_path / "run", data=data, steps=1))
