"""Saving in the background, on full disks, killed at any moment; exports; runs without a base."""

import errno
import os
import shutil
import signal
import sys
import threading
import time
from collections import namedtuple
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.train.checkpoints import State, assert_equal
from tests.train.ranks import Ranks
from tigon.train import checkpoint, main, trainer
from tigon.train.checkpoint import KeepPolicy, files, format, newest_complete, saver
from tigon.train.distributed import start
from tigon.weights.files import require_space

Usage = namedtuple("Usage", "total used free")


def test_a_save_in_the_background_has_the_values_of_its_moment(state, tmp_path, monkeypatch):
    expected, written = state.tensors(), format._write
    slow, order = threading.Event(), []

    def wait(*arguments):
        slow.wait(60)
        order.append("written")
        return written(*arguments)

    monkeypatch.setattr(format, "_write", wait)
    with saver.Saver(tmp_path, state.world) as to:
        first = state.save(to, 1)
        state.step(seed=2)  # training goes on
        later = state.tensors()
        assert not first.exists() and not order
        threading.Timer(0.5, slow.set).start()
        state.save(to, 2)  # waits for the first
        assert first.exists() and order[:2] == ["written", "written"]
    assert checkpoint.latest(tmp_path / "checkpoints") == tmp_path / "checkpoints/step-00000002"
    for target, tensors in (
        (first, expected),
        (checkpoint.latest(tmp_path / "checkpoints"), later),
    ):
        checkpoint.verify(target)
        checkpoint.load(target, state.model, state.optimizer)
        assert_equal(state.tensors(), tensors)


@pytest.mark.parametrize("background", [False, True])
def test_what_stops_a_save_is_raised_and_nothing_of_it_stays(
    background, state, tmp_path, monkeypatch
):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with saver.Saver(tmp_path, state.world, background=background) as to:
        first = state.save(to, 1)
        to.wait()
        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(
            checkpoint.SaveError,
            match=r"^.*step-00000002 was not written: the disk became full while .*weights-00000.* "
            r"was written: 0\.\d MiB needed, [\d.]+ GiB free$",
        ):
            state.save(to, 2)
            to.wait()
        monkeypatch.undo()
        assert [path.name for path in first.parent.iterdir()] == ["step-00000001"]
        state.save(to, 3)  # the next one may succeed
    checkpoint.verify(tmp_path / "checkpoints/step-00000003")


def test_a_run_on_a_full_disk_ends_in_one_line(workspace, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 30, 1 << 30, 1 << 19))
    with pytest.raises(SystemExit) as error:
        main(workspace.settings("full", steps=2, save_every=1))
    message = str(error.value)
    assert "\n" not in message
    assert "step-00000001 was not written: the disk of" in message
    assert message.endswith("is too full: 0.9 MiB needed, 0.5 MiB free")
    assert list((workspace.root / "full/checkpoints").iterdir()) == []


def test_sizes_that_differ_by_little_are_told_in_bytes(tmp_path, monkeypatch):
    free = 987_654
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 30, 1 << 30, free))
    with pytest.raises(OSError, match=f": {free + 1:,} bytes needed, {free:,} bytes free$"):
        require_space(tmp_path, free + 1)
    with pytest.raises(OSError, match=r": 1\.9 MiB needed, 0\.9 MiB free$"):
        require_space(tmp_path, 2 * free)


def test_a_checkpoint_is_said_to_be_there_when_it_is(workspace, capsys):
    for name, said in (("true", "checkpoint begun; training waited "), ("false", "c")):
        main(workspace.settings(f"said-{name}", steps=1, async_save=name))
        (line,) = [x for x in capsys.readouterr().out.splitlines() if "1/1  checkpoint" in x]
        assert f"step 1/1  {said}" in line and ("checkpoint, in " in line) == (name == "false")


@pytest.mark.parametrize("where", ["weight", "state"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_values_that_are_not_finite_are_not_saved(where, value, state, tmp_path):
    with saver.Saver(tmp_path, state.world) as to:
        state.save(to, 1)
        p = state.model.model.layers[1].mlp.down_proj.weight
        tensor = p.data if where == "weight" else state.optimizer.state[p]["exp_avg_sq"]
        tensor[3, 5] = value
        name = ("" if where == "weight" else "exp_avg_sq of ") + "model.layers.1.mlp.down_proj"
        with pytest.raises(FloatingPointError, match=f"not finite: {name}.weight$"):
            state.save(to, 2)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    if where == "weight":
        with pytest.raises(FloatingPointError, match="not finite"):
            checkpoint.check_finite(state.model)
    else:
        checkpoint.check_finite(state.model)


def test_memory_for_the_copy(tmp_path, state, capsys):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  900 kB\nMemAvailable:    800 kB\n")
    assert saver.available_memory(meminfo, tmp_path) == 800 * 1024
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 100\n")
    assert saver.available_memory(meminfo, tmp_path) == 400
    (tmp_path / "memory.max").write_text("max\n")
    assert saver.available_memory(meminfo, tmp_path) == 800 * 1024


def test_without_memory_for_a_copy_training_waits(state, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(saver, "available_memory", lambda: 1000)
    to = saver.Saver(tmp_path, state.world)
    assert state.save(to, 1).exists()
    assert state.save(to, 2).exists()
    assert capsys.readouterr().out.count("async_save: no host memory for a copy") == 1
    assert to._stager.buffers == {}


EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir")


def save_and_die(model: Path, root: Path, moment: int) -> None:
    """A save whose process is killed at every fifth file operation, if there are so many."""
    count = 0

    def hook(event, arguments):
        nonlocal count
        if event in EVENTS and str(arguments[0]).startswith(str(root / "checkpoints")):
            count += 1
            if count == moment * 5:
                os.kill(os.getpid(), signal.SIGKILL)

    with start("cpu") as world:
        state = State(model, world)
        with saver.Saver(root, world, keep=KeepPolicy(last=1), background=moment % 2 == 0) as to:
            if newest_complete(root / "checkpoints") is None:
                state.save(to, 1)
                to.wait()
            sys.addaudithook(hook)
            state.save(to, 1 + moment)


def kill_saves(model: Path, root: Path) -> None:
    status, moment = -signal.SIGKILL, 0
    while status == -signal.SIGKILL:
        moment += 1
        child = os.fork()
        if child == 0:
            save_and_die(model, root, moment)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said: list[str] = []
        whole = newest_complete(root / "checkpoints", said.append)
        assert whole is not None and not said, said
        print(moment, status, whole.name)
    assert status == 0


def test_killed_at_any_moment_of_a_save_a_whole_checkpoint_stays(workspace, tmp_path):
    """At every fifth file operation, in turn; what has a checkpoint's name is whole."""
    printed = Ranks(1, kill_saves, workspace.model, tmp_path).finish()
    assert len(printed.splitlines()) > 5, printed


def test_exports_while_training(workspace):
    run = workspace.root / "exports"
    main(
        workspace.settings(
            "exports", eval_data=workspace.held_out, eval_every=1, steps=4, hf_every=2,
            save_every=1, keep_last=0, hf_best="true", export="true", lr=1e-2, schedule="constant",
        )
    )  # fmt: skip
    names = sorted(path.name for path in run.iterdir() if path.is_dir())
    assert names == ["checkpoints", "hf", "hf-best", "hf-step-00000002", "hf-step-00000004"]
    losses = workspace.metrics("exports", "eval_loss")[1:]
    best = 1 + min(range(4), key=losses.__getitem__)
    for name, step in (("hf-step-00000002", 2), ("hf-best", best), ("hf", 4)):
        exported = load_file(run / name / "model.safetensors")
        assert_equal(
            exported, load_file(run / f"checkpoints/step-{step:08d}/weights-00000.safetensors")
        )
        assert (run / name / "tokenizer.json").is_file()
    with pytest.raises(SystemExit, match="hf_best=true needs eval_data"):
        main(workspace.settings("never", hf_best="true"))


def test_an_export_that_a_kill_prevented_is_made_by_the_run_that_goes_on(workspace):
    """After the step's checkpoint, or a signal in that step; also of a run that has ended."""
    run, changes = workspace.root / "owed", {"steps": 4, "hf_every": 2, "save_every": 1}
    settings = workspace.settings("owed", schedule="constant", keep_last=0, **changes)
    for steps, made in ((2, 2), (4, 4)):
        main([*settings, "resume=auto", f"steps={steps}"])
        exported = run / f"hf-step-{made:08d}/model.safetensors"
        before = exported.read_bytes()
        shutil.rmtree(exported.parent)
        main([*settings, "resume=auto", f"steps={min(steps + 1, 4)}"])
        assert exported.read_bytes() == before
    branch = f"resume={run / 'checkpoints/step-00000002'}"
    main([*workspace.settings("owes-nothing", **changes), branch])
    assert not (workspace.root / "owes-nothing/hf-step-00000002").exists()


def test_steps_that_come_again_are_exported_again(workspace, capsys):
    """Also up to the same step, when a run goes back to an earlier checkpoint."""
    run = workspace.root / "again"
    settings = workspace.settings("again", steps=4, save_every=2, keep_last=0, export="true")
    main(settings)
    exported = run / "hf/model.safetensors"
    before = exported.read_bytes()
    shutil.rmtree(run / "checkpoints/step-00000004")
    main([*settings, "resume=auto", "lr=1e-5"])
    assert exported.read_bytes() != before and capsys.readouterr().out.count("exported to") == 2
    main([*settings, "resume=auto", "lr=1e-5"])
    assert "nothing left to do" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["hf", "adapter"])
def test_the_users_files_in_an_export_stay(workspace, kind):
    """When the run goes on and exports again; a link made meanwhile is not followed."""
    run = workspace.root / f"notes-{kind}"
    lora = {"lora.rank": 2} if kind == "adapter" else {}
    settings = workspace.settings(run.name, export="true", resume="auto", **lora)
    (run / kind).mkdir(parents=True)
    (run / ".lock").touch()
    mine = ("notes.md", "README.md", "eval_results.json", "pytorch_model.bin", "evals/a.json")
    for name in mine:
        (run / kind / name).parent.mkdir(exist_ok=True)
        (run / kind / name).write_text("mine")
    stems = {"hf": "model", "adapter": "adapter_model"}
    weights = run / kind / f"{stems[kind]}.safetensors"
    before = b""
    for steps in (1, 2):
        main([*settings, f"steps={steps}"])
        assert weights.read_bytes() != before
        before = weights.read_bytes()
        assert all((run / kind / name).read_text() == "mine" for name in mine)
    shutil.move(run / kind, workspace.root / f"moved-{kind}")

    with pytest.MonkeyPatch.context() as patch:
        export = trainer.export

        def linked(one, target, *more):
            target.symlink_to(workspace.root / f"moved-{kind}")
            export(one, target, *more)

        patch.setattr(trainer, "export", linked)
        with pytest.raises(SystemExit, match=f"{kind} was not written: .* is a link to .*moved"):
            main([*settings, "steps=3"])
    assert (workspace.root / f"moved-{kind}" / weights.name).read_bytes() == before


def test_a_run_needs_no_base_model_to_go_on(workspace, tmp_path):
    base = shutil.copytree(workspace.model, tmp_path / "base")
    settings = workspace.settings("moved", model=base, steps=4, save_every=2)
    main(workspace.settings("stayed", steps=4, save_every=2))
    main([*settings, "steps=2", "schedule=constant"])
    main([*workspace.settings("stayed2", steps=2), "schedule=constant"])
    shutil.rmtree(base)
    before = time.time()
    main([*settings, "resume=auto", "schedule=constant", "export=true"])
    main([*workspace.settings("stayed2", steps=4), "resume=auto", "schedule=constant"])
    assert workspace.metrics("moved", "loss") == workspace.metrics("stayed2", "loss")
    newest = checkpoint.latest(workspace.root / "moved/checkpoints")
    assert checkpoint.read_metadata(newest)["saved_at"] >= before
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        original = (workspace.model / name).read_bytes()
        assert (newest / name).read_bytes() == original
        assert (workspace.root / "moved/hf" / name).read_bytes() == original


def test_the_checkpoint_that_a_run_goes_on_from_is_not_removed_meanwhile(
    workspace, finished, monkeypatch
):
    source, load = finished / "checkpoints/step-00000002", checkpoint.load
    removed = []

    def try_to_remove(path, *arguments):
        removed.append(files.remove(path))
        load(path, *arguments)

    monkeypatch.setattr(checkpoint, "load", try_to_remove)
    main(workspace.settings("branch", steps=3, resume=source))
    assert removed == [False]
    assert workspace.metrics("branch", "loss") == workspace.metrics("finished", "loss")[2:]
