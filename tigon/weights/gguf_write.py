"""Writes GGUF files: the header by the `gguf` package, tensors in pieces of rows."""

import math
from collections.abc import Callable, Sequence
from io import BufferedRandom
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tigon.utils.paths import new_file
from tigon.weights.entries import row_chunks, row_count
from tigon.weights.files import explain_full_disk, require_space
from tigon.weights.gguf import import_gguf
from tigon.weights.read import parallel_for
from tigon.weights.write import WORKERS

F32, F16, Q8_0, BF16 = 0, 1, 8, 30  # ggml's numbers of the types that are written
TORCH_TYPES = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}
BLOCK, BLOCK_BYTES = 32, 34  # of Q8_0: values, and bytes with their scale
LARGEST_Q8_0 = 127 * torch.finfo(torch.float16).max  # 127 of the largest scale


class GGUFEntry(NamedTuple):
    """A tensor of a GGUF file. A row spans the last dimension; in a vector it is an element."""

    name: str
    shape: tuple[int, ...]  # in torch's order
    kind: int  # F32, F16, BF16 or Q8_0
    read: Callable[[int, int], Tensor]  # (first, count) -> these rows, fp32 on the CPU
    unit: int = 1  # rows are read in whole units of so many, which divide the tensor

    @property
    def units(self) -> int:
        """The number of units of rows."""
        return row_count(self.shape) // self.unit

    @property
    def unit_bytes(self) -> int:
        """The bytes of a unit as it is read."""
        return self.unit * math.prod(self.shape[1:][-1:]) * torch.float32.itemsize

    @property
    def row_bytes(self) -> int:
        """The bytes of a row in the file."""
        width = math.prod(self.shape[1:][-1:])
        if self.kind == Q8_0:
            return width // BLOCK * BLOCK_BYTES
        return width * TORCH_TYPES[self.kind].itemsize

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor in the file."""
        return row_count(self.shape) * self.row_bytes


def write_gguf(
    writer: Any, path: Path, entries: Sequence[GGUFEntry], check: Callable[[Path], None]
) -> None:
    """Writes a GGUF file, which appears complete or not at all.

    Args:
        writer: the package's GGUFWriter, which has the metadata and no tensors.
        entries: the tensors; vectors are written first.
        check: called with the path of the unfinished file, which has its header, its vectors and
            its size; an error that it raises stops before matrices are written.

    Raises ValueError, naming the tensor, for values that are NaN, or infinite in its type, and
    DiskFullError.
    """
    entries = sorted(entries, key=lambda entry: len(entry.shape) > 1)
    needed = sum(entry.nbytes for entry in entries)
    path.parent.mkdir(parents=True, exist_ok=True)
    require_space(path.parent, needed)
    with explain_full_disk(path, needed), new_file(path) as temporary:
        offsets = _write_header(writer, temporary, entries)
        jobs = [
            _Piece(entry, offset, first * entry.unit, units * entry.unit)
            for entry, offset in zip(entries, offsets, strict=True)
            for first, units in row_chunks(entry.units, entry.unit_bytes)
        ]
        vectors = [job for job in jobs if len(job.entry.shape) < 2]
        parallel_for(vectors, _write_piece, lambda: temporary.open("r+b"), 1)
        check(temporary)
        parallel_for(jobs[len(vectors) :], _write_piece, lambda: temporary.open("r+b"), WORKERS)


class _Piece(NamedTuple):
    """Consecutive rows of a tensor, and where the tensor begins in the file."""

    entry: GGUFEntry
    offset: int
    first: int
    rows: int


def _write_header(writer: Any, path: Path, entries: Sequence[GGUFEntry]) -> list[int]:
    """Writes header, metadata and tensor list, sets the size; returns tensors' offsets."""
    types = import_gguf().GGMLQuantizationType
    for entry in entries:
        writer.add_tensor_info(
            entry.name, entry.shape, np.dtype("float32"), entry.nbytes, types(entry.kind)
        )
    path.open("xb").close()  # follows no link
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    end, offsets = path.stat().st_size, []
    for entry in entries:
        offsets.append(writer.ggml_pad(end, writer.data_alignment))
        end = offsets[-1] + entry.nbytes
    with path.open("r+b") as file:
        file.truncate(writer.ggml_pad(end, writer.data_alignment))
    return offsets


def _write_piece(piece: _Piece, file: BufferedRandom) -> None:
    """Reads a piece, encodes it and writes it at its place."""
    entry = piece.entry
    content = _encode(entry, entry.read(piece.first, piece.rows)).tobytes()
    if len(content) != piece.rows * entry.row_bytes:
        raise ValueError(
            f"tensor {entry.name} was announced as {list(entry.shape)}, and {piece.rows} rows of "
            f"it came as {len(content)} bytes"
        )
    file.seek(piece.offset + piece.first * entry.row_bytes)
    file.write(content)


def _encode(entry: GGUFEntry, values: Tensor) -> np.ndarray:
    """Returns fp32 rows in the entry's type; raises ValueError if one is not finite in it."""
    if entry.kind != Q8_0:
        values = values.to(TORCH_TYPES[entry.kind])
    gguf = import_gguf()
    types = gguf.GGMLQuantizationType
    most = LARGEST_Q8_0 if entry.kind == Q8_0 else torch.finfo(values.dtype).max
    if not (values.abs() <= most).all():  # nor is NaN
        raise ValueError(
            f"tensor {entry.name} has values that are NaN, or infinite in {types(entry.kind).name}:"
            " if the model's are finite, choose another type, such as bfloat16"
        )
    if entry.kind == Q8_0:
        return gguf.quants.quantize(values.numpy(), types.Q8_0)
    return values.contiguous().view(-1).view(torch.uint8).numpy()
