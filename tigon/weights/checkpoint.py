"""A safetensors checkpoint, one file or shards with an index: what it holds and how to read it."""

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import IO

import torch
from torch import Tensor

from tigon.hub import Repository
from tigon.json_file import escaped, read_json, shown
from tigon.weights.decoded import Decoded
from tigon.weights.fp8 import BlockScales, decode_fp8
from tigon.weights.header import MAX_HEADER, TensorInfo, read_header
from tigon.weights.reading import Reader

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
SAMPLED = 4096  # bytes of each tensor that tell checkpoints apart
DECODED = 8 << 20  # bytes of values that a thread decodes at a time
OTHER_WEIGHTS = (".safetensors", ".gguf", ".h5", ".msgpack", ".onnx", ".npz")


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
        single = repository.optional_file(SINGLE)
        if single is not None:
            return cls(repository.name, decode_fp8(read_header(single), scales))
        index = repository.optional_file(INDEX)
        if index is None:
            raise FileNotFoundError(_no_weights(repository))
        weight_map = _read_index(index)
        shards = sorted(set(weight_map.values()))

        def fetch(shard: str) -> Path:
            try:
                return repository.file(shard)
            except FileNotFoundError as error:
                raise FileNotFoundError(f"{error}, but {INDEX} names it") from error

        with ThreadPoolExecutor(8) as pool:
            paths = dict(zip(shards, pool.map(fetch, shards), strict=True))
        return cls(repository.name, decode_fp8(_merge(index, weight_map, paths), scales))

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


def _no_weights(repository: Repository) -> str:
    names = repository.listing()
    message = f"{repository.name} has neither {SINGLE} nor {INDEX}"
    if pickles := [name for name in names if name.endswith(PICKLES)]:
        return (
            f"{message}; its pickled weights ({', '.join(pickles[:3])}) are not read, as they can "
            "run code: convert them once with transformers, "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(directory)"
        )
    others = [name for name in names if name.endswith(OTHER_WEIGHTS)]
    return f"{message}; other weights there: {', '.join(others[:3]) or 'none'}"


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name -> shard file, checked to stay in the index's directory."""
    weight_map = read_json(path, most_bytes=MAX_HEADER).get("weight_map")
    where = escaped(path)
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{where} has no weight_map from tensor names to shard files")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard.endswith(".safetensors"):
            raise ValueError(
                f"{where}: tensor {shown(name)} is in {shown(shard)}, no .safetensors file"
            )
        parts = PurePosixPath(shard)
        if parts.is_absolute() or ".." in parts.parts or "\\" in shard:
            raise ValueError(
                f"{where}: the shard {shown(shard)} is outside the checkpoint's directory"
            )
        if str(parts) != shard or not shard.isprintable():  # one file, one name
            raise ValueError(f"{where}: the shard {shown(shard)} is no plain file name")
    return weight_map


def _merge(
    index: Path, weight_map: dict[str, str], paths: dict[str, Path]
) -> dict[str, TensorInfo]:
    """All tensors of all shards; where two hold one of the same name, the one the index means."""
    tensors: dict[str, TensorInfo] = {}
    for shard, path in paths.items():
        for name, info in read_header(path).items():
            if weight_map.get(name, shard) != shard:
                continue
            if name in tensors:
                raise ValueError(
                    f"{escaped(index)} does not list tensor {shown(name)}, which is in two "
                    f"shards: {tensors[name].path.name} and {shard}"
                )
            tensors[name] = info
    if absent := sorted(weight_map.keys() - tensors.keys()):
        raise ValueError(
            f"{escaped(index)} names {len(absent)} tensors that their shards do not hold, the "
            f"first {shown(absent[0])} in {weight_map[absent[0]]}: the files are not of one "
            "checkpoint"
        )
    return tensors
