"""How ranks start, and how all of them end when one cannot go on."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tigon.train import main
from tigon.train.launch import take_count
from tigon.train.processes import check_count

ROOT = Path(__file__).parents[2]
NPROC = ["-m", "tigon.cli", "train", "--nproc", "2"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TORCHRUN += ["-m", "tigon.train"]
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(workspace, tmp_path) -> Start:
    """Ranks of which number 1 runs `code` when its Python starts; paths are those of rank 0."""

    def begin(command: list[str], settings: list[str], code: str = "") -> subprocess.Popen[str]:
        lines = "".join(f"    {line}\n" for line in code.strip().splitlines())
        condition = "import os\nif os.environ.get('RANK') == '1':\n    pass\n"
        (tmp_path / "sitecustomize.py").write_text(condition + lines)
        (tmp_path / "empty").mkdir(exist_ok=True)
        threads = str(torch.get_num_threads())
        environment = os.environ | {"OMP_NUM_THREADS": threads, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
        return subprocess.Popen(
            [sys.executable, *command, *settings],
            cwd=workspace.root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return begin


def test_a_number_of_processes_gives_the_same_curve(workspace, start):
    settings = {"steps": 3, "save_every": 2}
    main(workspace.settings("alone", **settings))
    process = start(NPROC, workspace.settings("pair", **settings))
    printed, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert "on 2 x cpu" in printed and printed.count("steps: 0 to 3") == 1
    expected = workspace.metrics("alone", "loss")
    assert len(expected) == 3
    assert workspace.metrics("pair", "loss") == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("command", [NPROC, TORCHRUN], ids=["nproc", "torchrun"])
def test_an_input_that_one_rank_lacks_is_told_last(workspace, start, tmp_path, command):
    settings = workspace.settings("x", run_dir=tmp_path / "run", data="train.jsonl")
    process = start(command, settings, f"os.chdir({str(tmp_path / 'empty')!r})")
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 1
    message = "rank 1: no data file matches 'train.jsonl'"
    assert f"tigon.train: {message}\n" in errors
    if command is NPROC:
        assert errors.strip().splitlines()[-1] == f"tigon.train: {message}"
        assert "Traceback" not in errors
    else:  # whose own report comes last
        assert message in errors[errors.rindex("Root Cause") :]
        assert "tigon/train/launch.py" not in errors
    assert not (tmp_path / "run").exists()


FAIL_LATER = """
import tigon.train.record as record
step = record.Record.step
def fail(self, row):
    if row["step"] == 2:
        {what}
    step(self, row)
record.Record.step = fail
"""


@pytest.mark.parametrize(
    ("what", "code", "message"),
    [
        ("raise RuntimeError('by chance')", 1, "rank 1: RuntimeError: by chance"),
        ("import signal; os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 1 was killed by SIGKI"),
    ],
)
def test_a_rank_that_fails_later_ends_the_other(workspace, start, tmp_path, what, code, message):
    settings = workspace.settings("x", run_dir=tmp_path / "run", steps=50)
    process = start(NPROC, settings, FAIL_LATER.format(what=what))
    _, errors = process.communicate(timeout=200)
    assert process.returncode == code
    assert errors.strip().splitlines()[-1].startswith(f"tigon.train: {message}")
    assert errors.count("Traceback") == (code == 1)  # of the rank that failed


def test_a_signal_reaches_all_ranks_once(workspace, start):
    run = workspace.root / "signalled"
    process = start(NPROC, workspace.settings("signalled", steps=5000, log_every=1))
    until = time.monotonic() + 120
    while not (run / "metrics.jsonl").exists() or not workspace.metrics("signalled", "loss"):
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    done = len(workspace.metrics("signalled", "loss"))
    assert f"stopped by a signal after step {done}: resume=auto" in printed
    assert errors.count("SIGTERM: stopping after this step, with a checkpoint") == 1
    assert (run / f"checkpoints/step-{done:08d}").exists()


def test_the_number_of_processes_may_stand_anywhere(monkeypatch):
    assert take_count(["c.yaml", "--nproc", "4", "lr=1"]) == (4, ["c.yaml", "lr=1"])
    assert take_count(["c.yaml", "lr=1", "--nproc=4"]) == (4, ["c.yaml", "lr=1"])
    assert take_count(["c.yaml", "--lr", "1"]) == (None, ["c.yaml", "--lr", "1"])
    for wrong in (["--nproc"], ["--nproc", "all"], ["--nproc=-1"]):
        with pytest.raises(ValueError, match="needs the number of processes"):
            take_count(wrong)
    with pytest.raises(ValueError, match="must be at least 1"):
        check_count(0, "cpu")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="inside torchrun"):
        check_count(2, "cpu")
