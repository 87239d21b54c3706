"""Fills a model's parameters from a checkpoint, strictly, each rank with its own slices only."""

import os
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from huggingface_hub.utils import tqdm
from torch import Tensor

from tigon.json_file import escaped
from tigon.weights.checkpoint import Checkpoint
from tigon.weights.decoded import Decoded
from tigon.weights.header import TensorInfo
from tigon.weights.layout import Layout, Part, fills
from tigon.weights.plan import Decoding, Lines, local_part, runs_of
from tigon.weights.reading import SHARE, Reader
from tigon.weights.replicas import Replicas
from tigon.weights.transfer import Run, Transfer, transfers

STAGING_BYTES = 256 << 20  # of the host's memory, by default
LEAST_SHARE = 1 << 20  # bytes of a thread's buffers: with less, fewer threads read
SLOW = 0.5  # seconds, after which a progress bar appears

Matched = dict[str, list[tuple[Part, TensorInfo | Decoded]]]


def load_into(
    parameters: Mapping[str, Tensor],
    layout: Layout,
    checkpoint: Checkpoint,
    *,
    source_of: Mapping[str, str] | None = None,
    ignored: Collection[str] = (),
    into: str = "the model",
    workers: int | None = None,
    staging_bytes: int = STAGING_BYTES,
) -> None:
    """Fills every parameter from the parts that its layout names, or raises before one is touched.

    `source_of` maps a part's name to the file's where they differ. A tensor of the file that no
    part uses is an error unless it is in `ignored`. Of a DTensor a rank reads its own rows or
    columns; what several ranks have alike one of them reads and sends to the others, so that all
    ranks of its mesh have to call this together. `workers` threads read, by default up to 16;
    their buffers take at most `staging_bytes` of the host's memory.
    """
    if staging_bytes < LEAST_SHARE:
        raise ValueError(f"staging_bytes={staging_bytes}: at least {LEAST_SHARE} are needed")
    for name, parameter in parameters.items():
        if parameter.is_meta:
            raise ValueError(f"{name} is on the meta device: allocate it first (to_empty)")
    local = {name: local_part(name, parameter) for name, parameter in parameters.items()}
    matched = match(parameters, layout, checkpoint, source_of=source_of, ignored=ignored, into=into)
    replicas = Replicas(parameters)
    runs: list[Run] = []
    decodings: list[Decoding] = []
    for name in replicas.own:
        lines = Lines(local[name], single=len(layout[name][0].shape) < 2)
        for part, info in matched[name]:
            for found in runs_of(part, info, lines):
                if isinstance(found, Run):
                    runs.append(found)
                else:
                    decodings.append(found)
    workers = min(workers or _threads(), max(1, staging_bytes // LEAST_SHARE))
    share = min(SHARE, staging_bytes // workers)
    with replicas.agreed():
        _read_all(runs, decodings, workers, share)
    replicas.send({name: part.memory for name, part in local.items()})


def match(
    parameters: Mapping[str, Tensor],
    layout: Layout,
    checkpoint: Checkpoint,
    *,
    source_of: Mapping[str, str] | None = None,
    ignored: Collection[str] = (),
    into: str = "the model",
) -> Matched:
    """The checkpoint's tensors that every parameter is made of; ValueError unless they all fit."""
    source_of = source_of or {}
    missing: list[str] = []
    misfits: list[str] = []
    matched: Matched = {}
    for parameter_name, parameter in parameters.items():
        parts = layout[parameter_name]
        if not fills(parts, parameter):
            misfits.append(f"{parameter_name} is {list(parameter.shape)}, not filled by {parts}")
            continue
        matched[parameter_name] = []
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
                matched[parameter_name].append((part, info))
    used = {source_of.get(part.name, part.name) for parts in layout.values() for part in parts}
    unexpected = checkpoint.tensors.keys() - used - set(ignored)
    if missing or unexpected or misfits:
        raise ValueError(
            f"the checkpoint {checkpoint.name} does not fit {into}:"
            + _list("missing", missing)
            + _list("unexpected", sorted(unexpected))
            + _list("of another shape or kind", misfits)
        )
    return matched


def _list(what: str, names: list[str]) -> str:
    more = ", ..." if len(names) > 10 else ""
    some = ", ".join(escaped(name, 300) for name in names[:10])
    return f"\n  {len(names)} {what}: {some}{more}" if names else ""


def _threads() -> int:
    """As many as read at once: the processors of this process, shared with its host's ranks."""
    usable = getattr(os, "sched_getaffinity", None)
    processors = len(usable(0)) if usable else os.cpu_count() or 1
    return max(1, min(16, processors // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def _read_all(
    runs: Sequence[Run], decodings: Sequence[Decoding], workers: int, staging: int
) -> None:
    # All threads take from one queue in file order, so that a disk sees few sequential streams
    work: deque[Transfer | Decoding] = deque(transfers(runs, Reader(staging).most))
    work += [piece for decoding in decodings for piece in decoding.pieces(staging)]
    total = sum(item.nbytes for item in work)
    first_rank = os.environ.get("RANK", "0") == "0"
    bar = tqdm(
        desc="Loading weights",
        total=total,
        unit="B",
        unit_scale=True,
        delay=SLOW,
        leave=False,
        disable=None if first_rank else True,  # None: unless it writes to a terminal
    )

    def take() -> None:
        torch.set_num_threads(1)  # these are the threads: more of torch's only get in their way
        with Reader(staging) as reader, torch.no_grad():
            while True:
                try:
                    item = work.popleft()
                except IndexError:
                    return
                if isinstance(item, Transfer):
                    reader.fill(item)
                else:
                    item.out.copy_(item.read(reader))
                bar.update(item.nbytes)

    threads = torch.get_num_threads()
    try:
        with bar, ThreadPoolExecutor(workers) as pool:
            try:
                for done in [pool.submit(take) for _ in range(workers)]:
                    done.result()
            except BaseException:
                work.clear()
                raise
    finally:
        torch.set_num_threads(threads)  # of threads that are started from now on
