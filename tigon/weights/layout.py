"""Maps parameters to rows of a checkpoint's tensors, and to what each rank has of them."""

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from tigon.weights.decoded import DecodedTensor
from tigon.weights.header import TensorInfo
from tigon.weights.read import Reader, ReadSpan

Span = tuple[int, int]  # the first row or column, and how many


class RowSpan(NamedTuple):
    """Maps `length` rows of a tensor from `source` on to those of a parameter from `target` on."""

    source: int
    target: int
    length: int


class ReplicaIndex(NamedTuple):
    """The index of this rank among the tensor ranks that have the same rows."""

    number: int = 0
    total: int = 1


@dataclass(frozen=True)
class TensorSlice:
    """The part of a checkpoint's tensor that a parameter has.

    A shard of a packed projection [gate; up] has two spans of its rows: one of gate, one of up.
    Rows of a parameter with one dimension more, [E, N, D], are those of its flattening [E * N, D].
    Under tensor parallelism a parameter may have only a part of each row, and then several
    TensorSlices of one tensor.
    """

    name: str
    shape: tuple[int, ...]  # of the full tensor
    rows: tuple[RowSpan, ...]
    inner: tuple[RowSpan, ...] = ()  # of each dimension after the first; (): full rows
    replica: ReplicaIndex | None = None  # None: there is no tensor parallelism

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...], target: int = 0) -> "TensorSlice":
        """All rows of the tensor, from row `target` of the parameter on."""
        return cls(name, shape, (RowSpan(0, target, shape[0] if shape else 1),))

    @property
    def inner_spans(self) -> tuple[RowSpan, ...]:
        """The span of each dimension after the first: `inner`, or all of these dimensions."""
        return self.inner or tuple(RowSpan(0, 0, size) for size in self.shape[1:])

    @property
    def column(self) -> int:
        """The first column of the tensor that the parameter has."""
        return self.inner[-1].source if self.inner else 0

    def lines(self, shape: Sequence[int]) -> Iterator[RowSpan]:
        """Yields spans of rows as lines, rows of the last dimension; `shape`: the parameter's."""
        middle, sizes = self.inner_spans[:-1], self.shape[1:-1]
        if not middle or (middle == (RowSpan(0, 0, sizes[0]),) and shape[-2] == sizes[0]):
            per_row = math.prod(sizes)
            for rows in self.rows:
                yield RowSpan(*(per_row * n for n in rows))
            return
        (span,) = middle
        tensor_lines, parameter_lines = self.shape[1], shape[-2]
        for source, target, length in self.rows:
            for i in range(length):
                at = (
                    (source + i) * tensor_lines + span.source,
                    (target + i) * parameter_lines + span.target,
                )
                yield RowSpan(*at, span.length)


Layout = dict[str, tuple[TensorSlice, ...]]  # parameter name -> slices of tensors


@dataclass(frozen=True)
class ShardSpec:
    """The pieces of a parameter that this rank has under tensor or expert parallelism."""

    shape: tuple[int, ...]  # of the full parameter
    dim: int
    pieces: tuple[tuple[RowSpan, ReplicaIndex], ...]

    @property
    def length(self) -> int:
        """The size of this rank's shard in dimension `dim`."""
        return sum(rows.length for rows, _ in self.pieces)

    def take(self, whole: Tensor) -> Tensor:
        """Copies this rank's shard of the full parameter."""
        return torch.cat(
            [whole.narrow(self.dim, r.source, r.length) for r, _ in self.pieces], self.dim
        )


def shard_slices(parts: Sequence[TensorSlice], spec: ShardSpec) -> tuple[TensorSlice, ...]:
    """The parts of this rank's shard, from those of the full parameter."""
    return tuple(new for part in parts for new in _shard_slice(part, spec))


def _shard_slice(part: TensorSlice, spec: ShardSpec) -> Iterator[TensorSlice]:
    """Yields the slices of a part that a shard has."""
    lead = len(spec.shape) - len(part.shape[1:])  # number of dimensions that make up a row index
    if spec.dim >= lead:
        for rows, replica in spec.pieces:
            spans = list(part.inner_spans)
            spans[spec.dim - lead] = rows
            yield replace(part, inner=tuple(spans), replica=replica)
        return
    spans_by_replica: dict[ReplicaIndex, list[RowSpan]] = {}
    inner = math.prod(spec.shape[spec.dim + 1 : lead])  # rows for each index of the dimension
    size = spec.shape[spec.dim] * inner
    for source, target, length in part.rows:
        for outer in range(target // size, -(-(target + length) // size)):
            for piece, replica in spec.pieces:
                begin = outer * size + piece.source * inner
                first = max(target, begin)
                end = min(target + length, begin + piece.length * inner)
                if first < end:
                    at = (outer * spec.length + piece.target) * inner + first - begin
                    rows = RowSpan(source + first - target, at, end - first)
                    spans_by_replica.setdefault(replica, []).append(rows)
    for replica, spans in (spans_by_replica or {ReplicaIndex(): []}).items():
        yield replace(part, rows=tuple(spans), replica=replica)


def covers_parameter(parts: Sequence[TensorSlice], parameter: Tensor) -> bool:
    """Whether the parts cover every element of the parameter once, within their tensors."""
    dims = len(parts[0].shape[1:])
    lead = parameter.dim() - dims
    blocks: list[list[Span]] = []
    for part in parts:
        if len(part.shape[1:]) != dims:
            return False
        height = part.shape[0] if part.shape else 1
        bounds = [(rows, height) for rows in part.rows]
        bounds += zip(part.inner_spans, part.shape[1:], strict=True)
        if any(s.source < 0 or s.source + s.length > size for s, size in bounds):
            return False
        inner = [(s.target, s.length) for s in part.inner_spans]
        blocks += [[(rows.target, rows.length), *inner] for rows in part.rows]
    return covers_tensor(blocks, (math.prod(parameter.shape[:lead]), *parameter.shape[lead:]))


def covers_tensor(blocks: Iterable[Sequence[Span]], shape: Sequence[int]) -> bool:
    """Whether blocks, each with a span of every dimension, cover each element of a tensor once.

    Only one of the dimensions after the first may be divided.
    """
    rows: dict[tuple[Span, ...], list[Span]] = {}
    for first, *inner in blocks:
        rows.setdefault(tuple(inner), []).append(first)
    if not rows:
        return 0 in shape
    dims = [list(dict.fromkeys(spans)) for spans in zip(*rows, strict=True)]
    return all(covers_once(spans, shape[0]) for spans in rows.values()) and all(
        covers_once(spans, size) for spans, size in zip(dims, shape[1:], strict=True)
    )


def covers_once(spans: Sequence[Span], height: int) -> bool:
    """Whether spans cover each of `height` rows once."""
    end = 0
    for first, count in sorted(spans):
        if first != end:
            return False
        end += count
    return end == height


# This rank's shard of a parameter, and the lines of the checkpoint that fill it


@dataclass(frozen=True, slots=True)
class DecodedSpan:
    """Lines of a decoded tensor from line `first` on, and the memory that they fill."""

    source: DecodedTensor
    first: int
    column: int
    out: Tensor

    @property
    def nbytes(self) -> int:
        """The bytes of the memory that is filled."""
        return self.out.numel() * self.out.itemsize

    def split(self, max_bytes: int) -> Iterator["DecodedSpan"]:
        """Yields spans of at most `max_bytes`, or of one unit, that begin at units."""
        lines, width = self._row
        unit = self.source.unit * lines
        step = max(1, max_bytes // max(1, unit * width * self.source.dtype.itemsize)) * unit
        begin, end = self.first, self.first + len(self.out)
        while begin < end:
            stop = min(end, (begin // step + 1) * step)
            out = self.out[begin - self.first : stop - self.first]
            yield DecodedSpan(self.source, begin, self.column, out)
            begin = stop

    def read(self, reader: Reader) -> Tensor:
        """Decodes the values for `out`, in fp32, and returns them."""
        lines, width = self._row
        first, end = self.first // lines, -(-(self.first + len(self.out)) // lines)
        values = self.source.rows(reader, first, end - first).reshape(-1, width)
        values = values.narrow(0, self.first - first * lines, len(self.out))
        return values.narrow(1, self.column, self.out.shape[1])

    @property
    def _row(self) -> tuple[int, int]:
        """The number of lines in a row, and their width."""
        shape = self.source.shape
        return math.prod(shape[1:-1]), shape[-1] if len(shape) > 1 else 1


class LocalShard(NamedTuple):
    """This rank's memory of a parameter, and where it begins in the full parameter."""

    memory: Tensor
    shape: tuple[int, ...]  # of the full parameter
    first: tuple[int, ...]  # index of the first element


def local_shard(name: str, parameter: Tensor) -> LocalShard:
    """This rank's shard of a parameter; ValueError on meta, and for placements with gaps."""
    if parameter.is_meta:
        raise ValueError(f"{name} is on the meta device: allocate it first (to_empty)")
    parameter, shape = parameter.detach(), tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        return LocalShard(parameter, shape, (0,) * len(shape))
    for placement in parameter.placements:
        contiguous = isinstance(placement, Shard) and not isinstance(placement, _StridedShard)
        if not contiguous and not placement.is_replicate():
            raise ValueError(f"{name} is placed {placement}; only Shard and Replicate() load")
    _, first = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return LocalShard(parameter.to_local(), shape, tuple(first))


def local_rows(name: str, parameter: Tensor) -> tuple[Tensor, int]:
    """This rank's rows of a parameter and the first one's index; ValueError if columns are."""
    if isinstance(parameter, DTensor):
        for placement in parameter.placements:
            if not placement.is_replicate() and placement != Shard(0):
                raise ValueError(f"{name} is placed {placement}, which is not Shard(0)")
    memory, _, first = local_shard(name, parameter)
    return memory, first[0] if first else 0


def row_group(parameter: DTensor) -> dist.ProcessGroup:
    """The process group that shards the parameter's rows: fully_shard's last mesh dimension."""
    mesh = parameter.device_mesh
    return mesh.get_group(mesh.ndim - 1)


def local_blocks(
    part: TensorSlice, shape: Sequence[int], local: Tensor, first: int
) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Yields the blocks of `local` that a part fills, each with its index in the part's tensor.

    `shape` is the full parameter's; `local` and `first` are the results of `local_rows`.
    """
    if not local.numel():
        return
    dims = len(part.shape[1:])
    rows = local.view(-1, *local.shape[local.dim() - dims :])
    first *= math.prod(shape[1 : len(shape) - dims])
    for dim, span in enumerate(part.inner, 1):
        rows = rows.narrow(dim, span.target, span.length)
    inner = tuple(span.source for span in part.inner_spans)
    for source, target, count in part.rows:
        begin, end = max(target, first), min(target + count, first + len(rows))
        if begin < end:
            yield (source + begin - target, *inner), rows[begin - first : end - first]


class ShardLines:
    """This rank's shard of a parameter, as runs of consecutive lines of the full parameter."""

    def __init__(self, local: LocalShard, *, single: bool) -> None:
        """`single`: the file's tensors have one dimension, so that lines are elements."""
        memory, shape, first = local
        self.shape, self.column = shape, 0
        self.starts: list[int] = []  # first line of each run
        if not memory.numel():  # on a rank outside the mesh it lacks dimensions
            return
        dims = shape if single else shape[:-1]
        sizes = tuple(memory.shape)[: len(dims)]
        self.column = 0 if single else first[-1]
        self.memory = memory.view(-1, 1 if single else memory.shape[-1])
        cut = max((i for i, n in enumerate(dims) if sizes[i] != n), default=0)
        below = math.prod(dims[cut + 1 :])
        self.count = (sizes[cut] if dims else 1) * below  # lines in a run
        for index in itertools.product(*map(range, sizes[:cut])):
            start = 0
            for i, n in enumerate(dims[: cut + 1]):
                start = start * n + first[i] + (index[i] if i < cut else 0)
            self.starts.append(start * below)

    @classmethod
    def from_lines(cls, memory: Tensor, shape: tuple[int, ...], first: int) -> Self:
        """Returns one run of lines [lines, columns] of the full parameter, from line `first` on."""
        lines = cls.__new__(cls)
        lines.memory, lines.shape, lines.column = memory, shape, 0
        lines.starts, lines.count = [first], len(memory)
        return lines

    def within(self, begin: int, end: int) -> Iterator[tuple[int, Tensor]]:
        """Yields this rank's lines in [begin, end): the first line of each run, and its memory."""
        for i in range(max(0, bisect_right(self.starts, begin) - 1), len(self.starts)):
            start = self.starts[i]
            if start >= end:
                return
            low, high = max(begin, start), min(end, start + self.count)
            if low < high:
                at = i * self.count - start
                yield low, self.memory[at + low : at + high]


def slice_columns(part: TensorSlice, lines: Tensor) -> Tensor:
    """Views the columns of a parameter's lines that this part fills."""
    if not part.inner or part.inner[-1].length == lines.shape[-1]:
        return lines
    return lines.narrow(-1, part.inner[-1].target, part.inner[-1].length)


def plan_reads(
    part: TensorSlice, info: TensorInfo | DecodedTensor, lines: ShardLines
) -> Iterator[ReadSpan | DecodedSpan]:
    """Yields the reads of a part's tensor that fill this rank's lines."""
    width, column = part.shape[-1] if len(part.shape) > 1 else 1, part.column + lines.column
    for source, target, length in part.lines(lines.shape):
        for line, memory in lines.within(target, target + length):
            at, out = source + line - target, slice_columns(part, memory)
            if isinstance(info, TensorInfo):
                offset = info.offset + at * width * info.dtype.itemsize
                yield ReadSpan(info.path, offset, info.dtype, width, column, out)
            else:
                yield DecodedSpan(info, at, column, out)
