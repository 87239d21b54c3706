"""Kernels as a GPU has them, compiled without one: the interpreter runs only their Python."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from tests.hopper.compiling import WIDE, in_place


@pytest.mark.timeout(1200)  # two minutes of both cores, more beside other tests
@pytest.mark.parametrize(
    "options", [["--quick"], pytest.param([], marks=pytest.mark.slow)], ids=["quick", "all"]
)
def test_kernels_compile_for_hopper_with_wide_accesses(options: list[str]) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.hopper", *options]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["compiled"]
    wide = {name: [counts.get("16", 0) for counts in found[name]] for name in WIDE}
    assert {name: len(each) for name, each in wide.items()} == {k: len(v) for k, v in WIDE.items()}
    short = {
        name: each
        for name, each in wide.items()
        if any(n < wanted for n, wanted in zip(each, WIDE[name], strict=True))
    }
    assert not short
    written = [counts for name in found if in_place(name) for counts in found[name]]
    assert written
    assert not any(counts["exposed"] for counts in written)
