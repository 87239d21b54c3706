"""A run goes on with the reference or the teacher that it began with."""

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests.support.small import write_chats, write_model
from tests.train import preferences
from tigon.train import main
from tigon.train.reference import read, store

pytestmark = pytest.mark.usefixtures("empty_cache")


@pytest.fixture
def settings(workspace: Any, tmp_path: Path) -> Callable[..., list[str]]:
    pairs = preferences.write(tmp_path / "pairs.jsonl", preferences.pairs(13, 5))

    def of(**changes: Any) -> list[str]:
        same = {"run_dir": tmp_path / "run", "task": "dpo", "data": pairs, "save_every": 1}
        return workspace.settings("run", **same | {"steps": 1} | changes)

    return of


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return write_model(tmp_path / "other", num_hidden_layers=1)


def change(model: Path) -> None:
    """Its weights, in place."""
    path = model / "model.safetensors"
    save_file({n: 2 * t for n, t in load_file(path).items()}, path, metadata={"format": "pt"})


LORA = {"lora.rank": 4}
STREAM = {"streaming": "true", "shuffle_window": 64, "workers": 0}
DISTILL = {"task": "distill", "data": "chats", "teacher": "other"}
NF4 = LORA | {"lora.quantize": "nf4"}
# What a run begins with, what it may go on with, and what it may not: "change" writes other weights
CASES: dict[str, tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any], str]] = {
    "adapter": (LORA, [{}], {"reference": "other"}, "other is not the reference"),
    "left out": (LORA | {"reference": "other"}, [], {"reference": ""}, "model is not the ref"),
    "four bits": (NF4, [], {"reference": "model"}, "model is not the reference"),
    "stream": (STREAM | {"reference": "other"}, [], {"change": "other"}, "other is not the ref"),
    "teacher": (DISTILL, [{}], {"change": "other"}, "other is not the teacher"),
    **{
        f"path of the base, {name}": (
            LORA | changes,
            [{"reference": "model"}, {}, {"reference": "model"}],
            {"reference": "other"},
            "other is not the reference",
        )
        for name, changes in (("cached", {}), ("stream", STREAM))
    },
}


@pytest.mark.slow(first=5)
@pytest.mark.parametrize("case", CASES)
def test_runs_keep_their_reference_or_teacher(workspace, settings, other, tmp_path, case):
    """Also where the base of an adapter is named by its path."""
    began, allowed, refused, said = CASES[case]
    files = {"other": other, "model": workspace.model}
    files["chats"] = write_chats(tmp_path / "chats.jsonl", 13)

    def train(steps: int, changes: dict[str, Any]) -> None:
        given = began | changes | {"steps": steps, "resume": "auto"}
        main(settings(**{name: files.get(value, value) for name, value in given.items()}))

    train(1, {})
    for steps, changes in enumerate(allowed, start=2):
        train(steps, changes)
    changes = dict(refused)
    if changed := changes.pop("change", None):
        change(files[changed])
    with pytest.raises(SystemExit, match=f"{said}.* that the run began with"):
        train(len(allowed) + 2, changes)


def test_a_file_that_may_not_be_as_large_is_said(tmp_path: Path) -> None:
    values = np.arange(10_000, dtype=np.float32)
    store(tmp_path / "whole.npy", values)
    found = read(tmp_path / "whole.npy", 10_000)
    assert found is not None and np.array_equal(found, values)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match=r"cannot write .*part.npy \(File too large\): set TIGON"):
            store(tmp_path / "part.npy", values)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.glob("*part*"))
