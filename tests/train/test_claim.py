"""A run directory has one run, and a run that was killed gets its directory back."""

import os
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.train.ranks import Ranks
from tigon.train import load, logging, main, prepare, start
from tigon.train.resume import claim

ROOT = Path(__file__).parents[2]


def hold(settings: list[str]) -> None:
    with claim(load(None, settings)):
        print("held")
        time.sleep(600)


def killed_before_its_first_row(settings: list[str]) -> None:
    def killed(self, step):
        os.kill(os.getpid(), signal.SIGKILL)

    logging.RunLog._cut = killed
    main(settings)


def test_a_second_run_on_a_directory_is_told_of_the_first(workspace, tmp_path):
    run = tmp_path / "run"
    settings = workspace.settings("x", run_dir=run, steps=1)
    first = Ranks(1, hold, settings)
    try:
        until = time.monotonic() + 200
        while first.printed != "held\n":
            assert time.monotonic() < until and first.codes == [None], first.errors
            time.sleep(0.01)
        who = f"is in use by process {first.processes[0].pid} on {socket.gethostname()}: wait until"
        for resume in ("false", "auto"):
            with pytest.raises(SystemExit, match=who):
                main([*settings, f"resume={resume}"])
        assert [file.name for file in run.iterdir()] == [".lock"]
    finally:
        first.kill()
    main(settings)  # the lock died with its holder
    assert workspace.root is not None and (run / "metrics.jsonl").exists()


def test_killed_before_its_first_row_the_same_command_goes_on(workspace, tmp_path):
    for resume in ("false", "auto"):
        run = tmp_path / resume
        settings = workspace.settings("x", run_dir=run, steps=1, resume=resume)
        killed = Ranks(1, killed_before_its_first_row, settings)
        assert killed.one_ended(60) and killed.codes == [-signal.SIGKILL], killed.errors
        assert (run / "config.yaml").exists() and not (run / "metrics.jsonl").exists()
        main(settings)
        assert len((run / "metrics.jsonl").read_text().splitlines()) == 1


def test_what_is_not_a_runs_is_left_alone(workspace, tmp_path):
    """Nor does a claim that fails leave anything behind."""
    (tmp_path / "config.yaml").write_text("lr: 1\n")
    settings = workspace.settings("x", run_dir=tmp_path, resume="auto")
    with pytest.raises(SystemExit, match="is not empty, and holds no run: choose another run_dir"):
        main(settings)
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]
    config = load(None, workspace.settings("x", run_dir=tmp_path / "a/b/c"))
    with claim(config):
        assert (tmp_path / "a/b/c/.lock").exists()
    assert not (tmp_path / "a").exists()
    with claim(config):
        Path(config.run_dir, "config.yaml").write_text("")
    assert (tmp_path / "a/b/c/.lock").exists()


def test_a_run_dir_that_cannot_be_written_is_told_before_anything_is_loaded(workspace, tmp_path):
    (tmp_path / "file").write_text("")
    settings = workspace.settings("x", run_dir=tmp_path / "file/run", model=tmp_path / "nowhere")
    with pytest.raises(SystemExit, match=r"Not a directory: .*file/run"):
        main(settings)
    if os.getuid():
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(SystemExit, match="Permission denied"):
            main([*settings, f"run_dir={tmp_path}/locked/run"])


def test_one_process_may_prepare_a_run_twice(workspace, tmp_path):
    config = load(None, workspace.settings("x", run_dir=tmp_path / "run"))
    with start("cpu") as world:
        prepare(config, world)
        prepare(config, world)
        assert (tmp_path / "run/.lock").exists()
    assert not (tmp_path / "run").exists()


LEFT = (
    "checkpoints/.step-00000003.partial",
    "checkpoints/.step-00000002.removed",
    f".hf.tmp-{'0a' * 8}",
    f".adapter-step-00000002.old-{'0a' * 8}",
    f".hf-best.tmp-{'1b' * 8}",
)
LEFT_FILES = (
    ".report.html.ab_cd123",
    ".comparison.html.12345678",
    ".config.yaml.partial",
    ".metrics.jsonl.partial",
    ".samples.jsonl.partial",
    "..exported.partial",
    ".predictions-step-00000004.jsonl.partial",
    ".predictions-step-00000004.jsonl.rank-1.partial",
    f".reference.json.{'2c' * 8}",
    ".rank-3-0123abcd",
    ".hf.lock",
)
MINE = (
    ".report.html.swp",
    ".report.html.mine",
    "report.html.ab_cd123",
    ".notes.partial",
    ".rank-mine-1",
    "checkpoints/.step-mine/notes.md",
    "checkpoints/.step-1.partial.bak/notes.md",
    ".hf.tmp-mine/notes.md",
    f".other.tmp-{'0a' * 8}/notes.md",
)


def killed(run: Path) -> None:
    """What a killed run leaves, and files of the user's that are named nearly so."""
    for name in LEFT:
        (run / name).mkdir(parents=True)
        (run / name / "half").touch()
    (run / "adapter-step-00000002").mkdir()
    for name in (*LEFT_FILES, *MINE):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text("process 1 on nowhere" if name.endswith("lock") else "mine")
    (run / "metrics.jsonl").touch()


def test_what_a_killed_run_left_is_removed(workspace, tmp_path):
    run = tmp_path / "run"
    config = load(None, workspace.settings("x", run_dir=run, resume="auto"))
    killed(run)
    (tmp_path / "page").write_text("mine")
    (run / ".report.html.abcdefgh").symlink_to(tmp_path / "page")
    (run / f".hf.tmp-{'3d' * 8}").symlink_to(tmp_path)
    with claim(config):
        for name in (*LEFT, *LEFT_FILES):
            assert not os.path.lexists(run / name), name
        for name in MINE:
            assert (run / name).read_text() == "mine", name
        for name in LEFT:  # a live run's own
            (run / name).mkdir()
        with claim(config):
            assert all((run / name).is_dir() for name in LEFT)
    assert (tmp_path / "page").read_text() == "mine"


def test_what_a_live_run_writes_is_not_removed(workspace, tmp_path):
    run = tmp_path / "run"
    first = Ranks(1, hold, workspace.settings("x", run_dir=run))
    try:
        until = time.monotonic() + 200
        while first.printed != "held\n":
            assert time.monotonic() < until and first.codes == [None], first.errors
            time.sleep(0.01)
        killed(run)
        with pytest.raises(SystemExit, match="is in use by process"):
            main(workspace.settings("x", run_dir=run, resume="auto"))
        assert all((run / name).exists() for name in (*LEFT, *LEFT_FILES))
    finally:
        first.kill()


@pytest.mark.parametrize(
    "name", ["hf", "adapter", "hf-best", "checkpoints", "report.html", "metrics.jsonl", "profile"]
)
def test_a_run_writes_through_no_link_in_its_directory(workspace, tmp_path, name):
    run, mine = tmp_path / "run", tmp_path / "mine"
    run.mkdir()
    (run / ".lock").touch()
    (run / "data").symlink_to(tmp_path)  # not the run's
    mine.mkdir()
    (mine / "notes.md").write_text("mine")
    (run / name).symlink_to(mine)
    settings = workspace.settings("x", run_dir=run, resume="auto", steps=1)
    said = f"{run / name} is a link to {mine}, and the run would write there: remove the link"
    with pytest.raises(SystemExit, match=said):
        main(settings)
    assert [path.name for path in mine.iterdir()] == ["notes.md"]
    (run / name).unlink()
    (tmp_path / "named").symlink_to(run)  # the user's own name for it
    main([*settings, f"run_dir={tmp_path}/named"])
    assert (run / "metrics.jsonl").read_text()


def test_a_directory_that_was_removed_hides_no_error(workspace, tmp_path):
    settings = load(None, workspace.settings("x", run_dir=tmp_path / "run"))
    with pytest.raises(ValueError, match="what ended it"), claim(settings):
        shutil.rmtree(tmp_path / "run")
        raise ValueError("what ended it")
