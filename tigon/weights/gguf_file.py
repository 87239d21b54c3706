"""The header of a GGUF file: metadata and tensors, every count, size and offset checked.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3. The `gguf`
package's reader allocates what a file asks for and reads a vocabulary string by string; from the
package come the block sizes and the dequantisation, see `ggml`.
"""

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from tigon.utils.json import escape, quote
from tigon.weights.ggml import block_of

MAGIC, VERSIONS = b"GGUF", (2, 3)
# Value types with a fixed size, as struct has them; 8 is a string, 9 an array
SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
FLOAT, STRING, ARRAY = 6, 8, 9
ALIGNMENT = 32
PIECE = 1 << 20  # bytes that are read at a time
# Far more than a file needs: bytes of its header, values, tensors, dimensions, bytes of a name and
# of a text, items of all arrays, and items of an array that is kept
MOST_HEADER, MOST_VALUES, MOST_TENSORS, MOST_DIMENSIONS = 256 << 20, 1 << 12, 1 << 14, 4
MOST_NAME, MOST_TEXT, MOST_ITEMS, MOST_KEPT = 1 << 10, 1 << 24, 1 << 22, 1 << 14


@dataclass(frozen=True)
class Items:
    """An array that is too long to keep, such as a vocabulary."""

    number: int


class Stored(NamedTuple):
    """A tensor of the file: its shape outermost first, as torch has it, and where its bytes are."""

    kind: int  # ggml's number of its type
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GGUF:
    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Stored]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "GGUF":
        """Reads the header alone; ValueError, which names the file, for anything wrong in it."""
        path = Path(path)
        with open(path, "rb", buffering=PIECE) as file:
            try:
                return _read(path, _Cursor(file, os.path.getsize(path)))
            except ValueError as error:
                raise ValueError(f"{escape(path)}: {error}") from error


def _read(path: Path, at: "_Cursor") -> GGUF:
    if at.take(4) != MAGIC:
        raise ValueError("this is no GGUF file; if a download was cut off, delete it and repeat")
    version = at.number("I")
    if version not in VERSIONS:
        hint = " (written for another byte order)" if version & 0xFFFF == 0 else ""
        raise ValueError(f"GGUF version {version}{hint} is not read; what is: 2 and 3")
    tensors = at.count("tensors", MOST_TENSORS)
    values = at.count("metadata values", MOST_VALUES)
    metadata: dict[str, Any] = {}
    for _ in range(values):
        key = at.string("the name of a metadata value", MOST_NAME)
        if key in metadata:
            raise ValueError(f"its metadata has {quote(key)} twice")
        metadata[key] = at.value(key)
    described = {}
    for _ in range(tensors):
        name = at.string("the name of a tensor", MOST_NAME)
        if name in described:
            raise ValueError(f"it has tensor {quote(name)} twice")
        dimensions = at.number("I")
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            raise ValueError(f"tensor {quote(name)} has {dimensions} dimensions")
        *sizes, kind, offset = at.numbers(f"{dimensions}QIQ")
        described[name] = tuple(sizes[::-1]), kind, offset
    return GGUF(path, metadata, _place(described, metadata, at))


def _place(
    described: dict[str, tuple[tuple[int, ...], int, int]], metadata: dict[str, Any], at: "_Cursor"
) -> dict[str, Stored]:
    """Where every tensor is in the file, which holds them all, and none in another's place."""
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & alignment - 1:
        raise ValueError(f"general.alignment={quote(alignment)} is not a power of two, 1 to 2^20")
    start = -(-at.position // alignment) * alignment
    found = {}
    for name, (shape, kind, offset) in described.items():
        try:
            length, size, what = block_of(kind)
        except ValueError as error:
            raise ValueError(f"tensor {quote(name)}: {error}") from None
        if shape[-1] % length:
            raise ValueError(
                f"tensor {quote(name)} is {what} {list(shape)}, whose rows are no blocks of "
                f"{length} values"
            )
        if offset % alignment:
            raise ValueError(f"tensor {quote(name)} begins at {offset}, no multiple of {alignment}")
        nbytes = math.prod(shape) // length * size
        if start + offset + nbytes > at.size:
            raise ValueError(
                f"it is truncated: tensor {quote(name)}, {what} {list(shape)}, ends at byte "
                f"{start + offset + nbytes} and the file has {at.size}; download it again"
            )
        found[name] = Stored(kind, shape, start + offset, nbytes)
    end, last = 0, ""
    for name, tensor in sorted(found.items(), key=lambda item: item[1].offset):
        if tensor.nbytes and tensor.offset < end:
            raise ValueError(f"tensor {quote(name)} overlaps {quote(last)}")
        end, last = max(end, tensor.offset + tensor.nbytes), name
    return found


class _Cursor:
    """Reads a header from its beginning on, never more than the file can have."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file, self.size = file, size
        self.position = self.items = 0

    def advance(self, count: int) -> None:
        self.position += count
        if self.position > min(self.size, MOST_HEADER):
            what = "it is truncated" if self.position > self.size else "its header is too long"
            raise ValueError(f"{what}: the header goes on to byte {self.position} at least")

    def take(self, count: int) -> bytes:
        self.advance(count)
        data = self.file.read(count)
        if len(data) < count:
            raise ValueError("it was shortened while it was read")
        return data

    def skip(self, count: int) -> None:
        self.advance(count)
        self.file.seek(self.position)

    def numbers(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))

    def number(self, form: str) -> Any:
        return self.numbers(form)[0]

    def skip_strings(self, count: int) -> None:
        """A vocabulary, of hundreds of thousands: many at a time."""
        length_at = struct.Struct("<Q").unpack_from
        while count:
            data = self.file.read(PIECE)
            if len(data) < 8:
                self.advance(8)  # says that the file ends
            at = 0
            while count and at <= len(data) - 8:
                at += 8 + length_at(data, at)[0]
                count -= 1
            self.skip(at)

    def count(self, what: str, most: int) -> int:
        count = self.number("Q")
        if count > most:
            raise ValueError(f"it announces {count} {what}, more than {most}")
        return count

    def string(self, what: str, most: int) -> str:
        data = self.take(self.count(f"bytes for {what}", most))
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise ValueError(f"{what} is no UTF-8: {quote(data)}") from None

    def value(self, key: str) -> Any:
        kind = self.number("I")
        if kind == STRING:
            return self.string(escape(key, 100), MOST_TEXT)
        if kind == ARRAY:
            return self._array(key)
        if kind not in SCALARS:
            raise ValueError(f"{escape(key)} has the unknown value type {kind}")
        return _plain(kind, self.number(SCALARS[kind]))

    def _array(self, key: str) -> list[Any] | Items:
        kind = self.number("I")
        count = self.count(f"items of {escape(key)}", MOST_ITEMS)
        self.items += count
        if self.items > MOST_ITEMS:
            raise ValueError(f"its arrays have more than {MOST_ITEMS} items")
        if kind == STRING:
            self.skip_strings(count)
            return Items(count)
        if kind not in SCALARS:
            raise ValueError(f"{escape(key)} is an array of the unknown value type {kind}")
        form = f"{count}{SCALARS[kind]}"
        if count > MOST_KEPT:
            self.skip(struct.calcsize(f"<{form}"))
            return Items(count)
        return [_plain(kind, item) for item in self.numbers(form)]


def _plain(kind: int, value: Any) -> Any:
    """1e-6 was rounded to fp32 when it was written; as fp32 the shortest number is the same."""
    return float(str(np.float32(value))) if kind == FLOAT else value
