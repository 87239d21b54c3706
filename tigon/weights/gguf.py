"""GGUF files by the `gguf` package: their metadata, and their tensors in plain and quantized types.

# D a head's size
"""

import os
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tigon.utils.json import escape, quote
from tigon.weights.decoded import DecodedTensor
from tigon.weights.read import Reader

TORCH_DTYPES = {0: torch.float32, 1: torch.float16, 28: torch.float64, 30: torch.bfloat16}
MAX_ARRAY = 1 << 14  # numbers of a metadata array; longer ones belong to the tokenizer


class GGUFTensorInfo(NamedTuple):
    """Where a tensor's bytes are in the file, and its shape in torch's order."""

    kind: int  # a GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GGUF:
    """The header of a GGUF file: metadata and tensors."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensorInfo]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "GGUF":
        """Reads the header. Raises ValueError, naming the file, if it cannot be read."""
        path, reader_class = Path(path), import_reader()
        try:
            reader = reader_class(path)
            if reader.byte_order == "S":
                raise ValueError("it is written for another byte order")
            fields = {k: f for k, f in reader.fields.items() if not k.startswith("GGUF.")}
            metadata = {key: _metadata_value(field) for key, field in fields.items()}
            tensors = {}
            for tensor in reader.tensors:
                kind = int(tensor.tensor_type)
                if kind not in TORCH_DTYPES and not _is_dequantized(kind):
                    name = quote(tensor.name)
                    raise ValueError(f"tensor {name}: ggml's type {kind} is not read")
                tensors[tensor.name] = GGUFTensorInfo(
                    kind,
                    tuple(tensor.shape.tolist()[::-1]),
                    int(tensor.data_offset),
                    int(tensor.n_bytes),
                )
        except OSError:
            raise
        except Exception as error:  # a damaged header is any error of numpy or the package
            raise ValueError(
                f"{escape(path)} cannot be read as GGUF: {escape(error)}; if a download was cut "
                "off, delete it and repeat"
            ) from error
        return cls(path, metadata, tensors)


@cache
def import_reader() -> Any:
    """Makes a subclass of GGUFReader that reads an array of numbers at once and skips arrays of
    strings: the package's own takes half a minute for a vocabulary."""
    gguf = import_gguf()
    length_at = struct.Struct("<Q").unpack_from

    class Reader(gguf.GGUFReader):  # type: ignore[name-defined]
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != gguf.GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            item_type = gguf.GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
            count, end = int(self._get(orig_offs + 4, np.uint64)[0]), orig_offs + 12
            types = [gguf.GGUFValueType.ARRAY, item_type]
            if item_type == gguf.GGUFValueType.STRING:  # a vocabulary, which no model needs
                for _ in range(count):
                    end += 8 + length_at(self.data, end)[0]
                return end - orig_offs, [], [], types
            values = self._get(end, self.gguf_scalar_to_np[item_type], count)
            if len(values) < count:
                raise ValueError("it is truncated")
            return 12 + values.nbytes, [values], [0], types

    return Reader


def _metadata_value(field: Any) -> Any:
    """A metadata value; None for an array of strings or of more than MAX_ARRAY numbers.

    1e-6 was rounded to fp32 when it was written: the shortest decimal of that fp32 number is 1e-6
    again.
    """
    is_array = field.types[0].name == "ARRAY"
    if is_array and (not field.data or field.parts[field.data[0]].size > MAX_ARRAY):
        return None
    value = field.contents()
    if field.types[-1].name != "FLOAT32":
        return value
    shortest = [float(str(np.float32(item))) for item in (value if is_array else [value])]
    return shortest if is_array else shortest[0]


@dataclass(frozen=True)
class GGMLTensor(DecodedTensor):
    """A tensor that is dequantized on reading, in Hugging Face's order of rows."""

    kind: int
    row_bytes: int
    # llama.cpp rotates neighbors, (0, 1), (2, 3) ..., where transformers rotates halves,
    # (0, D / 2), (1, D / 2 + 1) ...: rows of queries and keys are in that order, in heads of this
    # many. 0: they are as in transformers.
    head: int = 0
    plus: float = 0.0  # was added when the file was written

    @property
    def unit(self) -> int:
        """The rows of a head where these are permuted, else 1."""
        return self.head or 1

    def rows(self, reader: Reader, first: int, count: int) -> Tensor:
        """Reads rows [first, first + count), in Hugging Face's order, and dequantizes them."""
        if not self.head:
            return self._read_rows(reader, first, count)
        begin = first // self.head * self.head
        end = -(-(first + count) // self.head) * self.head
        neighbors = self._read_rows(reader, begin, end - begin)
        heads = neighbors.view(-1, self.head // 2, 2, *self.shape[1:]).transpose(1, 2)
        return heads.reshape(neighbors.shape)[first - begin : first - begin + count]

    def _read_rows(self, reader: Reader, first: int, count: int) -> Tensor:
        """Read and dequantize rows in the file's order, and subtract `plus`."""
        stored = torch.empty(count * self.row_bytes, dtype=torch.uint8, device="cpu")
        reader.read(self.path, self.offset + first * self.row_bytes, stored.dtype, stored)
        if self.kind in TORCH_DTYPES:
            values = stored.view(TORCH_DTYPES[self.kind]).float()
        else:
            blocks = stored.numpy().reshape(count, self.row_bytes)
            values = torch.from_numpy(_dequantize(blocks, self.kind))
        if self.plus:
            values -= self.plus
        return values.view(count, *self.shape[1:])


def import_gguf() -> Any:
    """Imports the `gguf` package; an ImportError says how to install it."""
    try:
        import gguf
        import gguf.quants
    except ImportError as error:
        raise ImportError(f"GGUF files need pip install 'tigon[gguf]': {error}") from error
    return gguf


def _dequantize(blocks: np.ndarray, kind: int) -> np.ndarray:
    """Returns float32 from blocks of a quantization type."""
    gguf = import_gguf()
    with np.errstate(all="ignore"):  # a block may hold any number
        return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(kind))


@cache
def _is_dequantized(kind: int) -> bool:
    """Whether the gguf package can dequantize a type."""
    gguf = import_gguf()
    try:
        _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        _dequantize(np.zeros((1, size), dtype=np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError):
        return False
    return True
