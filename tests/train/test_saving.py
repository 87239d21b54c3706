"""Checkpoints in the background, on full disks and of several ranks, of which one cannot write
or wrote what its file does not say.
"""

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

from tests.train.checkpoints import assert_equal, changed_metadata, full_disk
from tests.train.ranks import Ranks, train_on
from tigon.train import checkpoint, main, trainer
from tigon.train.checkpoint import format, saver
from tigon.train.export import convert_checkpoint
from tigon.train.optim import Ema
from tigon.utils import memory
from tigon.weights.files import remove_directory, require_space

Usage = namedtuple("Usage", "total used free")


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
