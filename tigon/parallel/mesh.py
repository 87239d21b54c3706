"""The device mesh: sizes and process groups of its dimensions."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class DataRank(NamedTuple):
    """A rank among `size`."""

    rank: int
    size: int


@dataclass(frozen=True)
class MeshSizes:
    """Ranks of each dimension. The innermost is tensor, whose ranks are neighbours, since tensor
    parallelism communicates the most."""

    replicate: int = 1
    fsdp: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1  # neighbours within a replica; no factor of the number of ranks

    @property
    def data(self) -> int:
        """Ranks with different rows of the data."""
        return self.replicate * self.fsdp

    @property
    def shards(self) -> int:
        """Ranks that FSDP shards the weights over; each has a tensor rank's part of them."""
        return self.fsdp * self.context

    @property
    def same(self) -> int:
        """Ranks of a replica that have the same experts."""
        return self.shards * self.tensor // self.expert

    @property
    def dividing(self) -> int:
        """Ranks that FSDP shards or replicates over; 1 if tensor parallelism has all ranks."""
        return self.replicate * max(self.shards, self.same if self.expert > 1 else 1)

    @property
    def ranks(self) -> int:
        return self.replicate * self.shards * self.tensor

    @property
    def shown(self) -> str:
        """For a person: the dimensions with more than one rank."""
        sizes = {"replicate": self.replicate, "fsdp": self.fsdp, "context": self.context}
        sizes["tensor"] = self.tensor
        product = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        return product + (f", expert {self.expert}" if self.expert > 1 else "")


@dataclass(frozen=True)
class Meshes:
    """Device meshes and process groups of the default process group, by `sizes`."""

    sizes: MeshSizes
    data: DataRank  # among the ranks with different rows of the data
    weights: DeviceMesh  # for fully_shard: (shard,) or, for HSDP, (replicate, shard)
    tensor: DeviceMesh | None  # of one dimension; None for one rank
    context: DeviceMesh | None
    expert: DeviceMesh | None  # neighbours with different experts of each layer
    experts: DeviceMesh  # for fully_shard of experts: the ranks with the same experts
    # The ranks with different rows, over which the sums of a loss are all-reduced
    loss: dist.ProcessGroup

    @classmethod
    def of(cls, device: str, sizes: MeshSizes) -> "Meshes":
        """`device`: the type. A collective call: every rank of the process group makes it."""
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
            # Neighbours across dimensions, tensor ranks the nearest
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
            DataRank(dist.get_rank() // (sizes.context * sizes.tensor), sizes.data),
            weights,
            whole["tensor"] if sizes.tensor > 1 else None,
            context,
            expert,
            experts,
            rows,
        )
