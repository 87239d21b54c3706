"""Files, globs and data sets that `data` names, as numbered rows.

A row has a place, file:line. In tables and data sets, lines count rows.
"""

import csv
import glob
import gzip
import hashlib
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from tigon.data.formats import VALUE_KEYS, Format, Row
from tigon.data.selection import Split, is_held_out, parse_split
from tigon.utils.json import DuplicateKeyError, object_from_pairs, quote, read_json
from tigon.utils.paths import check_file_name, expand_user

HUB = "hf://"
COMPRESSED = (".gz", ".zst")
ACCEPTED_FILES = (
    ".jsonl, .json, .csv, .tsv and .txt files (each also .gz or .zst), .parquet and .arrow files, "
    f"directories written by datasets' save_to_disk, and data sets of the hub as {HUB}owner/name"
)
BLOCK_BYTES = 2**20  # bytes of a block, about
HASH_BYTES = 2**25  # bytes that a thread hashes at a time
SAMPLE_BYTES = 4096  # bytes of each piece that `sample` hashes
MAX_ROW_CHARS = 2**24  # characters; tokenizing them takes 2.4 GB
MAX_LINE_BYTES = 8 * MAX_ROW_CHARS  # bytes that are read of a row which is too large
LARGE_ROW_BYTES = 2**24  # bytes above which the lists and objects of a row are counted
MAX_CONTAINERS = 2**22  # lists and objects in a row of more bytes
_ESCAPES = {r"\n": "\n", r"\r": "\r", r"\t": "\t"}

Record = bytes | Row | ValueError  # JSON, a row, or what is wrong with it
NumberedRows = Iterator[tuple[int, Row | ValueError]]  # line, and its row


@dataclass(frozen=True)
class Entry:
    """One item of a list of data: a path, a glob, or a data set of the hub, hf://owner/name."""

    path: str
    weight: float | None = None  # its share of the examples drawn from all entries
    format: str | None = None  # one of formats.REQUIRED; None: detected from the keys
    columns: Mapping[str, str] = field(default_factory=dict)  # our name of a key -> theirs
    split: str | None = None  # or slices of splits, as in `datasets`; None: train. A file is train
    skip: int = 0  # rows at the start
    take: int | None = None  # rows after those; None: all
    config: str | None = None  # of a data set of the hub
    revision: str | None = None  # of a data set of the hub
    name: str | None = None  # of held-out data that is also measured on its own


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


@dataclass(frozen=True)
class Source:
    """The rows of one file or data set, or a range of them.

    A kind of file implements `read_all`, or `read` where it can skip rows without reading them.
    """

    name: str  # for messages; a file's path
    format: Format
    start: int = field(default=0, kw_only=True)  # the first row
    stop: int | None = field(default=None, kw_only=True)  # the row after the last; None: the end
    # eval_fraction, and whether the rows are those that it holds out; None: all rows
    fraction: tuple[float, bool] | None = field(default=None, kw_only=True)

    def read_all(self) -> Iterator[tuple[int, Record]]:
        """Yields each record of the file or data set with its line; ValueError if it cannot be
        read."""
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
        """Counts the rows of the whole file or data set; None if only reading all of a stream would
        tell."""
        return sum(1 for _ in self.read())

    def records(self, first: int = 0, last: int | None = None) -> Iterator[tuple[int, Record]]:
        """Yields the records `first` to `last` - 1 of the range, counted from its start, with their
        lines."""
        begin = self.start + first
        ends = [self.stop, None if last is None else self.start + last]
        end = min((end for end in ends if end is not None), default=None)
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
        """Counts the rows of the range before `fraction` selects among them; ValueError for a
        stream."""
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
        """Returns digests, one after the other for each file, of about `count` pieces in all at
        equal distances, at least both ends of each, to compare large sources without reading all of
        them."""
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
        """Yields each line that is not blank as bytes, or the parsed items of a list, with their
        lines; a ValueError in place of a line that is too long."""
        with open_file(self.name) as file:
            if file.peek(3)[:3] == b"\xef\xbb\xbf":
                file.read(3)
            line = 1
            if suffix(self.name) == ".json":
                blank = b""
                while (piece := file.peek(1)[:1]) and piece.isspace():
                    blank += file.read(1)
                if piece == b"[":
                    yield from _list_items(blank + file.read(), self.name)
                    return
                line += blank.count(b"\n")
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
        """Yields each row under the header with its line; a ValueError in place of one with another
        number of cells."""
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
        """Raises ValueError for two columns of one name, or a header that another delimiter
        divides."""
        is_name = len(header) != 1 or header[0] in self.format.columns.values()
        if not is_name and (other := re.search(r"[;\t,]", header[0])):
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
        """Yields each document that is not blank with the line on which it begins; ValueError for
        one that is too long."""
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
        """Yields the text in pieces of about BLOCK_BYTES characters, with line ends of one
        character."""
        with open_text(self.name) as text:
            while piece := text.read(BLOCK_BYTES):
                if piece.endswith("\r"):
                    piece += text.read(1)
                yield piece.replace("\r\n", "\n")


@dataclass(frozen=True)
class Table(Source):
    """A data set that the library `datasets` reads: .parquet, .arrow, saved, or of the hub."""

    kind: str = "parquet"  # or arrow, saved, hub
    split: str = "train"
    config: str | None = None
    revision: str | None = None
    streaming: bool = False

    def read(self, start: int = 0) -> Iterator[tuple[int, Record]]:
        """Yields the rows from number `start` on, without the nulls of structs, with their numbers,
        counted from 1, as lines."""
        line = start + 1
        with _reader_errors(self.name):
            data = self.load()
            if start >= getattr(data, "num_rows", start + 1):
                return
            data = data.skip(start) if start else data
            for batch in data.with_format("arrow").iter(batch_size=256):
                check_columns(self.name, batch.schema.names)
                for row in _table_rows(batch):
                    yield line, without_nulls(row)
                    line += 1

    def load(self) -> Any:
        """A datasets.Dataset, or if it is read as it comes, a datasets.IterableDataset."""
        from datasets import load_dataset, load_from_disk

        if self.kind == "parquet":
            from pyarrow.parquet import read_schema

            check_columns(self.name, read_schema(self.name).names)
        if self.kind == "saved":
            return load_from_disk(str(self.folder()))
        if self.kind == "hub":
            repository = self.name.partition("[")[0].removeprefix(HUB)
            options = {"split": self.split, "revision": self.revision}
            return load_dataset(repository, self.config, streaming=self.streaming, **options)
        # As it comes: a copy in the library's cache would be kept for its name and time alone
        return load_dataset(
            self.kind, data_files=glob.escape(self.name), split="train", streaming=True
        )

    def total(self) -> int | None:
        """Counts the rows of the data set; None for one of the hub that is streamed."""
        with _reader_errors(self.name):
            if self.kind == "parquet":
                from pyarrow.parquet import read_metadata

                return read_metadata(self.name).num_rows
            if self.kind == "arrow":
                return sum(batch.num_rows for batch in self.load().with_format("arrow").iter(1000))
            return None if self.streaming else len(self.load())

    def options(self) -> tuple[Any, ...]:
        """Split, config and revision of the data set."""
        return self.split, self.config, self.revision

    def files(self) -> list[Path]:
        """Lists the files on this host: of a saved data set the .arrow and .json files of its
        split, and of the hub those in the library's cache, none if it is streamed."""
        if self.kind == "saved":
            return [f for f in sorted(self.folder().rglob("*")) if f.suffix in (".arrow", ".json")]
        if self.kind != "hub":
            return super().files()
        if self.streaming:  # the content is not here to be read
            return []
        with _reader_errors(self.name):
            return [Path(file["filename"]) for file in self.load().cache_files]

    def digest(self) -> str:
        """As Source's, and of the name for a data set of the hub."""
        location = self.name if self.kind == "hub" else ""
        return hashlib.sha256(f"{location} {super().digest()}".encode()).hexdigest()

    def size(self) -> int:
        """The bytes on this host; 0 for a data set of the hub."""
        return 0 if self.kind == "hub" else super().size()

    def folder(self) -> Path:
        """The split's folder of a saved data set; ValueError if there is none."""
        folder = Path(self.name)
        if not (folder / "dataset_dict.json").is_file():
            if self.split != (saved := saved_split(folder)):
                text = f"{self.name} has no split {self.split!r}: it was saved as the one split"
                raise ValueError(f"{text} {saved!r}")
            return folder
        splits = sorted(path.name for path in folder.iterdir() if path.is_dir())
        if self.split not in splits:
            raise ValueError(f"{self.name} has no split {self.split!r}: there are {splits}")
        return folder / self.split


def find_sources(
    entries: Sequence[Entry | str] | Entry | str,
    *,
    separator: str = "",
    streaming: bool = False,
    columns: Mapping[str, str] | None = None,
) -> list[Source]:
    """The sources of the entries, in the order given, a glob's files sorted; every one must exist.

    Each has the rows that the entry's `split`, then `skip` and `take`, leave of its files end to
    end. `columns` are those of entries that have none. `separator` divides text files into
    documents. `streaming` reads the hub's data sets as they come, not downloaded first.
    """
    sources: list[Source] = []
    for entry in [entries] if isinstance(entries, Entry | str) else entries:
        entry = Entry(entry) if isinstance(entry, str) else entry
        format = Format(entry.format, entry.columns or columns or {}, strict=bool(entry.columns))
        sources += _resolve_entry(entry, format, separator, streaming)
    return sources


def _resolve_entry(entry: Entry, format: Format, separator: str, streaming: bool) -> list[Source]:
    """Make the sources of an entry, narrowed by its split, skip and take; ValueError if these leave
    none."""
    if entry.skip < 0 or (entry.take is not None and entry.take < 1):
        raise ValueError(
            f"{entry.path}: skip={entry.skip} and take={entry.take} must be numbers of rows, skip "
            "0 or more and take 1 or more"
        )
    splits = [None] if entry.split is None else parse_split(entry.split)
    selected: list[Source] = []
    for split in splits:
        name = None if split is None else split.name
        if entry.path.startswith(HUB):
            sources = [_hub_source(entry, name, format, streaming)]
        else:
            sources = [
                _file_source(path, entry, name, format, separator)
                for path in _match_paths(entry.path)
            ]
        selected += sources if split is None else select_split(sources, split)
    end = None if entry.take is None else entry.skip + entry.take
    if selected := select_rows(selected, entry.skip, end):
        return selected
    options = {name: getattr(entry, name) for name in ("split", "skip", "take")}
    selection = ", ".join(f"{k}={v!r}" for k, v in options.items() if v)
    raise ValueError(f"{entry.path} has no rows left by {selection}")


def _match_paths(pattern: str) -> list[Path]:
    """Lists the path, or the files that a glob matches, sorted; FileNotFoundError if there are
    none."""
    path = expand_user(pattern)
    paths = [path] if path.exists() else [Path(p) for p in glob.glob(str(path), recursive=True)]
    if not paths:
        hint = ""
        if re.fullmatch(r"[\w.-]+/[\w.-]+", pattern) and not path.suffix:
            hint = f"; a data set of the hub is written {HUB}{pattern}"
        raise FileNotFoundError(f"no data file matches {pattern!r}{hint}")
    for path in paths:
        check_file_name(str(path))
    return sorted(paths)


def _file_source(
    path: Path, entry: Entry, split: str | None, format: Format, separator: str
) -> Source:
    """Makes the source of a file or of a directory that save_to_disk wrote, by its suffix;
    ValueError for another kind of file, or for options that it cannot have."""
    name = str(path)
    for option in ("config", "revision"):
        if (value := getattr(entry, option)) is not None:
            raise ValueError(
                f"{path} has no {option}: it is not on the hub, so leave out {option}={value!r}"
            )
    if path.is_dir():
        if not any((path / state).is_file() for state in ("state.json", "dataset_dict.json")):
            raise IsADirectoryError(f"{path} is a directory; name its files: '{path}/*.jsonl'")
        source = Table(name, format, "saved", split or saved_split(path))
        source.folder()
        return source
    if split not in (None, "train"):
        raise ValueError(f"{path} has no split {split!r}: a file's only split is 'train'")
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty")
    if path.suffix in (".parquet", ".arrow"):
        return Table(name, format, path.suffix[1:])
    if suffix(name) == ".txt":
        return TextFile(name, format, separator)
    readers = {".jsonl": JsonFile, ".json": JsonFile, ".csv": CsvFile, ".tsv": CsvFile}
    if suffix(name) in readers:
        return readers[suffix(name)](name, format)
    raise ValueError(f"{path}: data is read from {ACCEPTED_FILES}")


def _hub_source(entry: Entry, split: str | None, format: Format, streaming: bool) -> Source:
    """Make the source of a data set of the hub, whose name tells config and split too; ValueError
    for a bad name."""
    repository = entry.path.removeprefix(HUB)
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", repository):
        raise ValueError(f"{entry.path!r} is not {HUB}owner/name")
    split = split or "train"
    name = f"{entry.path}[{','.join(filter(None, (entry.config, split)))}]"
    return Table(name, format, "hub", split, entry.config, entry.revision, streaming)


def select_split(sources: Sequence[Source], split: Split) -> list[Source]:
    """Narrows the sources, reads one after the other, to a slice that is rounded as in
    `datasets`."""
    start, stop = split.start, split.stop
    if split.percent or (start or 0) < 0 or (stop or 0) < 0:
        total = sum(source.count() for source in sources)
        if split.percent:
            start, stop = (b if b is None else round(b * total / 100) for b in (start, stop))
        start, stop = (max(total + b, 0) if b is not None and b < 0 else b for b in (start, stop))
    return select_rows(sources, start or 0, stop)


def select_rows(sources: Sequence[Source], start: int, stop: int | None) -> list[Source]:
    """Narrows the sources, reads one after the other, to rows `start` to `stop` - 1 of all."""
    if start == 0 and stop is None:
        return list(sources)
    selected: list[Source] = []
    for i, source in enumerate(sources):
        if stop is not None and stop <= start:
            break
        count = source.count() if i + 1 < len(sources) else None
        if count is None or count > start:
            ends = [source.stop, None if stop is None else source.start + stop]
            end = min((end for end in ends if end is not None), default=None)
            selected.append(replace(source, start=source.start + start, stop=end))
        if count is not None:
            start, stop = max(0, start - count), None if stop is None else max(0, stop - count)
    return selected


def select_fraction(sources: Sequence[Source], fraction: float, held_out: bool) -> list[Source]:
    """Narrow each source to its held-out rows or to its training rows; drop it if it has none."""
    parts = [replace(source, fraction=(fraction, held_out)) for source in sources]
    return [part for part in parts if next(part.rows(), None) is not None]


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
        return _duplicate_key(error)
    except ValueError as error:  # bad JSON and bad UTF-8 alike
        split = "; each line must be a whole object" if raw.strip() in (b"{", b"[") else ""
        return ValueError(f"not valid JSON: {error}{split}")
    except RecursionError:
        return ValueError("not valid JSON: nested too deeply")
    if isinstance(row, list):
        return ValueError("needs a JSON object, not a list; one list of all rows is a .json file")
    return _check_object(row)


def _duplicate_key(error: DuplicateKeyError) -> ValueError:
    """Makes the error of a row with one key twice."""
    return ValueError(f"has the key {quote(error.key)} twice in one object: remove one")


def _check_object(row: Any) -> Row | ValueError:
    """Returns the row, or a ValueError if it is no object."""
    if isinstance(row, dict | ValueError):
        return row
    return ValueError(f"needs a JSON object, not {type(row).__name__}")


def _list_items(raw: bytes, name: str) -> Iterator[tuple[int, Row | ValueError]]:
    """Yields the line and the row of each item of a JSON list."""
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
                row, end = _duplicate_key(error), decode(text, at)[1]
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name}:{line}: not valid JSON: {error}") from None
        yield line, _check_object(row)
        at = skip(end)
        if text.startswith(",", at):
            at = skip(at + 1)
        elif not text.startswith("]", at):
            raise ValueError(f"{name}:{line}: not valid JSON: no ',' or ']' behind this item")


def _document_row(line: int, text: str, *, trim: bool) -> Iterator[tuple[int, Row]]:
    """Yields the row of a document, if it is not blank, and the line on which it begins; `trim`
    removes blank ends."""
    body = text.strip() if trim else text
    if body.strip():
        yield line + text[: text.index(body)].count("\n"), {"text": body}


def _unescape(separator: str) -> str:
    """Replaces written \\n, \\r and \\t by these characters, and \\r\\n by \\n."""
    for written, meaning in _ESCAPES.items():
        separator = separator.replace(written, meaning)
    return separator.replace("\r\n", "\n")


def measure(value: Any, scalar: int = 0) -> int:
    """Counts the characters of all texts among the values of a row or a record (bytes of bytes);
    any other value, such as a number, counts `scalar`."""
    if isinstance(value, str | bytes):
        return len(value)
    values = value.values() if isinstance(value, dict) else value
    return sum(measure(v, scalar) for v in values) if isinstance(value, dict | list) else scalar


def saved_split(folder: Path) -> str:
    """The name of the one split in a directory; "train" if there are several or it has none."""
    state = folder / "state.json"
    name = read_json(state).get("_split") if state.is_file() else None
    return str(name).partition("[")[0] if name else "train"


def check_columns(name: str, columns: Sequence[str]) -> None:
    """Raises ValueError if two columns have one name."""
    if twice := [column for column, count in Counter(columns).items() if count > 1]:
        raise ValueError(f"{name} has the column {quote(twice[0])} twice: remove one")


def _table_rows(table: Any) -> list[Row | ValueError]:
    """The rows of an Arrow table, with an error in place of each that is not UTF-8."""
    try:
        rows: list[Row | ValueError] = table.to_pylist()
    except UnicodeDecodeError as error:
        if table.num_rows == 1:
            return [ValueError(f"is not UTF-8 text: {error}")]
        return [row for i in range(table.num_rows) for row in _table_rows(table.slice(i, 1))]
    return rows


def without_nulls(value: Any) -> Any:
    """Copy without the nulls that Arrow puts in a struct for the keys that a row lacks, at any
    depth; nulls in lists stay."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


@contextmanager
def _reader_errors(name: str) -> Iterator[None]:
    """Turns the errors of pyarrow, datasets and huggingface_hub into one line with the name."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{name} needs pip install 'tigon[train]': {error}") from None
    except Exception as error:
        # pyarrow, datasets and huggingface_hub raise many kinds
        if isinstance(error, ValueError) and str(error).startswith(name):
            raise
        raise ValueError(f"{name} cannot be read: {error}") from error
