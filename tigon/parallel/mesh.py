"""The device mesh: sizes and process groups of its dimensions."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tigon.distributed.collectives import Ranks
from tigon.settings.mesh import MeshSizes


def as_ranks(mesh: DeviceMesh | Ranks) -> Ranks:
    """The ranks of a mesh of one dimension; `Ranks` need no process group on meta."""
    return mesh if isinstance(mesh, Ranks) else Ranks.of(mesh.get_group())


class DataRank(NamedTuple):
    """The index of this rank among the ranks with different rows, and their number."""

    rank: int
    size: int


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
