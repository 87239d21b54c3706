"""Ranks start, and all of them end when one fails."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from tests.train.ranks import TORCHRUN as FIRST_OF_TWO
from tests.train.ranks import Ranks
from tigon import cli
from tigon.settings.command import read_command, refusal
from tigon.settings.config import Config
from tigon.train import checkpoint, main
from tigon.train.distributed import prepare_flight_recorder
from tigon.train.launch import check_count, summarize
from tigon.train.signals import peer_failed
from tigon.utils.launcher import record_error

ROOT = Path(__file__).parents[2]
NPROC = ["-m", "tigon.cli", "train", "--nproc", "2"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TORCHRUN += ["-m", "tigon", "train"]
LACKS = "rank 1: no data file matches 'train.jsonl'"
Launch = Callable[[list[str], str], tuple[int, str]]


def environment(path: Path | None = None) -> dict[str, str]:
    """`path` holds a sitecustomize.py that ranks import first."""
    paths = str(ROOT) if path is None else f"{path}:{ROOT}"
    return {"OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONPATH": paths}


def start(command: list[str], settings: list[str], **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command, *settings],
        **{"env": os.environ | environment(), **options},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def write_rank_one_code(directory: Path, code: str) -> None:
    lines = "".join(f"    {line}\n" for line in code.strip().splitlines())
    (directory / "sitecustomize.py").write_text(
        f"import os\nif os.environ.get('RANK') == '1':\n{lines}"
    )


@pytest.fixture
def launch_two(tmp_path, monkeypatch, capfd) -> Iterator[Launch]:
    """--nproc 2 in this process, rank 1 of which runs `code` first: exit code and stderr."""
    variables, handlers = dict(os.environ), {n: signal.getsignal(n) for n in (1, 2, 15)}

    def run(settings: list[str], code: str) -> tuple[int, str]:
        write_rank_one_code(tmp_path, code)
        for name, value in environment(tmp_path).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "1")
        with pytest.raises(SystemExit) as ended:
            main(["--nproc", "2", *settings])
        return ended.value.code, capfd.readouterr().err

    yield run
    os.environ.clear()
    os.environ.update(variables)
    for number, handler in handlers.items():
        signal.signal(number, handler)


FAIL_LATER = """
import tigon.train.trainer as trainer
update_weights = trainer.update_weights
def fail(run, step, scale):
    if step == 1:
        {what}
    update_weights(run, step, scale)
trainer.update_weights = fail
"""


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("what", "code", "message"),
    [
        ("raise RuntimeError('by chance')", 1, "rank 1 failed in step 2: RuntimeError: by chance"),
        ("os.kill(os.getpid(), 9)", 137, "rank 1 was killed by SIGKILL"),
    ],
    ids=["error", "killed"],
)
def test_failed_rank_ends_the_others(workspace, launch_two, tmp_path, what, code, message):
    settings = workspace.settings("x", run_dir=tmp_path / "run", steps=50)
    found, errors = launch_two(settings, FAIL_LATER.format(what=what))
    assert found == code, errors
    assert errors.strip().splitlines()[-1].startswith(f"tigon.train: {message}")


@pytest.mark.slow
def test_torchrun_reports_missing_input(workspace, tmp_path):
    write_rank_one_code(tmp_path, f"os.chdir({str(tmp_path)!r})")
    settings = workspace.settings("x", run_dir=tmp_path / "run", data="train.jsonl")
    variables = os.environ | environment(tmp_path)
    process = start(TORCHRUN, settings, cwd=workspace.root, env=variables)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 1
    assert f"tigon.train: {LACKS}\n" in errors
    assert LACKS in errors[errors.rindex("Root Cause") :]  # torchrun's own report comes last
    assert "tigon/train/launch.py" not in errors
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_interrupted_ranks_save_a_checkpoint(workspace):
    main(workspace.settings("alone", steps=3, schedule="constant"))
    expected = workspace.metrics("alone", "loss")
    run = workspace.root / "interrupted"
    settings = {"steps": 5000, "log_every": 1, "schedule": "constant"}
    process = start(NPROC, workspace.settings("interrupted", **settings))
    until = time.monotonic() + 200
    while not (run / "metrics.jsonl").exists() or len(workspace.metrics(run.name, "loss")) < 3:
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=200)
    assert process.returncode == 130, errors
    assert "on 2 x cpu" in printed and printed.count("steps: 0 to 5000") == 1
    found = workspace.metrics(run.name, "loss")
    assert found[:3] == pytest.approx(expected, rel=1e-5)
    assert f"stopped by a signal after step {len(found)}: resume=auto" in printed
    assert errors.count("SIGINT: stopping after this step, with a checkpoint") == 1
    assert checkpoint.step_of(checkpoint.latest(run / "checkpoints")) == len(found)


@pytest.mark.slow
def test_taken_port_is_named(workspace):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        variables = {**FIRST_OF_TWO, "LOCAL_RANK": "0", "MASTER_PORT": port}
        ranks = Ranks(1, main, workspace.settings("port", steps=1), environment=variables)
        with pytest.raises(AssertionError, match=rf"MASTER_PORT={port}: another program"):
            ranks.finish()
    assert "Traceback" not in ranks.errors


@pytest.mark.parametrize("command", ["train", "generate"])
def test_refusal_is_in_the_error_file(command, tmp_path, monkeypatch):
    report = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))
    if command == "train":
        with pytest.raises(SystemExit):
            main(["lr=fast"])
    else:
        assert cli.main(["generate", "model", "hello", "--tp", "0"]) == 1
    said = {"train": "lr='fast' is not a number", "generate": "--tp 0 must be at least 1"}
    assert said[command] in json.loads(report.read_text())["message"]


@pytest.mark.parametrize(
    ("left", "printed"),
    [
        ({"TIGON_LAUNCHED": "1"}, "tigon.train: why"),
        ({"TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "1"}, "tigon.train: why"),
        ({"RANK": "1"}, "tigon.train: why"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "tigon.train: rank 1: why"),
        ({"TIGON_LAUNCHED": str(os.getppid())}, 1),
    ],
)
def test_variables_that_a_launcher_has_left_hide_no_error(left, printed, monkeypatch):
    for name, value in left.items():
        monkeypatch.setenv(name, value)
    assert refusal(ValueError("why")) == printed


@pytest.mark.parametrize("size", ["two", "", "0", "-3"])
def test_a_world_size_that_is_no_number_of_processes_is_named(size, workspace, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(SystemExit, match=f"WORLD_SIZE='{size}' is no number .*: unset it to run"):
        main(workspace.settings("left"))


def test_an_error_file_is_whole_or_missing(tmp_path, monkeypatch):
    report = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))
    write, present = Path.write_text, []

    def ended(path, text):
        write(path, text[:5])
        present.append(report.exists())
        return write(path, text)

    monkeypatch.setattr(Path, "write_text", ended)
    record_error("why")
    assert present == [False]
    assert json.loads(report.read_text())["message"] == "why"
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]


@pytest.mark.parametrize(
    ("codes", "texts", "expected"),
    [
        ({0: 1, 1: -15}, {0: "why"}, (1, "why")),
        ({0: 1, 1: -9}, {0: "connection closed"}, (137, "rank 1 was killed by SIGKILL")),
        ({1: 3}, {}, (3, "rank 1 ended with exit code 3")),
        ({0: -15, 1: 1}, {1: {"message": "E: why"}}, (1, "rank 1: E: why")),  # as @record writes
        ({0: 143, 1: 143}, {}, (143, None)),  # ranks say themselves that a signal has stopped them
    ],
)
def test_summary_names_the_first_failure(codes, texts, expected, tmp_path):
    failures = {}
    for rank, code in codes.items():
        file = tmp_path / f"{rank}.json"
        if rank in texts:
            text = texts[rank]
            if isinstance(text, dict):
                text = text | {"extraInfo": {"timestamp": int(time.time())}}
            file.write_text(json.dumps({"message": text, "timestamp": int(time.time())}))
        failures[rank] = ProcessFailure(rank, 1, code, str(file))
    code, text = summarize(failures)
    assert code == expected[0]
    assert text == expected[1] if expected[1] is None else text.startswith(expected[1])


def test_peer_failed_looks_at_error_files(tmp_path, monkeypatch):
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0/error.json"))
    (tmp_path / "0/error.json").touch()
    assert not peer_failed()
    (tmp_path / "1/error.json").touch()
    assert peer_failed()


def test_nproc_may_stand_anywhere(monkeypatch, capsys):
    launched = []

    def run(*given):
        launched.append(given)
        return 0, None

    module = sys.modules["tigon.train.launch"]
    monkeypatch.setattr(module, "run_ranks", run)
    monkeypatch.setattr(module, "check_count", lambda *_: None)
    settings = ["model=m", "data=hf://d", "run_dir=r"]
    for given in (["--nproc", "4", *settings, "--lr", "1"], [*settings, "--lr", "1", "--nproc=4"]):
        with pytest.raises(SystemExit, match="0"):
            main(given)
        assert launched.pop() == (4, ["train", *settings, "--lr", "1"])
    shared = "batch_size=8 must be a multiple of micro_batch_size=2 x 3 ranks .*: give 6 or 12"
    with pytest.raises(SystemExit, match=shared):  # before ranks start and tokenize
        main(["--nproc", "3", *settings, "micro_batch_size=2"])
    assert not launched
    for wrong in (["--nproc"], ["--nproc", "all"]):
        with pytest.raises(SystemExit, match="2"):
            main([*settings, *wrong])
        assert "argument --nproc: " in capsys.readouterr().err
    monkeypatch.undo()
    with pytest.raises(ValueError, match="must be at least 1"):
        check_count(0, "cpu")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="inside torchrun"):
        check_count(2, "cpu")


def test_ranks_check_files_together(monkeypatch):
    """One that ended alone would leave the others waiting for it."""
    settings = ["model=./none", "data=none.jsonl", "run_dir=r"]
    with pytest.raises(SystemExit, match=r"no data file matches .none\.jsonl"):
        read_command(settings)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert read_command(settings).settings == settings


def test_ranks_share_the_cpus_of_the_process(monkeypatch):
    module, threads = sys.modules["tigon.train.launch"], []

    def launch(*_):
        assert os.environ["TIGON_LAUNCHED"] == str(os.getpid())  # not what a shell has left
        # Its line about a signal would stand beside what the ranks say
        agent = logging.getLogger("torch.distributed.elastic.agent.server.api")
        assert not agent.isEnabledFor(logging.WARNING)
        return lambda *command: threads.append((os.environ["OMP_NUM_THREADS"], command))

    monkeypatch.setattr(module, "elastic_launch", launch)
    monkeypatch.setenv("TIGON_LAUNCHED", "1")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    assert module.run_ranks(2, ["train", "a.yaml"]) == (0, None)
    # By the command, which imports torch without collecting garbage
    assert threads == [("3", ("-m", "tigon", "train", "a.yaml"))]


def test_incomplete_rank_environment_is_refused(workspace, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(SystemExit, match=r"RANK expected, but not set.*: unset WORLD_SIZE"):
        main(workspace.settings("left"))


@pytest.mark.parametrize(
    ("given", "size"), [({}, "2000"), ({"TORCH_FR_BUFFER_SIZE": "7"}, "7")], ids=["none", "set"]
)
def test_collectives_of_a_timeout_are_dumped_into_the_run(tmp_path, monkeypatch, given, size):
    """By NCCL's flight recorder; what a person has set stays."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", given)
    prepare_flight_recorder(Config(model="m", data=("d",), run_dir="run"))
    assert given == {
        "TORCH_FR_BUFFER_SIZE": size,
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/run/flight-recorder-",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
