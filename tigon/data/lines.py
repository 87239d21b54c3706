"""Files of JSON, of CSV and of text, compressed or not."""

import csv
import gzip
import io
import json
import re
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tigon.data.blocks import LARGEST_ROW, SIZE, Block, Rows, RowsBlock, Source, hash_files
from tigon.data.formats import VALUES, Row
from tigon.utils.json import DuplicateKeyError, object_from_pairs, quote

LONGEST_LINE = 8 * LARGEST_ROW  # bytes that are read of a row which is too large
SPACIOUS, MOST_CONTAINERS = 2**24, 2**22  # bytes of a row, and lists and objects in a larger one
COMPRESSED = (".gz", ".zst")
_ESCAPES = {r"\n": "\n", r"\r": "\r", r"\t": "\t"}


@dataclass(frozen=True)
class JsonBlock(Block):
    first: int  # line
    raw: bytes  # whole lines

    def rows(self) -> Rows:
        # Not splitlines(), which for bytes also divides at a lone \r
        for line, raw in enumerate(self.raw.split(b"\n"), self.first):
            if raw.strip():
                yield line, _parse(raw)

    def content(self) -> bytes:
        return self.raw


@dataclass(frozen=True)
class JsonFile(Source):
    """One JSON object a line; a .json file may also be one list of objects."""

    def blocks(self) -> Iterator[Block]:
        with open_file(self.name) as file:
            start = file.read(SIZE)
            raw, line = start.removeprefix(BOM_UTF8), 1
            if _suffix(self.name) == ".json" and raw.lstrip()[:1] == b"[":
                yield from self._items(raw + file.read())
                return
            while raw:
                end = file.readline(LONGEST_LINE)
                too_long = len(end) == LONGEST_LINE and not end.endswith(b"\n")
                if too_long:
                    raw = raw[: raw.rfind(b"\n") + 1]
                else:
                    raw += end
                yield JsonBlock(self.name, self.format, line, raw)
                line += raw.count(b"\n")
                if too_long:
                    while end and not end.endswith(b"\n"):
                        end = file.readline(SIZE)
                    error = ValueError(
                        f"has more than {LONGEST_LINE:,} bytes: divide it, or leave it out"
                    )
                    yield RowsBlock(self.name, self.format, ((line, error),))
                    line += 1
                raw = file.read(SIZE)

    def _items(self, raw: bytes) -> Iterator[Block]:
        rows: list[tuple[int, Row | ValueError]] = []
        begun = 0
        for line, at, row in _list_items(raw, self.name):
            rows.append((line, row))
            if at - begun > SIZE:
                yield RowsBlock(self.name, self.format, tuple(rows))
                rows, begun = [], at
        yield RowsBlock(self.name, self.format, tuple(rows))

    def digest(self) -> str:
        return hash_files([Path(self.name)], "json", str(self.format))


@dataclass(frozen=True)
class CsvFile(Source):
    """Rows of texts under a header, divided by commas, or in a .tsv file by tabs.

    Every cell is the text that is in the file, "007" no number and "NA" not missing, but for those
    in VALUES.
    """

    def blocks(self) -> Iterator[Block]:
        rows: list[tuple[int, Row | ValueError]] = []
        size = 0
        for line, row in self._lines():
            rows.append((line, row))
            size += sum(map(len, map(str, row.values()))) if isinstance(row, dict) else 0
            if size > SIZE:
                yield RowsBlock(self.name, self.format, tuple(rows))
                rows, size = [], 0
        if rows:
            yield RowsBlock(self.name, self.format, tuple(rows))

    def _lines(self) -> Rows:
        csv.field_size_limit(2**31 - 1)  # too large cells are bad rows
        delimiter = "\t" if _suffix(self.name) == ".tsv" else ","
        with open_file(self.name) as file:
            text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
            reader = csv.reader(text, delimiter=delimiter, strict=True)
            try:
                header = next(filter(None, reader), [])
                named = header[:1] and header[0] in self.format.columns.values()
                if len(header) == 1 and not named and (other := re.search(r"[;\t,]", header[0])):
                    raise ValueError(
                        f"{self.name} is divided by {other[0]!r}, not by {delimiter!r}: "
                        "write a .csv file with commas or a .tsv file with tabs"
                    )
                if twice := [name for name in header if header.count(name) > 1]:
                    raise ValueError(
                        f"{self.name} has the column {quote(twice[0])} twice: remove one"
                    )
                line = reader.line_num + 1
                for cells in reader:
                    if len(cells) == len(header):
                        yield line, self._row(dict(zip(header, cells, strict=True)))
                    elif cells:
                        cell = "cell" if len(cells) == 1 else "cells"
                        problem = f"has {len(cells)} {cell}, and the header has {len(header)}"
                        yield line, ValueError(problem)
                    line = reader.line_num + 1
            except csv.Error as error:
                raise ValueError(f"{self.name}:{reader.line_num}: not valid CSV: {error}") from None
            except UnicodeDecodeError as error:
                raise ValueError(f"{self.name} is not UTF-8 text: {error}") from None

    def _row(self, cells: dict[str, str]) -> Row:
        """Cells that are read as numbers or truth values become these, if they are written so."""
        row: Row = dict(cells)
        for key in map(self.format.key, VALUES):
            if key in row:
                with suppress(ValueError):
                    row[key] = json.loads(cells[key].lower()) if cells[key].strip() else None
        return row

    def digest(self) -> str:
        return hash_files([Path(self.name)], "csv", str(self.format))


@dataclass(frozen=True)
class TextFile(Source):
    r"""Documents as rows {"text": ...}: the whole file, or what `separator` divides it into.

    Blank ends of divided documents are trimmed, and empty ones are left out. \r\n counts as \n,
    and a byte order mark is no text. In the separator \n, \r and \t are escapes, since neither a
    shell nor single quotes in YAML make line ends of them.
    """

    separator: str = ""

    def blocks(self) -> Iterator[Block]:
        documents: list[tuple[int, Row]] = []
        size = 0
        for line, text in self._documents():
            documents.append((line, {"text": text}))
            size += len(text)
            if size > SIZE:
                yield RowsBlock(self.name, self.format, tuple(documents))
                documents, size = [], 0
        if documents:
            yield RowsBlock(self.name, self.format, tuple(documents))

    def _documents(self) -> Iterator[tuple[int, str]]:
        separator = _unescaped(self.separator)
        line, rest = 1, ""
        for piece in self._pieces():
            *documents, rest = (rest + piece).split(separator) if separator else [rest + piece]
            for document in documents:
                yield from _document(line, document, trim=True)
                line += (document + separator).count("\n")
            if len(rest) > LARGEST_ROW:
                raise ValueError(
                    f"{self.name}:{line}: a document of more than {LARGEST_ROW:,} characters; "
                    "separator= says what divides the file into documents, such as '\\n\\n'"
                )
        yield from _document(line, rest, trim=bool(separator))

    def _pieces(self) -> Iterator[str]:
        with open_file(self.name) as file:
            text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
            try:
                while piece := text.read(SIZE):
                    if piece.endswith("\r"):
                        piece += text.read(1)
                    yield piece.replace("\r\n", "\n")
            except UnicodeDecodeError as error:
                raise ValueError(f"{self.name} is not UTF-8 text: {error}") from None

    def digest(self) -> str:
        return hash_files([Path(self.name)], "text", _unescaped(self.separator), str(self.format))


@contextmanager
def open_file(name: str) -> Iterator[IO[bytes]]:
    """The bytes of a file, decompressed; ValueError if they cannot be."""
    try:
        with _open(name) as file:
            yield file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{name} cannot be decompressed: {error}") from None


@contextmanager
def _open(name: str) -> Iterator[IO[bytes]]:
    if name.endswith(".gz"):
        with gzip.open(name) as unzipped:
            yield unzipped  # type: ignore[misc]
    elif name.endswith(".zst"):
        try:
            import zstandard
        except ImportError:
            raise ImportError(f"{name}: .zst needs pip install 'tigon[data]'") from None
        try:
            with open(name, "rb") as file:
                frames = _Frames(file, zstandard.ZstdDecompressor().decompressobj)
                with io.BufferedReader(frames, 2**20) as unzipped:
                    yield unzipped
        except zstandard.ZstdError as error:
            raise ValueError(f"{name} cannot be decompressed: {error}") from None
    else:
        with open(name, "rb") as file:
            yield file


class _Frames(io.RawIOBase):
    """All frames of a .zst file. zstandard's own reader ends without a word where a frame does, or
    where the file is cut off."""

    def __init__(self, file: IO[bytes], begin: Callable[[], Any]):
        self.file, self.begin = file, begin
        self.frame: Any = None  # the one that has begun
        self.compressed, self.text = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.text:
            # Four bytes may become 128 KiB, all at once
            self.compressed = self.compressed or self.file.read(2**12)
            if not self.compressed:
                if self.frame is not None:
                    raise EOFError("its end is missing")
                return 0
            self.frame = self.frame or self.begin()
            self.text, self.compressed = memoryview(self.frame.decompress(self.compressed)), b""
            if self.frame.eof:
                self.compressed, self.frame = self.frame.unused_data, None
        count = min(len(buffer), len(self.text))
        buffer[:count], self.text = self.text[:count], self.text[count:]
        return count


def _suffix(name: str) -> str:
    path = Path(name)
    return path.with_suffix("").suffix if path.suffix in COMPRESSED else path.suffix


def _parse(raw: bytes) -> Row | ValueError:
    # `[],` over and over is small as bytes only
    if len(raw) > SPACIOUS and raw.count(b"[") + raw.count(b"{") > MOST_CONTAINERS:
        return ValueError(f"has more than {MOST_CONTAINERS:,} lists and objects")
    try:
        row = json.loads(raw, object_pairs_hook=object_from_pairs)
    except DuplicateKeyError as error:
        return _named_twice(error)
    except ValueError as error:  # bad JSON and bad UTF-8 alike
        split = "; each line must be a whole object" if raw.strip() in (b"{", b"[") else ""
        return ValueError(f"not valid JSON: {error}{split}")
    except RecursionError:
        return ValueError("not valid JSON: nested too deeply")
    if isinstance(row, list):
        return ValueError("needs a JSON object, not a list; one list of all rows is a .json file")
    return _checked(row)


def _named_twice(error: DuplicateKeyError) -> ValueError:
    return ValueError(f"has the key {quote(error.key)} twice in one object: remove one")


def _checked(row: Any) -> Row | ValueError:
    if isinstance(row, dict | ValueError):
        return row
    return ValueError(f"needs a JSON object, not {type(row).__name__}")


def _list_items(raw: bytes, name: str) -> Iterator[tuple[int, int, Row | ValueError]]:
    """Line, character and row of each item of a JSON list."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text: {error}") from None
    decode, blank = json.JSONDecoder().raw_decode, re.compile(r"[ \t\r\n]*")
    decode_unique = json.JSONDecoder(object_pairs_hook=object_from_pairs).raw_decode

    def skip(at: int) -> int:
        return blank.match(text, at).end()  # type: ignore[union-attr]

    at = skip(skip(0) + 1)
    counted, line = 0, 1
    while not text.startswith("]", at):
        line += text.count("\n", counted, at)
        counted = at
        try:
            try:
                row, end = decode_unique(text, at)
            except DuplicateKeyError as error:
                row, end = _named_twice(error), decode(text, at)[1]
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name}:{line}: not valid JSON: {error}") from None
        yield line, at, _checked(row)
        at = skip(end)
        if text.startswith(",", at):
            at = skip(at + 1)
        elif not text.startswith("]", at):
            raise ValueError(f"{name}:{line}: not valid JSON: no ',' or ']' behind this item")


def _document(line: int, text: str, *, trim: bool) -> Iterator[tuple[int, str]]:
    body = text.strip() if trim else text
    if body.strip():
        yield line + text[: text.index(body)].count("\n"), body


def _unescaped(separator: str) -> str:
    for written, meant in _ESCAPES.items():
        separator = separator.replace(written, meant)
    return separator.replace("\r\n", "\n")
