"""Reads checkpoints into models and optimizers on any number of ranks, and checks their values."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.optim import Optimizer

from tigon.hub import check_folder
from tigon.models import CausalLM
from tigon.models.pretrained.names import stored_tensors
from tigon.train.checkpoint.format import (
    EMA,
    OPTIMIZER,
    State,
    full_state,
    run_layout,
    state_blocks,
)
from tigon.train.optim import Ema
from tigon.utils.json import list_first
from tigon.weights import Checkpoint, Layout, RowSpan, TensorInfo, TensorSlice, WriterGroup
from tigon.weights.files import read_lock
from tigon.weights.header import read_header
from tigon.weights.layout import covers_parameter
from tigon.weights.load import Matched, fill_shards

# Sums of squares, scales and counts
NEVER_NEGATIVE = ("exp_avg_sq", "exp_avg_sq_scale", "exp_avg_scale", "step")
BEGIN_AGAIN = "begin another run_dir, with model= an export of this one"


class StoredBlock(NamedTuple):
    """A block of a checkpoint tensor in a file, and where it begins in the full tensor."""

    info: TensorInfo
    offset: tuple[int, ...]


StoredBlocks = dict[str, list[StoredBlock]]  # by the tensor's name


def load(
    checkpoint: Path, model: CausalLM, optimizer: Optimizer | None = None, ema: Ema | None = None
) -> None:
    """Fills weights and, if given, optimizer states and average in place; lr, betas and so on stay.
    An average that the checkpoint does not have begins with its weights.

    Each rank reads its own rows only. In a process group every rank calls this. Raises ValueError
    if the checkpoint does not fit the model, cannot be read, or has values that no run has.
    """
    with read_lock(checkpoint):
        check_folder(checkpoint)
        stored = _read_blocks(checkpoint)
        has_average = any(name.startswith(EMA) for name in stored)
        unused = tuple(p for p, of in ((EMA, ema), (OPTIMIZER, optimizer)) if of is None)
        stored = {name: blocks for name, blocks in stored.items() if not name.startswith(unused)}
        state = full_state(model, optimizer, ema if has_average else None)
        layout = {name: shard.parts for name, shard in state.items()}
        _check_optimizer(checkpoint, _tensor_names(layout), stored)
        tensors = {
            name: torch.empty(shard.shape, dtype=shard.memory.dtype, device="meta")
            for name, (shard, _) in state.items()
        }
        matched, fault = _match_blocks(checkpoint, tensors, layout, stored), ""
        try:
            fill_shards({name: shard.local for name, shard in state.items()}, matched)
        except (OSError, ValueError) as error:
            fault = str(error)
        if fault := next(filter(None, WriterGroup().gather(fault)), ""):
            raise ValueError(f"{checkpoint} cannot be read: {fault}")
        _check_values(checkpoint, state, stored)
    if ema is not None and not has_average:
        ema.begin(model)


def stored_weights(checkpoint: Path, model: CausalLM) -> tuple[Checkpoint, Layout]:
    """Returns the blocks of checkpoint tensors that the files have, each with a name of its own,
    and their layout in the model. Raises ValueError if the checkpoint is of another model, or lacks
    rows of it."""
    stored = _read_blocks(checkpoint)
    stored = {n: blocks for n, blocks in stored.items() if not n.startswith((OPTIMIZER, EMA))}
    matched = _match_blocks(checkpoint, stored_tensors(model), run_layout(model), stored)
    tensors = {part.name: info for parts in matched.values() for part, info in parts}
    layout = {name: tuple(part for part, _ in parts) for name, parts in matched.items()}
    return Checkpoint(str(checkpoint), tensors), layout


def _read_blocks(checkpoint: Path) -> StoredBlocks:
    """Returns the blocks of each tensor in a checkpoint's files; ValueError for unreadable ones."""
    try:
        found = HuggingFaceStorageReader(str(checkpoint)).read_metadata().storage_data
    except Exception as error:  # whatever torch and safetensors meet in headers that are wrong
        raise ValueError(f"{checkpoint} cannot be read: {error}") from error
    headers = {path: read_header(Path(path)) for path in {i.relative_path for i in found.values()}}
    blocks: StoredBlocks = {}
    for index, info in found.items():
        block = StoredBlock(headers[info.relative_path][index.fqn], tuple(index.offset))
        blocks.setdefault(index.fqn, []).append(block)
    return blocks


# Checks of what is stored against the model


def _match_blocks(
    checkpoint: Path, tensors: Mapping[str, Tensor], layout: Layout, stored: StoredBlocks
) -> Matched:
    """Returns what stored blocks have of each tensor of a rank, which may be on the meta device;
    raises ValueError for other names, shapes or kinds of numbers, and for missing rows."""
    names = _tensor_names(layout)
    for fault, wrong in (("lacks", names - stored.keys()), ("also has", stored.keys() - names)):
        if wrong:
            hint = ""
            if all(name.startswith((OPTIMIZER, EMA)) for name in wrong):
                hint = f"; if parameter_groups freeze other parameters than before, {BEGIN_AGAIN}"
            raise _misfit(checkpoint, f"{fault} {list_first(sorted(wrong))}{hint}")
    matched: Matched = {}
    for name, parts in layout.items():
        tensor, matched[name] = tensors[name], []
        for part in parts:
            blocks = stored[part.name]
            ends = [map(sum, zip(b.offset, b.info.shape, strict=True)) for b in blocks]
            if tuple(map(max, zip(*ends, strict=True))) != part.shape:
                raise _misfit(checkpoint, f"resizes {part.name}")
            for i, (info, offset) in enumerate(blocks):
                if info.dtype.is_floating_point != tensor.dtype.is_floating_point:
                    fault = "has whole numbers for others, or others for whole ones, in"
                    file = f"({info.path.name}); take another checkpoint"
                    raise _misfit(checkpoint, f"{fault} {part.name} {file}")
                key = f"{part.name} {i}"
                matched[name] += [(s, info) for s in _stored_part(part, key, info.shape, offset)]
        slices = [part for part, _ in matched[name]]
        if tensor.numel() and not (slices and covers_parameter(slices, tensor)):
            raise _misfit(checkpoint, f"lacks rows of {name}")
    return matched


def _stored_part(
    part: TensorSlice, key: str, shape: tuple[int, ...], offset: Sequence[int]
) -> list[TensorSlice]:
    """Returns the slice that a parameter has of a stored block, in a list, if it has one; `part` is
    what it has of the whole tensor."""
    rows = [_overlap(span, offset[0], shape[0]) for span in part.rows]
    inner = tuple(map(_overlap, part.inner_spans, offset[1:], shape[1:]))
    rows = [span for span in rows if span.length > 0]
    if rows and all(span.length > 0 for span in inner):
        return [TensorSlice(key, shape, tuple(rows), inner)]
    return []


def _overlap(span: RowSpan, first: int, size: int) -> RowSpan:
    """Returns the part of a span in a stored range, counted within it; empty if length <= 0."""
    begin, end = max(span.source, first), min(span.source + span.length, first + size)
    return RowSpan(begin - first, span.target + begin - span.source, end - begin)


def _tensor_names(layout: Layout) -> set[str]:
    """Returns the names of the checkpoint tensors of a layout."""
    return {part.name for parts in layout.values() for part in parts}


def _misfit(checkpoint: Path, fault: str) -> ValueError:
    """Returns the error for a checkpoint that does not fit the run."""
    return ValueError(f"{checkpoint} does not fit the model: it {fault}")


def _check_optimizer(checkpoint: Path, names: Iterable[str], stored: Iterable[str]) -> None:
    """Raises ValueError, naming the states, if another optimizer made the checkpoint's."""
    was, now = (", ".join(sorted({*map(_state_kind, n)} - {""})) for n in (stored, names))
    if was != now:
        raise ValueError(
            f"{checkpoint} has the states of another optimizer: {was or 'none'}; this one has "
            f"{now or 'none'}. Give the optimizer and settings that it was made with, or "
            f"{BEGIN_AGAIN}"
        )


def _state_kind(name: str) -> str:
    """Returns STATE of a tensor optimizer.STATE.NAME, "" for weights and averages."""
    return name.split(".")[1] if name.startswith(OPTIMIZER) else ""


@torch.no_grad()
def _check_values(checkpoint: Path, state: State, stored: StoredBlocks) -> None:
    """Raises ValueError, naming file, tensor and value, if a value that was read is NaN, infinite,
    or negative where none can be.

    In a process group every rank calls this and all raise the same error. Each tensor takes one
    reduction on its device, and all of them one wait.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[str, Tensor]]] = {}
    for name, _, rows in state_blocks(state):
        if rows.dtype.is_floating_point or _state_kind(name) in NEVER_NEGATIVE:
            groups.setdefault((rows.device, rows.dtype), []).append((name, rows))
    wrong: dict[str, float] = {}
    for group in groups.values():
        ranges = torch.stack([torch.stack(torch.aminmax(rows)) for _, rows in group])
        for (name, _), pair in zip(group, ranges.double().tolist(), strict=True):
            least = 0.0 if _state_kind(name) in NEVER_NEGATIVE else -torch.inf
            if bad := [x for x in pair if not (least <= x < torch.inf and x > -torch.inf)]:
                wrong.setdefault(name, bad[0])
    faults = [f"{checkpoint} has {x} in {n} ({_files(stored[n])})" for n, x in wrong.items()]
    if faults := sorted({fault for some in WriterGroup().gather(faults) for fault in some}):
        more = f", and so {len(faults) - 1} more" if len(faults) > 1 else ""
        raise ValueError(
            f"{faults[0]}, which no run has{more}: resume from another checkpoint, or {BEGIN_AGAIN}"
        )


def _files(blocks: Sequence[StoredBlock]) -> str:
    """Returns a text with the first file that has a block, and how many others have."""
    files = {block.info.path.name for block in blocks}
    return min(files) + f" or {len(files) - 1} more" * (len(files) > 1)
