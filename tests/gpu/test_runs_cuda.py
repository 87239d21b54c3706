"""Whole runs of `tigon train` on the GPU: repeated, stopped by a signal, or left by a rank."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from tests.support.small import EXPERTS, write_model
from tests.train.conftest import workspace
from tigon.kernels.attention.backends import Backend
from tigon.train.logging import read_metrics

__all__ = ["workspace"]
pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
SAME = {"device": "cuda", "deterministic": "true", "warmup_steps": 2}
WIDE = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}  # head dim 64
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TORCHRUN += ["-m", "tigon", "train"]
COMMANDS = {
    "one": ["-m", "tigon", "train"],
    "nproc": ["-m", "tigon", "train", "--nproc", "2"],
    "torchrun": TORCHRUN,
}


def begin(
    command: str, settings: list[str], tmp_path: Path, rank: int = 0, code: str = ""
) -> subprocess.Popen[str]:
    """A run of which one rank executes `code` when its Python starts."""
    if command != "one" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    lines = "".join(f"    {line}\n" for line in code.strip().splitlines())
    condition = f"import os\nif os.environ.get('RANK', '0') == '{rank}':\n    pass\n"
    (tmp_path / "sitecustomize.py").write_text(condition + lines)
    path = str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH")
    return subprocess.Popen(
        [sys.executable, *COMMANDS[command], *settings],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def assert_same_bits(run: Path, expected: Path, steps: int) -> None:
    """Of every step's loss and gradient norm, and of the last weights and optimizer states."""
    for key in ("step", "loss", "grad_norm", "accuracy", "lr"):
        values, others = (
            [row[key] for row in read_metrics(p / "metrics.jsonl")] for p in (run, expected)
        )
        assert len(values) == steps and values == others, key
    last = expected / f"checkpoints/step-{steps:08d}"
    files = sorted(last.glob("*.safetensors"))
    assert len(files) >= 2
    for path in files:
        other = run / path.relative_to(expected)
        assert other.read_bytes() == path.read_bytes(), path.name


CASES: dict[str, dict[str, Any]] = {name: {"attention": name} for name in get_args(Backend)}
CASES["float32"] = {"attention": "sdpa", "dtype": "float32"}
CASES["experts"] = {"attention": "auto", "model": EXPERTS}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_deterministic_runs_repeat_or_are_refused(workspace, tmp_path, case):
    """Both runs share the GPU, so that their kernels are scheduled differently."""
    backend = case["attention"]
    model = write_model(tmp_path / "model", **(WIDE | case.get("model", {})))
    settings = workspace.settings("x", **(SAME | case | {"model": model, "steps": 5}))
    runs = [tmp_path / "first", tmp_path / "second"]
    started = [begin("one", [*settings, f"run_dir={run}"], tmp_path) for run in runs]
    ended = [process.communicate(timeout=200) for process in started]
    codes = [process.returncode for process in started]
    if backend == "cudnn" or (backend == "fa4" and any(codes)):
        assert codes == [1, 1], ended
        for _, errors in ended:
            assert errors.strip().splitlines()[-1].startswith(f"tigon.train: attention='{backend}'")
            assert "Traceback" not in errors
        return
    assert codes == [0, 0], ended
    assert_same_bits(*runs, steps=5)


# The signal comes while the main thread waits for the GPU, which has a second to spend
SIGNAL = """
import signal, threading, torch
import tigon.train.trainer as trainer
update = trainer.update_weights
def then(run, step, scale):
    if step == 2:
        torch.cuda._sleep(3_000_000_000)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    return update(run, step, scale)
trainer.update_weights = then
"""


@pytest.mark.parametrize("command", ["one", "nproc"])
def test_signal_saves_after_its_step(workspace, tmp_path, command):
    settings = workspace.settings("x", **SAME, steps=7)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    for run, code in ((whole, ""), (stopped, SIGNAL), (stopped, "")):
        process = begin(command, [*settings, f"run_dir={run}", "resume=auto"], tmp_path, 0, code)
        printed, errors = process.communicate(timeout=200)
        assert process.returncode == (143 if code else 0), errors
        if code:  # it came in step 4
            assert "stopped by a signal after step 4" in printed
            assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-00000004"]
    assert_same_bits(stopped, whole, steps=7)


# The other rank is in the next step by then, and waits in one of its collectives
KILL = """
import signal, time
import tigon.train.logging as logging
log = logging.RunLog.log
def die(self, row, samples=()):
    if row["step"] == 3:
        time.sleep(3)
        with open({when!r}, "w") as file:
            file.write(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    log(self, row, samples)
logging.RunLog.log = die
"""


@pytest.mark.parametrize(
    ("command", "seconds", "code", "message"),
    [
        ("nproc", 30, 137, "tigon.train: rank 1 was killed by SIGKILL"),
        # which itself gives the other ranks 30 s
        ("torchrun", 60, 1, "Signal 9 (SIGKILL) received by PID"),
    ],
)
def test_killed_rank_ends_one_waiting_in_nccl(
    workspace, tmp_path, command, seconds, code, message, monkeypatch
):
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "10")
    settings = workspace.settings("x", device="cuda", steps=50, run_dir=tmp_path / "run")
    when = tmp_path / "when"
    process = begin(command, settings, tmp_path, 1, KILL.format(when=str(when)))
    _, errors = process.communicate(timeout=200)
    assert time.time() - float(when.read_text()) < seconds
    assert process.returncode == code, errors
    assert message in errors
    assert len(read_metrics(tmp_path / "run/metrics.jsonl")) == 3
