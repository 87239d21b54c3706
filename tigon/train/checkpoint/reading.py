"""Reads checkpoints into models and optimizers on any number of ranks, and checks their values."""

import warnings
from collections.abc import Container, Mapping, Sequence
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
from tigon.models.pretrained.names import stored_tensors
from tigon.train.checkpoint.files import first_cause
from tigon.train.checkpoint.format import EMA, OPTIMIZER, State, full_state, run_layout
from tigon.train.optim import Ema
from tigon.utils.json import list_first
from tigon.weights import Checkpoint, Layout, RowSpan, TensorInfo, TensorSlice, WriterGroup
from tigon.weights.files import read_lock
from tigon.weights.header import read_header
from tigon.weights.layout import covers_parameter, covers_tensor

# Sums of squares, scales and counts
NEVER_NEGATIVE = ("exp_avg_sq", "exp_avg_sq_scale", "exp_avg_scale", "step")
BEGIN_AGAIN = "begin another run_dir, with model= an export of this one"


def load(
    checkpoint: Path, model: CausalLM, optimizer: Optimizer | None = None, ema: Ema | None = None
) -> None:
    """Fills weights and, if given, optimizer states and average in place; lr, betas and so on stay.
    An average that the checkpoint does not have begins with its weights.

    Each rank reads its own rows only. In a process group every rank calls this. Raises ValueError
    if the checkpoint does not fit the model, cannot be read, or has values that no run has.
    """
    with read_lock(checkpoint), warnings.catch_warnings():
        check_folder(checkpoint)
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        metadata = _read_tensor_metadata(checkpoint)
        stored: dict[str, Any] = metadata.state_dict_metadata
        has_average = any(name.startswith(EMA) for name in stored)
        unused = tuple(p for p, of in ((EMA, ema), (OPTIMIZER, optimizer)) if of is None)
        stored = {name: info for name, info in stored.items() if not name.startswith(unused)}
        try:
            state = full_state(model, optimizer, ema if has_average else None)
            _check_optimizer(checkpoint, state, stored)
            _check_dtypes(checkpoint, stored, metadata)
            _check_tensors(checkpoint, state, stored)
            reader = HuggingFaceStorageReader(str(checkpoint))
            with torch.device("cpu"):  # where safetensors puts what it has read, not on the default
                dcp.load(dict(state), storage_reader=reader, no_dist=not dist.is_initialized())
        except CheckpointException as error:
            raise ValueError(f"{checkpoint} cannot be read: {first_cause(error)}") from error
        check_values(checkpoint, state, metadata)
    if ema is not None and not has_average:
        ema.begin(model)


def stored_weights(checkpoint: Path, model: CausalLM) -> tuple[Checkpoint, Layout]:
    """Returns the blocks of checkpoint tensors that the files have, each with a name of its own,
    and their layout in the model. Raises ValueError if the checkpoint is of another model, or lacks
    rows of it."""
    layout = run_layout(model)
    shapes = {part.name: part.shape for parts in layout.values() for part in parts}
    metadata = _read_tensor_metadata(checkpoint)
    _check_dtypes(checkpoint, shapes, metadata)
    headers: dict[Path, dict[str, TensorInfo]] = {}
    stored: dict[str, TensorInfo] = {}
    blocks: dict[str, list[tuple[str, Sequence[int]]]] = {}  # of each tensor, with their offsets
    for index, info in metadata.storage_data.items():
        name, path = index.fqn, Path(info.relative_path)
        if name.startswith((OPTIMIZER, EMA)):
            continue
        if path not in headers:
            headers[path] = read_header(path)
        block = headers[path][name]
        if not block.dtype.is_floating_point:
            fault = f"has whole numbers for others in {name} ({path.name}); take another checkpoint"
            raise _misfit(checkpoint, fault)
        if len(block.shape) != len(shapes.get(name, block.shape)):
            raise _misfit(checkpoint, f"resizes {name}")
        stored[key := f"{path.name}: {name}"] = block
        blocks.setdefault(name, []).append((key, tuple(index.offset)))
    for fault, names in (("lacks", shapes.keys() - blocks), ("also has", blocks.keys() - shapes)):
        if names:
            raise _misfit(checkpoint, f"{fault} {list_first(sorted(names))}")
    stored_layout = {
        name: tuple(
            _block_slice(part, key, stored[key].shape, offset)
            for part in parts
            for key, offset in blocks[part.name]
        )
        for name, parts in layout.items()
    }
    for name, tensor in stored_tensors(model).items():
        if not covers_parameter(stored_layout[name], tensor):
            raise _misfit(checkpoint, f"lacks rows of {name}")
    return Checkpoint(str(checkpoint), stored), stored_layout


def _block_slice(
    part: TensorSlice, key: str, shape: tuple[int, ...], offset: Sequence[int]
) -> TensorSlice:
    """Returns the part of a parameter that a stored block of a tensor has."""
    rows = []
    for source, target, length in part.rows:
        begin, end = max(source, offset[0]), min(source + length, offset[0] + shape[0])
        if begin < end:
            rows.append(RowSpan(begin - offset[0], target + begin - source, end - begin))
    inner = tuple(RowSpan(0, *span) for span in zip(offset[1:], shape[1:], strict=True))
    return TensorSlice(key, shape, tuple(rows), inner)


def _read_tensor_metadata(checkpoint: Path) -> Metadata:
    """Returns names, shapes and dtypes of a checkpoint's tensors; ValueError if unreadable."""
    try:
        return HuggingFaceStorageReader(str(checkpoint)).read_metadata()
    except Exception as error:  # whatever torch and safetensors meet in headers that are wrong
        raise ValueError(f"{checkpoint} cannot be read: {error}") from error


# Checks of what is stored against the model


def _misfit(checkpoint: Path, fault: str) -> ValueError:
    """Returns the error for a checkpoint that does not fit the run."""
    return ValueError(f"{checkpoint} does not fit the model: it {fault}")


def _check_dtypes(checkpoint: Path, names: Container[str], metadata: Metadata) -> None:
    """Raises ValueError if files have rows of one of the tensors in different dtypes, which no run
    writes: each would be read as its own header says."""
    first: dict[str, Any] = {}
    for index, info in metadata.storage_data.items():
        other = first.setdefault(index.fqn, info)
        if index.fqn in names and other.dtype != info.dtype:
            places = sorted((Path(i.relative_path).name, str(i.dtype)) for i in (other, info))
            dtypes = " and ".join(f"{dtype} in {file}" for file, dtype in places)
            raise ValueError(
                f"{checkpoint} is damaged: {index.fqn} is {dtypes}; take another checkpoint"
            )


def _check_optimizer(checkpoint: Path, state: State, stored: Mapping[str, Any]) -> None:
    """Raises ValueError, naming the states, if another optimizer made the checkpoint's."""
    was, now = (", ".join(sorted({*map(_state_kind, names)} - {""})) for names in (stored, state))
    if was != now:
        raise ValueError(
            f"{checkpoint} has the states of another optimizer: {was or 'none'}; this one has "
            f"{now or 'none'}. Give the optimizer and settings that it was made with, or "
            f"{BEGIN_AGAIN}"
        )


def _state_kind(name: str) -> str:
    """Returns STATE of a tensor optimizer.STATE.NAME, "" for weights and averages."""
    return name.split(".")[1] if name.startswith(OPTIMIZER) else ""


def _check_tensors(checkpoint: Path, state: State, stored: Mapping[str, Any]) -> None:
    """Raises ValueError for other names, shapes or kinds of numbers, and for missing rows."""
    for fault, names in (("lacks", state.keys() - stored), ("also has", stored.keys() - state)):
        if names:
            hint = ""
            if all(name.startswith((OPTIMIZER, EMA)) for name in names):
                hint = f"; if parameter_groups freeze other parameters than before, {BEGIN_AGAIN}"
            raise _misfit(checkpoint, f"{fault} {list_first(sorted(names))}{hint}")
    for name, tensor in sorted(state.items()):
        found, fault = stored[name], ""
        if found.size != tensor.size():
            fault = "resizes"
        elif not _has_all_rows(found.chunks, tensor.size()):
            fault = "lacks rows of"
        elif found.properties.dtype.is_floating_point != tensor.dtype.is_floating_point:
            fault = "has whole numbers for others, or others for whole ones, in"
        if fault:
            raise _misfit(checkpoint, f"{fault} {name}")


def _has_all_rows(chunks: Sequence[ChunkStorageMetadata], shape: Sequence[int]) -> bool:
    """Returns whether chunks, of which replicas may have the same, cover a tensor."""
    if any(not len(c.offsets) == len(c.sizes) == len(shape) for c in chunks):
        return False
    return covers_tensor({tuple(zip(c.offsets, c.sizes, strict=True)) for c in chunks}, shape)


@torch.no_grad()
def check_values(checkpoint: Path, state: State, stored: Metadata) -> None:
    """Raises ValueError, naming file, tensor and value, if a value that was read is NaN, infinite,
    or negative where none can be.

    In a process group every rank calls this and all raise the same error. Each tensor takes one
    reduction on its device, and all of them one wait.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[str, Tensor]]] = {}
    for name, tensor in state.items():
        if tensor.dtype.is_floating_point or _state_kind(name) in NEVER_NEGATIVE:
            for rows in (chunk.rows for chunk in tensor.chunks if chunk.rows.numel()):
                groups.setdefault((rows.device, rows.dtype), []).append((name, rows))
    wrong: dict[str, float] = {}
    for group in groups.values():
        ranges = torch.stack([torch.stack(torch.aminmax(rows)) for _, rows in group])
        for (name, _), pair in zip(group, ranges.double().tolist(), strict=True):
            least = 0.0 if _state_kind(name) in NEVER_NEGATIVE else -torch.inf
            if bad := [x for x in pair if not (least <= x < torch.inf and x > -torch.inf)]:
                wrong.setdefault(name, bad[0])
    faults = [f"{checkpoint} has {x} in {n} ({_files(stored, n)})" for n, x in wrong.items()]
    if faults := sorted({fault for some in WriterGroup().gather(faults) for fault in some}):
        more = f", and so {len(faults) - 1} more" if len(faults) > 1 else ""
        raise ValueError(
            f"{faults[0]}, which no run has{more}: resume from another checkpoint, or {BEGIN_AGAIN}"
        )


def _files(stored: Metadata, name: str) -> str:
    """Returns a text with the first file that has rows of a tensor, and how many others have."""
    paths = [info.relative_path for index, info in stored.storage_data.items() if index.fqn == name]
    files = {Path(path).name for path in paths}
    return min(files) + f" or {len(files) - 1} more" * (len(files) > 1)
