"""Weights and optimizer states under the names of checkpoint tensors, each rank with its own rows.

So that a checkpoint can be read on any layout: the rows of q_proj are those of q_proj, whichever
packed parameter holds them and however it is divided.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import Optimizer

from tigon.models import CausalLM, adapter_parameters
from tigon.train.optim import Ema
from tigon.train.parallel import local
from tigon.weights import Layout, Part, Rows, own_rows, own_slices

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


def everything(model: CausalLM, optimizer: Optimizer | None, ema: Ema | None) -> State:
    """Weights and, if given, optimizer states and average."""
    state = weights(model)
    if optimizer is not None:
        state |= optimizer_states(model, optimizer)
    if ema is not None:
        state |= averages(model, ema)
    return state


def weights(model: CausalLM) -> State:
    """By name of the checkpoint tensor; a tied one once. Of a model with an adapter that alone."""
    adapter, every = model.active_adapter, dict(model.named_parameters())
    chosen = every if adapter is None else adapter_parameters(model, adapter)
    own = {name: own_rows(name, p) for name, p in chosen.items()}
    return _by_part(own, model)


def averages(model: CausalLM, ema: Ema) -> State:
    """As `weights`, named ema.NAME; of the parameters that are trained."""
    parameters = dict(model.named_parameters())
    own = {n: (value, own_rows(n, parameters[n])[1]) for n, value in ema.values.items()}
    return _by_part(own, model, EMA)


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
        own, first = own_rows(name, parameters[name])
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
        found |= _by_part(own_of, model, f"{OPTIMIZER}{kind}.")
    return found


def _same_rows(state: Tensor, own: Tensor) -> bool:
    """All dimensions of this rank's rows but perhaps the last one of a matrix."""
    return state.shape == own.shape or (own.dim() > 1 and state.shape[:-1] == own.shape[:-1])


def run_layout(model: CausalLM) -> Layout:
    """All experts of a layer in one tensor: thousands of small ones would take long to plan."""
    return model.layout(stacked_experts=True)


def _by_part(own: Mapping[str, tuple[Tensor, int]], model: CausalLM, prefix: str = "") -> State:
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
            slices = own_slices(part, shape, held, first)
            chunks.setdefault(name, []).extend(Chunk(at, rows) for at, rows in slices)
    return {name: LocalRows(shapes[name], dtypes[name], chunks[name]) for name in shapes}


def _coarser(part: Part, block: int) -> Part:
    """Of a tensor with one number for each `block` elements of a row."""
    spans = part.spans
    if spans:
        spans = (*spans[:-1], Rows(*(n // block for n in spans[-1])))
    return replace(part, shape=(*part.shape[:-1], part.shape[-1] // block), spans=spans)
