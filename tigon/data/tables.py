"""Data sets that the library `datasets` reads: .parquet, .arrow, saved by it, or of the hub."""

import glob
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tigon.data.formats import Row
from tigon.data.sources import Record, Source, check_columns
from tigon.settings.data import HUB
from tigon.utils.json import read_json

BATCH_ROWS = 256


@dataclass(frozen=True)
class Table(Source):
    """A data set that the library `datasets` reads: .parquet, .arrow, saved, or of the hub."""

    kind: str = "parquet"  # or arrow, saved, hub
    split: str = "train"
    config: str | None = None
    revision: str | None = None
    streaming: bool = False

    def read(self, start: int = 0) -> Iterator[tuple[int, Record]]:
        """Yields the rows from number `start` on, without nulls of structs; lines count from 1."""
        line = start + 1
        with _reader_errors(self.name):
            data = self.load()
            if start >= getattr(data, "num_rows", start + 1):
                return
            data = data.skip(start) if start else data
            for batch in data.with_format("arrow").iter(batch_size=BATCH_ROWS):
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
        # By default it reads as many rows at once as the first row group has, which may be none
        rows = {"batch_size": BATCH_ROWS} if self.kind == "parquet" else {}
        # As it comes: a copy in the library's cache would be kept for its name and time alone
        return load_dataset(
            self.kind, data_files=glob.escape(self.name), split="train", streaming=True, **rows
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
        """Split, config and revision of the data set, and of one of the hub the name."""
        return self.split, self.config, self.revision, self.name if self.kind == "hub" else ""

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


def saved_split(folder: Path) -> str:
    """The name of the one split in a directory; "train" if there are several or it has none."""
    state = folder / "state.json"
    name = read_json(state).get("_split") if state.is_file() else None
    return str(name).partition("[")[0] if name else "train"


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
    """Copy without the nulls that Arrow puts in structs for absent keys, at any depth."""
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
