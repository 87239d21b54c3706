"""Writes safetensors checkpoints: every process its own rows, with several threads.

The files get their headers and sizes first; then all rows are written at their offsets, in any
order, through buffers of at most CHUNK bytes a thread.
"""

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor

from tigon.utils.memory import count_cpus
from tigon.utils.paths import fsync
from tigon.weights.entries import (
    RowBlock,
    TensorEntry,
    WriterGroup,
    check_shared,
    row_chunks,
    row_count,
)
from tigon.weights.header import TAGS, write_header
from tigon.weights.layout import covers_tensor
from tigon.weights.read import parallel_for


@torch.no_grad()
def all_finite(
    tensors: Iterable[Tensor], device: torch.device, *, most: float = math.inf
) -> Tensor:
    """A boolean tensor on `device`: whether no tensor has NaN, infinity, or a magnitude above
    `most`. Makes no copy of a floating tensor."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    good = [torch.ones((), dtype=torch.bool, device=device)]
    for group in groups.values():
        if group[0].device.type == "cpu":  # the norm takes six times as long there
            largest = torch.stack([torch.maximum(-x, y) for x, y in map(torch.aminmax, group)])
        else:
            largest = torch.stack(torch._foreach_norm(group, math.inf))
        fits = torch.isfinite(largest) & (largest <= most)
        good.append(fits.all().to(device))
    return torch.stack(good).all()


class StagingBuffer:
    """The host buffer of one thread, which turns rows of any dtype and device into bytes."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def __call__(self, rows: Tensor, dtype: torch.dtype) -> memoryview:
        """The rows' bytes in `dtype`, row-major; overwrites the bytes of the previous call."""
        if rows.is_cuda:
            return self._from_gpu(rows, dtype)
        if rows.dtype == dtype and rows.is_contiguous():
            return rows.view(-1).view(torch.uint8).numpy().data
        staged = self._room(rows.numel() * dtype.itemsize, pinned=False)
        staged.view(dtype).view(rows.shape).copy_(rows)
        return staged.numpy().data

    def _from_gpu(self, rows: Tensor, dtype: torch.dtype) -> memoryview:
        """Converts rows on the GPU and copies them to the host."""
        if rows.device not in self._streams:
            torch.cuda.synchronize(rows.device)  # queued kernels may still change the rows
            self._streams[rows.device] = torch.cuda.Stream(rows.device)
        stream = self._streams[rows.device]
        # The device too, or leaving the stream would make a context on this thread's, the first GPU
        with torch.cuda.device(rows.device), torch.cuda.stream(stream):
            # Convert on the GPU: copy_ would do it on the host, unpinned
            converted = rows.to(dtype).contiguous().view(-1).view(torch.uint8)
            staged = self._room(converted.numel(), pinned=True)
            staged.copy_(converted, non_blocking=True)
        stream.synchronize()
        return staged.numpy().data

    def _room(self, nbytes: int, *, pinned: bool) -> Tensor:
        """The first `nbytes` bytes of the buffer, which is replaced if too small or not pinned."""
        if len(self._buffer) < nbytes or (pinned and not self._buffer.is_pinned()):
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned, device="cpu")
        return self._buffer[:nbytes]


# Writing

WORKERS = min(8, count_cpus())
PT = MappingProxyType({"format": "pt"})
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])B", re.IGNORECASE)


def write_checkpoint(
    directory: str | os.PathLike[str] | None,
    tensors: Iterable[TensorEntry],
    *,
    max_shard_size: int | str = "5GB",
    stem: str = "model",
    ranks: WriterGroup | None = None,
) -> None:
    """Write STEM.safetensors, or shards and their index, split and named as in transformers.

    In a process group all ranks call this with entries of equal names, shapes and dtypes, each with
    its own blocks; the first rank passes the directory, which all must see. An error on one rank
    stops all and removes the files. Raises ValueError unless all blocks cover each row once.
    """
    ranks = ranks or WriterGroup()
    with ranks.sync_errors():
        shards = _shards(tensors, max_shard_size, stem)
        files = [_File(name, entries) for name, entries in shards.items()]
    _check_blocks(shards, ranks)
    created: list[Path] = []
    try:
        with ranks.sync_errors():
            if ranks.first:
                assert directory is not None, "the first rank needs the directory"
                for file in files:
                    file.create(Path(directory), created)
                if len(files) > 1:
                    _write_index(Path(directory, f"{stem}.safetensors.index.json"), shards, created)
        root = Path(ranks.gather(os.path.abspath(directory or ""))[0])
        if ranks.size > 1:
            check_shared(root, ranks, ranks.sync_errors)
        # Ranks begin with different files, since writes into one wait for each other
        start = ranks.rank * len(files) // ranks.size
        with ranks.sync_errors():
            _write(root, files[start:] + files[:start])
    except BaseException:
        for path in created:
            with suppress(OSError):
                path.unlink()
        raise


def _parse_size(size: int | str) -> int:
    """Returns the bytes of a size such as "2GB", or of digits, as a command line has them."""
    if isinstance(size, str) and re.fullmatch("[0-9]{1,18}", size):
        size = int(size)
    match = SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    count = int(float(match[1]) * 1000 ** (1 + "KMGT".index(match[2].upper()))) if match else size
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(
            f"max_shard_size={size!r} is not a size: give a text such as '5GB' or '500MB', or a "
            "whole number of bytes"
        )
    return count


def _shards(
    tensors: Iterable[TensorEntry], max_shard_size: int | str, stem: str
) -> dict[str, list[TensorEntry]]:
    """Maps each file name to its entries, in the order of the safetensors library; raises
    ValueError for a name given twice or a dtype that files cannot hold."""
    entries: dict[str, TensorEntry] = {}
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
        max_shard_size=_parse_size(max_shard_size),
    )
    rank = {dtype: -i for i, dtype in enumerate(TAGS)}
    return {
        file: sorted((entries[name] for name in names), key=lambda e: (rank[e.dtype], e.name))
        for file, names in split.filename_to_tensors.items()
    }


def _check_blocks(shards: Mapping[str, list[TensorEntry]], ranks: WriterGroup) -> None:
    """Raises ValueError, on every rank, unless the ranks write each row of each tensor once."""
    entries = [entry for shard in shards.values() for entry in shard]
    described = [(file, [tuple(e[:3]) for e in shard]) for file, shard in shards.items()]
    widths = [math.prod(entry.shape[1:][-1:]) for entry in entries]
    spans = [
        [((b.row, b.rows), (b.column, b.columns or width)) for b in entry.blocks if b.rows]
        for entry, width in zip(entries, widths, strict=True)
    ]
    gathered = ranks.gather((repr(described), spans))
    with ranks.sync_errors():
        for rank, (other, _) in enumerate(gathered):
            if other != gathered[0][0]:
                raise ValueError(f"rank {rank} and rank 0 do not write the same tensors")
        for i, entry in enumerate(entries):
            blocks = [block for _, rank_spans in gathered for block in rank_spans[i]]
            if entry.nbytes and not covers_tensor(blocks, (row_count(entry.shape), widths[i])):
                raise ValueError(
                    f"{entry.name} {list(entry.shape)} cannot be written: there are "
                    f"{sorted({rows for rows, _ in blocks})} of its rows (first, number), "
                    "not each row once"
                )


@dataclass(frozen=True)
class _Job:
    """Consecutive rows, of at most CHUNK bytes unless it is one row."""

    file: str
    offset: int  # of the first byte in the file
    entry: TensorEntry
    block: RowBlock
    first: int  # in the block
    count: int

    def write(self, descriptor: int, content: memoryview) -> None:
        """Writes the bytes of the rows, one by one if they have only some of the columns."""
        if self.block.columns is None:
            _pwrite(descriptor, content, self.offset)
            return
        size = self.block.columns * self.entry.dtype.itemsize
        for i in range(self.count):
            row = content[i * size : (i + 1) * size]
            _pwrite(descriptor, row, self.offset + i * self.entry.row_bytes)


class _File:
    """A file of the checkpoint: its header and size, and the jobs of this process."""

    def __init__(self, name: str, entries: list[TensorEntry]) -> None:
        self.name = name
        self.header = write_header([entry[:3] for entry in entries], PT)
        self.size, self.jobs = len(self.header), list[_Job]()
        for entry in entries:
            for block in entry.blocks if entry.nbytes else ():
                column = self.size + block.column * entry.dtype.itemsize
                for first, count in row_chunks(block.rows, entry.row_bytes):
                    offset = column + (block.row + first) * entry.row_bytes
                    self.jobs.append(_Job(name, offset, entry, block, first, count))
            self.size += entry.nbytes

    def create(self, root: Path, created: list[Path]) -> None:
        """Creates the file with its header and its size, and appends its path to `created`."""
        path = root / self.name
        with open(path, "xb") as file:
            created.append(path)
            file.write(self.header)
            file.truncate(self.size)
        if not self.jobs:
            fsync(path)


def _write(root: Path, files: list[_File]) -> None:
    """Runs this process's jobs, on as many files at once as there are threads, and flushes all."""
    jobs: list[_Job] = []
    for i in range(0, len(files), WORKERS):
        turns = zip_longest(*(file.jobs for file in files[i : i + WORKERS]))
        jobs += [job for turn in turns for job in turn if job is not None]
    descriptors: dict[str, int] = {}

    def write(job: _Job, stage: StagingBuffer) -> None:
        job.write(descriptors[job.file], stage(_rows(job), job.entry.dtype))

    try:
        for file in files:
            if file.jobs:
                descriptors[file.name] = os.open(root / file.name, os.O_WRONLY)
        parallel_for(jobs, write, lambda: nullcontext(StagingBuffer()), WORKERS)
        parallel_for(descriptors.values(), lambda fd, _: os.fsync(fd), nullcontext, WORKERS)
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


def copy_to_host(tensors: Iterable[TensorEntry]) -> list[TensorEntry]:
    """The same entries, with copies in host memory of all rows that this process writes."""
    entries, jobs = [], []
    for entry in tensors:
        blocks = []
        for block in entry.blocks:
            columns = entry.shape[1:][-1:] if block.columns is None else [block.columns]
            copy = torch.empty(block.rows, *columns, dtype=entry.dtype, device="cpu")
            blocks.append(block._replace(read=partial(copy.narrow, 0)))
            jobs += [(block, copy, *job) for job in row_chunks(block.rows, entry.row_bytes)]
        entries.append(entry._replace(blocks=blocks))

    def fill(job: tuple[RowBlock, Tensor, int, int], stage: StagingBuffer) -> None:
        block, copy, first, count = job
        content = stage(block.read(first, count).detach(), copy.dtype)
        copy[first : first + count].view(-1).view(torch.uint8).numpy().data[:] = content

    parallel_for(jobs, fill, lambda: nullcontext(StagingBuffer()), WORKERS)
    return entries


def _rows(job: _Job) -> Tensor:
    """Reads a job's rows; raises ValueError unless they have the shape of the entry."""
    entry, rows = job.entry, job.block.read(job.first, job.count)
    columns = entry.shape[1:][-1:] if job.block.columns is None else [job.block.columns]
    if rows.shape != (job.count, *columns):
        raise ValueError(
            f"tensor {entry.name!r} was announced as {list(entry.shape)}, and {job.count} rows of "
            f"it came as {list(rows.shape)}"
        )
    return rows.detach()


def _pwrite(descriptor: int, content: memoryview, offset: int) -> None:
    """Writes all of the content at an offset."""
    while content:
        count = os.pwrite(descriptor, content, offset)
        content, offset = content[count:], offset + count


def _write_index(path: Path, shards: dict[str, list[TensorEntry]], created: list[Path]) -> None:
    """Writes the index that maps each tensor to its shard, and appends its path to `created`."""
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
