"""A run goes on with the reference or the teacher that it began with."""

import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests.small import write_chats, write_model
from tests.train import preferences
from tigon.train import main
from tigon.train.reference import read, store


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TIGON_CACHE", str(tmp_path / "cache"))


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


def test_an_adapter_s_reference(settings: Any, other: Path) -> None:
    main(settings(**{"lora.rank": 4}))
    with pytest.raises(SystemExit, match="other is not the reference that the run began with"):
        main(settings(**{"lora.rank": 4}, reference=other, resume="auto", steps=2))
    main(settings(**{"lora.rank": 4}, resume="auto", steps=2))


def test_an_adapter_s_reference_left_out(settings: Any, other: Path) -> None:
    main(settings(**{"lora.rank": 4}, reference=other))
    with pytest.raises(SystemExit, match="model is not the reference that the run began with"):
        main(settings(**{"lora.rank": 4}, resume="auto", steps=2))


@pytest.mark.slow
@pytest.mark.parametrize("streaming", ["false", "true"])
def test_an_adapter_s_base_by_its_path_is_the_same_reference(
    settings: Any, workspace: Any, other: Path, streaming: str
) -> None:
    same = {"lora.rank": 4, "streaming": streaming, "workers": 0}
    main(settings(**same))
    for steps, reference in ((2, workspace.model), (3, ""), (4, workspace.model)):
        main(settings(**same, reference=reference, resume="auto", steps=steps))
    with pytest.raises(SystemExit, match="other is not the reference that the run began with"):
        main(settings(**same, reference=other, resume="auto", steps=5))


def test_a_base_in_four_bits_is_another_reference(settings: Any, workspace: Any) -> None:
    same = {"lora.rank": 4, "lora.quantize": "nf4"}
    main(settings(**same))
    with pytest.raises(SystemExit, match="model is not the reference that the run began with"):
        main(settings(**same, reference=workspace.model, resume="auto", steps=2))


def test_a_stream_s_reference(settings: Any, other: Path) -> None:
    same = {"streaming": "true", "shuffle_window": 64, "reference": other, "workers": 0}
    main(settings(**same))
    change(other)
    with pytest.raises(SystemExit, match="other is not the reference that the run began with"):
        main(settings(**same, resume="auto", steps=2))


def test_a_teacher(settings: Any, other: Path, tmp_path: Path) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", 13)
    same = {"task": "distill", "data": chats, "teacher": other}
    main(settings(**same))
    main(settings(**same, resume="auto", steps=2))
    change(other)
    with pytest.raises(SystemExit, match="other is not the teacher that the run began with"):
        main(settings(**same, resume="auto", steps=3))


@pytest.mark.slow
def test_a_cached_reference_of_no_bytes_is_computed_again(
    settings: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(settings())
    (cached,) = (tmp_path / "cache/reference").glob("*.npy")
    cached.write_bytes(b"")
    capsys.readouterr()
    main(settings(run_dir=tmp_path / "again"))
    assert "computed in" in capsys.readouterr().out


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


@pytest.mark.parametrize("suffix", [".npy", ".json"])
def test_a_directory_where_a_file_belongs_is_named(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"a{suffix}").mkdir()
    assert read(tmp_path / "a.npy", 5) is None
    message = (
        rf"cannot write .*: .*/a{suffix} is in the way \(Is a directory\): move it away, or set"
    )
    with pytest.raises(OSError, match=message):
        store(tmp_path / "a.npy", np.zeros(5, dtype=np.float32))


@pytest.mark.slow
def test_the_checkpoint_s_run_says_which_reference(
    settings: Any, other: Path, tmp_path: Path
) -> None:
    """Not what a run began with that was in the directory and saved no checkpoint."""
    main(settings())
    source, again = tmp_path / "run/checkpoints/step-00000001", tmp_path / "again"
    main(settings(run_dir=again, reference=other))
    shutil.rmtree(again / "checkpoints")
    on = {"run_dir": again, "resume": source, "steps": 2}
    with pytest.raises(SystemExit, match="other is not the reference that the run began with"):
        main(settings(**on, reference=other))
    main(settings(**on))


def test_a_checkpoint_named_from_its_own_directory(
    settings: Any, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main(settings())
    monkeypatch.chdir(tmp_path / "run/checkpoints")
    on = {"run_dir": tmp_path / "again", "resume": "step-00000001", "steps": 2}
    with pytest.raises(SystemExit, match="other is not the reference that the run began with"):
        main(settings(**on, reference=other))
