"""Maps weights and optimizer states to the tensors of a checkpoint, and writes each rank's rows.

Tensors have the names and shapes of a Hugging Face checkpoint, so any layout can read them: rows of
q_proj are stored as q_proj, whichever packed parameter holds them and however it is sharded. The
files are those of torch.distributed.checkpoint's HuggingFaceStorageWriter, which copies all that a
rank saves before it writes the first byte, keeps only the last of several slices of one tensor,
syncs a file before its buffer is written, and knows no checksums.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import Optimizer

from tigon.models import CausalLM
from tigon.models.adapters.adapters import adapter_parameters
from tigon.models.pretrained.names import stored_tensors
from tigon.train.distributed import local
from tigon.train.optim import Ema
from tigon.utils.memory import split_by_size
from tigon.weights import Layout, RowSpan, TensorSlice, WriterGroup, local_blocks, local_rows
from tigon.weights.entries import TensorEntry, row_chunks
from tigon.weights.files import explain_full_disk
from tigon.weights.header import write_header
from tigon.weights.layout import LocalShard
from tigon.weights.write import WORKERS, StagingBuffer

OPTIMIZER, EMA = "optimizer.", "ema."  # prefixes of the names of states and averages
FILE = 1 << 30  # bytes of a file, at most: files are hashed and written side by side


class StateShard(NamedTuple):
    """This rank's rows of a parameter or a state, and the checkpoint tensors that it is made of."""

    local: LocalShard
    parts: tuple[TensorSlice, ...]


class StateBlock(NamedTuple):
    """Rows of a checkpoint tensor that this rank has, and where they begin in the full tensor."""

    name: str
    offset: tuple[int, ...]
    rows: Tensor


State = dict[str, StateShard]


def state_blocks(state: State) -> Iterator[StateBlock]:
    """Yields this rank's rows of checkpoint tensors, as views of its parameters and states."""
    for (memory, shape, first), parts in state.values():
        for part in parts:
            for offset, rows in local_blocks(part, shape, memory, first[0] if first else 0):
                yield StateBlock(part.name, offset, rows)


def full_state(model: CausalLM, optimizer: Optimizer | None, ema: Ema | None) -> State:
    """Returns this rank's rows of the weights, a tied one once, or of the adapter's alone, of the
    optimizer states and of the average (ema.NAME)."""
    tensors, layout = stored_tensors(model), run_layout(model)
    names, averages = tensors.keys(), {} if ema is None else ema.values
    if model.active_adapter is not None:
        names = adapter_parameters(model, model.active_adapter).keys()
    state = {name: _state_shard(name, tensors[name], tensors[name], layout[name]) for name in names}
    for name, value in averages.items():
        state[EMA + name] = _state_shard(name, tensors[name], value, layout[name], EMA)
    return state if optimizer is None else state | optimizer_states(model, optimizer)


def optimizer_states(model: CausalLM, optimizer: Optimizer) -> State:
    """Returns this rank's rows of the states as optimizer.STATE.NAME; zeros before the first step.

    A state is one number, which each checkpoint tensor of a packed parameter gets, or has the rows
    of its parameter, perhaps with fewer columns (scales of blocks).
    """
    is_new = not optimizer.state
    by_parameter: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer))
    if is_new:  # torch makes states by a step that changes no weight, but counts
        for values in optimizer.state.values():
            if "step" in values:
                values["step"].zero_()
    layout, parameters = run_layout(model), dict(model.named_parameters())
    state: State = {}
    for name, values in by_parameter["state"].items():
        weight = local(parameters[name])
        for kind, value in values.items():
            part, prefix = local(value), f"{OPTIMIZER}{kind}."
            # A state with all dimensions of the weight but the last has scales of blocks
            if isinstance(part, Tensor) and (
                part.shape == weight.shape
                or (weight.dim() > 1 and part.shape[:-1] == weight.shape[:-1])
            ):
                state[prefix + name] = _state_shard(
                    name, parameters[name], part, layout[name], prefix
                )
            elif isinstance(part, Tensor) and part.numel() == 1:
                number = LocalShard(part.detach().view(1), (1,), (0,))
                for tensor in layout[name]:
                    key = prefix + tensor.name
                    state[key] = StateShard(number, (TensorSlice.whole(key, (1,)),))
            else:
                raise TypeError(
                    f"the optimizer's {kind} of {name} cannot be saved: it is neither one number "
                    f"nor a tensor with the parameter's rows, but {value!r}"
                )
    return state


def run_layout(model: CausalLM) -> Layout:
    """Returns the layout with stacked experts: thousands of small tensors take long to plan."""
    return model.layout(stacked_experts=True)


def _state_shard(
    name: str, parameter: Tensor, value: Tensor, parts: Sequence[TensorSlice], prefix: str = ""
) -> StateShard:
    """Returns the shard of a value with the parameter's rows, in tensors whose names begin with
    `prefix`; it may have one number for several columns."""
    _, first = local_rows(name, parameter)
    memory, shape = local(value.detach()), tuple(parameter.shape)
    columns = memory.shape[-1] if shape else 1
    if len(shape) > 1 and columns != shape[-1]:
        parts = [_block_slice(part, shape[-1] // columns) for part in parts]
        shape = (*shape[:-1], columns)
    parts = tuple(replace(part, name=prefix + part.name) for part in parts)
    start = (first, *(0 for _ in shape[1:])) if shape else ()
    return StateShard(LocalShard(memory, shape, start), parts)


def _block_slice(part: TensorSlice, block: int) -> TensorSlice:
    """Returns the slice of a tensor with one number for each `block` elements of a row."""
    spans = part.inner
    if spans:
        spans = (*spans[:-1], RowSpan(*(n // block for n in spans[-1])))
    return replace(part, shape=(*part.shape[:-1], part.shape[-1] // block), inner=spans)


def assign_blocks(state: State, ranks: WriterGroup) -> list[StateBlock]:
    """Returns the blocks that this rank writes. Those that several ranks have are divided, so that
    each rank writes about as much. Every rank calls this."""
    blocks = {block[:2]: block for block in state_blocks(state)}
    sizes = ranks.gather({key: block.rows.nbytes for key, block in blocks.items()})
    holders: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for rank, keys in enumerate(sizes):
        for key in keys:
            holders.setdefault(key, []).append(rank)
    loads, owned = [0] * ranks.size, []
    for key, candidates in holders.items():
        owner = min(candidates, key=loads.__getitem__)
        loads[owner] += sizes[owner][key]
        if owner == ranks.rank:
            owned.append(blocks[key])
    return owned


def write_blocks(directory: Path, blocks: Sequence[StateBlock], rank: int) -> dict[str, str]:
    """Writes this rank's weights, optimizer and ema files; returns their checksums by name."""

    def write(file: tuple[str, list[StateBlock]]) -> tuple[str, str]:
        name, of_file = file
        with explain_full_disk(directory / name, sum(block.rows.nbytes for block in of_file)):
            return name, _write(directory / name, of_file)

    with ThreadPoolExecutor(WORKERS) as pool:
        return dict(pool.map(write, _assign_files(blocks, rank).items()))


def _assign_files(blocks: Sequence[StateBlock], rank: int) -> dict[str, list[StateBlock]]:
    """Returns the blocks by file name; a further one of the same tensor goes to a further file, as
    does what would make a file larger than FILE.

    Large elements come first, so that all are aligned.
    """
    groups: dict[tuple[str, int], list[StateBlock]] = {}
    seen, counts = Counter[str](), Counter[str]()
    for block in blocks:
        name = block.name
        kind = name.partition(".")[0] if name.startswith((OPTIMIZER, EMA)) else "weights"
        groups.setdefault((kind, seen[name]), []).append(block)
        seen[name] += 1
    files: dict[str, list[StateBlock]] = {}
    for (kind, _), group in groups.items():
        group.sort(key=lambda block: (-block.rows.itemsize, block.name))
        for part in split_by_size(group, lambda block: block.rows.nbytes, FILE):
            suffix = f"-{counts[kind]}" if counts[kind] else ""
            files[f"{kind}-{rank:05d}{suffix}.safetensors"] = part
            counts[kind] += 1
    return files


def _write(path: Path, blocks: Sequence[StateBlock]) -> str:
    """Writes a new safetensors file to the disk, a few rows at a time; returns its SHA-256."""
    offsets = {block.name: {SAVED_OFFSETS_KEY: list(block.offset)} for block in blocks}
    header = write_header(
        [(block.name, block.rows.shape, block.rows.dtype) for block in blocks],
        {"format": "pt", CUSTOM_METADATA_KEY: json.dumps(offsets)},
    )
    digest, stage = hashlib.sha256(header), StagingBuffer()
    with open(path, "xb") as file:
        file.write(header)
        for block in blocks:
            entry = TensorEntry.of("", block.rows)
            (rows,) = entry.blocks
            for first, count in row_chunks(rows.rows, entry.row_bytes):
                content = stage(rows.read(first, count), entry.dtype)
                digest.update(content)
                file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()
