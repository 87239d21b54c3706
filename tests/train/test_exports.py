"""Exports: of which steps, what of them stays, and those written while training goes on."""

import os
import shutil
import threading
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

import tigon
from tests.train.checkpoints import State, assert_equal, full_disk
from tests.train.ranks import Ranks
from tigon.train import checkpoint, main, trainer
from tigon.train.checkpoint import saver
from tigon.train.distributed import start
from tigon.weights.entries import RankError


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
        expected = load_file(run / f"checkpoints/step-{step:08d}/weights-00000.safetensors")
        assert_equal(load_file(run / name / "model.safetensors"), expected)
        assert (run / name / "tokenizer.json").is_file()


@pytest.mark.parametrize("save_every", [0, 1])
def test_after_the_last_step_nothing_is_copied(save_every, workspace, monkeypatch):
    """Neither the checkpoint nor the export takes memory for a copy."""
    copied, stage = [], saver.CopyStager.stage
    monkeypatch.setattr(
        saver.CopyStager, "stage", lambda self, state: copied.append(1) or stage(self, state)
    )
    monkeypatch.setattr(saver, "copy_to_host", None)
    name = f"last-{save_every}"
    main(
        workspace.settings(
            name, eval_data=workspace.held_out, steps=2, save_every=save_every, export="true"
        )
    )
    assert len(copied) == save_every  # of the first step alone
    last = load_file(workspace.root / name / "checkpoints/step-00000002/weights-00000.safetensors")
    assert_equal(load_file(workspace.root / name / "hf/model.safetensors"), last)
    assert len(workspace.metrics(name, "eval_loss")) == 1


@pytest.mark.slow
def test_a_resumed_run_makes_missing_exports(workspace):
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


@pytest.mark.slow(first=1)
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


def export(to, state, target):
    to.export(state.model, target, state.tokenizer, dtype=torch.bfloat16)


def state_weights(state):
    return {name: p.detach().bfloat16() for name, p in state.model.state_dict().items()}


def exported(target):
    return tigon.from_pretrained(target).state_dict()


def test_background_exports_have_their_steps_values(state, tmp_path, monkeypatch):
    pwrite, slow, begun = os.pwrite, threading.Event(), threading.Event()

    def wait(*arguments):
        begun.set()
        assert slow.wait(60)
        return pwrite(*arguments)

    first = state_weights(state)
    with checkpoint.Exporter(state.world) as to:
        monkeypatch.setattr(os, "pwrite", wait)
        export(to, state, tmp_path / "a")
        assert begun.wait(60)
        state.step(seed=2)  # training goes on
        assert not (tmp_path / "a").exists()
        threading.Timer(0.2, slow.set).start()
        export(to, state, tmp_path / "b")
        assert_equal(exported(tmp_path / "a"), first)
        second = state_weights(state)
        state.step(seed=3)
    assert_equal(exported(tmp_path / "b"), second)
    assert not torch.equal(first["model.norm.weight"], second["model.norm.weight"])
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_what_stops_one_is_raised_by_the_next(state, tmp_path, monkeypatch):
    export(checkpoint.Exporter(state.world, background=False), state, tmp_path / "a")
    before = load_file(tmp_path / "a/model.safetensors")
    state.step(seed=2)

    with checkpoint.Exporter(state.world) as to:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full_disk)
            export(to, state, tmp_path / "a")
            with pytest.raises(checkpoint.SaveError, match=r"a was not written: .*became full"):
                export(to, state, tmp_path / "b")
        to.wait()
        assert_equal(load_file(tmp_path / "a/model.safetensors"), before)
        assert os.listdir(tmp_path) == ["a"]
        export(to, state, tmp_path / "b")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator")]
)
def test_memory_error_names_the_export(state, tmp_path, monkeypatch, error):
    monkeypatch.setattr(saver, "write_model", Mock(side_effect=error))
    with pytest.raises(checkpoint.SaveError) as caught, checkpoint.Exporter(state.world) as to:
        export(to, state, tmp_path / "a")
    assert str(caught.value) == f"{tmp_path}/a was not written: {error!r}"


def test_without_memory_for_a_copy_an_export_waits(state, tmp_path, monkeypatch):
    monkeypatch.setattr(saver, "available_memory", lambda: 1000)
    with checkpoint.Exporter(state.world) as to:
        export(to, state, tmp_path / "a")
        assert_equal(exported(tmp_path / "a"), state_weights(state))


def on_ranks(model, target):
    """One rank's part cannot be written at first, then not be copied; then all can."""
    with start("cpu") as world, checkpoint.Exporter(world) as to:
        state, pwrite = State(model, world), os.pwrite
        os.pwrite = full_disk if world.rank else pwrite
        export(to, state, target)
        with pytest.raises(checkpoint.SaveError, match=r"No space left|became full"):
            to.wait()
        assert not target.exists()
        os.pwrite = pwrite
        with pytest.MonkeyPatch.context() as patch:
            if world.rank:
                no_memory = Mock(side_effect=MemoryError("for the copy"))
                patch.setattr(saver, "copy_to_host", no_memory)
            with pytest.raises((MemoryError, RankError), match="for the copy"):
                export(to, state, target)
        export(to, state, target)


def test_what_stops_one_rank_stops_all(workspace, state, tmp_path):
    Ranks(2, on_ranks, workspace.model, tmp_path / "out").finish()
    assert_equal(exported(tmp_path / "out"), state_weights(state))
    assert os.listdir(tmp_path) == ["out"]
