"""Saving in the background, on full disks, killed at any moment, on ranks; exports."""

import errno
import json
import math
import os
import re
import shutil
import threading
import time
from collections import Counter, namedtuple
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tigon
from tests.train.checkpoints import State, assert_equal, changed_metadata
from tests.train.ranks import Ranks, train_on
from tigon.train import background_export, checkpoint, main, trainer
from tigon.train.background_export import Exporter
from tigon.train.checkpoint import format, saver
from tigon.train.distributed import start
from tigon.train.export import convert_checkpoint
from tigon.train.optim import Ema
from tigon.utils import memory
from tigon.weights.entries import RankError
from tigon.weights.files import remove_directory, require_space

Usage = namedtuple("Usage", "total used free")


def full_disk(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_background_saves_have_their_steps_values(state, tmp_path, monkeypatch):
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
    second = checkpoint.latest(tmp_path / "checkpoints")
    assert second == tmp_path / "checkpoints/step-00000002"
    for target, tensors in ((first, expected), (second, later)):
        checkpoint.verify(target)
        checkpoint.load(target, state.model, state.optimizer)
        assert_equal(state.tensors(), tensors)


@pytest.mark.parametrize("background", [False, True])
def test_a_failed_save_raises_and_leaves_nothing(background, state, tmp_path, monkeypatch):
    said = (
        r"^.*step-00000002 was not written: the disk became full while .*weights-00000.* "
        r"was written: 0\.\d MiB needed, [\d.]+ GiB free$"
    )
    with saver.Saver(tmp_path, state.world, background=background) as to:
        first = state.save(to, 1)
        to.wait()
        monkeypatch.setattr(os, "fsync", full_disk)
        with pytest.raises(checkpoint.SaveError, match=said):
            state.save(to, 2)
            to.wait()
        monkeypatch.undo()
        assert [path.name for path in first.parent.iterdir()] == ["step-00000001"]
        state.save(to, 3)  # the next one may succeed
    checkpoint.verify(tmp_path / "checkpoints/step-00000003")


def test_weights_and_states_are_flushed_once(state, tmp_path, monkeypatch):
    fsync, flushed = os.fsync, Counter()

    def count(descriptor: int) -> None:
        flushed[os.fstat(descriptor).st_ino] += 1
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", count)
    with saver.Saver(tmp_path, state.world, background=False) as to:
        files = [*state.save(to, 1).glob("*.safetensors")]
    assert len(files) == 2 and {flushed[path.stat().st_ino] for path in files} == {1}


def test_link_stays_if_its_step_cannot_be_saved(state, tmp_path, monkeypatch):
    moved, link = tmp_path / "moved", tmp_path / "checkpoints/step-00000004"
    for path in (moved, link.parent):
        path.mkdir()
    link.symlink_to(moved)
    with saver.Saver(tmp_path, state.world, background=False) as to:
        with monkeypatch.context() as patch:
            patch.setattr(saver, "write_sums", lambda *_: 1 / 0)
            with pytest.raises(saver.SaveError):
                state.save(to, 4)
        assert link.readlink() == moved and os.listdir(link.parent) == [link.name]
        state.save(to, 4)
    assert not link.is_symlink() and os.listdir(link.parent) == [link.name]


def test_full_disk_is_a_one_line_error(workspace, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 30, 1 << 30, 1 << 19))
    with pytest.raises(SystemExit) as error:
        main(workspace.settings("full", steps=2, save_every=1))
    message = str(error.value)
    assert "\n" not in message
    assert "step-00000001 was not written: the disk of" in message
    assert message.endswith("is too full: 0.9 MiB needed, 0.5 MiB free")
    assert list((workspace.root / "full/checkpoints").iterdir()) == []


def test_a_disk_without_room_is_known_after_the_first_step(workspace, monkeypatch, capsys):
    main(workspace.settings("space", steps=1))
    assert "would end the run" not in capsys.readouterr().out
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 30, 1 << 30, 1 << 19))
    with pytest.raises(SystemExit, match=r"step-00000003 was not written"):
        main(workspace.settings("room", steps=3, log_every=1))
    lines = capsys.readouterr().out.splitlines()
    (note,) = (i for i, line in enumerate(lines) if "too full: 0.9 MiB needed, 0.5" in line)
    assert lines[note].startswith("note: the disk of ") and lines[note + 1].startswith("step 2/3")


def test_nearly_equal_sizes_are_given_in_bytes(tmp_path, monkeypatch):
    free = 987_654
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 30, 1 << 30, free))
    with pytest.raises(OSError, match=f": {free + 1:,} bytes needed, {free:,} bytes free$"):
        require_space(tmp_path, free + 1)
    with pytest.raises(OSError, match=r": 1\.9 MiB needed, 0\.9 MiB free$"):
        require_space(tmp_path, 2 * free)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 0))  # as of /proc
    require_space(tmp_path, free)


@pytest.mark.parametrize(
    ("where", "value"), [("", math.nan), ("exp_avg_sq of ", -math.inf), ("average of ", math.nan)]
)
def test_values_that_are_not_finite_are_not_saved(where, value, state, tmp_path):
    name, ema = "model.layers.1.mlp.down_proj.weight", Ema(state.model, 0.9)
    with saver.Saver(tmp_path, state.world) as to:
        state.save(to, 1)
        p = state.model.get_parameter(name)
        states = {"": p.data, "average of ": ema.values[name]}
        states["exp_avg_sq of "] = state.optimizer.state[p]["exp_avg_sq"]
        states[where][3, 5] = value
        with pytest.raises(FloatingPointError, match=f"not finite: {where}{name}$"):
            to.save(2, state.model, state.optimizer, state.tokenizer, {"config": {}}, ema)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def test_memory_for_the_copy(tmp_path, monkeypatch):
    meminfo = tmp_path / "meminfo"
    monkeypatch.setattr(memory, "MEMINFO", meminfo)
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    meminfo.write_text("MemTotal:  900 kB\nMemAvailable:    800 kB\n")
    assert memory.available_memory() == 800 * 1024
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 100\n")
    assert memory.available_memory() == 400
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_memory() == 800 * 1024


def test_without_memory_for_a_copy_training_waits(state, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(saver, "available_memory", lambda: 1000)
    to = saver.Saver(tmp_path, state.world)
    assert state.save(to, 1).exists()
    assert state.save(to, 2).exists()
    assert capsys.readouterr().out.count("async_save: no host memory for a copy") == 1
    assert to._stager.buffers == {}


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
    with pytest.raises(SystemExit, match="hf_best=true needs eval_data"):
        main(workspace.settings("never", hf_best="true"))


@pytest.mark.parametrize("save_every", [0, 1])
def test_after_the_last_step_nothing_is_copied(save_every, workspace, monkeypatch):
    """Neither the checkpoint nor the export takes memory for a copy."""
    copied, stage = [], saver.CopyStager.stage
    monkeypatch.setattr(
        saver.CopyStager, "stage", lambda self, state: copied.append(1) or stage(self, state)
    )
    monkeypatch.setattr(background_export, "copy_to_host", None)
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


def test_resuming_needs_no_base_model(workspace, tmp_path):
    base = shutil.copytree(workspace.model, tmp_path / "base")
    same = {"schedule": "constant", "steps": 2}
    settings = workspace.settings("moved", model=base, **same)
    main([*settings, "steps=1"])
    main(workspace.settings("stayed", **same))
    shutil.rmtree(base)
    before = time.time()
    main([*settings, "resume=auto", "export=true"])
    assert workspace.metrics("moved", "loss") == workspace.metrics("stayed", "loss")
    newest = checkpoint.latest(workspace.root / "moved/checkpoints")
    assert checkpoint.read_metadata(newest)["saved_at"] >= before
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        original = (workspace.model / name).read_bytes()
        assert (newest / name).read_bytes() == original
        assert (workspace.root / "moved/hf" / name).read_bytes() == original


def test_source_checkpoint_is_locked_while_it_loads(workspace, finished, monkeypatch):
    source, load = finished / "checkpoints/step-00000002", checkpoint.load
    removed = []

    def try_to_remove(path, *arguments):
        removed.append(remove_directory(path))
        load(path, *arguments)

    monkeypatch.setattr(checkpoint, "load", try_to_remove)
    main(workspace.settings("branch", steps=3, resume=source))
    assert removed == [False]
    assert workspace.metrics("branch", "loss") == workspace.metrics("finished", "loss")[2:]


# Checkpoints of several ranks, of which one cannot write, or wrote what its file does not say.


STEPS, SAVE_EVERY = 16, 4


def fail_on_a_rank(failing: int, settings: list[str]) -> None:
    """A run in which one rank cannot write the first checkpoint, which it and the other one know
    after the step that follows."""
    update = trainer.update_weights

    def full(path, *_):
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))

    def wait(run, step, scale):
        update(run, step, scale)
        until = time.monotonic() + 60
        while step == SAVE_EVERY and not run.saver.pending.done():
            assert time.monotonic() < until, "the other rank has ended without this one"
            time.sleep(0.01)

    trainer.update_weights = wait
    if int(os.environ["RANK"]) == failing:
        format._write = full
    main(settings)


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("failing", [1, 0])
def test_failed_write_of_one_rank_ends_all(workspace, failing):
    """Both ranks have ended after the step that followed."""
    run = workspace.root / f"full-{failing}"
    more = {"steps": STEPS, "schedule": "constant", "save_every": SAVE_EVERY}
    running = Ranks(2, fail_on_a_rank, failing, workspace.settings(run, **more))
    for process in running.processes:
        process.join(200)
    codes, errors = running.codes, running.errors
    running.kill()
    assert codes == [1, 1] and "Traceback" not in errors, errors
    assert workspace.metrics(run, "step") == [*range(1, SAVE_EVERY + 1)]
    assert not [*run.glob("checkpoints/*")]
    # Both ranks may print it: torch's agent ends the other one a moment later
    line = next(line for line in errors.splitlines() if line.startswith("tigon.train: "))
    said = re.fullmatch(
        r"tigon.train: rank (\d): \S*step-00000004 was not written: "
        r"(?:rank (\d) stopped with OSError: )?\[Errno 27\] File too large: "
        r"'\S*/\w+-0000(\d).safetensors'",
        line,
    )
    assert said is not None, line
    told, other, file = said.groups()
    assert int(file) == failing
    assert other == (None if int(told) == failing else str(failing))


@pytest.fixture(scope="module")
def of_two_ranks(workspace) -> Path:
    run = workspace.root / "two"
    run.mkdir()
    for name in (".lock", ".rank-1-b1d317bb"):  # which a killed run has left
        (run / name).touch()
    train_on(2, workspace.settings("two", steps=2))
    assert not [*run.glob(".rank-*")]
    return run / "checkpoints/step-00000002"


def give_dtype(path: Path, dtype: str) -> str:
    """To the file's first tensor, whose name is returned."""
    before = path.read_bytes()
    length = int.from_bytes(before[:8], "little")
    header = json.loads(before[8 : 8 + length])
    name = next(key for key in header if key != "__metadata__")
    assert header[name]["dtype"] == "F32"
    header[name]["dtype"] = dtype
    new = json.dumps(header).encode()
    path.write_bytes(len(new).to_bytes(8, "little") + new + before[8 + length :])
    return name


WHOLE = r"has whole numbers for others, or others for whole ones, in {} \({}"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["weights-00001"], WHOLE.format("{}", "weights-00001")),
        (["optimizer-00000"], WHOLE.format("{}", "optimizer-00000")),
        (["weights-00000", "weights-00001"], WHOLE.format("{}", "weights-0000")),
    ],
)
def test_changed_dtypes_are_refused(workspace, of_two_ranks, tmp_path, changed, said):
    """By somebody who could write the checksums too. The values would be wrong, and finite."""
    source = shutil.copytree(of_two_ranks, tmp_path / of_two_ranks.name)
    with changed_metadata(source):
        (name,) = {give_dtype(source / f"{file}.safetensors", "I32") for file in changed}
    said = said.format(re.escape(name))
    settings = workspace.settings("x", run_dir=tmp_path / "run", steps=3, resume=source)
    with pytest.raises(SystemExit, match=said):
        main(settings)
    of_weights = "optimizer" not in said  # which an export does not read
    with pytest.raises(ValueError, match=said) if of_weights else nullcontext():
        convert_checkpoint(source, str(tmp_path / "hf"))
    assert (tmp_path / "hf").exists() != of_weights


# Exports that are written while training goes on.


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
    with Exporter(state.world) as to:
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
    export(Exporter(state.world, background=False), state, tmp_path / "a")
    before = load_file(tmp_path / "a/model.safetensors")
    state.step(seed=2)

    with Exporter(state.world) as to:
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
    def no_memory(*arguments, **options):
        raise error

    monkeypatch.setattr(background_export, "write_model", no_memory)
    with pytest.raises(checkpoint.SaveError) as caught, Exporter(state.world) as to:
        export(to, state, tmp_path / "a")
    assert str(caught.value) == f"{tmp_path}/a was not written: {error!r}"


def test_without_memory_for_a_copy_an_export_waits(state, tmp_path, monkeypatch):
    monkeypatch.setattr(saver, "available_memory", lambda: 1000)
    with Exporter(state.world) as to:
        export(to, state, tmp_path / "a")
        assert_equal(exported(tmp_path / "a"), state_weights(state))


def on_ranks(model, target):
    """One rank's part cannot be written at first, then not be copied; then all can."""
    with start("cpu") as world, Exporter(world) as to:
        state, pwrite = State(model, world), os.pwrite
        os.pwrite = full_disk if world.rank else pwrite
        export(to, state, target)
        with pytest.raises(checkpoint.SaveError, match=r"No space left|became full"):
            to.wait()
        assert not target.exists()
        os.pwrite = pwrite

        def no_memory(*arguments):
            raise MemoryError("for the copy")

        with pytest.MonkeyPatch.context() as patch:
            if world.rank:
                patch.setattr(background_export, "copy_to_host", no_memory)
            with pytest.raises((MemoryError, RankError), match="for the copy"):
                export(to, state, target)
        export(to, state, target)


def test_what_stops_one_rank_stops_all(workspace, state, tmp_path):
    Ranks(2, on_ranks, workspace.model, tmp_path / "out").finish()
    assert_equal(exported(tmp_path / "out"), state_weights(state))
    assert os.listdir(tmp_path) == ["out"]
