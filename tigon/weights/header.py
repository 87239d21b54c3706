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

from tigon.json_file import escaped, parse_object, shown

# The reference implementation stores the last of these first; equal ones follow by name.
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
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
MOST_DIMENSIONS = 64  # of a tensor, torch's limit
LARGEST = 2**63 - 1  # of a size or a product of sizes


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
                f"{escaped(path)} is no safetensors file: its first 8 bytes announce a header of "
                f"{length} bytes and the file has {size}; if a download was cut off, delete it "
                "and repeat"
            )
        text = file.read(length)
    header = parse_object(text, f"{path}: its header")
    _check_metadata(path, header.pop("__metadata__", {}))

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


def _check_metadata(path: Path, metadata: Any) -> None:
    if not isinstance(metadata, dict):
        raise ValueError(f"{escaped(path)}: __metadata__ is {shown(metadata)}, not an object")
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise ValueError(
                f"{escaped(path)}: __metadata__ has {shown(value)} as {shown(key)}, not a text"
            )


def _entry(path: Path, name: str, entry: Any) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    try:
        return _checked(entry)
    except ValueError as error:
        raise ValueError(f"{escaped(path)}: tensor {shown(name)} {error}") from None


def _checked(entry: Any) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    if not isinstance(entry, dict):
        raise ValueError(f"is described by {shown(entry)}, not by dtype, shape and data_offsets")
    tag, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not _counts(shape):
        raise ValueError(f"has shape {shown(shape)}, not a list of sizes")
    if not _counts(span) or len(span) != 2 or span[0] > span[1]:
        raise ValueError(f"has data_offsets {shown(span)}, not [begin, end]")
    dtype = DTYPES.get(tag) if isinstance(tag, str) else None
    if dtype is None:
        if isinstance(tag, str) and tag.startswith(("F4", "F6", "F8")):
            raise ValueError(
                f"is stored as {shown(tag)}: this is a quantised checkpoint, which is not "
                "supported; use the model's bf16, fp16 or fp32 checkpoint"
            )
        raise ValueError(f"has the unknown dtype {shown(tag)}; known: {', '.join(DTYPES)}")
    expected = _count(shape)
    if expected is None:
        raise ValueError(f"has shape {shown(shape)}: no tensor is so large")
    expected *= dtype.itemsize
    if span[1] - span[0] != expected:
        raise ValueError(
            f"is {tag} {shown(shape)}, {expected} bytes, but its data_offsets {span} "
            f"hold {span[1] - span[0]}"
        )
    return dtype, tuple(shape), span[0], span[1]


def _counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item <= LARGEST for item in value
    )


def _count(shape: Sequence[int]) -> int | None:
    """The values of a tensor; None if torch has no tensor of so many dimensions or values, sizes of
    zero aside. Stops at the limit: the product of a million sizes would take a minute."""
    if len(shape) > MOST_DIMENSIONS:
        return None
    product = 1
    for size in filter(None, shape):
        product *= size
        if product > LARGEST:
            return None
    return 0 if 0 in shape else product


def _check_spans(path: Path, spans: list[tuple[int, int, str]], data_bytes: int) -> None:
    """The format allows neither overlaps nor holes nor a tail."""
    end, last = 0, None
    for begin, next_end, name in spans:
        if begin != end:
            fault = "overlaps" if begin < end else f"leaves a hole of {begin - end} bytes after"
            before = "the header" if last is None else shown(last)
            raise ValueError(f"{escaped(path)}: tensor {shown(name)} {fault} {before}")
        end, last = next_end, name
    if end > data_bytes:
        raise ValueError(
            f"{escaped(path)} is truncated: its tensors take {end} bytes and {data_bytes} are "
            "there; delete it and download or copy it again"
        )
    if end < data_bytes:
        raise ValueError(f"{escaped(path)} has {data_bytes - end} bytes after its last tensor")
