"""A safetensors checkpoint, one file or shards with an index: what it holds and how to read it."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from tigon.hub import Repository
from tigon.utils.safetensors_header import find_tensors
from tigon.weights.decoded import Decoded
from tigon.weights.fp8 import BlockScales, decode_fp8
from tigon.weights.header import TensorInfo
from tigon.weights.reading import Reader

SAMPLED = 4096  # bytes of each tensor that tell checkpoints apart
DECODED = 8 << 20  # bytes of values that a thread decodes at a time


class Checkpoint:
    """The validated headers of all files of a checkpoint; no tensor is read yet."""

    def __init__(self, name: str, tensors: Mapping[str, TensorInfo | Decoded]) -> None:
        self.name = name
        self.tensors = tensors

    def sampled_digest(self) -> str:
        """Changes with the names, shapes and dtypes of tensors, and with a few values of each.

        Training changes values everywhere, so that these tell models of one shape apart, and little
        is read of the files. The same tensors in other files have the same digest.
        """
        values: dict[str, bytes] = {}
        of_files: dict[Path, list[str]] = {}
        for name, info in self.tensors.items():
            of_files.setdefault(info.path, []).append(name)
        for path, names in of_files.items():
            with path.open("rb") as file:
                values |= {name: _sample(self.tensors[name], file) for name in names}
        total = hashlib.sha256()
        for name, info in sorted(self.tensors.items()):
            total.update(repr((name, tuple(info.shape), str(info.dtype))).encode())
            total.update(values[name])
        return total.hexdigest()

    @classmethod
    def open(cls, repository: Repository, scales: BlockScales | None = None) -> "Checkpoint":
        """Finds (and fetches) the repository's model.safetensors, or its index and all shards.

        `scales` is what config.json says of fp8 tensors, which without it cannot be read.
        """
        tensors = {n: TensorInfo.of(stored) for n, stored in find_tensors(repository).items()}
        return cls(repository.name, decode_fp8(tensors, scales))

    def read_into(self, name: str, out: Tensor, *, row: int = 0) -> None:
        """Fills `out` with rows [row, row + len(out)) of the tensor, converted to its dtype."""
        info = self.tensors.get(name)
        if info is None:
            raise KeyError(f"{self.name} has no tensor {name!r}")
        rows = (row, row + len(out)) if out.dim() else (0, 0)
        if (
            out.dim() != len(info.shape)
            or out.shape[1:] != info.shape[1:]
            or not 0 <= row <= rows[1] <= (info.shape or (0,))[0]
        ):
            raise ValueError(
                f"{self.name}: tensor {name!r} has shape {list(info.shape)}; "
                f"its rows from {row} on do not fill {list(out.shape)}"
            )
        if out.is_meta:
            raise ValueError(f"tensor {name!r} cannot be read into a meta tensor: allocate it")
        with Reader() as reader:
            read_rows(reader, info, out.detach(), row)


def _sample(info: TensorInfo | Decoded, file: IO[bytes]) -> bytes:
    """A digest of the values in its middle; of encoded ones, of those that begin it."""
    plain = isinstance(info, TensorInfo)
    size = min(SAMPLED, info.nbytes) if plain else SAMPLED  # of others: those that follow
    file.seek(info.offset + ((info.nbytes - size) // 2 if plain else 0))
    return hashlib.sha256(file.read(size)).digest()


def read_rows(reader: Reader, info: TensorInfo | Decoded, out: Tensor, row: int) -> None:
    """Fills `out` with as many rows of the tensor from `row` on."""
    row_bytes = info.nbytes // max(1, info.shape[0]) if info.shape else info.nbytes
    with torch.no_grad():
        if isinstance(info, TensorInfo):
            reader.read(info.path, info.offset + row * row_bytes, info.dtype, out)
            return
        step = max(1, DECODED // max(1, row_bytes * info.unit)) * info.unit
        end = row + len(out)
        while row < end:
            stop = min(end, (row // step + 1) * step)  # all but the ends begin at whole units
            out[: stop - row].copy_(info.rows(reader, row, stop - row))
            out, row = out[stop - row :], stop
