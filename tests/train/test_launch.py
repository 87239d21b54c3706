"""How ranks start, and how all of them end when one cannot go on."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.ranks import ERR, OUT, Child, Ranks
from tests.train.ranks import TORCHRUN as FIRST_OF_TWO
from tigon import cli
from tigon.train import main
from tigon.train.launch import check_count, run_ranks, take_count

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONPATH": str(ROOT)}
NPROC = ["-m", "tigon.cli", "train", "--nproc", "2"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TORCHRUN += ["-m", "tigon.train"]
LACKS = "rank 1: no data file matches 'train.jsonl'"
Launch = Callable[[list[str], str], tuple[int, str, str]]


def start(command: list[str], settings: list[str], **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command, *settings],
        **{"env": os.environ | ENVIRONMENT, **options},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def launch(tmp_path, monkeypatch, capfd) -> Launch:
    """--nproc in this process, with forked ranks, of which number 1 runs `code` first: the exit
    code, and what the ranks and then the launcher have written to stderr."""
    ensure_running()  # the server of forks, before a test leaves the directory of `tests`
    for name in (OUT, ERR):
        (tmp_path / name).touch()
    monkeypatch.setattr(Child, "directory", str(tmp_path), raising=False)
    monkeypatch.setattr("tigon.train.launch.subprocess.Popen", Child)

    def begin(settings: list[str], code: str) -> tuple[int, str, str]:
        lines = "".join(f"    {line}\n" for line in code.strip().splitlines())
        rank = f"import os\nif os.environ['RANK'] == '1':\n    pass\n{lines}"
        monkeypatch.setattr(Child, "before", rank)
        with pytest.raises(SystemExit) as ended:
            main(["--nproc", "2", *settings])
        return ended.value.code, (tmp_path / ERR).read_text(), capfd.readouterr().err

    return begin


def test_an_input_that_one_rank_lacks_is_told_last(workspace, launch, tmp_path, monkeypatch):
    monkeypatch.chdir(workspace.root)
    settings = workspace.settings("x", run_dir=tmp_path / "run", data="train.jsonl")
    code, errors, last = launch(settings, f"os.chdir({str(tmp_path)!r})")
    assert code == 1 and "Traceback" not in errors, errors
    assert last.strip().splitlines()[-1] == f"tigon.train: {LACKS}"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("steps", [0, 2])
def test_ranks_end_if_their_parent_is_killed(workspace, tmp_path, steps):
    """As soon as it has started them, when they wait for it to meet in, and in a step, in which
    rank 0 then waits for a rank that has ended."""
    code = "from tigon.train import board\n    board.GRACE = 0.0"
    (tmp_path / "sitecustomize.py").write_text(
        f"import os\nif os.environ.get('RANK') == '1':\n    {code}\n"
    )
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    run = workspace.root / f"killed-{steps}"
    settings = workspace.settings(run.name, steps=100_000, schedule="constant")
    process = start(NPROC, settings, env=environment)
    children, metrics = (
        Path(f"/proc/{process.pid}/task/{process.pid}/children"),
        run / "metrics.jsonl",
    )
    until = time.monotonic() + 60
    while len(children.read_text().split()) < 2 or steps > (
        metrics.read_text().count('"loss"') if metrics.exists() else 0
    ):
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.02)
    process.kill()
    _, errors = process.communicate(timeout=60)  # when the ranks have closed it too
    (line,) = [line for line in errors.splitlines() if line.startswith("tigon")]
    said = "tigon.train: the process that started the ranks was killed; the last step of rank 0 was"
    assert line.startswith(
        said if steps else "tigon: the process that started the ranks was killed"
    )
    assert "Traceback" not in errors


def test_a_port_that_is_taken(workspace):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        environment = {**FIRST_OF_TWO, "LOCAL_RANK": "0", "MASTER_PORT": port}
        ranks = Ranks(1, main, workspace.settings("port", steps=1), environment=environment)
        with pytest.raises(
            AssertionError, match=rf"tigon.train: MASTER_PORT={port}: another program"
        ):
            ranks.finish(60)
    assert "Traceback" not in ranks.errors


def test_an_input_that_one_rank_lacks_is_in_torchruns_report(workspace, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        f"import os\nif os.environ.get('RANK') == '1':\n    os.chdir({str(tmp_path)!r})\n"
    )
    settings = workspace.settings("x", run_dir=tmp_path / "run", data="train.jsonl")
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    process = start(TORCHRUN, settings, cwd=workspace.root, env=environment)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 1
    assert f"tigon.train: {LACKS}\n" in errors
    assert LACKS in errors[errors.rindex("Root Cause") :]  # torchrun's own report comes last
    assert "tigon/train/launch.py" not in errors
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("start", ["train", "generate"])
def test_what_is_refused_at_once_is_in_torchruns_report(start, tmp_path, monkeypatch):
    """Before there is a group of ranks."""
    report = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))
    if start == "train":
        with pytest.raises(SystemExit):
            main(["lr=fast"])
    else:
        assert cli.main(["generate", "model", "hello", "--tp", "0"]) == 1
    said = {"train": "lr='fast' is not a number", "generate": "--tp 0 must be at least 1"}
    assert said[start] in json.loads(report.read_text())["message"]


FAIL_LATER = """
import tigon.train.logging as record
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
        (
            "raise RuntimeError('by chance')",
            1,
            "rank 1, whose last step was 2: RuntimeError: by chance",
        ),
        ("import signal; os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 1 was killed by SIGKI"),
    ],
)
def test_a_rank_that_fails_later_ends_the_other(workspace, launch, tmp_path, what, code, message):
    settings = workspace.settings("x", run_dir=tmp_path / "run", steps=50)
    found, errors, last = launch(settings, FAIL_LATER.format(what=what))
    assert found == code
    assert last.strip().splitlines()[-1].startswith(f"tigon.train: {message}")
    # Of the rank that failed; other threads of this process may write to its stderr too
    assert errors.count("Traceback") == (code == 1), errors


DIE = """
import signal
import tigon.train.checkpoint.saver, tigon.train.background_export, tigon.train.loop
def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    "where",
    [
        *("exporter.write_model", "exporter.prepare_save"),
        *("checkpoint.saver.Writer.write_data", "loop.evaluate"),
    ],
)
def test_a_rank_that_is_killed_outside_of_steps_is_named(workspace, launch, tmp_path, where):
    """What the others met instead, such as an export that they could not write, is not told."""
    settings = {"steps": 2, "export": "true", "save_every": 2, "eval_data": workspace.held_out}
    settings = workspace.settings("x", run_dir=tmp_path / "run", **settings)
    code, errors, last = launch(settings, f"{DIE}tigon.train.{where} = die")
    assert code == 137, errors
    line = last.strip().splitlines()[-1]
    assert line.startswith("tigon.train: rank 1 was killed by SIGKILL on "), line
    assert line.endswith("its last step was 2") and "Traceback" not in errors


def test_ranks_have_the_same_curve_and_a_signal_reaches_all_once(workspace):
    main(workspace.settings("alone", steps=3, schedule="constant"))
    expected = workspace.metrics("alone", "loss")
    run = workspace.root / "signalled"
    settings = {"steps": 5000, "log_every": 1, "schedule": "constant"}
    process = start(NPROC, workspace.settings("signalled", **settings))
    until = time.monotonic() + 120
    while not (run / "metrics.jsonl").exists() or len(workspace.metrics("signalled", "loss")) < 3:
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    printed, errors = process.communicate(timeout=200)
    assert process.returncode == 143, errors
    assert "on 2 x cpu" in printed and printed.count("steps: 0 to 5000") == 1
    found = workspace.metrics("signalled", "loss")
    assert found[:3] == pytest.approx(expected, rel=1e-5)
    assert f"stopped by a signal after step {len(found)}: resume=auto" in printed
    assert errors.count("SIGTERM: stopping after this step, with a checkpoint") == 1
    assert (run / f"checkpoints/step-{len(found):08d}").exists()


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


def test_a_number_of_ranks_that_another_program_has_left(workspace, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    said = "WORLD_SIZE=1 is in the environment without RANK, MASTER_ADDR, MASTER_PORT: unset it"
    with pytest.raises(SystemExit, match=said):
        main(workspace.settings("left"))
    for name, value in (("RANK", "0"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "port")):
        monkeypatch.setenv(name, value)
    for name in ("MASTER_PORT", "WORLD_SIZE"):
        with pytest.raises(SystemExit, match=f"{name}=.* in the environment is no number: unset"):
            main(workspace.settings("left"))
        monkeypatch.setenv("WORLD_SIZE", "abc")


def test_one_rank_that_a_signal_ends_is_named():
    program = "import os; os.getenv('RANK') == '1' and os.kill(os.getpid(), 15)"
    code, problem = run_ranks(2, ["-n1", "-r1", "-s", program, "pass"], module="timeit")
    assert code == 143 and problem is not None
    assert problem.startswith("rank 1 was killed by SIGTERM on ")


def test_a_rank_that_does_not_end_when_another_is_stopped_is_killed():
    """As one that waits for a GPU, where Python runs no handler."""
    program = (
        "import os, signal, time;"
        "os.getenv('RANK') == '1' and os._exit(130);"
        "signal.signal(2, signal.SIG_IGN); time.sleep(60)"
    )
    begun = time.monotonic()
    arguments = ["-n1", "-r1", "-s", program, "pass"]
    assert run_ranks(2, arguments, module="timeit", stop_within=0.5) == (130, None)
    assert time.monotonic() - begun < 30


def test_a_network_interface_that_is_not_here(workspace, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,nosuch0")
    with pytest.raises(SystemExit, match=r"this host has no network interface nosuch0, and has "):
        main(workspace.settings("interface"))
