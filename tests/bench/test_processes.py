"""Sides that are processes of their own: how they end, and which checkout they import."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

import tigon
from bench import compare, processes, train_step
from bench.harness import ROOT
from tests.bench.small import Patch


@pytest.mark.slow
def test_sides_that_end_badly_are_recorded(tmp_path: Path) -> None:
    step = next(name for name in compare.CASES if name.startswith("Llama"))
    found = compare.run_side(ROOT, [step], tiny=True, limit=0.05)
    assert found == {step: {"error": "not done after 0.05 s"}}
    side = tmp_path / "side.py"
    side.write_text('print(\'{"kind": "x"}\', flush=True)\nimport sys; sys.exit(3)\n')
    *_, last = processes.spawn(train_step.Request(step, 1, False, tiny=True), 60.0, side)
    assert last == {"kind": "ended", "error": "it ended with status 3"}
    # A rank that fails ends the others: they would wait for it to the limit
    side.write_text(
        "import os, time\nassert os.environ['RANK'] == '0', 'no memory'\ntime.sleep(60)"
    )
    began = time.monotonic()
    assert processes.run_ranks(side, 2, tmp_path, [], 50)["error"] == "AssertionError: no memory"
    assert time.monotonic() - began < 20


def test_processes_start_beside_threads() -> None:
    """No Python runs between fork and exec, where it would wait for what other threads hold."""
    code = (
        "import os\n"
        "from bench.processes import lines\n"
        "os.register_at_fork(after_in_parent=lambda: print('a fork that runs Python'))\n"
        "list(lines(['-c', ''], 60))\n"
    )
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, env=processes.environment(), capture_output=True, text=True)
    assert (found.stdout, found.returncode) == ("", 0), found.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel for it")
def test_sides_end_with_their_benchmark(tmp_path: Path) -> None:
    """However it ends: a side that goes on would share the GPU with the next benchmark."""
    side = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    code = f"from bench.processes import lines; list(lines(['-c', {side!r}], 60, Path('log')))"
    command = [sys.executable, "-c", f"from pathlib import Path\n{code}"]
    parent = subprocess.Popen(command, cwd=tmp_path, env=processes.environment())
    log, until = tmp_path / "log", time.monotonic() + 120
    while not (log.exists() and log.read_text().strip()) and time.monotonic() < until:
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    status = Path("/proc", log.read_text().strip(), "status")
    while status.exists() and "Z (zombie)" not in status.read_text():
        assert time.monotonic() < until, "it runs on"
        time.sleep(0.05)


def test_ranks_import_this_checkout(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    side = tmp_path / "side.py"
    side.write_text(
        "import json, pathlib, sys\n"
        "import tigon\n"
        "pathlib.Path(sys.argv[1]).write_text(json.dumps({'from': tigon.__file__}))\n"
    )
    assert processes.run_ranks(side, 1, tmp_path, [], 50) == {"from": tigon.__file__}
