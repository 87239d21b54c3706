"""Weights and optimizer states under the names of checkpoint tensors, each rank with its own rows.

So that a checkpoint can be read on any layout: the rows of q_proj are those of q_proj, whichever
packed parameter holds them and however it is divided.
"""

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import StorageWriter
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

from tigon.models import CausalLM, adapter_parameters
from tigon.train.distributed import local
from tigon.train.optim import Ema
from tigon.weights import Layout, RowSpan, TensorSlice, local_blocks, local_rows
from tigon.weights.files import explain_full_disk, require_space
from tigon.weights.header import write_header
from tigon.weights.write import tensor_bytes

OPTIMIZER = "optimizer."  # what the names of its states begin with
EMA = "ema."  # and those of averages


class Chunk(NamedTuple):
    offsets: tuple[int, ...]  # in the whole tensor, where these rows begin
    rows: Tensor


class LocalRows(Tensor):
    """The rows of a checkpoint tensor that this rank has, for torch.distributed.checkpoint.

    Its planner takes only tensors and asks them for these three methods, as it asks a DTensor.
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
        return [
            ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.rows.shape))
            for chunk in self.chunks
        ]

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
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
        return next(c.rows for c in self.chunks if torch.Size(c.offsets) == index.offset)


State = dict[str, LocalRows]


def full_state(model: CausalLM, optimizer: Optimizer | None, ema: Ema | None) -> State:
    """Weights and, if given, optimizer states and average."""
    state = weight_state(model)
    if optimizer is not None:
        state |= optimizer_states(model, optimizer)
    if ema is not None:
        state |= ema_state(model, ema)
    return state


def weight_state(model: CausalLM) -> State:
    """By name of the checkpoint tensor; a tied one once. Of a model with an adapter that alone."""
    adapter, every = model.active_adapter, dict(model.named_parameters())
    chosen = every if adapter is None else adapter_parameters(model, adapter)
    own = {name: local_rows(name, p) for name, p in chosen.items()}
    return _shards_by_tensor(own, model)


def ema_state(model: CausalLM, ema: Ema) -> State:
    """As `weights`, named ema.NAME; of the parameters that are trained."""
    parameters = dict(model.named_parameters())
    own = {n: (value, local_rows(n, parameters[n])[1]) for n, value in ema.values.items()}
    return _shards_by_tensor(own, model, EMA)


def optimizer_states(model: CausalLM, optimizer: Optimizer) -> State:
    """As `weights`, named optimizer.STATE.NAME; all zeros before the first step.

    A state is sharded as its parameter is, or has the same rows on each rank, perhaps of another
    length. What an optimizer counts for a parameter as one number, all its parts have.
    """
    layout = run_layout(model)
    parameters = dict(model.named_parameters())
    rows: dict[str, dict[str, tuple[Tensor, int]]] = {}
    found: State = {}
    new = not optimizer.state
    by_parameter: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer))
    if new:  # torch makes states by a step that changes no weight, but counts
        for values in optimizer.state.values():
            if "step" in values:
                values["step"].zero_()
    for name, values in by_parameter["state"].items():
        own, first = local_rows(name, parameters[name])
        for kind, value in values.items():
            state = local(value)
            if isinstance(state, Tensor) and _same_rows(state, own):
                rows.setdefault(kind, {})[name] = (state.detach(), first)
            elif isinstance(state, Tensor) and state.numel() == 1:
                one = Chunk((0,), state.detach().view(1))
                for part in layout[name]:
                    found[f"{OPTIMIZER}{kind}.{part.name}"] = LocalRows((1,), one.rows.dtype, [one])
            else:
                raise TypeError(
                    f"the optimizer's {kind} of {name} cannot be saved: it is neither one number "
                    f"nor a tensor with the parameter's rows, but {value!r}"
                )
    for kind, own_of in rows.items():
        found |= _shards_by_tensor(own_of, model, f"{OPTIMIZER}{kind}.")
    return found


def _same_rows(state: Tensor, own: Tensor) -> bool:
    """All dimensions of this rank's rows but perhaps the last one of a matrix."""
    return state.shape == own.shape or (own.dim() > 1 and state.shape[:-1] == own.shape[:-1])


def run_layout(model: CausalLM) -> Layout:
    """All experts of a layer in one tensor: thousands of small ones would take long to plan."""
    return model.layout(stacked_experts=True)


def _shards_by_tensor(
    own: Mapping[str, tuple[Tensor, int]], model: CausalLM, prefix: str = ""
) -> State:
    """`own`: of each parameter this rank's rows, and which of the whole is the first."""
    layout, parameters = run_layout(model), dict(model.named_parameters())
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, torch.dtype] = {}
    chunks: dict[str, list[Chunk]] = {}
    for parameter, (held, first) in own.items():
        shape = parameters[parameter].shape
        for part in layout[parameter]:
            if held.shape[-1:] != shape[-1:] and len(shape) > 1:  # a number for several elements
                part = _coarser(part, shape[-1] // held.shape[-1])
            name = prefix + part.name
            shapes[name], dtypes[name] = part.shape, held.dtype
            slices = local_blocks(part, shape, held, first)
            chunks.setdefault(name, []).extend(Chunk(at, rows) for at, rows in slices)
    return {name: LocalRows(shapes[name], dtypes[name], chunks[name]) for name in shapes}


def _coarser(part: TensorSlice, block: int) -> TensorSlice:
    """Of a tensor with one number for each `block` elements of a row."""
    spans = part.inner
    if spans:
        spans = (*spans[:-1], RowSpan(*(n // block for n in spans[-1])))
    return replace(part, shape=(*part.shape[:-1], part.shape[-1] // block), inner=spans)


# torch's HuggingFaceStorageWriter makes a second copy of all that a rank saves before it writes
# the first byte, keeps only the last of several slices of one tensor, syncs a file before its
# buffer is written, and knows no checksums.

BLOCK = 16 << 20  # bytes that are hashed and written at a time


class FileResult(NamedTuple):
    file: str
    sha256: str


class Writer(StorageWriter):
    """Every rank writes weights-RANK, optimizer-RANK and ema-RANK.safetensors; then rank 0 calls
    `commit`."""

    def __init__(self, directory: Path, commit: Callable[[Mapping[str, str]], None]) -> None:
        """`commit` gets the checksum of every file."""
        self.directory, self.commit = directory, commit

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass  # for one checkpoint only

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0."""
        require_space(
            self.directory.parent, sum(_nbytes(item) for plan in plans for item in plan.items)
        )
        return [dataclasses.replace(p, storage_data=rank) for rank, p in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        for name, items in _files(plan.items, plan.storage_data).items():
            path = self.directory / name
            with explain_full_disk(path, sum(map(_nbytes, items))):
                written = FileResult(name, _write(path, items, planner))
            results += [WriteResult(item.index, _nbytes(item), written) for item in items]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, after all have written."""
        self.commit(dict(result.storage_data for rank in results for result in rank))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _files(items: Sequence[WriteItem], rank: int) -> dict[str, list[WriteItem]]:
    """By name; a file has one slice of a tensor, so further ones of this rank go to further files.

    Large elements first, so that all are aligned.
    """
    found: dict[str, list[WriteItem]] = {}
    seen: dict[str, int] = {}
    for item in items:
        name = item.index.fqn
        count = seen[name] = seen.get(name, -1) + 1
        kind = "weights"
        if name.startswith((OPTIMIZER, EMA)):
            kind = name.partition(".")[0]
        again = f"-{count}" if count else ""
        found.setdefault(f"{kind}-{rank:05d}{again}.safetensors", []).append(item)
    for group in found.values():
        group.sort(key=lambda item: (-_data(item).properties.dtype.itemsize, item.index.fqn))
    return found


def _write(path: Path, items: Sequence[WriteItem], planner: SavePlanner) -> str:
    """Tensor by tensor; the file's checksum."""
    offsets = {i.index.fqn: {SAVED_OFFSETS_KEY: list(_data(i).chunk.offsets)} for i in items}
    header = write_header(
        [(i.index.fqn, _data(i).chunk.sizes, _data(i).properties.dtype) for i in items],
        {"format": "pt", CUSTOM_METADATA_KEY: json.dumps(offsets)},
    )
    digest = hashlib.sha256()
    with open(path, "xb") as file:
        digest.update(header)
        file.write(header)
        for item in items:
            content = tensor_bytes(planner.resolve_data(item))  # type: ignore[arg-type]
            for start in range(0, len(content), BLOCK):
                digest.update(content[start : start + BLOCK])
                file.write(content[start : start + BLOCK])
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _data(item: WriteItem) -> Any:
    return item.tensor_data


def _nbytes(item: WriteItem) -> int:
    return math.prod(_data(item).chunk.sizes) * _data(item).properties.dtype.itemsize
