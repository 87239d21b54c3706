"""Writes safetensors checkpoints: every process its own rows, several threads at once.

The files get their headers and their sizes first; then all rows are written at their places, in any
order, through buffers of at most CHUNK bytes a thread.
"""

import json
import math
import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor

from tigon.weights.directory import fsync
from tigon.weights.header import TAGS, write_header
from tigon.weights.layout import tiles
from tigon.weights.pieces import Entry, Piece, cut, height
from tigon.weights.staging import Stage
from tigon.weights.threads import spread
from tigon.weights.writers import Writers

WORKERS = min(8, os.cpu_count() or 1)
PT = MappingProxyType({"format": "pt"})
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])B", re.IGNORECASE)


def write_checkpoint(
    directory: str | os.PathLike[str] | None,
    tensors: Iterable[Entry],
    *,
    max_shard_size: int | str = "5GB",
    stem: str = "model",
    metadata: Mapping[str, str] = PT,
    ranks: Writers | None = None,
    workers: int | None = None,
) -> None:
    """Writes STEM.safetensors, or shards and their index, split and named as transformers does.

    In a process group all ranks call it with entries of the same names, shapes and dtypes, each
    with its own pieces, and the first one with the directory, which all must be able to see. What
    stops one rank stops all of them, and leaves none of the files. Raises ValueError unless the
    pieces of all ranks are every row once.
    """
    ranks = ranks or Writers()
    with ranks.together():
        shards = _shards(tensors, max_shard_size, stem)
        files = [_File(name, entries, metadata) for name, entries in shards.items()]
    _check_pieces(shards, ranks)
    created: list[Path] = []
    try:
        with ranks.together():
            if ranks.first:
                assert directory is not None, "the first rank needs the directory"
                for file in files:
                    file.create(Path(directory), created)
                if len(files) > 1:
                    _write_index(Path(directory, f"{stem}.safetensors.index.json"), shards, created)
        root = _seen_by_all(directory, ranks)
        # Not all ranks begin with the same file: writes into one wait for each other
        start = ranks.rank * len(files) // ranks.size
        with ranks.together():
            _write(root, files[start:] + files[:start], workers or WORKERS)
    except BaseException:
        for path in created:
            with suppress(OSError):
                path.unlink()
        raise


def _most_bytes(size: int | str) -> int:
    found = SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    count = int(float(found[1]) * 1000 ** (1 + "KMGT".index(found[2].upper()))) if found else size
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(
            f"max_shard_size={size!r} is no size: give a text such as '5GB' or '500MB', or a whole "
            "number of bytes"
        )
    return count


def _shards(
    tensors: Iterable[Entry], max_shard_size: int | str, stem: str
) -> dict[str, list[Entry]]:
    """File name -> its entries in the order the safetensors library gives them in a file."""
    entries: dict[str, Entry] = {}
    for entry in tensors:
        if entry.name in entries:
            raise ValueError(f"tensor {entry.name!r} is given twice")
        if entry.dtype not in TAGS:
            raise ValueError(
                f"tensor {entry.name!r} is {entry.dtype}, which safetensors files cannot hold"
            )
        entries[entry.name] = entry
    split = split_state_dict_into_shards_factory(
        entries,
        get_storage_size=lambda entry: entry.nbytes,
        filename_pattern=stem + "{suffix}.safetensors",
        max_shard_size=_most_bytes(max_shard_size),
    )
    return {
        file: sorted((entries[name] for name in names), key=_place)
        for file, names in split.filename_to_tensors.items()
    }


def _place(entry: Entry) -> tuple[int, str]:
    return -list(TAGS).index(entry.dtype), entry.name


def _check_pieces(shards: Mapping[str, list[Entry]], ranks: Writers) -> None:
    """Raises ValueError, on every rank, unless all rows of all tensors are there once."""
    entries = [entry for shard in shards.values() for entry in shard]
    described = [(file, [tuple(e[:3]) for e in shard]) for file, shard in shards.items()]
    spans = [[(p.column, p.columns, p.row, p.rows) for p in e.pieces if p.rows] for e in entries]
    everywhere = ranks.gather((repr(described), spans))
    with ranks.together():
        for rank, (other, _) in enumerate(everywhere):
            if other != everywhere[0][0]:
                raise ValueError(f"rank {rank} and rank 0 do not write the same tensors")
        for i, entry in enumerate(entries):
            found = [span for _, of_rank in everywhere for span in of_rank[i]]
            if entry.nbytes and not _whole(entry, found):
                raise ValueError(
                    f"{entry.name} {list(entry.shape)} cannot be written: there are "
                    f"{sorted({span[2:] for span in found})} of its rows (first, number), "
                    "not each row once"
                )


def _whole(entry: Entry, found: Sequence[tuple[int, int | None, int, int]]) -> bool:
    """Whether blocks (column, columns, row, rows) are each element once."""
    width = math.prod(entry.shape[1:][-1:])
    stripes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for column, columns, row, rows in found:
        stripes.setdefault((column, columns or width), []).append((row, rows))
    high = height(entry.shape)
    return tiles(list(stripes), width) and all(tiles(rows, high) for rows in stripes.values())


def _seen_by_all(directory: str | os.PathLike[str] | None, ranks: Writers) -> Path:
    """The first rank's directory, if every rank sees it."""
    if ranks.size == 1:
        assert directory is not None
        return Path(directory)
    token = os.urandom(16).hex() if ranks.first else ""
    mark = Path(directory).resolve() / f".{token}" if ranks.first else None  # type: ignore[arg-type]
    with ranks.together():
        if mark is not None:
            mark.write_text(token)
    path, token = ranks.gather((mark, token))[0]
    assert path is not None
    try:
        with ranks.together():
            if not path.is_file() or path.read_text() != token:
                raise OSError(
                    f"rank {ranks.rank} does not see {path.parent}, which rank 0 has made: every "
                    "rank writes its own rows, so all need one file system; choose a directory on "
                    "a shared one"
                )
    finally:
        if mark is not None:
            mark.unlink()
    return path.parent


@dataclass(frozen=True)
class _Job:
    """Consecutive rows, of at most CHUNK bytes unless it is one row."""

    file: "_File"
    entry: Entry
    piece: Piece
    first: int  # of the piece
    count: int

    @property
    def offset(self) -> int:
        row = self.piece.row + self.first
        column = self.piece.column * self.entry.dtype.itemsize
        return self.file.offsets[self.entry.name] + row * self.entry.row_bytes + column

    def write(self, descriptor: int, content: memoryview) -> None:
        """Columns alone lie apart in the file."""
        if self.piece.columns is None:
            _pwrite(descriptor, content, self.offset)
            return
        size = self.piece.columns * self.entry.dtype.itemsize
        for i in range(self.count):
            row = content[i * size : (i + 1) * size]
            _pwrite(descriptor, row, self.offset + i * self.entry.row_bytes)


class _File:
    """A file of the checkpoint: where its tensors are, and what this process writes."""

    def __init__(self, name: str, entries: list[Entry], metadata: Mapping[str, str]) -> None:
        self.name = name
        self.header = write_header([entry[:3] for entry in entries], metadata)
        self.offsets: dict[str, int] = {}
        end = len(self.header)
        for entry in entries:
            self.offsets[entry.name] = end
            end += entry.nbytes
        self.size = end
        self.jobs = [
            _Job(self, entry, piece, first, count)
            for entry in entries
            if entry.nbytes
            for piece in entry.pieces
            for first, count in cut(piece.rows, entry.row_bytes)
        ]
        self._lock, self._left, self._descriptor = threading.Lock(), len(self.jobs), -1

    def create(self, root: Path, created: list[Path]) -> None:
        """With its header and its size."""
        path = root / self.name
        with open(path, "xb") as file:
            created.append(path)
            file.write(self.header)
            file.truncate(self.size)
        if not self.jobs:
            fsync(path)

    def open(self, root: Path) -> int:
        """A descriptor that all threads of this process share."""
        with self._lock:
            if self._descriptor < 0:
                self._descriptor = os.open(root / self.name, os.O_WRONLY)
            return self._descriptor

    def done(self) -> None:
        """One job more is; after the last one all is on the disk."""
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            os.fsync(self._descriptor)
            self.close()

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _write(root: Path, files: list[_File], workers: int) -> None:
    """What this process writes of all files; as many files at a time as there are threads."""
    jobs: list[_Job] = []
    for i in range(0, len(files), workers):
        turns = zip_longest(*(file.jobs for file in files[i : i + workers]))
        jobs += [job for turn in turns for job in turn if job is not None]

    def write(job: _Job, stage: Stage) -> None:
        job.write(job.file.open(root), stage(_rows(job), job.entry.dtype))
        job.file.done()

    try:
        spread(jobs, write, _stage, workers)
    finally:
        for file in files:
            file.close()


def copied(tensors: Iterable[Entry], workers: int | None = None) -> list[Entry]:
    """The same with all that this process writes of them in host memory, in their dtypes."""
    entries, jobs = [], []
    for entry in tensors:
        pieces = []
        for piece in entry.pieces:
            columns = entry.shape[1:][-1:] if piece.columns is None else [piece.columns]
            copy = torch.empty(piece.rows, *columns, dtype=entry.dtype)
            pieces.append(piece._replace(read=partial(copy.narrow, 0)))
            jobs += [(piece, copy, *job) for job in cut(piece.rows, entry.row_bytes)]
        entries.append(entry._replace(pieces=pieces))

    def fill(job: tuple[Piece, Tensor, int, int], stage: Stage) -> None:
        piece, copy, first, count = job
        content = stage(piece.read(first, count).detach(), copy.dtype)
        copy[first : first + count].view(-1).view(torch.uint8).numpy().data[:] = content

    spread(jobs, fill, _stage, workers or WORKERS)
    return entries


def _stage() -> AbstractContextManager[Stage]:
    return nullcontext(Stage())


def _rows(job: _Job) -> Tensor:
    entry, rows = job.entry, job.piece.read(job.first, job.count)
    columns = entry.shape[1:][-1:] if job.piece.columns is None else [job.piece.columns]
    if rows.shape != (job.count, *columns):
        raise ValueError(
            f"tensor {entry.name!r} was announced as {list(entry.shape)}, and {job.count} rows of "
            f"it came as {list(rows.shape)}"
        )
    return rows.detach()


def _pwrite(descriptor: int, content: memoryview, offset: int) -> None:
    while content:
        count = os.pwrite(descriptor, content, offset)
        content, offset = content[count:], offset + count


def _write_index(path: Path, shards: dict[str, list[Entry]], created: list[Path]) -> None:
    entries = [entry for shard in shards.values() for entry in shard]
    index = {
        "metadata": {
            "total_parameters": sum(math.prod(entry.shape) for entry in entries),
            "total_size": sum(entry.nbytes for entry in entries),
        },
        "weight_map": {entry.name: file for file, shard in shards.items() for entry in shard},
    }
    with open(path, "x") as file:
        created.append(path)
        file.write(json.dumps(index, indent=2, sort_keys=True) + "\n")
    fsync(path)
