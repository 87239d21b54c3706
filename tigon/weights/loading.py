"""Fills a model's parameters from a checkpoint, strictly, each rank with its own rows only."""

import math
import os
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tigon.weights.checkpoint import Checkpoint, read_rows
from tigon.weights.decoded import Decoded
from tigon.weights.header import TensorInfo
from tigon.weights.layout import Layout, Part, fills
from tigon.weights.reading import Reader

CHUNK = 64 << 20  # bytes one thread reads before it takes the next piece


def load_into(
    parameters: Mapping[str, Tensor],
    layout: Layout,
    checkpoint: Checkpoint,
    *,
    source_of: Mapping[str, str] | None = None,
    ignored: Collection[str] = (),
    into: str = "the model",
    workers: int | None = None,
) -> None:
    """Fills every parameter from the parts that its layout names, or raises before one is touched.

    `source_of` maps a part's name to the file's where they differ. A tensor of the file that no
    part uses is an error unless it is in `ignored`. A DTensor sharded on dim 0 reads its own rows.
    """
    source_of = source_of or {}
    missing: list[str] = []
    misfits: list[str] = []
    reads: list[_Read] = []
    for parameter_name, parameter in parameters.items():
        local, first = own_rows(parameter_name, parameter)
        parts = layout[parameter_name]
        if not fills(parts, parameter):
            misfits.append(f"{parameter_name} is {list(parameter.shape)}, not filled by {parts}")
            continue
        for part in parts:
            source = source_of.get(part.name, part.name)
            info = checkpoint.tensors.get(source)
            if info is None:
                missing.append(source)
            elif info.shape != part.shape:
                misfits.append(f"{source} is {list(info.shape)}, not {list(part.shape)}")
            elif info.dtype.is_floating_point != parameter.dtype.is_floating_point:
                misfits.append(f"{source} is {info.dtype}, not {parameter.dtype}")
            else:
                reads += _reads(info, part, parameter, local, first)
    used = {source_of.get(part.name, part.name) for parts in layout.values() for part in parts}
    unexpected = checkpoint.tensors.keys() - used - set(ignored)
    if missing or unexpected or misfits:
        raise ValueError(
            f"the checkpoint {checkpoint.name} does not fit {into}:"
            + _list("missing", missing)
            + _list("unexpected", sorted(unexpected))
            + _list("of another shape or kind", misfits)
        )
    _read_all(reads, workers or min(8, os.cpu_count() or 1))


@dataclass(frozen=True)
class _Read:
    info: TensorInfo | Decoded
    row: int
    out: Tensor


def own_rows(name: str, parameter: Tensor) -> tuple[Tensor, int]:
    """The parameter's memory on this rank, and which row of the whole its first one is."""
    if parameter.is_meta:
        raise ValueError(f"{name} is on the meta device: allocate it first (to_empty)")
    parameter = parameter.detach()
    if not isinstance(parameter, DTensor):
        return parameter, 0
    for placement in parameter.placements:
        if not placement.is_replicate() and placement != Shard(0):
            raise ValueError(f"{name} is placed {placement}; only Shard(0) and Replicate() load")
    _, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return parameter.to_local(), offset[0] if offset else 0


def own_slices(
    part: Part, shape: Sequence[int], local: Tensor, first: int
) -> Iterator[tuple[int, Tensor]]:
    """What this rank has of a part: rows of `local`, and which row of the part's tensor is first.

    `shape` is the whole parameter's; `local` and `first` are what `own_rows` gives for it.
    """
    if not local.numel():
        return
    rows = local.view(-1, *part.shape[1:])
    first *= math.prod(shape[1 : len(shape) - len(part.shape) + 1])
    for source, target, count in part.slices:
        begin, end = max(target, first), min(target + count, first + len(rows))
        if begin < end:
            yield source + begin - target, rows[begin - first : end - first]


def _reads(
    info: TensorInfo | Decoded, part: Part, parameter: Tensor, local: Tensor, first: int
) -> Iterator[_Read]:
    """The part's rows that this rank owns, in pieces of at most CHUNK bytes."""
    step = max(1, CHUNK // max(1, info.nbytes // (part.shape[0] if part.shape else 1)))
    for row, rows in own_slices(part, parameter.shape, local, first):
        for i in range(0, len(rows), step):
            yield _Read(info, row + i, rows[i : i + step])


def _list(what: str, names: list[str]) -> str:
    more = ", ..." if len(names) > 10 else ""
    return f"\n  {len(names)} {what}: {', '.join(names[:10])}{more}" if names else ""


def _read_all(reads: list[_Read], workers: int) -> None:
    # All threads take from one queue in file order, so that a disk sees few sequential streams
    queue = deque(sorted(reads, key=lambda read: (read.info.path, read.info.offset, read.row)))

    def work() -> None:
        with Reader() as reader:
            while True:
                try:
                    read = queue.popleft()
                except IndexError:
                    return
                try:
                    read_rows(reader, read.info, read.out, read.row)
                except BaseException:
                    queue.clear()
                    raise

    with ThreadPoolExecutor(workers) as pool:
        for done in [pool.submit(work) for _ in range(workers)]:
            done.result()
