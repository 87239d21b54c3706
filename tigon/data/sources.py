"""What `data` names: files, globs and data sets, as sources of rows."""

import glob
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tigon.data.blocks import Block, Rows, Source
from tigon.data.formats import Format
from tigon.data.lines import COMPRESSED, CsvFile, JsonFile, TextFile
from tigon.data.selection import parse_split, select_rows, select_split
from tigon.data.tables import (
    ArrowFile,
    HubDataset,
    ParquetFile,
    SavedDataset,
    is_saved,
    saved_split,
)
from tigon.utils.paths import check_file_name, expand_user

__all__ = ["Block", "Entry", "Rows", "Source", "find_sources"]

HUB = "hf://"
ACCEPTED = (
    ".jsonl, .json, .csv, .tsv and .txt files (each also .gz or .zst), .parquet and .arrow files, "
    f"directories written by datasets' save_to_disk, and data sets of the hub as {HUB}owner/name"
)


@dataclass(frozen=True)
class Entry:
    """One item of a list of data: a path, a glob, or a data set of the hub, hf://owner/name."""

    path: str
    weight: float | None = None  # its share of the examples drawn from all entries
    format: str | None = None  # of its rows, one of formats.KINDS; None: told from their keys
    columns: Mapping[str, str] = field(default_factory=dict)  # our name of a key -> theirs
    split: str | None = None  # or slices of splits, as in `datasets`; None: train. A file is train
    skip: int = 0  # rows at the start
    take: int | None = None  # rows after those; None: all
    config: str | None = None  # of a data set of the hub
    revision: str | None = None  # of a data set of the hub
    name: str | None = None  # of held-out data that is also measured on its own


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
        form = Format(entry.format, entry.columns or columns or {}, strict=bool(entry.columns))
        sources += _selected(entry, form, separator, streaming)
    return sources


def _selected(entry: Entry, form: Format, separator: str, streaming: bool) -> list[Source]:
    if entry.skip < 0 or (entry.take is not None and entry.take < 1):
        raise ValueError(
            f"{entry.path}: skip={entry.skip} and take={entry.take} must be numbers of rows, skip "
            "0 or more and take 1 or more"
        )
    splits = [None] if entry.split is None else parse_split(entry.split)
    chosen: list[Source] = []
    for split in splits:
        name = None if split is None else split.name
        if entry.path.startswith(HUB):
            sources = [_hub(entry, name, form, streaming)]
        else:
            sources = [_source(path, entry, name, form, separator) for path in _find(entry.path)]
        chosen += sources if split is None else select_split(sources, split)
    chosen = select_rows(
        chosen, entry.skip, None if entry.take is None else entry.skip + entry.take
    )
    if not chosen:
        options = {name: getattr(entry, name) for name in ("split", "skip", "take")}
        given = ", ".join(f"{k}={v!r}" for k, v in options.items() if v)
        raise ValueError(f"{entry.path} has no rows left by {given}")
    return chosen


def _find(pattern: str) -> list[Path]:
    path = expand_user(pattern)
    found = [path] if path.exists() else [Path(p) for p in glob.glob(str(path), recursive=True)]
    if not found:
        hint = ""
        if re.fullmatch(r"[\w.-]+/[\w.-]+", pattern) and not path.suffix:
            hint = f"; a data set of the hub is written {HUB}{pattern}"
        raise FileNotFoundError(f"no data file matches {pattern!r}{hint}")
    for path in found:
        check_file_name(str(path))
    return sorted(found)


def _source(path: Path, entry: Entry, split: str | None, form: Format, separator: str) -> Source:
    name = str(path)
    for option in ("config", "revision"):
        if (value := getattr(entry, option)) is not None:
            raise ValueError(
                f"{path} has no {option}: it is not on the hub, so leave out {option}={value!r}"
            )
    if path.is_dir():
        if not is_saved(path):
            raise IsADirectoryError(
                f"{path} is a directory; name its files, as in '{path}/*.jsonl'"
            )
        source = SavedDataset(name, form, split or saved_split(path))
        source.folder()
        return source
    if split not in (None, "train"):
        raise ValueError(
            f"{path} has no split {split!r}: a file's only split is 'train', as in `datasets`"
        )
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty")
    suffix = path.with_suffix("").suffix if path.suffix in COMPRESSED else path.suffix
    if suffix in (".jsonl", ".json"):
        return JsonFile(name, form)
    if suffix in (".csv", ".tsv"):
        return CsvFile(name, form)
    if suffix == ".txt":
        return TextFile(name, form, separator)
    if path.suffix == ".parquet":
        return ParquetFile(name, form)
    if path.suffix == ".arrow":
        return ArrowFile(name, form)
    raise ValueError(f"{path}: data is read from {ACCEPTED}")


def _hub(entry: Entry, split: str | None, form: Format, streaming: bool) -> Source:
    repository = entry.path.removeprefix(HUB)
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", repository):
        raise ValueError(f"{entry.path!r} is not {HUB}owner/name")
    split = split or "train"
    name = f"{entry.path}[{','.join(filter(None, (entry.config, split)))}]"
    return HubDataset(name, form, repository, split, entry.config, entry.revision, streaming)
