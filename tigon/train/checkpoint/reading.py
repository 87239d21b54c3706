"""Reads checkpoints into models and optimizers on any number of ranks, and checks their values."""

import math
import warnings
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata
from torch.optim import Optimizer

from tigon.hub import check_folder
from tigon.models import CausalLM
from tigon.train.checkpoint.files import first_cause, read_lock
from tigon.train.checkpoint.format import EMA, OPTIMIZER, State, full_state, run_layout
from tigon.train.optim import Ema
from tigon.weights import Checkpoint, Layout, StoredRows
from tigon.weights.header import read_header

# States that are sums of squares, scales of them, and counts
NEVER_NEGATIVE = ("exp_avg_sq", "exp_avg_sq_scale", "exp_avg_scale", "step")


def check_values(checkpoint: Path, state: State, stored: Metadata) -> None:
    """Raises ValueError, naming file, tensor and value, where what was read is NaN, infinite, or
    negative where nothing can be.

    In a process group every rank calls this and all raise alike. One reduction of each tensor on
    its device, and one wait for it.
    """
    faults = _faults(checkpoint, state, stored)
    everywhere: list[list[str] | None] = [faults]
    if dist.is_initialized():
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, faults)
    found = sorted({fault for some in everywhere for fault in some or ()})
    if found:
        more = f", and so {len(found) - 1} more" if len(found) > 1 else ""
        raise ValueError(
            f"{found[0]}, which no run has{more}: resume from another checkpoint, or begin another "
            "run_dir, with model= an export of this run"
        )


@torch.no_grad()
def _faults(checkpoint: Path, state: State, stored: Metadata) -> list[str]:
    groups: dict[tuple[torch.device, torch.dtype], dict[str, list[Tensor]]] = {}
    for name, tensor in state.items():
        if tensor.dtype.is_floating_point or _kind(name) in NEVER_NEGATIVE:
            for rows in (chunk.rows for chunk in tensor.chunks if chunk.rows.numel()):
                own = groups.setdefault((rows.device, rows.dtype), {})
                own.setdefault(name, []).append(rows)
    wrong: dict[str, float] = {}
    for group in groups.values():
        names = [name for name, rows in group.items() for _ in rows]
        ranges = [torch.stack(torch.aminmax(x)) for rows in group.values() for x in rows]
        for name, pair in zip(names, torch.stack(ranges).double().tolist(), strict=True):
            least = 0.0 if _kind(name) in NEVER_NEGATIVE else -torch.inf
            bad = [x for x in pair if not (least <= x < torch.inf and x > -torch.inf)]
            if bad:
                wrong.setdefault(name, bad[0])
    files = _files(stored, wrong) if wrong else {}
    return [f"{checkpoint} has {x} in {name} ({files[name]})" for name, x in wrong.items()]


def _kind(name: str) -> str:
    """Returns the kind of optimizer state that a name ends with."""
    return name.split(".")[1] if name.startswith(OPTIMIZER) else ""


def _files(stored: Metadata, names: Mapping[str, float]) -> dict[str, str]:
    """Which have some of each: the first of them, and how many more."""
    found: dict[str, set[str]] = {name: set() for name in names}
    for index, info in stored.storage_data.items():
        if index.fqn in names:
            found[index.fqn].add(Path(info.relative_path).name)
    more = {name: f" or {len(some) - 1} more" * (len(some) > 1) for name, some in found.items()}
    return {name: min(some) + more[name] for name, some in found.items()}


ANOTHER = "take another checkpoint"
OTHERS_TRAINED = (
    "parameter_groups that freeze other parameters than before are for another run_dir, with "
    "model= an export of this one"
)


def load(
    checkpoint: Path, model: CausalLM, optimizer: Optimizer | None = None, ema: Ema | None = None
) -> None:
    """Fill weights and, if given, optimizer states and average in place; lr, betas and so on stay.
    An average that the checkpoint does not have begins with its weights.

    Each rank reads its own rows only. In a process group every rank calls this. Raises ValueError
    if the checkpoint does not fit the model, cannot be read, or has values that no run has.
    """
    with read_lock(checkpoint), warnings.catch_warnings():
        check_folder(checkpoint)
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            has_average = _load(checkpoint, model, optimizer, ema)
        except CheckpointException as error:
            raise ValueError(f"{checkpoint} cannot be read: {first_cause(error)}") from error
    if ema is not None and not has_average:
        ema.begin(model)


def _load(checkpoint: Path, model: CausalLM, optimizer: Optimizer | None, ema: Ema | None) -> bool:
    """Whether it has an average."""
    reader = HuggingFaceStorageReader(str(checkpoint))
    metadata = _metadata(checkpoint)
    stored: dict[str, Any] = metadata.state_dict_metadata
    has_average = any(name.startswith(EMA) for name in stored)
    state = full_state(model, optimizer, ema if has_average else None)
    if ema is None:
        stored = {name: info for name, info in stored.items() if not name.startswith(EMA)}
    if optimizer is None:
        stored = {name: info for name, info in stored.items() if not name.startswith(OPTIMIZER)}
    _check_optimizer(checkpoint, state, stored)
    _check_dtypes(checkpoint, stored, metadata)
    _check_names(checkpoint, state, stored)
    dcp.load(dict(state), storage_reader=reader, no_dist=not dist.is_initialized())
    check_values(checkpoint, state, metadata)
    return has_average


def stored_weights(checkpoint: Path, model: CausalLM) -> tuple[dict[str, list[StoredRows]], Layout]:
    """Where the rows of each checkpoint tensor are, and what those tensors are of the model.

    Raises ValueError if the checkpoint is not of such a model; rows that are nowhere are found by
    who reads them.
    """
    layout = run_layout(model)
    shapes = {part.name: part.shape for parts in layout.values() for part in parts}
    found: dict[str, list[StoredRows]] = {}
    files_of: dict[Path, Checkpoint] = {}
    metadata = _metadata(checkpoint)
    _check_dtypes(checkpoint, shapes, metadata)
    for index, info in metadata.storage_data.items():
        if index.fqn.startswith((OPTIMIZER, EMA)):
            continue
        path = Path(info.relative_path)
        if path not in files_of:
            files_of[path] = Checkpoint(str(path), read_header(path))
        held = files_of[path].tensors[index.fqn]
        if not held.dtype.is_floating_point:
            raise ValueError(
                f"{checkpoint} does not fit the model: it has whole numbers for others in "
                f"{index.fqn} ({path.name}); {ANOTHER}"
            )
        block = held.shape
        whole = shapes.get(index.fqn, block)
        if len(block) != len(whole):
            raise ValueError(f"{checkpoint} does not fit the model: it resizes {index.fqn}")
        for place in _places(tuple(index.offset), block, whole):
            found.setdefault(index.fqn, []).append(StoredRows(*place, index.fqn, files_of[path]))
    for fault, wrong in (
        ("lacks", shapes.keys() - found.keys()),
        ("also has", found.keys() - shapes),
    ):
        if wrong:
            raise ValueError(
                f"{checkpoint} does not fit the model: it {fault} {', '.join(sorted(wrong)[:3])}"
            )
    return found, layout


def _places(
    offsets: tuple[int, ...], block: Sequence[int], whole: Sequence[int]
) -> Iterator[tuple[int, int, int, int]]:
    """(row, first, rows, column) of what a block has of a tensor, as `Stored` counts them."""
    column = offsets[-1] if len(offsets) > 1 else 0
    per_row = math.prod(block[1:-1])
    if tuple(block[1:-1]) == tuple(whole[1:-1]):
        yield offsets[0] * per_row, 0, block[0] * per_row, column
        return
    for i in range(block[0]):  # [E, N, D] with some of each N
        row = (offsets[0] + i) * math.prod(whole[1:-1]) + offsets[1]
        yield row, i * per_row, per_row, column


def _metadata(checkpoint: Path) -> Metadata:
    try:
        return HuggingFaceStorageReader(str(checkpoint)).read_metadata()
    except Exception as error:  # whatever torch and safetensors meet in headers that are wrong
        raise ValueError(f"{checkpoint} cannot be read: {error}") from error


def _check_dtypes(checkpoint: Path, names: Container[str], metadata: Metadata) -> None:
    """Raises ValueError if files have rows of one of the tensors in different dtypes, which no run
    writes: each would be read as its own header says. `properties` has the dtype of one file."""
    first: dict[str, Any] = {}
    for index, info in metadata.storage_data.items():
        if index.fqn not in names:
            continue
        other = first.setdefault(index.fqn, info)
        if other.dtype != info.dtype:
            places = sorted((Path(i.relative_path).name, str(i.dtype)) for i in (other, info))
            told = " and ".join(f"{dtype} in {file}" for file, dtype in places)
            raise ValueError(f"{checkpoint} is damaged: {index.fqn} is {told}; {ANOTHER}")


def _check_optimizer(checkpoint: Path, state: State, stored: Mapping[str, Any]) -> None:
    """Raises ValueError, naming the states, if another optimizer made the checkpoint's."""

    def kinds(names: Iterable[str]) -> str:
        found = {name.split(".")[1] for name in names if name.startswith(OPTIMIZER)}
        return ", ".join(sorted(found)) or "none"

    if (was := kinds(stored)) != (now := kinds(state)):
        raise ValueError(
            f"{checkpoint} has the states of another optimizer: {was}; this one has {now}. Give "
            "the optimizer and settings that it was made with, or begin another run_dir, with "
            "model= an export of this one"
        )


def _check_names(checkpoint: Path, state: State, stored: Mapping[str, Any]) -> None:
    missing = sorted(state.keys() - stored.keys())
    unexpected = sorted(stored.keys() - state.keys())
    both = state.keys() & stored.keys()
    wrong = sorted(n for n in both if stored[n].size != state[n].size())
    holes = sorted(n for n in both if not _has_all_rows(stored[n].chunks, state[n].size()))
    kinds = sorted(
        n
        for n in both
        if stored[n].properties.dtype.is_floating_point != state[n].dtype.is_floating_point
    )
    for fault, names in (
        ("lacks", missing),
        ("also has", unexpected),
        ("resizes", wrong),
        ("lacks rows of", holes),
        ("has whole numbers for others, or others for whole ones, in", kinds),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            trained = all(name.startswith((OPTIMIZER, EMA)) for name in names)
            hint = f"; {OTHERS_TRAINED}" if trained and fault in ("lacks", "also has") else ""
            what = f"{', '.join(names[:3])}{more}{hint}"
            raise ValueError(f"{checkpoint} does not fit the model: it {fault} {what}")


def _has_all_rows(chunks: Sequence[ChunkStorageMetadata], shape: Sequence[int]) -> bool:
    """Whether each row is in chunks, those of tensor parallelism with shares of their rows."""
    stripes: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
    for chunk in chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(shape):
            return False
        inner = tuple(zip(chunk.offsets[1:], chunk.sizes[1:], strict=True))
        stripes.setdefault(inner, []).append((chunk.offsets[0], chunk.sizes[0]))
    if not all(_covers(found, shape[0]) for found in stripes.values()):
        return False
    dims = zip(zip(*stripes, strict=True), shape[1:], strict=True)
    return all(_covers(found, size) for found, size in dims)


def _covers(spans: Iterable[tuple[int, int]], size: int) -> bool:
    """Whether each of `size` is in spans of (first, number), which may have some alike."""
    end = 0
    for first, count in sorted(spans):
        if first > end:
            return False
        end = max(end, first + count)
    return end == size
