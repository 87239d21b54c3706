"""The headers of safetensors files, with torch's dtypes."""

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

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

    @classmethod
    def of(cls, stored: StoredTensor) -> Self:
        return cls(DTYPES[stored.tag], stored.shape, stored.path, stored.offset)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a file, every length, dtype, shape and offset of its header checked."""
    return {name: TensorInfo.of(stored) for name, stored in read_tensors(path).items()}


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
