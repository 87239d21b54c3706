"""Reads the headers of a safetensors checkpoint, and no tensor.

A file is the header's length in 8 bytes, a JSON header, and the tensors' bytes. This imports no
torch, which takes seconds.
"""

import math
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, TypeGuard

from tigon.utils.json import escape, parse_object, quote, read_json

# Tag of the format -> torch's name and the bytes of a value. The reference implementation stores
# tensors in the reverse of this order, and those of one dtype by name.
DTYPES = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "I16": ("int16", 2),
    "U16": ("uint16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I32": ("int32", 4),
    "U32": ("uint32", 4),
    "F32": ("float32", 4),
    "F64": ("float64", 8),
    "I64": ("int64", 8),
    "U64": ("uint64", 8),
}
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
UNSUPPORTED_WEIGHTS = (".safetensors", ".gguf", ".h5", ".msgpack", ".onnx", ".npz")
MAX_HEADER = 100_000_000  # bytes, the reference implementation's limit
MAX_DIMENSIONS = 64  # of a tensor, torch's limit
LARGEST = 2**63 - 1  # of a size or a product of sizes


@dataclass(frozen=True)
class StoredTensor:
    """Says where a tensor's bytes are: row-major, little-endian, from `offset` of the file on."""

    tag: str  # one of DTYPES
    shape: tuple[int, ...]
    path: Path
    offset: int

    @property
    def dtype(self) -> str:
        """Returns torch's name of the dtype, such as bfloat16."""
        return DTYPES[self.tag][0]

    @property
    def count(self) -> int:
        """Returns the number of values."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all values."""
        return self.count * DTYPES[self.tag][1]


class Files(Protocol):
    """A folder or repository with files, such as `tigon.hub.Repository`."""

    name: str

    def file(self, name: str) -> Path: ...

    def optional_file(self, name: str) -> Path | None: ...

    def listing(self) -> list[str]: ...


def find_tensors(repository: Files) -> dict[str, StoredTensor]:
    """Fetches model.safetensors, or all shards of its index, and returns their tensors."""
    single = repository.optional_file(SINGLE)
    if single is not None:
        return read_tensors(single)
    index = repository.optional_file(INDEX)
    if index is None:
        raise FileNotFoundError(_no_weights_message(repository))
    weight_map = _read_index(index)
    shards = sorted(set(weight_map.values()))
    with ThreadPoolExecutor(8) as pool:
        try:
            paths = dict(zip(shards, pool.map(repository.file, shards), strict=True))
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{error}, but {INDEX} names it") from error
    return _merge_shards(index, weight_map, paths)


def read_tensors(path: Path) -> dict[str, StoredTensor]:
    """Returns a file's tensors. Raises ValueError unless its header describes all of its bytes."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER, size - 8):
            raise ValueError(
                f"{escape(path)} is no safetensors file: its first 8 bytes announce a header of "
                f"{length} bytes and the file has {size}; if a download was cut off, delete it "
                "and repeat"
            )
        text = file.read(length)
    header = parse_object(text, f"{path}: its header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError(f"{escape(path)}: __metadata__ is {quote(metadata)}, no object of texts")
    tensors, spans = {}, []
    for name, entry in header.items():
        tag, shape, begin, end = _parse_entry(f"{escape(path)}: tensor {quote(name)}", entry)
        tensors[name] = StoredTensor(tag, shape, path, 8 + length + begin)
        spans.append((begin, end, name))
    _check_spans(path, sorted(spans), size - 8 - length)
    return tensors


def _parse_entry(tensor: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Returns a tensor's tag and shape, and where its bytes begin and end in the data; raises
    ValueError, which begins with `tensor`, unless these fit each other."""
    fields = entry if isinstance(entry, dict) else {}
    tag, shape, span = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not (_are_sizes(shape) and _are_sizes(span) and len(span) == 2 and isinstance(tag, str)):
        raise ValueError(
            f"{tensor} is described by {quote(entry)}, not by a dtype, a shape of sizes and "
            "data_offsets [begin, end]"
        )
    if tag not in DTYPES:
        raise ValueError(
            f"{tensor} has the unsupported dtype {quote(tag)}: of a quantized checkpoint, use the "
            f"model's bf16, fp16 or fp32 one; known: {', '.join(DTYPES)}"
        )
    if len(shape) > MAX_DIMENSIONS or math.prod(filter(None, shape)) > LARGEST:
        raise ValueError(f"{tensor} has shape {quote(shape)}: no tensor is so large")
    expected = math.prod(shape) * DTYPES[tag][1]
    if span[1] - span[0] != expected:
        raise ValueError(
            f"{tensor} is {tag} {quote(shape)}, {expected} bytes, but its data_offsets {span} "
            f"hold {span[1] - span[0]}"
        )
    return tag, tuple(shape), span[0], span[1]


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    """Whether a JSON value is a list of whole numbers from 0 to LARGEST."""
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item <= LARGEST for item in value
    )


def _check_spans(path: Path, spans: list[tuple[int, int, str]], data_bytes: int) -> None:
    """Raises ValueError for overlaps, holes and a tail, which the format does not allow."""
    end, last = 0, "the header"
    for begin, next_end, name in spans:
        if begin != end:
            fault = "overlaps" if begin < end else f"leaves a hole of {begin - end} bytes after"
            raise ValueError(f"{escape(path)}: tensor {quote(name)} {fault} {last}")
        end, last = next_end, quote(name)
    if end > data_bytes:
        raise ValueError(
            f"{escape(path)} is truncated: its tensors take {end} bytes and {data_bytes} are "
            "there; delete it and download or copy it again"
        )
    if end < data_bytes:
        raise ValueError(f"{escape(path)} has {data_bytes - end} bytes after its last tensor")


def _no_weights_message(repository: Files) -> str:
    """Says that a repository has no safetensors weights, and what it has instead."""
    names = repository.listing()
    message = f"{repository.name} has neither {SINGLE} nor {INDEX}"
    if pickles := ", ".join([name for name in names if name.endswith(PICKLES)][:3]):
        return (
            f"{message}; its pickled weights ({pickles}) are not read, as they can run code: "
            "convert them once with transformers' from_pretrained and save_pretrained"
        )
    others = ", ".join([name for name in names if name.endswith(UNSUPPORTED_WEIGHTS)][:3])
    return f"{message}; other weights there: {others or 'none'}"


def _read_index(path: Path) -> dict[str, str]:
    """Maps tensor names to shards. Raises ValueError for one outside the index's directory."""
    weight_map = read_json(path, max_bytes=MAX_HEADER).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{escape(path)} has no weight_map from tensor names to shard files")
    for name, shard in weight_map.items():
        parts = PurePosixPath(str(shard))
        is_inside = not parts.is_absolute() and ".." not in parts.parts and "\\" not in str(shard)
        is_plain = str(parts) == shard and shard.isprintable()  # one file, one name
        if not (is_inside and is_plain and parts.suffix == ".safetensors"):
            raise ValueError(
                f"{escape(path)}: tensor {quote(name)} is in {quote(shard)}, which is not the "
                "plain name of a .safetensors file in the checkpoint's directory"
            )
    return weight_map


def _merge_shards(
    index: Path, weight_map: dict[str, str], paths: dict[str, Path]
) -> dict[str, StoredTensor]:
    """Returns the tensors of all shards; of two with one name, the one that the index names."""
    tensors: dict[str, StoredTensor] = {}
    for shard, path in paths.items():
        for name, info in read_tensors(path).items():
            if weight_map.get(name, shard) != shard:
                continue
            if name in tensors:
                raise ValueError(
                    f"{escape(index)} does not list tensor {quote(name)}, which is in two "
                    f"shards: {tensors[name].path.name} and {shard}"
                )
            tensors[name] = info
    if absent := sorted(weight_map.keys() - tensors.keys()):
        raise ValueError(
            f"{escape(index)} names {len(absent)} tensors that their shards do not hold, the "
            f"first {quote(absent[0])} in {weight_map[absent[0]]}: the files are not of one "
            "checkpoint"
        )
    return tensors
