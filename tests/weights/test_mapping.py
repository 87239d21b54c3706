"""Weights that stay in their file until they are used."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tigon
from tests.models.tiny import CASES, FIRST, reference
from tests.weights.saved import save
from tigon.models import MODELS, build
from tigon.models.pretrained.load import map_weights
from tigon.weights import Layout, Repository, RowSpan, TensorSlice, map_parameters


def test_what_is_mapped_and_what_is_not(tmp_path: Path) -> None:
    # In files the names of a dtype follow each other by the alphabet
    tensors = {
        "a": torch.randn(4, 6),
        "b": torch.randn(3, 6),
        "c": torch.randn(2, 6),
        "d": torch.randn(5).to(torch.bfloat16),
        "e": torch.tensor(2.5),
    }
    layout: Layout = {
        "in order": (TensorSlice.whole("a", (4, 6)), TensorSlice.whole("b", (3, 6), 4)),
        "another order": (TensorSlice.whole("c", (2, 6)), TensorSlice.whole("b", (3, 6), 2)),
        "a gap": (TensorSlice.whole("a", (4, 6)), TensorSlice.whole("c", (2, 6), 4)),
        "some rows": (TensorSlice("a", (4, 6), (RowSpan(1, 0, 2),)),),
        "swapped": (TensorSlice("a", (4, 6), (RowSpan(2, 0, 2), RowSpan(0, 2, 2))),),
        "as it is": (TensorSlice.whole("d", (5,)),),
        "converted": (TensorSlice.whole("c", (2, 6)),),
        "scalar": (TensorSlice.whole("e", ()),),
    }
    shapes = [(7, 6), (5, 6), (6, 6), (2, 6), (4, 6), (5,), (2, 6), ()]
    parameters = {
        name: torch.empty(shape, device="meta") for name, shape in zip(layout, shapes, strict=True)
    }
    parameters["as it is"] = parameters["as it is"].bfloat16()
    parameters["converted"] = parameters["converted"].half()
    checkpoint = save(tmp_path, tensors)
    before = (tmp_path / "model.safetensors").read_bytes()
    mapped = map_parameters(parameters, layout, checkpoint)
    assert mapped.keys() == {"in order", "some rows", "as it is", "scalar"}
    assert torch.equal(mapped["in order"], torch.cat([tensors["a"], tensors["b"]]))
    assert torch.equal(mapped["some rows"], tensors["a"][1:3])
    assert torch.equal(mapped["as it is"], tensors["d"])
    assert mapped["scalar"].item() == 2.5

    mapped["in order"].zero_()
    assert not mapped["in order"].any()
    assert (tmp_path / "model.safetensors").read_bytes() == before


@pytest.mark.slow(first=6)
@pytest.mark.parametrize(("family", "case"), [*FIRST, ("llama", "tied")])
def test_a_mapped_model_is_the_same(tmp_path: Path, family: str, case: str) -> None:
    reference(family, CASES[family][case], tmp_path / "m", dtype=torch.bfloat16)
    files = {path: path.read_bytes() for path in (tmp_path / "m").iterdir()}
    read, mapped = (
        tigon.from_pretrained(tmp_path / "m"),
        tigon.from_pretrained(tmp_path / "m", mmap=True),
    )
    for (name, a), (other, b) in zip(
        read.named_parameters(), mapped.named_parameters(), strict=True
    ):
        assert name == other and a.dtype == b.dtype and a.requires_grad == b.requires_grad
        assert torch.equal(a, b)
    assert (read.lm_head.weight is read.model.embed_tokens.weight) == (
        mapped.lm_head.weight is mapped.model.embed_tokens.weight
    )
    ids = torch.arange(1, 9)[None]
    losses = []
    for model in (read, mapped):
        model.train()(ids, labels=ids).loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        losses.append(model(ids, labels=ids).loss)
    assert torch.equal(*losses)
    mapped.save_pretrained(tmp_path / "out")
    assert {path: path.read_bytes() for path in (tmp_path / "m").iterdir()} == files
    written, expected = (
        load_file(path / "model.safetensors") for path in (tmp_path / "out", tmp_path / "m")
    )
    assert written.keys() == expected.keys()


def test_only_the_converted_and_the_unordered_take_memory(tmp_path: Path) -> None:
    reference("llama", {}, tmp_path / "m", dtype=torch.bfloat16)
    model, checkpoint = build(Repository(tmp_path / "m"), MODELS)
    mapped = map_weights(model, checkpoint)
    apart = {n for n, _ in model.named_parameters() if n.endswith("qkv_proj.weight")}  # k o q v
    assert apart and mapped == {n for n, _ in model.named_parameters()} - apart
    model, checkpoint = build(Repository(tmp_path / "m"), MODELS, dtype=torch.float32)
    assert map_weights(model, checkpoint) == set()


def test_a_file_that_was_shortened_is_not_mapped(tmp_path: Path) -> None:
    reference("llama", {}, tmp_path / "m")
    model, checkpoint = build(Repository(tmp_path / "m"), MODELS)
    os.truncate(tmp_path / "m/model.safetensors", 20_000)
    with pytest.raises(
        ValueError, match=r"model.safetensors ended at byte 20000: it was shortened"
    ):
        map_weights(model, checkpoint)
    assert all(p.is_meta for p in model.parameters())
