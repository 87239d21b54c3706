"""What `data` names: files, globs and data sets, as sources of rows."""

import glob
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tigon.data.blocks import Block, Rows, Source
from tigon.data.formats import Format
from tigon.data.lines import COMPRESSED, JsonFile, TextFile
from tigon.data.tables import ArrowFile, HubDataset, ParquetFile, SavedDataset, is_saved
from tigon.paths import expanded

__all__ = ["Block", "Entry", "Rows", "Source", "find_sources"]

HUB = "hf://"
ACCEPTED = (
    ".jsonl, .json and .txt files (each also .gz or .zst), .parquet and .arrow files, directories "
    f"written by datasets' save_to_disk, and data sets of the hub as {HUB}owner/name"
)


@dataclass(frozen=True)
class Entry:
    """One item of a list of data: a path, a glob, or a data set of the hub, hf://owner/name."""

    path: str
    weight: float | None = None  # its share of the examples drawn from all entries
    format: str | None = None  # of its rows, one of formats.KINDS; None: told from their keys
    columns: Mapping[str, str] = field(default_factory=dict)  # our name of a key -> theirs
    split: str | None = None  # of a data set; None: train
    config: str | None = None  # of a data set of the hub
    revision: str | None = None  # of a data set of the hub
    name: str | None = None  # of held-out data that is also measured on its own


def find_sources(
    entries: Sequence[Entry | str] | Entry | str, *, separator: str = "", streaming: bool = False
) -> list[Source]:
    """The sources of the entries, in the order given, a glob's files sorted; every one must exist.

    `separator` divides text files into documents; `streaming` reads the hub's data sets as they
    come, instead of downloading them first.
    """
    sources: list[Source] = []
    for entry in [entries] if isinstance(entries, Entry | str) else entries:
        entry = Entry(entry) if isinstance(entry, str) else entry
        form = Format(entry.format, entry.columns)
        if entry.path.startswith(HUB):
            sources.append(_hub(entry, form, streaming))
        else:
            sources += [_source(path, entry, form, separator) for path in _find(entry.path)]
    return sources


def _find(pattern: str) -> list[Path]:
    path = expanded(pattern)
    found = [path] if path.exists() else [Path(p) for p in glob.glob(str(path), recursive=True)]
    if not found:
        hint = ""
        if re.fullmatch(r"[\w.-]+/[\w.-]+", pattern) and not path.suffix:
            hint = f"; a data set of the hub is written {HUB}{pattern}"
        raise FileNotFoundError(f"no data file matches {pattern!r}{hint}")
    return sorted(found)


def _source(path: Path, entry: Entry, form: Format, separator: str) -> Source:
    name = str(path)
    if path.is_dir():
        if not is_saved(path):
            raise IsADirectoryError(
                f"{path} is a directory; name its files, as in '{path}/*.jsonl'"
            )
        source = SavedDataset(name, form, entry.split or "train")
        source.folder()
        return source
    options = {"split": entry.split, "config": entry.config, "revision": entry.revision}
    for option, value in options.items():
        if value is not None:
            raise ValueError(
                f"{path} has no {option}: it is a file, so leave out {option}={value!r}"
            )
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty")
    suffix = path.with_suffix("").suffix if path.suffix in COMPRESSED else path.suffix
    if suffix in (".jsonl", ".json"):
        return JsonFile(name, form)
    if suffix == ".txt":
        return TextFile(name, form, separator)
    if path.suffix == ".parquet":
        return ParquetFile(name, form)
    if path.suffix == ".arrow":
        return ArrowFile(name, form)
    raise ValueError(f"{path}: data is read from {ACCEPTED}")


def _hub(entry: Entry, form: Format, streaming: bool) -> Source:
    repository = entry.path.removeprefix(HUB)
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", repository):
        raise ValueError(f"{entry.path!r} is not {HUB}owner/name")
    split = entry.split or "train"
    name = f"{entry.path}[{','.join(filter(None, (entry.config, split)))}]"
    return HubDataset(name, form, repository, split, entry.config, entry.revision, streaming)
