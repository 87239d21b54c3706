"""Weights and optimizer states under the names of checkpoint tensors, each rank with its own rows.

So that a checkpoint can be read on any layout: the rows of q_proj are those of q_proj, whichever
packed parameter holds them and however it is divided.
"""

from collections.abc import Mapping, Sequence
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

from tigon.models import CausalLM
from tigon.weights import Layout, own_rows, own_slices

OPTIMIZER = "optimizer."  # what the names of its states begin with


class Chunk(NamedTuple):
    row: int  # of the whole tensor, where these rows begin
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
            ChunkStorageMetadata(self._offsets(chunk), torch.Size(chunk.rows.shape))
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
        return next(c.rows for c in self.chunks if self._offsets(c) == index.offset)

    def _offsets(self, chunk: Chunk) -> torch.Size:
        return torch.Size([chunk.row] + [0] * (self.dim() - 1))


State = dict[str, LocalRows]


def weights(model: CausalLM) -> State:
    """By name of the checkpoint tensor; a tied one once."""
    return _by_part(dict(model.named_parameters()), run_layout(model))


def optimizer_states(model: CausalLM, optimizer: Optimizer) -> State:
    """As `weights`, named optimizer.STATE.NAME; all zeros before the first step.

    What an optimizer counts for a parameter as one number, all parts of the parameter have.
    """
    layout = run_layout(model)
    parameters = dict(model.named_parameters())
    states: dict[str, dict[str, Tensor]] = {}
    by_parameter: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer))
    for parameter, values in by_parameter["state"].items():
        for kind, value in values.items():
            if not isinstance(value, Tensor) or not (
                value.shape == parameters[parameter].shape or value.numel() == 1
            ):
                raise TypeError(
                    f"the optimizer's {kind} of {parameter} cannot be saved: it is neither one "
                    f"number nor a tensor like the parameter, but {value!r}"
                )
            states.setdefault(kind, {})[parameter] = value
    found: State = {}
    for kind, values in states.items():
        like = {n: v for n, v in values.items() if v.shape == parameters[n].shape}
        prefix = f"{OPTIMIZER}{kind}."
        found |= {prefix + name: rows for name, rows in _by_part(like, layout).items()}
        for parameter in values.keys() - like.keys():
            one = Chunk(0, values[parameter].detach().view(1))
            for part in layout[parameter]:
                found[prefix + part.name] = LocalRows((1,), one.rows.dtype, [one])
    return found


def run_layout(model: CausalLM) -> Layout:
    """All experts of a layer in one tensor: thousands of small ones would take long to plan."""
    return model.layout(stacked_experts=True)


def _by_part(tensors: Mapping[str, Tensor], layout: Layout) -> State:
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, torch.dtype] = {}
    chunks: dict[str, list[Chunk]] = {}
    for parameter, tensor in tensors.items():
        local, first = own_rows(parameter, tensor)
        for part in layout[parameter]:
            shapes[part.name], dtypes[part.name] = part.shape, tensor.dtype
            own = own_slices(part, tensor.shape, local, first)
            chunks.setdefault(part.name, []).extend(Chunk(row, rows) for row, rows in own)
    return {name: LocalRows(shapes[name], dtypes[name], chunks[name]) for name in shapes}
