"""Real checkpoint and data for the tests, built once into .assets/ and reused between runs."""

import runpy
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[2]


def built(name: str) -> Path:
    """By one of several test processes; the others wait for it."""
    (ROOT / ".assets").mkdir(exist_ok=True)
    with FileLock(ROOT / ".assets/.lock"):
        path: Path = runpy.run_path(str(ROOT / "examples/assets" / name))["build"]()
    return path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The directory of the SmolLM2-135M-Instruct checkpoint."""
    return built("smollm2.py")


@pytest.fixture(scope="session")
def gsm8k() -> Path:
    """The directory of train.jsonl and eval.jsonl."""
    return built("gsm8k.py")
