"""The safetensors format: the header's length in 8 bytes, a JSON header, the tensors' bytes."""

import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch

# The reference implementation stores the last of these first; equal ones follow by name.
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
TAGS = {dtype: tag for tag, dtype in DTYPES.items()}
MAX_HEADER = 100_000_000  # bytes, the reference implementation's limit


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor's bytes are: row-major, little-endian, from `offset` of the file on."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    path: Path
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a file, every length, dtype, shape and offset of its header checked."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER, size - 8):
            raise ValueError(
                f"{path} is no safetensors file: its first 8 bytes announce a header of {length} "
                f"bytes and the file has {size}; if a download was cut off, delete it and repeat"
            )
        text = file.read(length)
    try:
        header = json.loads(text.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: its header is no valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path}: its header is a JSON {type(header).__name__}, not an object")
    header.pop("__metadata__", None)

    tensors, spans = {}, []
    for name, entry in header.items():
        dtype, shape, begin, end = _entry(path, name, entry)
        tensors[name] = TensorInfo(dtype, shape, path, 8 + length + begin)
        spans.append((begin, end, name))
    _check_spans(path, sorted(spans), size - 8 - length)
    return tensors


def write_header(
    entries: Sequence[tuple[str, Sequence[int], torch.dtype]], metadata: Mapping[str, str]
) -> bytes:
    """The bytes before the data of tensors that follow in this order."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, shape, dtype in entries:
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": TAGS[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it names {max(names, key=names.count)!r} twice")
    return result


def _entry(path: Path, name: str, entry: Any) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict):
        raise ValueError(f"{where} is described by {entry!r}, not by dtype, shape and data_offsets")
    tag, shape, span = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not _counts(shape):
        raise ValueError(f"{where} has shape {shape!r}, not a list of sizes")
    if not _counts(span) or len(span) != 2 or span[0] > span[1]:
        raise ValueError(f"{where} has data_offsets {span!r}, not [begin, end]")
    dtype = DTYPES.get(tag) if isinstance(tag, str) else None
    if dtype is None:
        if isinstance(tag, str) and tag.startswith(("F4", "F6", "F8")):
            raise ValueError(
                f"{where} is stored as {tag}: this is a quantised checkpoint, which is not "
                "supported; use the model's bf16, fp16 or fp32 checkpoint"
            )
        raise ValueError(f"{where} has the unknown dtype {tag!r}; known: {', '.join(DTYPES)}")
    expected = math.prod(shape) * dtype.itemsize
    if span[1] - span[0] != expected:
        raise ValueError(
            f"{where} is {tag} {shape}, {expected} bytes, but its data_offsets {span} "
            f"hold {span[1] - span[0]}"
        )
    return dtype, tuple(shape), span[0], span[1]


def _counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_spans(path: Path, spans: list[tuple[int, int, str]], data_bytes: int) -> None:
    """The format allows neither overlaps nor holes nor a tail."""
    end, last = 0, "the header"
    for begin, next_end, name in spans:
        if begin != end:
            fault = "overlaps" if begin < end else f"leaves a hole of {begin - end} bytes after"
            raise ValueError(f"{path}: tensor {name!r} {fault} {last}")
        end, last = next_end, repr(name)
    if end > data_bytes:
        raise ValueError(
            f"{path} is truncated: its tensors take {end} bytes and {data_bytes} are there; "
            "delete it and download or copy it again"
        )
    if end < data_bytes:
        raise ValueError(f"{path} has {data_bytes - end} bytes after its last tensor")
