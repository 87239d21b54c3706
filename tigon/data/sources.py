"""Sources of numbered rows: the base class, and files of JSON, CSV and text.

A row has a place, file:line. In tables and data sets, lines count rows.
"""

import csv
import gzip
import hashlib
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from tigon.data.formats import KEY_ALIASES, ROW_KEYS, VALUE_KEYS, Format, Row
from tigon.utils.json import DuplicateKeyError, object_from_pairs, quote

COMPRESSED = (".gz", ".zst")
BLOCK_BYTES = 2**20  # bytes of a block, about
HASH_BYTES = 2**25  # bytes that a thread hashes at a time
SAMPLE_BYTES = 4096  # bytes of each piece that `sample` hashes
MAX_ROW_CHARS = 2**24  # characters; tokenizing them takes 2.4 GB
MAX_LINE_BYTES = 8 * MAX_ROW_CHARS  # bytes that are read of a row which is too large
LARGE_ROW_BYTES = 2**24  # bytes above which the lists and objects of a row are counted
MAX_CONTAINERS = 2**22  # lists and objects in a row of more bytes
_NO_TEXT = {  # what begins so
    b"\x1f\x8b": "compressed by gzip: its name has to end in .gz",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: its name has to end in .zst",
    b"PK\x03\x04": "a zip archive: unpack it",
    b"\xff\xfe": "UTF-16 text: write it as UTF-8",
    b"\xfe\xff": "UTF-16 text: write it as UTF-8",
}
_ESCAPES = {r"\n": "\n", r"\r": "\r", r"\t": "\t"}

Record = bytes | Row | ValueError  # JSON, a row, or what is wrong with it
NumberedRows = Iterator[tuple[int, Row | ValueError]]  # line, and its row


@dataclass(frozen=True)
class Block:
    """Consecutive rows of a source, about a megabyte, which are tokenized in one call."""

    name: str  # the source's
    format: Format
    records: Sequence[tuple[int, Record]]
    fraction: tuple[float, bool] | None = None  # as Source has it

    def rows(self) -> NumberedRows:
        """Yield the parsed rows with their lines, or what is wrong with a row; with `fraction` only
        the held-out rows, or only the others."""
        for line, record in self.records:
            row = parse_json(record) if isinstance(record, bytes) else record
            if self.fraction is not None:
                # A bad row is one of the training rows, so that it is counted once
                fraction, held_out = self.fraction
                selected = isinstance(row, dict) and is_held_out(row, self.format, fraction)
                if held_out != selected:
                    continue
            yield line, row


def is_held_out(row: Row, format: Format, fraction: float) -> bool:
    """Whether a row is in the held-out fraction, by a digest of the keys that formats read.

    So the answer is the same on every machine, in any order, and for each copy of a row.
    """
    read = {
        key: row[format.column(key)] for key in ROW_KEYS if row.get(format.column(key)) is not None
    }
    for name, key in KEY_ALIASES.items():
        if key not in read and row.get(name) is not None:
            read[key] = row[name]
    text = json.dumps(read or row, sort_keys=True, default=str)
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return number < fraction * 2**64


@dataclass(frozen=True)
class Source:
    """The rows of a file or data set, or a range; a kind implements `read_all` or `read`."""

    name: str  # for messages; a file's path
    format: Format
    start: int = field(default=0, kw_only=True)  # the first row
    stop: int | None = field(default=None, kw_only=True)  # the row after the last; None: the end
    # eval_fraction, and whether the rows are those that it holds out; None: all rows
    fraction: tuple[float, bool] | None = field(default=None, kw_only=True)

    def read_all(self) -> Iterator[tuple[int, Record]]:
        """Yields each record with its line; ValueError if the file cannot be read."""
        raise NotImplementedError

    def read(self, start: int = 0) -> Iterator[tuple[int, Record]]:
        """Yields the records of the file from number `start` on."""
        return islice(self.read_all(), start, None)

    def options(self) -> tuple[Any, ...]:
        """The settings of this kind of source that change its records, for `digest`; here none."""
        return ()

    def files(self) -> list[Path]:
        """Lists the files on this host, sorted: the file itself, or all below a directory."""
        path = Path(self.name)
        files = path.rglob("*") if path.is_dir() else [path]
        return sorted(file for file in files if file.is_file())

    def total(self) -> int | None:
        """Counts all rows of the file or data set; None for a stream."""
        return sum(1 for _ in self.read())

    def bounds(self, first: int, last: int | None) -> tuple[int, int | None]:
        """Returns the numbers, in the whole file, of the records `first` to `last` of the range."""
        ends = [self.stop, None if last is None else self.start + last]
        return self.start + first, min((end for end in ends if end is not None), default=None)

    def records(self, first: int = 0, last: int | None = None) -> Iterator[tuple[int, Record]]:
        """Yields the records `first` to `last` - 1 of the range with their lines."""
        begin, end = self.bounds(first, last)
        records = self.read(begin)
        return records if end is None else islice(records, max(0, end - begin))

    def blocks(self, first: int = 0, last: int | None = None) -> Iterator[Block]:
        """Yields the records `first` to `last` - 1 of the range in blocks of about BLOCK_BYTES
        each; ValueError if the range starts behind the last row."""
        records: list[tuple[int, Record]] = []
        size, has_rows = 0, first > 0
        for line, record in self.records(first, last):
            records.append((line, record))
            size += measure(record, scalar=8)  # about as in a file
            if size > BLOCK_BYTES:
                yield Block(self.name, self.format, tuple(records), self.fraction)
                records, size = [], 0
            has_rows = True
        if records:
            yield Block(self.name, self.format, tuple(records), self.fraction)
        if not has_rows and self.start:
            raise ValueError(
                f"{self.name} has no rows left by split, skip and take: it has {self.total():,}, "
                f"and {self.start:,} are skipped"
            )

    def rows(self) -> NumberedRows:
        """Yields the parsed rows of the range with their lines."""
        for block in self.blocks():
            yield from block.rows()

    def count(self) -> int:
        """Counts the rows of the range, before `fraction`; ValueError for a stream."""
        total = self.total()
        if total is None:
            raise ValueError(
                f"{self.name} is streamed, and its number of rows is not known: give a slice from "
                "its start, in rows, such as train[:1000], or streaming=false"
            )
        return max(0, min(total, total if self.stop is None else self.stop) - self.start)

    def digest(self) -> str:
        """A digest of the content and of how rows are made of it."""
        selection = self.start, self.stop, self.fraction
        options = type(self).__name__, *self.options(), selection, str(self.format)
        return hash_files(self.files(), *options)

    def size(self) -> int:
        """The bytes on this host; 0 if they come from elsewhere."""
        return sum(file.stat().st_size for file in self.files())

    def sample(self, count: int) -> bytes:
        """Samples a large source: a digest for each file of pieces at equal distances, at least its
        two ends, about `count` in all."""
        files = self.files()
        pieces = max(2, count // max(1, len(files)))
        digests = []
        for path in files:
            last = max(0, path.stat().st_size - SAMPLE_BYTES)
            digests.append(hashlib.sha256())
            with path.open("rb") as file:
                for start in sorted({last * i // (pieces - 1) for i in range(pieces)}):
                    file.seek(start)
                    digests[-1].update(file.read(SAMPLE_BYTES))
        return b"".join(digest.digest() for digest in digests)


class JsonFile(Source):
    """One JSON object a line; a .json file may also be one list of objects."""

    def read_all(self) -> Iterator[tuple[int, Record]]:
        """Yields each line that is not blank, or each item of a list, as bytes with its line; a
        ValueError in place of a line that is too long."""
        with open_file(self.name) as file:
            if file.peek(3)[:3] == b"\xef\xbb\xbf":
                file.read(3)
            if suffix(self.name) == ".json" and file.peek(1).lstrip()[:1] == b"[":
                yield from _list_items(file.read(), self.name)
                return
            line = 1
            while raw := file.readline(MAX_LINE_BYTES):
                if len(raw) == MAX_LINE_BYTES and not raw.endswith(b"\n"):
                    while raw and not raw.endswith(b"\n"):
                        raw = file.readline(BLOCK_BYTES)
                    advice = "divide it, or leave it out"
                    yield line, ValueError(f"has more than {MAX_LINE_BYTES:,} bytes: {advice}")
                elif raw.strip():
                    yield line, raw
                line += 1


class CsvFile(Source):
    """Rows of texts under a header, divided by commas, or in a .tsv file by tabs.

    Every cell is the text that is in the file, "007" no number and "NA" not missing, except in the
    columns of VALUE_KEYS.
    """

    def read_all(self) -> Iterator[tuple[int, Record]]:
        """Yields each row under the header with its line, or what is wrong with it."""
        csv.field_size_limit(2**31 - 1)  # too large cells are bad rows
        delimiter = "\t" if suffix(self.name) == ".tsv" else ","
        with open_text(self.name) as text:
            reader = csv.reader(text, delimiter=delimiter, strict=True)
            try:
                header = next(filter(None, reader), [])
                self._check_header(header, delimiter)
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

    def _check_header(self, header: list[str], delimiter: str) -> None:
        """Raises ValueError for equal names, or a header that another delimiter divides."""
        is_undivided = len(header) == 1 and header[0] not in self.format.columns.values()
        if is_undivided and (other := re.search(r"[;\t,]", header[0])):
            raise ValueError(
                f"{self.name} is divided by {other[0]!r}, not by {delimiter!r}: "
                "write a .csv file with commas or a .tsv file with tabs"
            )
        check_columns(self.name, header)

    def _row(self, cells: dict[str, str]) -> Row:
        """Makes a row of cells; those in the columns of VALUE_KEYS become numbers, truth values or,
        if blank, None where they are written so."""
        row: Row = dict(cells)
        for key in map(self.format.column, VALUE_KEYS):
            if key in row:
                with suppress(ValueError):
                    row[key] = json.loads(cells[key].lower()) if cells[key].strip() else None
        return row


@dataclass(frozen=True)
class TextFile(Source):
    r"""Documents as rows {"text": ...}: the whole file, or what `separator` divides it into.

    Blank ends of divided documents are trimmed, and empty ones are left out. \r\n counts as \n,
    and a byte order mark is no text. In the separator \n, \r and \t are escapes, since neither a
    shell nor single quotes in YAML make line ends of them.
    """

    separator: str = ""

    def options(self) -> tuple[Any, ...]:
        """The separator, without escapes."""
        return (_unescape(self.separator),)

    def read_all(self) -> Iterator[tuple[int, Record]]:
        """Yields each document that is not blank with its line; ValueError if too long."""
        separator = _unescape(self.separator)
        line, rest = 1, ""
        for piece in self._pieces():
            *documents, rest = (rest + piece).split(separator) if separator else [rest + piece]
            for document in documents:
                yield from _document_row(line, document, trim=True)
                line += (document + separator).count("\n")
            if len(rest) > MAX_ROW_CHARS:
                raise ValueError(
                    f"{self.name}:{line}: a document of more than {MAX_ROW_CHARS:,} characters; "
                    "separator= says what divides the file into documents, such as '\\n\\n'"
                )
        yield from _document_row(line, rest, trim=bool(separator))

    def _pieces(self) -> Iterator[str]:
        """Yields pieces of about BLOCK_BYTES characters, with line ends of one."""
        with open_text(self.name) as text:
            while piece := text.read(BLOCK_BYTES):
                if piece.endswith("\r"):
                    piece += text.read(1)
                yield piece.replace("\r\n", "\n")


def hash_files(paths: Sequence[Path], *options: object) -> str:
    """A digest of the files' bytes and of the options."""
    total = hashlib.sha256(repr(options).encode())
    with ThreadPoolExecutor() as threads:
        for path in paths:
            starts = range(0, max(path.stat().st_size, 1), HASH_BYTES)
            for digest in threads.map(partial(_hash_piece, path), starts):
                total.update(digest)
    return total.hexdigest()


def _hash_piece(path: Path, start: int) -> bytes:
    """Computes the SHA-256 digest of HASH_BYTES of a file, from byte `start` on."""
    with path.open("rb") as file:
        file.seek(start)
        piece = hashlib.sha256()
        for _ in range(0, HASH_BYTES, 2**20):
            piece.update(file.read(2**20))
        return piece.digest()


@contextmanager
def open_file(name: str) -> Iterator[io.BufferedReader]:
    """Opens a file for reading decompressed bytes; ValueError if they are damaged."""
    broken: tuple[type[Exception], ...] = (gzip.BadGzipFile, EOFError, zlib.error)
    with open(name, "rb") as file:
        raw: Any = file
        if name.endswith(".gz"):
            raw = gzip.GzipFile(fileobj=file)
        elif name.endswith(".zst"):
            try:
                from pyarrow import CompressedInputStream
            except ImportError:
                raise ImportError(f"{name}: .zst needs pip install 'tigon[train]'") from None
            broken = (OSError,)  # what pyarrow raises
            raw = CompressedInputStream(file, "zstd")
        try:
            with io.BufferedReader(raw, 2**20) as reader:
                start = reader.peek(4)[:4]
                for mark, problem in _NO_TEXT.items():
                    if start.startswith(mark):
                        raise ValueError(f"{name} is {problem}")
                yield reader
        except broken as error:
            raise ValueError(f"{name} cannot be decompressed: {error}") from None


@contextmanager
def open_text(name: str) -> Iterator[io.TextIOWrapper]:
    """Opens a file for reading text without its byte order mark; ValueError if it is not UTF-8."""
    with open_file(name) as file:
        try:
            yield io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
        except UnicodeDecodeError as error:
            raise ValueError(f"{name} is not UTF-8 text: {error}") from None


def suffix(name: str) -> str:
    """The suffix of a file's name, or the one before it if that is of a compression."""
    path = Path(name)
    return path.with_suffix("").suffix if path.suffix in COMPRESSED else path.suffix


def parse_json(raw: bytes) -> Row | ValueError:
    """Returns the JSON object of a line, or a ValueError that says what is wrong with it."""
    # `[],` over and over is small as bytes only
    if len(raw) > LARGE_ROW_BYTES and raw.count(b"[") + raw.count(b"{") > MAX_CONTAINERS:
        return ValueError(f"has more than {MAX_CONTAINERS:,} lists and objects")
    try:
        row = json.loads(raw, object_pairs_hook=object_from_pairs)
    except DuplicateKeyError as error:
        return ValueError(f"has the key {quote(error.key)} twice in one object: remove one")
    except json.JSONDecodeError as error:  # whose line is that of the row alone
        split = "; each line must be a whole object" if raw.strip() in (b"{", b"[") else ""
        return ValueError(f"not valid JSON: {error.msg}, at character {error.pos + 1}{split}")
    except ValueError as error:  # bad UTF-8
        return ValueError(f"not valid JSON: {error}")
    except RecursionError:
        return ValueError("not valid JSON: nested too deeply")
    if isinstance(row, list):
        return ValueError("needs a JSON object, not a list; one list of all rows is a .json file")
    if not isinstance(row, dict):
        return ValueError(f"needs a JSON object, not {type(row).__name__}")
    return row


def _list_items(raw: bytes, name: str) -> Iterator[tuple[int, bytes]]:
    """Yields the line and the JSON of each item of a JSON list."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text: {error}") from None
    decode, blank = json.JSONDecoder().raw_decode, re.compile(r"[ \t\r\n]*")

    def skip(at: int) -> int:
        return blank.match(text, at).end()  # type: ignore[union-attr]

    at = skip(skip(0) + 1)
    counted, line = 0, 1
    while not text.startswith("]", at):
        line += text.count("\n", counted, at)
        counted = at
        try:
            _, end = decode(text, at)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name}:{line}: not valid JSON: {error}") from None
        yield line, text[at:end].encode()
        at = skip(end)
        if text.startswith(",", at):
            at = skip(at + 1)
        elif not text.startswith("]", at):
            raise ValueError(f"{name}:{line}: not valid JSON: no ',' or ']' behind this item")


def _document_row(line: int, text: str, *, trim: bool) -> Iterator[tuple[int, Row]]:
    """Yields the row of a document that is not blank with its line; `trim` cuts blank ends."""
    body = text.strip() if trim else text
    if body.strip():
        yield line + text[: text.index(body)].count("\n"), {"text": body}


def _unescape(separator: str) -> str:
    """Replaces written \\n, \\r and \\t by these characters, and \\r\\n by \\n."""
    for written, meaning in _ESCAPES.items():
        separator = separator.replace(written, meaning)
    return separator.replace("\r\n", "\n")


def check_columns(name: str, columns: Sequence[str]) -> None:
    """Raises ValueError if two columns have one name."""
    if twice := [column for column, count in Counter(columns).items() if count > 1]:
        raise ValueError(f"{name} has the column {quote(twice[0])} twice: remove one")


def measure(value: Any, scalar: int = 0) -> int:
    """Counts the characters of all texts in a row or record; any other value counts `scalar`."""
    if isinstance(value, str | bytes):
        return len(value)
    values = value.values() if isinstance(value, dict) else value
    return sum(measure(v, scalar) for v in values) if isinstance(value, dict | list) else scalar
