"""`tigon export` of a checkpoint: what loading and saving write, byte for byte, without a model."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.tiny import CASES, FIRST, reference
from tigon import from_pretrained
from tigon.models import MODELS, convert
from tigon.weights import Repository, pieces

EXPERTS = ("mixtral", "qwen2_moe")
SIZE = "60KB"


def files(directory: Path) -> Mapping[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def assert_same(source: Path, root: Path, *, load: Any = "auto", **options: Any) -> None:
    from_pretrained(source, dtype=load).save_pretrained(root / "loaded", **options)
    convert(Repository(source), root / "converted", MODELS, dtype=load, **options)
    assert files(root / "converted") == files(root / "loaded")


@pytest.mark.parametrize(("model_type", "case"), FIRST)
def test_as_loaded_and_saved(
    model_type: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "CHUNK", 10_000)
    reference(model_type, CASES[model_type][case], tmp_path / "a", max_shard_size=SIZE)
    assert_same(tmp_path / "a", tmp_path, load=torch.bfloat16, max_shard_size="90KB")


@pytest.mark.parametrize("original", [True, False], ids=["apart", "stacked"])
@pytest.mark.parametrize("stacked", [None, True, False])
@pytest.mark.parametrize("model_type", EXPERTS)
def test_experts(model_type: str, stacked: bool | None, original: bool, tmp_path: Path) -> None:
    case = next(iter(CASES[model_type].values()))
    reference(model_type, case, tmp_path / "a", save_original_format=original)
    assert_same(tmp_path / "a", tmp_path, stacked_experts=stacked)


def test_expert_rows_are_cut_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "CHUNK", 5_000)
    case = next(iter(CASES["mixtral"].values()))
    reference("mixtral", case, tmp_path / "a", save_original_format=False)
    for name, stacked in (("b", False), ("c", True)):
        (tmp_path / name).mkdir()
        assert_same(tmp_path / "a", tmp_path / name, stacked_experts=stacked)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("load", ["auto", torch.float32, torch.float16])
def test_tied_and_dtypes(tied: bool, load: Any, tmp_path: Path) -> None:
    changes = {"tie_word_embeddings": tied}
    reference("llama", changes, tmp_path / "a", dtype=torch.bfloat16, max_shard_size=SIZE)
    assert_same(tmp_path / "a", tmp_path, load=load)


def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    reference("llama", {}, tmp_path / "a")
    file = tmp_path / "a" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = torch.ones(3)
    tensors["more"] = tensors.pop("lm_head.weight")
    save_file(tensors, file)
    with pytest.raises(
        ValueError, match=r"(?s)1 missing: lm_head.*1 unexpected: more.*norm.*\[3\]"
    ):
        convert(Repository(tmp_path / "a"), tmp_path / "b", MODELS)
    assert os.listdir(tmp_path) == ["a"]
