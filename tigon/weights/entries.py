"""What a process writes of a checkpoint: its rows of each tensor, and the ranks that share them."""

import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tigon.weights.layout import (
    Layout,
    LocalShard,
    ShardLines,
    TensorSlice,
    covers_parameter,
    local_shard,
    slice_columns,
)

CHUNK = 16 << 20  # bytes that a thread converts, stages and writes at a time


class RowBlock(NamedTuple):
    """Rows of a checkpoint's tensor that this process writes.

    A row spans the last dimension: [E, N, D] has E * N rows. In a vector it is an element.
    """

    row: int  # the first, in the tensor
    rows: int
    # (first, count) -> these of its rows, on any device, in any dtype; called by any thread
    read: Callable[[int, int], Tensor]
    column: int = 0  # the first
    columns: int | None = None  # None: all


class TensorEntry(NamedTuple):
    """A tensor of the checkpoint, and the rows that this process writes."""

    name: str
    shape: Sequence[int]
    dtype: torch.dtype
    blocks: Sequence[RowBlock]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> "TensorEntry":
        """Makes an entry that writes the full tensor in its dtype."""
        tensor = tensor.detach()
        shape = tuple(tensor.shape)
        rows = tensor.reshape(row_count(shape), *shape[1:][-1:])
        block = RowBlock(0, len(rows), lambda first, count: rows.narrow(0, first, count))
        return cls(name, shape, tensor.dtype, [block])

    @property
    def nbytes(self) -> int:
        """The bytes of the full tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """The bytes of one full row, as RowBlock counts rows."""
        return math.prod(self.shape[1:][-1:]) * self.dtype.itemsize


def row_count(shape: Sequence[int]) -> int:
    """The number of rows of a tensor, as RowBlock counts them."""
    return math.prod(shape[:-1] if len(shape) > 1 else shape)


def row_chunks(rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields (first, count) of groups of rows of at most CHUNK bytes."""
    step = max(1, CHUNK // max(1, row_bytes))
    return ((first, min(step, rows - first)) for first in range(0, rows, step))


T = TypeVar("T")


class RankError(RuntimeError):
    """An error of another rank, which stops this one too."""


class WriterGroup:
    """The ranks that share a checkpoint: a process group, or this process without one."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        grouped = dist.is_initialized()
        self.rank = dist.get_rank(group) if grouped else 0
        self.size = dist.get_world_size(group) if grouped else 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank."""
        if self.size == 1:
            return [value]
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values  # type: ignore[return-value]

    @contextmanager
    def sync_errors(self) -> Iterator[None]:
        """Waits for all ranks at the end; an error of one rank inside is raised on all of them.

        Inside, no rank may wait for another.
        """
        fault: str | None = None
        try:
            yield
        except BaseException as error:
            fault = f"{type(error).__name__}: {error}"
            raise
        finally:
            faults = self.gather(fault)
        for rank, rank_fault in enumerate(faults):
            if rank_fault is not None:
                number = dist.get_process_group_ranks(self._group)[rank]  # of all ranks
                raise RankError(f"rank {number} stopped with {rank_fault}")


def check_shared(
    directory: Path, ranks: WriterGroup, sync_errors: Callable[[], AbstractContextManager[None]]
) -> None:
    """Raises OSError, on all ranks as `sync_errors` does, unless each can write to the directory
    that rank 0 sees under this name: a host may have a disk of its own there."""
    probe = directory / f".rank-{ranks.rank}-{secrets.token_hex(4)}"
    try:
        with sync_errors():
            try:
                probe.touch(exist_ok=False)
            except OSError as error:
                reason = error.strerror or str(error)
                raise OSError(f"{directory}, which all ranks write to: {reason}") from None
        first = ranks.gather(probe.name)[0]
        with sync_errors():
            if not (directory / first).exists():
                raise OSError(
                    f"{directory} is another directory on rank {ranks.rank} than on rank 0: all "
                    "hosts need the same one, on storage that they share"
                )
    finally:
        with suppress(OSError):
            probe.unlink()


def make_entries(
    parameters: Mapping[str, Tensor],
    layout: Layout,
    dtype: torch.dtype,
    *,
    values: Mapping[str, Tensor] | None = None,
    ranks: WriterGroup | None = None,
) -> list[TensorEntry]:
    """Makes an entry in `dtype` for every tensor that the parameters fill by the layout, with the
    rows and columns that this rank writes.

    Rows that several ranks have are shared out among them. `values`: tensors to write instead of
    this rank's memory of parameters, by name. Raises ValueError unless the slices of a parameter
    cover it exactly once.
    """
    ranks, values = ranks or WriterGroup(), values or {}
    shapes: dict[str, tuple[int, ...]] = {}
    tensor_blocks: dict[str, list[RowBlock]] = {}
    for name, p in parameters.items():
        if not covers_parameter(layout[name], p):
            raise ValueError(f"{name} is {list(p.shape)}, not filled by {layout[name]}")
        local = local_shard(name, p)
        if name in values:
            value = values[name].detach()
            memory = value.to_local() if isinstance(value, DTensor) else value
            local = local._replace(memory=memory)
        for part in layout[name]:
            shapes[part.name] = part.shape
            blocks = _blocks(part, local)
            replica, replicas = _replica(p, part, ranks)
            if replicas > 1:  # starts rotate over tensors, since most tensors are one chunk
                chunks = [chunk for block in blocks for chunk in _split_block(block, dtype)]
                blocks = chunks[(replica - len(shapes)) % replicas :: replicas]
            tensor_blocks.setdefault(part.name, []).extend(blocks)
    return [TensorEntry(name, shape, dtype, tensor_blocks[name]) for name, shape in shapes.items()]


def _replica(parameter: Tensor, part: TensorSlice, ranks: WriterGroup) -> tuple[int, int]:
    """The index of this rank among those that have the same rows, and their number."""
    if not isinstance(parameter, DTensor):
        return (ranks.rank, ranks.size) if part.replica is None else part.replica
    mesh, (number, count) = parameter.device_mesh, part.replica or (0, 1)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return 0, 0
    for dim, placement in enumerate(parameter.placements):
        if placement.is_replicate():
            number, count = number * mesh.size(dim) + coordinate[dim], count * mesh.size(dim)
    return number, count


def _blocks(part: TensorSlice, local: LocalShard) -> list[RowBlock]:
    """The blocks of a part that this rank has."""
    single = len(part.shape) < 2
    lines, blocks = ShardLines(local, single=single), []
    for source, target, length in part.lines(local.shape):
        for line, memory in lines.within(target, target + length):
            rows = memory.view(-1) if single else slice_columns(part, memory)
            columns = None if rows.shape[1:] == part.shape[1:][-1:] else rows.shape[1]
            column, read = part.column + lines.column, partial(rows.narrow, 0)
            blocks.append(RowBlock(source + line - target, len(rows), read, column, columns))
    return blocks


def _split_block(block: RowBlock, dtype: torch.dtype) -> Iterator[RowBlock]:
    """Yields a block in pieces of rows that fit the staging buffer."""
    row_bytes = block.read(0, 1).numel() * dtype.itemsize
    for first, count in row_chunks(block.rows, row_bytes):
        read = partial(block.read(first, count).narrow, 0)
        yield block._replace(row=block.row + first, rows=count, read=read)
