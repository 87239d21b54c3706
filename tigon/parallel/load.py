"""Loads a checkpoint into a sharded model, and compares its files and first inputs over the ranks.

Hosts may have different files of one name, and a DistributedSampler gives each rank other rows: the
results would be meaningless.
"""

import os
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch.distributed.device_mesh import DeviceMesh

from tigon.distributed.collectives import Ranks, check_same_on_all_ranks
from tigon.layers import Experts
from tigon.models import MODELS, CausalLM
from tigon.models.pretrained import load
from tigon.parallel.expert_parallel import shard_experts
from tigon.parallel.fsdp import shard_blocks
from tigon.parallel.tensor_parallel import shard_model
from tigon.utils.config import check_keywords
from tigon.weights import Checkpoint, ReplicaIndex

CALL = "the first call of the model"
ROWS = ("input_ids", "attention_mask", "position_ids", "cu_seq_lens", "labels")

MESH_DIMENSIONS = ("replicate", "fsdp", "tensor")  # names of dimensions, if there are several
SINGLE_DIMENSION = ("fsdp", "tensor", "tp")  # names of the only dimension


class MeshOptions(load.LoadOptions, total=False):
    """Keywords of `tigon.from_pretrained`."""

    mesh: DeviceMesh | None
    expert_parallel: bool  # whole experts on each rank; docs/parallel.md


def from_pretrained(
    path_or_repo: str | os.PathLike[str], **options: Unpack[MeshOptions]
) -> CausalLM:
    """Loads as `tigon.models.from_pretrained` does; with `mesh`, each rank a shard of the model.

    `mesh` has one dimension, or several named "tensor", which shards each layer, "fsdp", which
    shards weights and gathers them block by block, and "replicate", whose ranks have the same
    weights. Every rank calls this and reads only its shard, to the mesh's device type unless
    `device` is given. All ranks then make the same calls, and get the losses, logits and tokens of
    the full model (docs/parallel.md). `expert_parallel`: a "tensor" rank has some whole experts of
    each layer instead of a shard of each. Raises ValueError for `mmap`, `quantize` and `labels`,
    which work on one rank alone, and for heads or experts that the ranks do not divide.
    """
    arguments: dict[str, Any] = dict(options)
    check_keywords("from_pretrained", arguments, frozenset(MeshOptions.__annotations__))
    mesh, expert_parallel = arguments.pop("mesh", None), arguments.pop("expert_parallel", False)
    if mesh is None:
        if expert_parallel:
            raise ValueError("expert_parallel=True needs mesh=, whose ranks have the experts")
        return load.from_pretrained(path_or_repo, MODELS, **arguments)
    tensor, fsdp = _tensor_and_fsdp_mesh(mesh)
    for name in ("mmap", "quantize", "labels"):
        if value := arguments.pop(name, None):
            raise ValueError(f"{name}={value!r} does not work with mesh=: leave one of them out")
    device = torch.device(arguments.pop("device", mesh.device_type))
    if device.type != mesh.device_type:
        raise ValueError(f"device={str(device)!r}, but the mesh is one of {mesh.device_type!r}")
    if expert_parallel and tensor is None:
        raise ValueError('expert_parallel=True needs a mesh with ranks for "tensor"')

    def shard(model: CausalLM, checkpoint: Checkpoint) -> None:
        if tensor is not None:
            shard_layers(model, tensor, expert_parallel=expert_parallel)
        if fsdp is not None:
            shard_blocks(model, fsdp, keeps_ends=False)
            model.fsdp_ranks = Ranks.of(fsdp.get_group("fsdp"))
        elif tensor is not None:
            _share_writing(model, mesh, tensor)
        model.files_digest = repr(model.config) + checkpoint.sampled_digest()
        if model.communication_groups:
            # Before FSDP's hook, which gathers weights
            model.first_call_hook = model.register_forward_pre_hook(
                check_first_call, with_kwargs=True, prepend=True
            )

    return load.from_pretrained(path_or_repo, MODELS, device=device, shard=shard, **arguments)


def shard_layers(model: CausalLM, mesh: DeviceMesh, *, expert_parallel: bool) -> None:
    """Keeps only this rank's shard of each layer, with some whole experts or a shard of each.
    `mesh` has one dimension; `model` is on the meta device."""
    if expert_parallel and mesh.size() > 1:
        shard_experts(model, mesh)
    shard_model(model, mesh)


def _tensor_and_fsdp_mesh(mesh: DeviceMesh) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """The tensor mesh and the FSDP mesh, which is (fsdp,) or (replicate, fsdp). Raises ValueError
    for dimensions with other names."""
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f'mesh={mesh!r} is not a DeviceMesh: give init_device_mesh("cuda", (2,))')
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {mesh.get_rank()} is not in the mesh, which has {mesh.mesh.tolist()}: start as "
            "many processes as it has ranks, or call this on those alone"
        )
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    for name, size in sizes.items():
        has_meaning = name in (MESH_DIMENSIONS if mesh.ndim > 1 else SINGLE_DIMENSION)
        if size > 1 and not has_meaning:
            raise ValueError(
                f"mesh has {size} ranks in the dimension {name!r}, which does nothing here: "
                'name a dimension "tensor" or "fsdp", and one before "fsdp" "replicate", whose '
                "ranks have copies; expert_parallel=True gives the ranks of a tensor dimension "
                "whole experts"
            )
    fsdp = None
    if sizes.get("fsdp", 1) > 1:
        shards = [name for name, size in sizes.items() if size > 1 and name != "tensor"]
        if shards[-1] != "fsdp":
            raise ValueError(f'mesh has the dimensions {(*sizes,)}: give "replicate" before "fsdp"')
        fsdp = mesh[tuple(shards)]
    if "tensor" in sizes:
        return mesh["tensor"], fsdp
    if fsdp is None and mesh.ndim > 1:
        names = mesh.mesh_dim_names or "without names"
        raise ValueError(
            f"mesh has {mesh.ndim} dimensions, {names}: give one of one dimension, or name one of "
            'them "tensor" or "fsdp"'
        )
    return (mesh if fsdp is None else None), fsdp


def _share_writing(model: CausalLM, mesh: DeviceMesh, tensor: DeviceMesh) -> None:
    """Lets ranks with the same shard of each layer each write a part of it when saving."""
    coordinate, count, index = mesh.get_coordinate(), mesh.size() // tensor.size(), 0
    assert coordinate is not None
    names = mesh.mesh_dim_names or ("tensor",)
    for name, size, at in zip(names, mesh.shape, coordinate, strict=True):
        index = index if name == "tensor" or mesh.ndim == 1 else index * size + at
    for name, spec in model.shard_specs.items():
        pieces = [
            (rows, ReplicaIndex(r.number + r.total * index, r.total * count))
            for rows, r in spec.pieces
        ]
        model.shard_specs[name] = replace(spec, pieces=tuple(pieces))


# No closure, so that a model can be copied and pickled before its first call
def check_first_call(model: CausalLM, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Raises ValueError on all ranks unless checkpoint and inputs of the first call are equal."""
    facts = {"files of the model": model.files_digest, "dtype": model.dtype}
    facts["expert_parallel"] = any(isinstance(m, Experts) and m.shard for m in model.modules())
    check_same_on_all_ranks(model.communication_groups, CALL, facts, model.device)
    inputs = named | dict(zip(("input_ids",), arguments, strict=False))
    rows = {name: inputs.get(name) for name in ROWS}
    ranks = [] if model.tensor_ranks is None else [model.tensor_ranks]
    check_same_on_all_ranks(ranks, CALL, rows, model.device)
    assert model.first_call_hook is not None
    model.first_call_hook.remove()
    model.first_call_hook = None
