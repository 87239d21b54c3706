"""`tigon export` of a checkpoint: what loading and saving write, byte for byte, without a model."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

from tests.models.fp8_checkpoints import DYNAMIC, to_fp8
from tests.models.gguf_files import write_gguf
from tests.models.tiny import CASES, FIRST, reference
from tigon import from_pretrained
from tigon.models import MODELS
from tigon.models.pretrained.convert import convert_pretrained
from tigon.weights import Repository, convert, entries

EXPERTS = ("mixtral", "qwen2_moe")
SIZE = "60KB"
EVEN = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
EVEN |= {"num_attention_heads": 4, "num_hidden_layers": 1}


def files(directory: Path) -> Mapping[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def assert_same(source: Path, root: Path, *, load: Any = "auto", **options: Any) -> None:
    from_pretrained(source, dtype=load).save_pretrained(root / "loaded", **options)
    convert_pretrained(Repository(source), root / "converted", MODELS, dtype=load, **options)
    assert files(root / "converted") == files(root / "loaded")


@pytest.mark.parametrize(("model_type", "case"), FIRST)
def test_as_loaded_and_saved(
    model_type: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entries, "CHUNK", 10_000)
    reference(model_type, CASES[model_type][case], tmp_path / "a", max_shard_size=SIZE)
    assert_same(tmp_path / "a", tmp_path, load=torch.bfloat16, max_shard_size="90KB")


@pytest.mark.parametrize("original", [True, False], ids=["apart", "stacked"])
@pytest.mark.parametrize("stacked", [None, True, False])
@pytest.mark.parametrize("model_type", EXPERTS)
def test_experts(model_type: str, stacked: bool | None, original: bool, tmp_path: Path) -> None:
    case = next(iter(CASES[model_type].values()))
    reference(model_type, case, tmp_path / "a", save_original_format=original)
    assert_same(tmp_path / "a", tmp_path, stacked_experts=stacked)


def test_experts_are_not_looked_for_in_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which hundreds of them, each in tensors of its own, would take seconds a layer for."""
    seen: list[str] = []
    plan = convert.plan_reads
    monkeypatch.setattr(
        convert, "plan_reads", lambda part, *rest: seen.append(part.name) or plan(part, *rest)
    )
    reference("mixtral", CASES["mixtral"]["plain"], tmp_path / "a", save_original_format=True)
    convert_pretrained(Repository(tmp_path / "a"), tmp_path / "b", MODELS)
    assert sorted(seen) == sorted(load_file(tmp_path / "a" / "model.safetensors"))


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
        convert_pretrained(Repository(tmp_path / "a"), tmp_path / "b", MODELS)
    assert os.listdir(tmp_path) == ["a"]


def test_fp8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "CHUNK", 3_000)  # parts of blocks too
    sizes = EVEN | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
    reference("qwen3_moe", sizes, tmp_path / "a", dtype=torch.bfloat16)
    to_fp8(tmp_path / "a", (32, 16), DYNAMIC)
    assert_same(tmp_path / "a", tmp_path, stacked_experts=True)


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "gemma"])
def test_gguf(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "CHUNK", 3_000)  # parts of heads too, whose rows are turned
    reference(model_type, EVEN, tmp_path / "a")
    write_gguf(tmp_path / "a", tmp_path / "a.gguf", Kind.Q8_0)
    from_pretrained(tmp_path / "a.gguf").save_pretrained(tmp_path / "loaded")
    convert_pretrained(Repository(tmp_path), tmp_path / "converted", MODELS, gguf_file="a.gguf")
    assert files(tmp_path / "converted") == files(tmp_path / "loaded")
