"""Maps weights and optimizer states to the tensors of a checkpoint, and writes each rank's rows.

Tensors have the names and shapes of a Hugging Face checkpoint, so any layout can read them: rows of
q_proj are stored as q_proj, whichever packed parameter holds them and however it is sharded.
"""

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.optim import Optimizer

from tigon.models import CausalLM
from tigon.models.adapters.adapters import adapter_parameters
from tigon.models.pretrained.names import stored_tensors
from tigon.train.distributed import local
from tigon.train.optim import Ema
from tigon.utils.memory import split_by_size
from tigon.weights import Layout, RowSpan, TensorSlice, local_blocks, local_rows
from tigon.weights.entries import TensorEntry, row_chunks
from tigon.weights.files import explain_full_disk
from tigon.weights.header import write_header
from tigon.weights.write import WORKERS, StagingBuffer

OPTIMIZER, EMA = "optimizer.", "ema."  # prefixes of the names of states and averages
FILE = 1 << 30  # bytes of a file, at most: files are hashed and written side by side


class Chunk(NamedTuple):
    """Rows of a tensor that this rank writes, and where they begin."""

    offsets: tuple[int, ...]  # of the first row, in the full tensor
    rows: Tensor


class LocalRows(Tensor):
    """This rank's rows of a checkpoint tensor, for torch.distributed.checkpoint.

    Its planner takes only tensors, and calls these three methods as it does for a DTensor.
    """

    chunks: tuple[Chunk, ...]

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, chunks: Sequence[Chunk]
    ) -> "LocalRows":
        cpu = torch.device("cpu")
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=cpu)
        self.chunks = tuple(chunks)
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func}: {cls.__name__} has no memory, only its chunks have")

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Returns the offsets and sizes of this rank's chunks."""
        return [
            ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.rows.shape))
            for chunk in self.chunks
        ]

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        """Returns an item to write for each of this rank's chunks."""
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, torch.Size(self.shape)),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Returns the rows of the chunk at the index's offset: to write them, or to read into."""
        return next(c.rows for c in self.chunks if torch.Size(c.offsets) == index.offset)


State = dict[str, LocalRows]
ParameterRows = Mapping[str, tuple[Tensor, int]]  # this rank's rows of each parameter, their first


def full_state(model: CausalLM, optimizer: Optimizer | None, ema: Ema | None) -> State:
    """Returns this rank's rows of the weights, the optimizer states and the average (ema.NAME)."""
    state = weight_state(model)
    if optimizer is not None:
        state |= optimizer_states(model, optimizer)
    if ema is not None:
        parameters = dict(model.named_parameters())
        rows = {n: (value, local_rows(n, parameters[n])[1]) for n, value in ema.values.items()}
        state |= _checkpoint_tensors(rows, model, EMA)
    return state


def weight_state(model: CausalLM) -> State:
    """Returns this rank's rows of the weights, a tied one once, or of the adapter's alone."""
    tensors = stored_tensors(model)
    if model.active_adapter is not None:
        tensors = {**adapter_parameters(model, model.active_adapter)}
    return _checkpoint_tensors({name: local_rows(name, t) for name, t in tensors.items()}, model)


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
    rows: dict[str, dict[str, tuple[Tensor, int]]] = {}
    state: State = {}
    for name, values in by_parameter["state"].items():
        weight, first = local_rows(name, parameters[name])
        for kind, value in values.items():
            part = local(value)
            # A state with all dimensions of the weight but the last has scales of blocks
            if isinstance(part, Tensor) and (
                part.shape == weight.shape
                or (weight.dim() > 1 and part.shape[:-1] == weight.shape[:-1])
            ):
                rows.setdefault(kind, {})[name] = (part.detach(), first)
            elif isinstance(part, Tensor) and part.numel() == 1:
                one = Chunk((0,), part.detach().view(1))
                for tensor in layout[name]:
                    key = f"{OPTIMIZER}{kind}.{tensor.name}"
                    state[key] = LocalRows((1,), one.rows.dtype, [one])
            else:
                raise TypeError(
                    f"the optimizer's {kind} of {name} cannot be saved: it is neither one number "
                    f"nor a tensor with the parameter's rows, but {value!r}"
                )
    for kind, rows_of_kind in rows.items():
        state |= _checkpoint_tensors(rows_of_kind, model, f"{OPTIMIZER}{kind}.")
    return state


def run_layout(model: CausalLM) -> Layout:
    """Returns the layout with all experts of a layer in one tensor: thousands of small ones would
    take long to plan."""
    return model.layout(stacked_experts=True)


def _checkpoint_tensors(rows: ParameterRows, model: CausalLM, prefix: str = "") -> State:
    """Returns this rank's rows of checkpoint tensors, named with `prefix`: views of its rows of the
    parameters, packed ones too."""
    layout, tensors = run_layout(model), stored_tensors(model)
    state: State = {}
    for name, (local_part, first) in rows.items():
        shape = tensors[name].shape
        for part in layout[name]:
            if local_part.shape[-1:] != shape[-1:] and len(shape) > 1:
                part = _block_slice(part, shape[-1] // local_part.shape[-1])
            key = prefix + part.name
            blocks = local_blocks(part, shape, local_part, first)
            chunks = (*(state[key].chunks if key in state else ()), *map(Chunk._make, blocks))
            state[key] = LocalRows(part.shape, local_part.dtype, chunks)
    return state


def _block_slice(part: TensorSlice, block: int) -> TensorSlice:
    """Returns the slice of a tensor with one number for each `block` elements of a row."""
    spans = part.inner
    if spans:
        spans = (*spans[:-1], RowSpan(*(n // block for n in spans[-1])))
    return replace(part, shape=(*part.shape[:-1], part.shape[-1] // block), inner=spans)


# torch's HuggingFaceStorageWriter copies all that a rank saves before it writes the first byte,
# keeps only the last of several slices of one tensor, syncs a file before its buffer is written,
# and knows no checksums.


class Writer(FileSystemWriter):
    """Writes weights-RANK, optimizer-RANK and ema-RANK.safetensors on every rank, into the
    directory that rank 0 gets from `begin` with the bytes of all; then rank 0 calls `commit` with
    the directory and the checksum of every file."""

    def __init__(
        self, begin: Callable[[int], Path], commit: Callable[[Path, Mapping[str, str]], None]
    ) -> None:
        super().__init__("")
        self.begin, self.commit, self.directory = begin, commit, Path()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Returns the plan unchanged."""
        return plan  # the directory is made when all ranks have a plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Makes the directory; returns the plans with it and their ranks. Rank 0 calls this."""
        self.directory = self.begin(sum(_nbytes(item) for plan in plans for item in plan.items))
        return [replace(p, storage_data=(self.directory, rank)) for rank, p in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's files of the plan; returns a finished future with a result for each
        item, which has the name and checksum of its file."""
        directory, rank = plan.storage_data

        def write(file: tuple[str, list[WriteItem]]) -> list[WriteResult]:
            name, items = file
            path = directory / name
            with explain_full_disk(path, sum(map(_nbytes, items))):
                written = name, _write(path, items, planner)  # its checksum
            return [WriteResult(item.index, _nbytes(item), written) for item in items]

        with ThreadPoolExecutor(WORKERS) as pool:
            results = [*pool.map(write, _assign_files(plan.items, rank).items())]
        done: Future[list[WriteResult]] = Future()
        done.set_result([result for of_file in results for result in of_file])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits the checkpoint; rank 0 calls this when all ranks have written."""
        sums = dict(result.storage_data for rank in results for result in rank)
        self.commit(self.directory, sums)


def _assign_files(items: Sequence[WriteItem], rank: int) -> dict[str, list[WriteItem]]:
    """Returns the items by file name; a further slice of the same tensor goes to a further file, as
    does what would make a file larger than FILE.

    Large elements come first, so that all are aligned.
    """
    groups: dict[tuple[str, int], list[WriteItem]] = {}
    seen, counts = Counter[str](), Counter[str]()
    for item in items:
        name = item.index.fqn
        kind = name.partition(".")[0] if name.startswith((OPTIMIZER, EMA)) else "weights"
        groups.setdefault((kind, seen[name]), []).append(item)
        seen[name] += 1
    files: dict[str, list[WriteItem]] = {}
    for (kind, _), group in groups.items():
        group.sort(key=lambda item: (-_data(item).properties.dtype.itemsize, item.index.fqn))
        for part in split_by_size(group, _nbytes, FILE):
            suffix = f"-{counts[kind]}" if counts[kind] else ""
            files[f"{kind}-{rank:05d}{suffix}.safetensors"] = part
            counts[kind] += 1
    return files


def _write(path: Path, items: Sequence[WriteItem], planner: SavePlanner) -> str:
    """Writes a new safetensors file, a few rows at a time, to the disk; returns its SHA-256 in
    hexadecimal digits."""
    offsets = {i.index.fqn: {SAVED_OFFSETS_KEY: list(_data(i).chunk.offsets)} for i in items}
    header = write_header(
        [(i.index.fqn, _data(i).chunk.sizes, _data(i).properties.dtype) for i in items],
        {"format": "pt", CUSTOM_METADATA_KEY: json.dumps(offsets)},
    )
    digest, stage = hashlib.sha256(header), StagingBuffer()
    with open(path, "xb") as file:
        file.write(header)
        for item in items:
            entry = TensorEntry.of("", planner.resolve_data(item))  # type: ignore[arg-type]
            (block,) = entry.blocks
            for first, count in row_chunks(block.rows, entry.row_bytes):
                content = stage(block.read(first, count), _data(item).properties.dtype)
                digest.update(content)
                file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _data(item: WriteItem) -> Any:
    return item.tensor_data


def _nbytes(item: WriteItem) -> int:
    """Returns the bytes of the rows that an item writes."""
    return math.prod(_data(item).chunk.sizes) * _data(item).properties.dtype.itemsize
