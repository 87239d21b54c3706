"""Fills a model's parameters from a checkpoint, strictly, each rank with its own slices only."""

import os
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch
from huggingface_hub.utils import tqdm
from torch import Tensor

from tigon.weights.checkpoint import Checkpoint
from tigon.weights.layout import Layout
from tigon.weights.matching import match
from tigon.weights.plan import Decoding, Lines, local_part, runs_of
from tigon.weights.reading import BUFFERS, SHARE, Reader, pinned_buffer, pinned_bytes
from tigon.weights.replicas import Replicas
from tigon.weights.threads import spread
from tigon.weights.transfer import Run, Transfer, transfers

STAGING_BYTES = 256 << 20  # of the host's memory, by default
LEAST_SHARE = 1 << 20  # bytes of a thread's buffers: with less, fewer threads read
THREADS = 12  # at most: on a GPU 16 were no faster, and their buffers take longer to pin
SLOW = 0.5  # seconds, after which a progress bar appears


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
    ranks of its mesh have to call this together. `workers` threads read, by default up to 12;
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
    workers, share = _shares(workers, staging_bytes)
    with replicas.agreed():
        _read_all(runs, decodings, workers, share)
    replicas.send({name: part.memory for name, part in local.items()})


@contextmanager
def pinned_ahead(device: torch.device, staging_bytes: int = STAGING_BYTES) -> Iterator[None]:
    """Within, a thread pins the host memory of the buffers of a load to this GPU, one by one.

    To be left before memory is allocated on the device: the driver does one of the two at a time.
    Torch keeps pinned memory for whoever asks next, and so it is found by `load_into`, which pins
    what is still lacking. On other devices nothing is done.
    """
    if device.type != "cuda":
        yield
        return
    workers, share = _shares(None, staging_bytes)
    # Each thread has a current device of its own
    index = torch.cuda.current_device() if device.index is None else device.index
    left = threading.Event()

    def pin() -> None:
        buffers: list[Tensor] = []
        # Memory that cannot be had is an error of the load, if it comes so far
        with torch.cuda.device(index), suppress(RuntimeError):
            while len(buffers) < BUFFERS * workers and not left.is_set():
                buffers.append(pinned_buffer(pinned_bytes(share)))

    thread = threading.Thread(target=pin, name="pinned_ahead")
    thread.start()
    try:
        yield
    finally:
        left.set()
        thread.join()


def _shares(workers: int | None, staging_bytes: int) -> tuple[int, int]:
    """How many threads read, and the bytes of each one's buffers."""
    workers = min(workers or _threads(), max(1, staging_bytes // LEAST_SHARE))
    return workers, min(SHARE, staging_bytes // workers)


def _threads() -> int:
    """As many as read at once: the processors of this process, shared with its host's ranks."""
    usable = getattr(os, "sched_getaffinity", None)
    processors = len(usable(0)) if usable else os.cpu_count() or 1
    return max(1, min(THREADS, processors // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def _read_all(
    runs: Sequence[Run], decodings: Sequence[Decoding], workers: int, staging: int
) -> None:
    # All threads take from one queue in file order, so that a disk sees few sequential streams
    work: list[Transfer | Decoding] = [*transfers(runs, Reader(staging).most)]
    # As fp32 values a piece is a quarter: what it is decoded from and with takes memory too
    work += [piece for decoding in decodings for piece in decoding.pieces(staging // 4)]
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

    @contextmanager
    def reader() -> Iterator[Reader]:
        torch.set_num_threads(1)  # these are the threads: more of torch's only get in their way
        with Reader(staging) as reader, torch.no_grad():
            yield reader

    def read(item: Transfer | Decoding, reader: Reader) -> None:
        if isinstance(item, Transfer):
            reader.fill(item)
        else:
            item.out.copy_(item.read(reader))
        bar.update(item.nbytes)

    threads = torch.get_num_threads()
    try:
        with bar:
            spread(work, read, reader, workers)
    finally:
        torch.set_num_threads(threads)  # of threads that are started from now on
