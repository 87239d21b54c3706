"""Matches a checkpoint's tensors to parameters, and reads, maps or broadcasts them into these."""

import itertools
import math
import mmap
import os
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub.utils import tqdm
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tigon.utils.json import escape
from tigon.utils.memory import count_rank_cpus
from tigon.weights.checkpoint import Checkpoint
from tigon.weights.decoded import DecodedTensor
from tigon.weights.entries import WriterGroup
from tigon.weights.header import TensorInfo
from tigon.weights.layout import (
    DecodedSpan,
    Layout,
    LocalShard,
    ShardLines,
    TensorSlice,
    covers_parameter,
    local_shard,
    plan_reads,
)
from tigon.weights.read import (
    BUFFERS,
    SHARE,
    Reader,
    ReadSpan,
    Transfer,
    merge_reads,
    parallel_for,
    pinned_buffer,
    pinned_bytes,
)

MAX_LISTED = 10  # tensors that a message lists for each kind of misfit

Parts = list[tuple[TensorSlice, TensorInfo | DecodedTensor]]
Matched = dict[str, Parts]  # by the parameter's name
Misfits = dict[str, list[str]]  # kind of misfit -> tensors


def match_tensors(
    parameters: Mapping[str, Tensor],
    layout: Layout,
    checkpoint: Checkpoint,
    *,
    into: str = "the model",
    **names: Any,
) -> Matched:
    """The tensors that fill every parameter, which may be on the meta device; `names` are keywords
    of `compare_tensors`. Raises ValueError unless the checkpoint fits."""
    matched, misfits = compare_tensors(parameters, layout, checkpoint, **names)
    if misfits:
        lines = [format_misfits(kind, tensors, MAX_LISTED) for kind, tensors in misfits.items()]
        file = escape(checkpoint.name)
        raise ValueError("\n  ".join([f"the checkpoint {file} does not fit {into}:", *lines]))
    return matched


def compare_tensors(
    parameters: Mapping[str, Tensor],
    layout: Layout,
    checkpoint: Checkpoint,
    *,
    source_of: Mapping[str, str] | None = None,
    ignored: Collection[str] = (),
) -> tuple[Matched, Misfits]:
    """As `match_tensors`, but returns what does not fit instead of raising.

    `source_of` maps names of the layout to the file's if they differ. A tensor of the file that is
    not used is a misfit unless it is in `ignored`.
    """
    source_of = source_of or {}
    missing: list[str] = []
    wrong: list[str] = []
    matched: Matched = {}
    for name, parameter in parameters.items():
        parts, matched[name] = layout[name], []
        if not covers_parameter(parts, parameter):
            wrong.append(f"{name} is {list(parameter.shape)}, not filled by {parts}")
            continue
        for part in parts:
            source = source_of.get(part.name, part.name)
            info = checkpoint.tensors.get(source)
            if info is None:
                missing.append(source)
            elif info.shape != part.shape:
                wrong.append(f"{source} is {list(info.shape)}, not {list(part.shape)}")
            elif info.dtype.is_floating_point != parameter.dtype.is_floating_point:
                wrong.append(f"{source} is {info.dtype}, not {parameter.dtype}")
            else:
                matched[name].append((part, info))
    used = {source_of.get(part.name, part.name) for parts in layout.values() for part in parts}
    misfits = {
        "missing": missing,
        "unexpected": sorted(checkpoint.tensors.keys() - used - set(ignored)),
        "of another shape or kind": wrong,
    }
    return matched, {fault: names for fault, names in misfits.items() if names}


def format_misfits(fault: str, names: list[str], most: int) -> str:
    """A line of a message about one kind of misfits."""
    more = ", ..." if len(names) > most else ""
    return f"{len(names)} {fault}: {', '.join(escape(name, 300) for name in names[:most])}{more}"


# Memory-mapping


def map_parameters(
    parameters: Mapping[str, Tensor], layout: Layout, checkpoint: Checkpoint, **names: Any
) -> dict[str, Tensor]:
    """Maps the parameters whose bytes a file holds unchanged and in one piece; returns the tensors.

    Pages are read when they are used, and writes to the tensors stay in this process. The file must
    be neither shortened nor changed while one of them exists. `names` are keywords of `load_into`,
    and the same errors are raised.
    """
    matched = match_tensors(parameters, layout, checkpoint, **names)
    files: dict[Path, mmap.mmap] = {}
    mapped: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        if (location := _file_location(parameter, matched[name])) is None:
            continue
        path, offset = location
        if path not in files:
            with open(path, "rb") as file:
                files[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        count, size = parameter.numel(), len(files[path])
        if offset + count * parameter.itemsize > size:
            raise ValueError(f"{path} ended at byte {size}: it was shortened")
        flat = torch.frombuffer(files[path], dtype=parameter.dtype, count=count, offset=offset)
        mapped[name] = flat.view(parameter.shape)
    return mapped


def _file_location(parameter: Tensor, parts: Parts) -> tuple[Path, int] | None:
    """The file and offset of the parameter's bytes, if a file holds them in one piece."""
    if not parameter.numel():
        return None
    spans: list[tuple[int, Path, int, int]] = []
    for part, info in parts:
        if not isinstance(info, TensorInfo) or info.dtype != parameter.dtype:
            return None
        row = info.nbytes // max(1, info.shape[0] if info.shape else 1)
        for source, target, length in part.rows:
            begin = info.offset + source * row
            spans.append((target, info.path, begin, begin + length * row))
    spans.sort()
    _, path, offset, _ = spans[0]
    follow = all(a[1] == b[1] and a[3] == b[2] for a, b in pairwise(spans))
    return (path, offset) if follow and offset % parameter.itemsize == 0 else None


# Replicated parameters: one rank reads each and broadcasts it


class Replicas:
    """Assigns each replicated parameter to a reading rank; `local_names` are this rank's."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.local_names: list[str] = []
        self._readers: dict[str, tuple[DeviceMesh, dict[int, int]]] = {}
        loads: dict[tuple[DeviceMesh, tuple[int, ...]], list[int]] = {}
        for name, p in parameters.items():
            dims = _replicated_dims(p)
            if not dims:
                self.local_names.append(name)
                continue
            assert isinstance(p, DTensor)
            mesh = p.device_mesh
            sizes = [mesh.size(dim) for dim in dims]
            # The rank that has the least to read so far
            load = loads.setdefault((mesh, dims), [0] * math.prod(sizes))
            reader = load.index(min(load))
            load[reader] += p.numel() * p.dtype.itemsize
            at = list(itertools.product(*map(range, sizes)))[reader]
            self._readers[name] = mesh, dict(zip(dims, at, strict=True))
            if all(mesh.get_local_rank(dim) == i for dim, i in self._readers[name][1].items()):
                self.local_names.append(name)

    @contextmanager
    def sync_errors(self) -> Iterator[None]:
        """Raises an error of one rank on all ranks, so that none waits for its broadcast."""
        groups = {(mesh, dim) for mesh, reader in self._readers.values() for dim in reader}
        with ExitStack() as stack:  # what one group raises, the next hands on
            for mesh, dim in sorted(groups, key=lambda g: (str(g[0].mesh.tolist()), g[1])):
                stack.enter_context(WriterGroup(mesh.get_group(dim)).sync_errors())
            yield

    def broadcast(self, memory: Mapping[str, Tensor]) -> None:
        """Fills every parameter's memory on this rank from the rank that has read it."""
        for name, (mesh, reader) in self._readers.items():
            if not memory[name].numel():
                continue
            flat = memory[name].contiguous().view(-1).view(torch.uint8)
            dims = list(reader)
            for i, dim in enumerate(dims):
                # Along the first dimension, then from all these ranks along the next
                if all(mesh.get_local_rank(d) == reader[d] for d in dims[i + 1 :]):
                    dist.broadcast(flat, group=mesh.get_group(dim), group_src=reader[dim])
            if not memory[name].is_contiguous():
                memory[name].copy_(flat.view(memory[name].dtype).view(memory[name].shape))


def _replicated_dims(p: Tensor) -> tuple[int, ...]:
    """The mesh dimensions along which the parameter is replicated."""
    if not isinstance(p, DTensor) or p.device_mesh.get_coordinate() is None:
        return ()
    mesh = p.device_mesh
    return tuple(
        dim
        for dim, placement in enumerate(p.placements)
        if placement.is_replicate() and mesh.size(dim) > 1
    )


# Reading

STAGING_BYTES = 256 << 20  # of host memory, by default
LEAST_SHARE = 1 << 20  # bytes of buffers below which fewer threads read
THREADS = 12  # at most: on a GPU 16 were no faster, and their buffers take longer to pin
SLOW = 0.5  # seconds, after which a progress bar appears


def load_into(
    parameters: Mapping[str, Tensor],
    layout: Layout,
    checkpoint: Checkpoint,
    *,
    staging_bytes: int = STAGING_BYTES,
    **names: Any,
) -> None:
    """Fills every parameter from the tensors that its layout names, or raises before any changes.

    `names` are keywords of `match_tensors`. Each rank reads its shard of a DTensor; one rank reads
    what several have and broadcasts it, so that all ranks of the mesh must call this. The buffers
    of all reading threads take `staging_bytes` of host memory.
    """
    if staging_bytes < LEAST_SHARE:
        raise ValueError(f"staging_bytes={staging_bytes}: at least {LEAST_SHARE} are needed")
    local = {name: local_shard(name, parameter) for name, parameter in parameters.items()}
    matched = match_tensors(parameters, layout, checkpoint, **names)
    replicas = Replicas(parameters)
    with replicas.sync_errors():
        shards = {name: local[name] for name in replicas.local_names}
        fill_shards(shards, matched, staging_bytes=staging_bytes)
        checkpoint.check_unchanged()
    replicas.broadcast({name: shard.memory for name, shard in local.items()})


def fill_shards(
    shards: Mapping[str, LocalShard], matched: Matched, *, staging_bytes: int = STAGING_BYTES
) -> None:
    """Fills this rank's memory of each parameter from the tensors that match it."""
    spans: list[ReadSpan | DecodedSpan] = []
    for name, shard in shards.items():
        if matched[name]:
            lines = ShardLines(shard, single=len(matched[name][0][0].shape) < 2)
            for part, info in matched[name]:
                spans += plan_reads(part, info, lines)
    _read_all(spans, *_shares(staging_bytes))


@contextmanager
def prepin_staging(device: torch.device, staging_bytes: int = STAGING_BYTES) -> Iterator[None]:
    """Inside, a thread pins host memory for the buffers of a later `load_into` to this GPU.

    Torch caches pinned memory, so that `load_into` gets it, and pins only what is missing. Leave it
    before allocating on the device, since the driver does one of the two at a time. On other
    devices it does nothing.
    """
    if device.type != "cuda":
        yield
        return
    workers, share = _shares(staging_bytes)
    # The current device is a property of the thread
    index = torch.cuda.current_device() if device.index is None else device.index
    stopped = threading.Event()

    def pin() -> None:
        buffers: list[Tensor] = []
        # If memory is lacking, the load will raise the error
        with torch.cuda.device(index), suppress(RuntimeError):
            while len(buffers) < BUFFERS * workers and not stopped.is_set():
                buffers.append(pinned_buffer(pinned_bytes(share)))

    thread = threading.Thread(target=pin, name="pinned_ahead")
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def _shares(staging_bytes: int) -> tuple[int, int]:
    """The number of reading threads, and the bytes of each thread's buffers."""
    workers = min(THREADS, count_rank_cpus(), max(1, staging_bytes // LEAST_SHARE))
    return workers, min(SHARE, staging_bytes // workers)


def _read_all(spans: Sequence[ReadSpan | DecodedSpan], workers: int, staging: int) -> None:
    """Reads all spans with several threads; the first error ends all."""
    # All threads take from one queue in file order, so that a disk sees few sequential streams
    reads = (span for span in spans if isinstance(span, ReadSpan))
    work: list[Transfer | DecodedSpan] = [*merge_reads(reads, Reader(staging).max_bytes)]
    for span in spans:
        if isinstance(span, DecodedSpan):  # a quarter: decoding takes memory too
            work += span.split(staging // 4)
    total, first_rank = sum(item.nbytes for item in work), os.environ.get("RANK", "0") == "0"
    hidden = None if first_rank else True  # None: unless it writes to a terminal
    options: dict[str, Any] = {"unit": "B", "unit_scale": True, "delay": SLOW, "leave": False}
    bar = tqdm(desc="Loading weights", total=total, disable=hidden, **options)

    @contextmanager
    def reader() -> Iterator[Reader]:
        torch.set_num_threads(1)  # these are the threads: more of torch's only get in their way
        with Reader(staging) as reader, torch.no_grad():
            yield reader

    def read(item: Transfer | DecodedSpan, reader: Reader) -> None:
        if isinstance(item, Transfer):
            reader.fill(item)
        else:
            item.out.copy_(item.read(reader))
        bar.update(item.nbytes)

    threads = torch.get_num_threads()
    try:
        with bar:
            parallel_for(work, read, reader, workers)
    finally:
        torch.set_num_threads(threads)  # of threads that are started from now on
