import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.weights.saved import save
from tigon.weights import Checkpoint, Repository, read
from tigon.weights.checkpoint import FP8
from tigon.weights.header import DTYPES

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


PLAIN = [dtype for dtype in DTYPES.values() if dtype not in FP8]


def open_checkpoint(directory: Path) -> Checkpoint:
    return Checkpoint.open(Repository(directory))


def random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Every bit pattern may come up, NaNs and subnormals too."""
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8)
    return (raw % 2).bool().view(shape) if dtype == torch.bool else raw.view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", PLAIN, ids=str)
def test_reads_what_the_library_reads(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "matrix": random_bits(dtype, 37, 19),
        "cube": random_bits(dtype, 3, 5, 7),
        "vector": random_bits(dtype, 11),
        "scalar": random_bits(dtype, 1).view(()),
        "empty": torch.empty(0, 4, dtype=dtype),
    }
    checkpoint = save(tmp_path, tensors)
    for name, expected in load_file(tmp_path / "model.safetensors").items():
        out = torch.empty_like(expected)
        checkpoint.read_into(name, out)
        assert bits(out) == bits(expected)
    rows = torch.empty(8, 19, dtype=dtype)
    checkpoint.read_into("matrix", rows, row=20)
    assert bits(rows) == bits(tensors["matrix"][20:28])


@pytest.mark.parametrize("target", FLOATS, ids=str)
@pytest.mark.parametrize("source", [*FLOATS, torch.int8, torch.int64], ids=str)
def test_conversion_is_that_of_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: torch.dtype, target: torch.dtype
) -> None:
    monkeypatch.setattr(read, "STAGING", 1000)  # many pieces, the last one short
    tensor = random_bits(source, 61, 33)
    out = torch.empty(40, 33, dtype=target)
    save(tmp_path, {"w": tensor}).read_into("w", out, row=21)
    expected = tensor[21:].to(target)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16], ids=str)
def test_strided_destinations(tmp_path: Path, target: torch.dtype) -> None:
    tensor = torch.randn(6, 5, 4)
    checkpoint = save(tmp_path, {"w": tensor})
    columns = torch.zeros(6, 5, 9, dtype=target)
    checkpoint.read_into("w", columns[:, :, 3:7])
    assert torch.equal(columns[:, :, 3:7], tensor.to(target))
    assert not columns[:, :, :3].any() and not columns[:, :, 7:].any()
    transposed = torch.zeros(4, 5, 6, dtype=target)
    checkpoint.read_into("w", transposed.transpose(0, 2))
    assert torch.equal(transposed, tensor.to(target).transpose(0, 2))
    parameter = torch.nn.Parameter(torch.zeros(2, 5, 4, dtype=target))
    checkpoint.read_into("w", parameter, row=4)
    assert torch.equal(parameter, tensor[4:].to(target))


def save_shards(directory: Path, **changes: Any) -> dict[str, torch.Tensor]:
    tensors = {"a": torch.randn(3, 2), "b": torch.randn(4)}
    save_file({"a": tensors["a"]}, directory / "one.safetensors")
    save_file({"b": tensors["b"]}, directory / "two.safetensors")
    weight_map = {"a": "one.safetensors", "b": "two.safetensors"} | changes
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tensors


def test_single_file_wins_over_an_index(tmp_path: Path) -> None:
    tensors = save_shards(tmp_path)
    assert open_checkpoint(tmp_path).tensors.keys() == tensors.keys()
    assert save(tmp_path, {"c": torch.ones(1)}).tensors.keys() == {"c"}


def test_the_index_says_which_of_two_copies_counts(tmp_path: Path) -> None:
    tensors = save_shards(tmp_path)
    save_file({"a": torch.zeros(3, 2), "b": tensors["b"]}, tmp_path / "two.safetensors")
    out = torch.empty(3, 2)
    open_checkpoint(tmp_path).read_into("a", out)
    assert torch.equal(out, tensors["a"])
    for shard in ("one", "two"):
        extra = {"unlisted": torch.ones(1)}
        path = tmp_path / f"{shard}.safetensors"
        save_file(load_file(path) | extra, path)
    with pytest.raises(ValueError, match="does not list tensor 'unlisted', which is in two shards"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        ("three.safetensors", r"has no file three.safetensors, but model.*index.json names it"),
        ("../one.safetensors", "is in '../one.safetensors', which is not the plain name"),
        ("x/../../one.safetensors", "which is not the plain name of a .safetensors file"),
        ("/one.safetensors", "which is not the plain name of a .safetensors file"),
        ("one.bin", r"tensor 'c' is in 'one.bin', which is not the plain"),
        (7, r"tensor 'c' is in 7, which is not the plain"),
        ("two.safetensors", "names 1 tensors that their shards do not hold, the first 'c' in two"),
    ],
)
def test_bad_index(tmp_path: Path, shard: Any, message: str) -> None:
    (tmp_path / "model").mkdir()
    save_shards(tmp_path / "model", c=shard)
    save_file({"c": torch.ones(1)}, tmp_path / "one.safetensors")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        open_checkpoint(tmp_path / "model")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 1}'])
def test_index_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(
        ValueError, match=r"index.json (is not valid JSON|is not a JSON object|has no weight_map)"
    ):
        open_checkpoint(tmp_path)


def test_no_safetensors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="other weights there: none"):
        open_checkpoint(tmp_path)
    (tmp_path / "tiny.gguf").touch()
    with pytest.raises(FileNotFoundError, match=r"other weights there: tiny.gguf"):
        open_checkpoint(tmp_path)
