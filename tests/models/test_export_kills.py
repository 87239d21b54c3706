"""kill -9 at random moments of an export: on disk is the whole old one, or the whole new one.

TIGON_KILLS=50 python -m pytest tests/models/test_export_kills.py: that many moments of each kind.
"""

import os
import random
import signal
import threading
from collections.abc import Callable, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest

import tigon
from tests.support.contract import tiny_llama
from tests.train.ranks import CONTEXT
from tigon.weights import files
from tigon.weights.files import new_directory

KILLS = int(os.environ.get("TIGON_KILLS", "3"))
STEPS = ("open", "mkdir", "truncate", "write", "pwrite", "fsync", "rename", "unlink", "rmdir")
SIZE = "20KB"  # of a file: there are several
# What is there before; whether the system can exchange two names in one step
KINDS = {"nothing": (False, True), "an export": (True, True), "two renames": (True, False)}


def export(source: Path, target: Path) -> None:
    tigon.from_pretrained(source).save_pretrained(target, max_shard_size=SIZE, replace=True)


def watched(source: Path, target: Path, exchanges: bool, kill: int | None, count: Path) -> None:
    """Export; the process ends before file operation number `kill`."""
    model, seen, lock = tigon.from_pretrained(source), 0, threading.Lock()

    def step(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def counted(*arguments: Any, **options: Any) -> Any:
            nonlocal seen
            with lock:
                seen += 1
                if seen == kill:
                    os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return counted

    for name in STEPS:
        setattr(os, name, step(getattr(os, name)))
    exchange = files._exchange if exchanges else lambda first, second: False
    files._exchange = step(exchange)
    model.save_pretrained(target, max_shard_size=SIZE, replace=True)
    if kill is None:
        count.write_text(str(seen))


def run(*arguments: Any) -> int | None:
    process = CONTEXT.Process(target=watched, args=arguments)
    process.start()
    process.join(200)
    return process.exitcode


def read_files(path: Path) -> Mapping[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()} if path.exists() else {}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("sources")
    for name in ("one", "two"):
        tiny_llama().save_pretrained(root / name)  # other weights each time
    return root / "one", root / "two"


@pytest.fixture(scope="module")
def steps(sources: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """How many file operations an export of a kind has."""
    found: dict[str, int] = {}

    def count(kind: str) -> int:
        if kind not in found:
            root = tmp_path_factory.mktemp("count")
            there, exchanges = KINDS[kind]
            if there:
                export(sources[0], root / "out")
            assert run(sources[1], root / "out", exchanges, None, root / "steps") == 0
            found[kind] = int((root / "steps").read_text())
            assert found[kind] > 30
        return found[kind]

    return count


@pytest.mark.slow(first=2)
@pytest.mark.parametrize("number", range(KILLS))
@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_any_moment(
    kind: str, number: int, sources: tuple[Path, Path], steps: Any, tmp_path: Path
) -> None:
    there, exchanges = KINDS[kind]
    target, expected = tmp_path / "out", [{}, {}]
    for i, source in enumerate(sources):
        export(source, tmp_path / "alone")
        expected[i] = dict(read_files(tmp_path / "alone"))
    if there:
        export(sources[0], target)
    old = expected[0] if there else {}
    event = random.Random(f"{kind} {number}").randint(1, steps(kind))
    attempt = partial(run, sources[1], target, exchanges, event, tmp_path / "steps")
    assert attempt() == -signal.SIGKILL
    if exchanges:
        assert read_files(target) in (old, expected[1]), f"killed before operation {event}"
    with pytest.raises(KeyError), new_directory(target, replace=True):  # the next one begins
        raise KeyError
    assert read_files(target) in (old, expected[1]), f"killed before operation {event}"
    export(sources[1], target)
    assert read_files(target) == expected[1]
    assert sorted(os.listdir(tmp_path)) == ["alone", "out"]
