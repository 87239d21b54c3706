"""Real checkpoint and data for the tests, built once into .assets/ and reused between runs."""

import runpy
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "examples" / "assets"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The directory of the SmolLM2-135M-Instruct checkpoint."""
    path: Path = runpy.run_path(str(SCRIPTS / "smollm2.py"))["build"]()
    return path


@pytest.fixture(scope="session")
def alpaca() -> Path:
    """The directory of train.jsonl and eval.jsonl."""
    path: Path = runpy.run_path(str(SCRIPTS / "alpaca.py"))["build"]()
    return path
