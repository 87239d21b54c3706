"""Which ranks do what together: the dimensions of the device mesh."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class Place(NamedTuple):
    """One of several."""

    rank: int
    size: int


@dataclass(frozen=True)
class MeshSizes:
    """Ranks of each dimension. Ranks that differ in the last one alone are neighbours, as those of
    tensor parallelism talk the most."""

    replicate: int = 1
    fsdp: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1  # neighbours that divide experts, within a replica; no factor of the ranks

    @property
    def data(self) -> int:
        """Ranks with different rows of the data."""
        return self.replicate * self.fsdp

    @property
    def shards(self) -> int:
        """Ranks that divide the weights, besides those of tensor parallelism."""
        return self.fsdp * self.context

    @property
    def same(self) -> int:
        """Ranks of a replica that have the same experts."""
        return self.shards * self.tensor // self.expert

    @property
    def dividing(self) -> int:
        """Ranks that FSDP is for: one where tensor parallelism divides all there is."""
        return self.replicate * max(self.shards, self.same if self.expert > 1 else 1)

    @property
    def ranks(self) -> int:
        return self.replicate * self.shards * self.tensor


@dataclass(frozen=True)
class Meshes:
    """The ranks of a process group, as `sizes` divide them."""

    sizes: MeshSizes
    data: Place  # among the ranks with different rows of the data
    weights: DeviceMesh  # for fully_shard: the ranks that divide the weights, or (replicate, those)
    tensor: DeviceMesh | None  # of one dimension; None where it has one rank
    context: DeviceMesh | None
    expert: DeviceMesh | None  # neighbours that divide the experts of each layer
    experts: DeviceMesh  # for fully_shard, of experts: the ranks that have the same of them
    loss: dist.ProcessGroup  # the ranks with different rows, whose sums are added up

    @classmethod
    def of(cls, device: str, sizes: MeshSizes) -> "Meshes":
        """`device`: the type. Every rank of the process group calls this, at the same time."""
        dims = {"replicate": sizes.replicate, "shard": sizes.shards, "tensor": sizes.tensor}
        whole = init_device_mesh(device, tuple(dims.values()), mesh_dim_names=tuple(dims))
        context = None
        if sizes.context > 1:
            names = ("rows", "context", "tensor")
            shape = (sizes.replicate * sizes.fsdp, sizes.context, sizes.tensor)
            context = init_device_mesh(device, shape, mesh_dim_names=names)["context"]
        weights = whole["replicate", "shard"] if sizes.replicate > 1 else whole["shard"]
        expert, experts = None, weights
        if sizes.expert > 1:
            # Neighbours across dimensions: those of tensor parallelism are the first of them
            names = ("replicate", "same", "expert")
            shape = (sizes.replicate, sizes.same, sizes.expert)
            apart = init_device_mesh(device, shape, mesh_dim_names=names)
            expert = apart["expert"]
            experts = apart["replicate", "same"] if sizes.replicate > 1 else apart["same"]
        rows = dist.group.WORLD
        if (same := sizes.context * sizes.tensor) > 1:
            lists = torch.arange(sizes.ranks).view(-1, same).T.tolist()
            rows, _ = dist.new_subgroups_by_enumeration(lists)
        assert rows is not None
        return cls(
            sizes,
            Place(dist.get_rank() // (sizes.context * sizes.tensor), sizes.data),
            weights,
            whole["tensor"] if sizes.tensor > 1 else None,
            context,
            expert,
            experts,
            rows,
        )
