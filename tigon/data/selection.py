"""What an entry of `data` names: files, globs and data sets of the hub, and which of their rows."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tigon.data.formats import Format
from tigon.data.sources import CsvFile, JsonFile, Source, TextFile, suffix
from tigon.data.tables import Table, saved_split
from tigon.settings.data import HUB, Entry, match_paths

ACCEPTED_FILES = (
    ".jsonl, .json, .csv, .tsv and .txt files (each also .gz or .zst), .parquet and .arrow files, "
    f"directories written by datasets' save_to_disk, and data sets of the hub as {HUB}owner/name"
)
READERS = {".jsonl": JsonFile, ".csv": CsvFile, ".tsv": CsvFile, ".json": JsonFile}

_BOUND = r"(-?\d{1,18})(%?)"
_SPLIT = re.compile(rf"(\w[\w.-]*)(?:\[(?:{_BOUND})?:(?:{_BOUND})?\])?")


class Split(NamedTuple):
    """A split of a data set and a slice of its rows; bounds are rows, or percent of them."""

    name: str = "train"
    start: int | None = None
    stop: int | None = None
    percent: bool = False


def parse_split(text: str) -> list[Split]:
    """Parses a text such as "train[80%:]" or "train+test[:10]", as in `datasets`."""
    splits = []
    for part in text.split("+"):
        match = _SPLIT.fullmatch(part.strip())
        if match is None:
            raise ValueError(
                f"split={text!r} is no split: write train, train[:100], train[80%:] or train+test"
            )
        name, start, start_unit, stop, stop_unit = match.groups()
        units = {unit for unit in (start_unit, stop_unit) if unit is not None}
        if len(units) > 1:
            raise ValueError(f"split={text!r} mixes rows and percent: give both bounds in one unit")
        first, last = (int(bound) if bound else None for bound in (start, stop))
        split = Split(name, first, last, percent="%" in units)
        if split.percent and max(abs(split.start or 0), abs(split.stop or 0)) > 100:
            raise ValueError(f"split={text!r} has a bound beyond 100%")
        splits.append(split)
    return splits


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
    """Makes the sources of an entry, narrowed by its split, skip and take."""
    splits = [None] if entry.split is None else parse_split(entry.split)
    selected: list[Source] = []
    for split in splits:
        name = None if split is None else split.name
        if entry.path.startswith(HUB):
            sources = [_hub_source(entry, name, format, streaming)]
        else:
            sources = [
                _file_source(path, entry, name, format, separator)
                for path in match_paths(entry.path)
            ]
        selected += sources if split is None else select_split(sources, split)
    end = None if entry.take is None else entry.skip + entry.take
    if selected := select_rows(selected, entry.skip, end):
        return selected
    options = {name: getattr(entry, name) for name in ("split", "skip", "take")}
    selection = ", ".join(f"{k}={v!r}" for k, v in options.items() if v)
    raise ValueError(f"{entry.path} has no rows left by {selection}")


def _file_source(
    path: Path, entry: Entry, split: str | None, format: Format, separator: str
) -> Source:
    """Makes the source of a file or of a directory that save_to_disk wrote, by its suffix;
    ValueError for another kind of file, or for options that it cannot have."""
    name = str(path)
    for option, value in (("config", entry.config), ("revision", entry.revision)):
        if value is not None:
            raise ValueError(f"{path} is not on the hub: leave out {option}={value!r}")
    if path.is_dir():
        if not any((path / state).is_file() for state in ("state.json", "dataset_dict.json")):
            raise IsADirectoryError(f"{path} is a directory; {_describe_files(path)}")
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
    if suffix(name) in READERS:
        return READERS[suffix(name)](name, format)
    raise ValueError(f"{path}: data is read from {ACCEPTED_FILES}")


def _describe_files(folder: Path) -> str:
    """Says in a message which files below a folder could be named; the likeliest is the example."""
    ranks = {kind: i for i, kind in enumerate((".parquet", ".arrow", *READERS, ".txt"))}
    files = [file for file in folder.rglob("*") if suffix(file.name) in ranks]
    if not files:
        return f"it has no data, which is read from {ACCEPTED_FILES}"
    example = min(files, key=lambda file: (ranks[suffix(file.name)], file))
    return f"name its files, one by one or as a glob: {str(example)!r}"


def _hub_source(entry: Entry, split: str | None, format: Format, streaming: bool) -> Source:
    """Makes the source of a data set of the hub, whose name tells config and split too."""
    repository = entry.path.removeprefix(HUB)
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", repository):
        raise ValueError(f"{entry.path!r} is not {HUB}owner/name")
    split = split or "train"
    name = f"{entry.path}[{','.join(filter(None, (entry.config, split)))}]"
    return Table(name, format, "hub", split, entry.config, entry.revision, streaming)


def select_split(sources: Sequence[Source], split: Split) -> list[Source]:
    """Narrows the sources, end to end, to a slice that is rounded as in `datasets`."""
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
            begin, end = source.bounds(start, stop)
            selected.append(replace(source, start=begin, stop=end))
        if count is not None:
            start, stop = max(0, start - count), None if stop is None else max(0, stop - count)
    return selected


def select_fraction(sources: Sequence[Source], fraction: float, held_out: bool) -> list[Source]:
    """Narrow each source to its held-out rows or to its training rows; drop it if it has none."""
    parts = [replace(source, fraction=(fraction, held_out)) for source in sources]
    return [part for part in parts if next(part.rows(), None) is not None]
