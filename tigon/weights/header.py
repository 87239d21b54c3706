"""The headers of safetensors files, with torch's dtypes."""

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tigon.utils.safetensors_header import DTYPES as NAMES
from tigon.utils.safetensors_header import StoredTensor, read_tensors

DTYPES: dict[str, torch.dtype] = {tag: getattr(torch, name) for tag, (name, _) in NAMES.items()}
TAGS = {dtype: tag for tag, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor's bytes are: row-major, little-endian, from `offset` of the file on."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    path: Path
    offset: int

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def tensor_infos(tensors: Mapping[str, StoredTensor]) -> dict[str, TensorInfo]:
    """Converts the tensors of files to TensorInfos, with torch's dtypes."""
    return {n: TensorInfo(DTYPES[t.tag], t.shape, t.path, t.offset) for n, t in tensors.items()}


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Reads the tensors of a file by name; everything in its header is checked."""
    return tensor_infos(read_tensors(path))


def write_header(
    entries: Sequence[tuple[str, Sequence[int], torch.dtype]], metadata: Mapping[str, str]
) -> bytes:
    """Makes the header of a safetensors file with these tensors (name, shape, dtype)."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, shape, dtype in entries:
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": TAGS[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
