"""The device mesh: sizes and process groups of its dimensions."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tigon.distributed.collectives import Ranks


def as_ranks(mesh: DeviceMesh | Ranks) -> Ranks:
    """The ranks of a mesh of one dimension; `Ranks` need no process group on meta."""
    return mesh if isinstance(mesh, Ranks) else Ranks.of(mesh.get_group())


class DataRank(NamedTuple):
    """The index of this rank among the ranks with different rows, and their number."""

    rank: int
    size: int


@dataclass(frozen=True)
class MeshSizes:
    """The number of ranks in each dimension; tensor ranks, which talk the most, are neighbors."""

    replicate: int = 1
    fsdp: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1  # neighboring ranks of a replica; not a factor of the number of ranks

    @property
    def data(self) -> int:
        """The number of ranks with different rows of the data."""
        return self.replicate * self.fsdp

    @property
    def shards(self) -> int:
        """The number of ranks over which FSDP shards a tensor rank's weights."""
        return self.fsdp * self.context

    @property
    def expert_replicas(self) -> int:
        """The number of ranks of a replica that have the same experts."""
        return self.shards * self.tensor // self.expert

    @property
    def fsdp_ranks(self) -> int:
        """The number of ranks that FSDP shards or replicates over; 1 if all are tensor ranks."""
        return self.replicate * max(self.shards, self.expert_replicas if self.expert > 1 else 1)

    @property
    def ranks(self) -> int:
        """The number of all ranks."""
        return self.replicate * self.shards * self.tensor

    @property
    def description(self) -> str:
        """A text with the dimensions that have more than one rank."""
        sizes = {"replicate": self.replicate, "fsdp": self.fsdp, "context": self.context}
        sizes["tensor"] = self.tensor
        product = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        return product + (f", expert {self.expert}" if self.expert > 1 else "")


@dataclass(frozen=True)
class Meshes:
    """The device meshes and process groups of a run, made by `Meshes.of` from `sizes`."""

    sizes: MeshSizes
    data: DataRank
    weights: DeviceMesh  # for fully_shard: (shard,) or, for HSDP, (replicate, shard)
    tensor: DeviceMesh | None  # of one dimension; None for one rank
    context: DeviceMesh | None
    expert: DeviceMesh | None  # neighbors with different experts of each layer
    experts: DeviceMesh  # for fully_shard of experts: the ranks with the same experts
    # The ranks with different rows, over which the sums of a loss are all-reduced
    loss: dist.ProcessGroup

    @classmethod
    def of(cls, device: str, sizes: MeshSizes) -> "Meshes":
        """Makes the meshes for a type of device. Every rank of the process group calls this."""
        dims = {"replicate": sizes.replicate, "shard": sizes.shards, "tensor": sizes.tensor}
        mesh = init_device_mesh(device, tuple(dims.values()), mesh_dim_names=tuple(dims))
        context = None
        if sizes.context > 1:
            names = ("rows", "context", "tensor")
            shape = (sizes.replicate * sizes.fsdp, sizes.context, sizes.tensor)
            context = init_device_mesh(device, shape, mesh_dim_names=names)["context"]
        weights = mesh["replicate", "shard"] if sizes.replicate > 1 else mesh["shard"]
        expert, experts = None, weights
        if sizes.expert > 1:
            # Neighboring ranks across dimensions, tensor ranks first
            names = ("replicate", "same", "expert")
            shape = (sizes.replicate, sizes.expert_replicas, sizes.expert)
            expert_mesh = init_device_mesh(device, shape, mesh_dim_names=names)
            expert = expert_mesh["expert"]
            experts = expert_mesh["same"]
            if sizes.replicate > 1:
                experts = expert_mesh["replicate", "same"]
        rows = dist.group.WORLD
        if (same := sizes.context * sizes.tensor) > 1:
            lists = torch.arange(sizes.ranks, device="cpu").view(-1, same).T.tolist()
            rows, _ = dist.new_subgroups_by_enumeration(lists)
        assert rows is not None
        return cls(
            sizes,
            DataRank(dist.get_rank() // (sizes.context * sizes.tensor), sizes.data),
            weights,
            mesh["tensor"] if sizes.tensor > 1 else None,
            context,
            expert,
            experts,
            rows,
        )
