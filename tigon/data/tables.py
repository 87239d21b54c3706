"""Parquet, Arrow and the data sets of the library `datasets`: batches of Arrow's tables."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tigon.data.blocks import SIZE, Block, Rows, Source, hash_files
from tigon.utils.json import quote, read_json

LARGEST_BATCH = 10_000  # rows; as many small ones are read together at most


@dataclass(frozen=True)
class TableBlock(Block):
    first: int  # row, from 1
    stream: bytes  # Arrow's IPC stream of one batch

    def rows(self) -> Rows:
        import pyarrow

        with pyarrow.ipc.open_stream(self.stream) as reader:
            table = reader.read_all()
        try:
            rows = table.to_pylist()
        except UnicodeDecodeError:
            rows = [_row(table, i) for i in range(table.num_rows)]
        for line, row in enumerate(rows, self.first):
            yield line, _present(row)

    def content(self) -> bytes:
        return self.stream


@dataclass(frozen=True)
class Tables(Source):
    """A table in batches of any size."""

    def batches(self) -> Iterator[Any]:
        """pyarrow.RecordBatch or pyarrow.Table, in order."""
        raise NotImplementedError

    def blocks(self) -> Iterator[Block]:
        first = 1
        for batch in self.batches():
            columns = Counter(batch.schema.names)
            if twice := [column for column, count in columns.items() if count > 1]:
                raise ValueError(f"{self.name} has the column {quote(twice[0])} twice: remove one")
            step = max(1, int(batch.num_rows * SIZE / max(batch.nbytes, 1)))
            for start in range(0, batch.num_rows, step):
                part = batch.slice(start, step)
                yield TableBlock(self.name, self.format, first, _stream(part))
                first += part.num_rows


@dataclass(frozen=True)
class ParquetFile(Tables):
    def batches(self) -> Iterator[Any]:
        with _reading(self.name):
            from pyarrow.parquet import ParquetFile as Reader

            with Reader(self.name, memory_map=True) as reader:
                yield from reader.iter_batches(batch_size=_batch_size(reader.metadata))

    def count(self) -> int:
        with _reading(self.name):
            from pyarrow.parquet import read_metadata

            return read_metadata(self.name).num_rows

    def digest(self) -> str:
        return hash_files([Path(self.name)], "parquet", str(self.format))


@dataclass(frozen=True)
class ArrowFile(Tables):
    """Arrow's file format, or its stream format, which `datasets` writes."""

    def batches(self) -> Iterator[Any]:
        with _reading(self.name):
            import pyarrow

            with pyarrow.memory_map(self.name) as file:
                try:
                    reader = pyarrow.ipc.open_file(file)
                except pyarrow.ArrowInvalid:
                    file.seek(0)
                    reader = pyarrow.ipc.open_stream(file)
                    yield from reader
                else:
                    yield from map(reader.get_batch, range(reader.num_record_batches))

    def digest(self) -> str:
        return hash_files([Path(self.name)], "arrow", str(self.format))


@dataclass(frozen=True)
class SavedDataset(Tables):
    """A directory written by `save_to_disk`, of a data set or of one for each split."""

    split: str = "train"

    def batches(self) -> Iterator[Any]:
        with _reading(self.name):
            from datasets import load_from_disk

            yield from _dataset_batches(load_from_disk(str(self.folder())))

    def count(self) -> int:
        with _reading(self.name):
            from datasets import load_from_disk

            return len(load_from_disk(str(self.folder())))

    def digest(self) -> str:
        folder = self.folder()
        files = sorted(path for path in folder.rglob("*") if path.suffix in (".arrow", ".json"))
        return hash_files(files, "saved", str(self.format))

    def folder(self) -> Path:
        """The split's; ValueError if there is none."""
        folder = Path(self.name)
        if not (folder / "dataset_dict.json").is_file():
            saved = saved_split(folder)
            if self.split != saved:
                raise ValueError(
                    f"{self.name} has no split {self.split!r}: it was saved as the one split "
                    f"{saved!r}"
                )
            return folder
        splits = sorted(path.name for path in folder.iterdir() if path.is_dir())
        if self.split not in splits:
            raise ValueError(f"{self.name} has no split {self.split!r}: there are {splits}")
        return folder / self.split


@dataclass(frozen=True)
class HubDataset(Tables):
    """A split of a data set of the hub, downloaded as `datasets` does, or streamed."""

    repository: str
    split: str = "train"
    config: str | None = None
    revision: str | None = None
    streaming: bool = False

    def batches(self) -> Iterator[Any]:
        with _reading(self.name):
            yield from _dataset_batches(self._load())

    def digest(self) -> str:
        where = self.repository, self.split, self.config, self.revision, str(self.format)
        if self.streaming:  # the content is not here to be read
            return hash_files([], "hub", *where)
        with _reading(self.name):
            files = [Path(file["filename"]) for file in self._load().cache_files]
        return hash_files(files, "hub", *where)

    def count(self) -> int | None:
        if self.streaming:
            return None
        with _reading(self.name):
            return len(self._load())

    def _load(self) -> Any:
        from datasets import load_dataset

        return load_dataset(
            self.repository,
            self.config,
            split=self.split,
            revision=self.revision,
            streaming=self.streaming,
        )


def is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` wrote this directory."""
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def saved_split(folder: Path) -> str:
    """The name of the one split in a directory; "train" if there are several or it has none."""
    state = folder / "state.json"
    name = read_json(state).get("_split") if state.is_file() else None
    return str(name).partition("[")[0] if name else "train"


def _dataset_batches(dataset: Any) -> Iterator[Any]:
    yield from dataset.with_format("arrow").iter(batch_size=1000)


def _batch_size(metadata: Any) -> int:
    """Rows of about SIZE bytes."""
    size = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    return min(max(1, metadata.num_rows * SIZE // max(size, 1)), LARGEST_BATCH)


def _stream(batch: Any) -> bytes:
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, batch.schema) as writer:
        writer.write(batch)
    return sink.getvalue().to_pybytes()


def _row(table: Any, i: int) -> dict[str, Any] | ValueError:
    try:
        row: dict[str, Any] = table.slice(i, 1).to_pylist()[0]
    except UnicodeDecodeError as error:
        return ValueError(f"is not UTF-8 text: {error}")
    return row


def _present(value: Any) -> Any:
    """Without the nulls that Arrow gives a struct for the keys that it does not have."""
    if isinstance(value, dict):
        return {key: _present(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_present(item) for item in value]
    return value


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """ImportError that says what to install, ValueError that names what cannot be read."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{name} needs pip install 'tigon[data]': {error}") from None
    except Exception as error:
        # pyarrow, datasets and huggingface_hub raise many kinds
        raise ValueError(f"{name} cannot be read: {error}") from error
