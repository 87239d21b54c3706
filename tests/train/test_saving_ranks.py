"""Checkpoints of several ranks, of which one cannot write, or wrote what its file does not say."""

import errno
import json
import os
import re
import shutil
import time
from pathlib import Path

import pytest
from torch.distributed.checkpoint import CheckpointException

from tests.train.ranks import Ranks, train_on
from tigon.train import checkpoint, main, trainer
from tigon.train.checkpoint import files, format
from tigon.train.checkpoint.files import first_cause
from tigon.train.export import convert_checkpoint
from tigon.weights import write

STEPS, SAVE_EVERY = 16, 4


def fail_on_a_rank(failing: int, what: str, settings: list[str]) -> None:
    """A run in which one rank cannot write the first checkpoint or export, which it and the others
    know after the step that follows."""
    update = trainer.update_weights

    def full(path, *_):
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))

    def wait(run, step):
        update(run, step)
        until = time.monotonic() + 60
        while step == SAVE_EVERY:
            if (run.exporter if what == "hf" else run.saver).pending.done():
                break
            assert time.monotonic() < until, "the other rank has ended without this one"
            time.sleep(0.01)

    trainer.update_weights = wait
    if int(os.environ["RANK"]) == failing:
        if what == "hf":
            write._pwrite = full
        else:
            format._write = full
    main(settings)


def errors_of_failed_run(workspace, name, failing, what, **settings):
    """What its ranks say: both have ended after the step that followed."""
    given = workspace.settings(name, steps=STEPS, schedule="constant", **settings)
    running = Ranks(2, fail_on_a_rank, failing, what, given)
    for process in running.processes:
        process.join(120)
    codes, errors = running.codes, running.errors
    running.kill()
    assert codes == [1, 1] and "Traceback" not in errors, errors
    assert workspace.metrics(name, "step") == [*range(1, SAVE_EVERY + 1)]
    return errors


@pytest.mark.parametrize("failing", [0, 1])
def test_an_export_that_fails_on_one_rank_ends_all_before_the_next(workspace, failing):
    name = f"full-hf-{failing}"
    errors = errors_of_failed_run(workspace, name, failing, "hf", hf_every=SAVE_EVERY)
    assert "hf-step-00000004 was not written: " in errors and "File too large" in errors
    assert not list((workspace.root / name).glob("hf-step-*"))


@pytest.mark.parametrize("failing", [0, 1])
def test_a_checkpoint_that_fails_on_one_rank_ends_all_before_the_next(workspace, failing):
    name = f"full-{failing}"
    errors = errors_of_failed_run(workspace, name, failing, "checkpoint", save_every=SAVE_EVERY)
    assert list((workspace.root / name / "checkpoints").iterdir()) == []
    # Both ranks may print it: torch's agent ends the other one a moment later
    line = next(line for line in errors.splitlines() if line.startswith("tigon.train: "))
    said = re.fullmatch(
        r"tigon.train: rank (\d): \S*step-00000004 was not written: (?:rank (\d): )?"
        r"\[Errno 27\] File too large: '\S*/weights-0000(\d).safetensors'",
        line,
    )
    assert said is not None, line
    told, other, file = said.groups()
    assert int(file) == failing
    assert other == (None if int(told) == failing else str(failing))


def test_what_a_killed_run_left_in_its_directory_goes(workspace):
    run = workspace.root / "left"
    run.mkdir()
    for name in (".lock", ".rank-1-b1d317bb"):
        (run / name).touch()
    train_on(2, workspace.settings("left", steps=1))
    assert (run / "metrics.jsonl").exists() and not [*run.glob(".rank-*")]


def test_the_rank_that_failed_is_named_once(world):
    """Who reports the error says the number of this rank, 0."""

    def cause(**of_ranks: Exception) -> str:
        failures = {int(name[1:]): (error, None) for name, error in of_ranks.items()}
        return first_cause(CheckpointException("write", failures))

    full, why = OSError(27, "File too large", "a"), "[Errno 27] File too large: 'a'"
    assert cause(r2=ValueError("b"), r1=full) == f"rank 1: {why}"
    assert cause(r2=ValueError("b")) == "rank 2: ValueError('b')"
    assert cause(r1=ValueError("b"), r0=full) == why
    assert cause(r0=ValueError("b")) == "ValueError('b')"
    assert first_cause(OSError()) == "OSError"


@pytest.fixture(scope="module")
def of_two_ranks(workspace) -> Path:
    train_on(2, workspace.settings("two", steps=2, save_every=2))
    return workspace.root / "two/checkpoints/step-00000002"


def give_dtype(source: Path, file: str, dtype: str) -> str:
    """To the file's first tensor, whose name is returned; the checksums are right again."""
    path = source / file
    before = path.read_bytes()
    length = int.from_bytes(before[:8], "little")
    header = json.loads(before[8 : 8 + length])
    name = next(key for key in header if key != "__metadata__")
    assert header[name]["dtype"] == "F32"
    header[name]["dtype"] = dtype
    new = json.dumps(header).encode()
    path.write_bytes(len(new).to_bytes(8, "little") + new + before[8 + length :])
    (source / files.SUMS).unlink()
    files.write_sums(source, {})
    return name


@pytest.mark.parametrize("kind", ["weights", "optimizer"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_tensor_of_another_dtype_in_one_file_is_refused(
    workspace, of_two_ranks, tmp_path, kind, rank
):
    """By somebody who could write the checksums too. The values would be wrong, and finite."""
    source = shutil.copytree(of_two_ranks, tmp_path / of_two_ranks.name)
    name = give_dtype(source, f"{kind}-{rank:05d}.safetensors", "I32")
    places = [
        f"torch.{'int' if i == rank else 'float'}32 in {kind}-0000{i}.safetensors" for i in (0, 1)
    ]
    said = f"{source} is damaged: {name} is {' and '.join(places)}; take another checkpoint"
    settings = workspace.settings("x", run_dir=tmp_path / "run", steps=3, resume=source)
    with pytest.raises(SystemExit, match=re.escape(said)):
        main(settings)
    with pytest.raises(AssertionError, match=re.escape(said)):
        train_on(2, settings)
    if kind == "weights":
        with pytest.raises(ValueError, match=re.escape(said)):
            convert_checkpoint(source, str(tmp_path / "hf"))
    else:  # which an export does not read
        convert_checkpoint(source, str(tmp_path / "hf"))
    assert (tmp_path / "hf").exists() == (kind == "optimizer")


def test_whole_numbers_for_others_are_not_exported(of_two_ranks, tmp_path):
    source = shutil.copytree(of_two_ranks, tmp_path / of_two_ranks.name)
    for rank in (0, 1):
        name = give_dtype(source, f"weights-{rank:05d}.safetensors", "I32")
    said = rf"has whole numbers for others in {name} \(weights-0000.\.safetensors\); take another"
    with pytest.raises(ValueError, match=said):
        convert_checkpoint(source, str(tmp_path / "hf"))
    assert checkpoint.step_of(source) == 2 and not (tmp_path / "hf").exists()
