import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.models.tiny import reference
from tests.weights.test_checkpoint import random_bits
from tigon.weights import TensorEntry, write_checkpoint
from tigon.weights.entries import RowBlock
from tigon.weights.header import DTYPES


def entries(tensors: dict[str, Tensor]) -> list[TensorEntry]:
    return [TensorEntry.of(name, tensor) for name, tensor in tensors.items()]


def test_file_is_byte_for_byte_the_librarys(tmp_path: Path) -> None:
    tensors = {f"{dtype}.{i}": random_bits(dtype, 3, 5) for dtype in DTYPES.values() for i in "ba"}
    tensors |= {"scalar": torch.tensor(1.5), "none": torch.empty(0, 3), 'é"\\': torch.ones(1)}
    tensors["strided"] = torch.randn(6, 4).t()
    tensors["parameter"] = torch.nn.Parameter(torch.randn(2, 2))
    write_checkpoint(tmp_path, entries(tensors))
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, tmp_path / "reference", metadata={"format": "pt"})
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "reference"]
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "reference").read_bytes()


@pytest.mark.parametrize("max_shard_size", ["15KB", "9kb", 4000, "4000", "1TB"])
def test_shards_and_index_are_those_of_transformers(
    tmp_path: Path, max_shard_size: int | str
) -> None:
    model = reference("llama", {}, tmp_path / "source", dtype=torch.bfloat16)
    # transformers takes no digits without a unit
    peer_size = int(max_shard_size) if max_shard_size == "4000" else max_shard_size
    model.save_pretrained(tmp_path / "hf", max_shard_size=peer_size)
    (tmp_path / "ours").mkdir()
    write_checkpoint(tmp_path / "ours", entries(model.state_dict()), max_shard_size=max_shard_size)
    names = sorted(path.name for path in (tmp_path / "ours").iterdir())
    ours_only = set(names) - {path.name for path in (tmp_path / "hf").iterdir()}
    assert not ours_only
    assert len(names) == 1 if max_shard_size == "1TB" else len(names) > 5
    for name in names:
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()


@pytest.mark.parametrize("max_shard_size", [16, "5GB"])
def test_nothing_is_left_of_a_failed_write(tmp_path: Path, max_shard_size: int | str) -> None:
    (tmp_path / "config.json").write_text("{}")

    def fail(first: int, count: int) -> Tensor:
        raise OSError("disk on fire")

    a = entries({"a": torch.ones(4)})
    tensors = [*a, TensorEntry("b", (4,), torch.float32, [RowBlock(0, 4, fail)])]
    with pytest.raises(OSError, match="disk on fire"):
        write_checkpoint(tmp_path, tensors, max_shard_size=max_shard_size)
    tensors[1] = TensorEntry(
        "b", (4,), torch.float32, [RowBlock(0, 4, lambda first, count: torch.ones(2))]
    )
    with pytest.raises(ValueError, match=r"'b' was announced as \[4\], and 4 rows .* as \[2\]"):
        write_checkpoint(tmp_path, tensors, max_shard_size=max_shard_size)
    for missing in ([RowBlock(0, 3, fail)], [RowBlock(1, 3, fail)], [RowBlock(0, 4, fail)] * 2, []):
        tensors[1] = TensorEntry("b", (4,), torch.float32, missing)
        with pytest.raises(ValueError, match=r"b \[4\] cannot be written: there are .* not each"):
            write_checkpoint(tmp_path, tensors, max_shard_size=max_shard_size)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_bad_requests(tmp_path: Path) -> None:
    a = entries({"a": torch.ones(4)})
    with pytest.raises(ValueError, match="tensor 'a' is given twice"):
        write_checkpoint(tmp_path, a + a)
    with pytest.raises(ValueError, match=r"tensor 'z' is torch.complex64"):
        write_checkpoint(tmp_path, entries({"z": torch.ones(1, dtype=torch.complex64)}))
    with pytest.raises(ValueError, match="5GiB"):
        write_checkpoint(tmp_path, a, max_shard_size="5GiB")
    assert list(tmp_path.iterdir()) == []
    write_checkpoint(tmp_path, a)
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(FileExistsError, match=r"model.safetensors"):
        write_checkpoint(tmp_path, entries({"a": torch.zeros(4)}))
    assert (tmp_path / "model.safetensors").read_bytes() == before
