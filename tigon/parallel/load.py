"""The first call of a model that ranks share: whether they have read the same files, and are given
the same rows.

Hosts may have other files of one name, and a DistributedSampler gives each rank other rows; the
results would be meaningless.
"""

import os
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch.distributed.device_mesh import DeviceMesh

from tigon import models
from tigon.distributed.agreement import check_same_on_all_ranks
from tigon.distributed.collectives import Ranks
from tigon.layers import Experts
from tigon.models import (
    MODELS,
    CausalLM,
    LoadOptions,
    build,
    check_keywords,
    load_weights,
    materialize,
    split_gguf,
)
from tigon.parallel.expert_parallel import share_experts
from tigon.parallel.fsdp import shard_blocks
from tigon.parallel.tensor_parallel import cut_model
from tigon.weights import STAGING_BYTES, Copy, Repository

CALL = "the first call of the model"
ROWS = ("input_ids", "attention_mask", "position_ids", "cu_seq_lens", "labels")


def check_first_call(model: CausalLM) -> None:
    """Compare `model.files` and the rows in its first call, by two small messages. Calls raise
    ValueError, on all ranks alike, until both are the same."""
    # Before FSDP's, which gathers
    model.unchecked = model.register_forward_pre_hook(_check, with_kwargs=True, prepend=True)


# No closure, so that a model can be copied and pickled before its first call
def _check(model: CausalLM, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    known = {"files of the model": model.files, "dtype": model.dtype}
    known["expert_parallel"] = any(isinstance(m, Experts) and m.shard for m in model.modules())
    check_same_on_all_ranks(model.together, CALL, known, model.device)
    given = named | dict(zip(("input_ids",), arguments, strict=False))
    rows = {name: given.get(name) for name in ROWS}
    ranks = [] if model.tensor_ranks is None else [model.tensor_ranks]
    check_same_on_all_ranks(ranks, CALL, rows, model.device)
    assert model.unchecked is not None
    model.unchecked.remove()
    model.unchecked = None


# Loads a checkpoint into a model that is split or sharded over ranks.

NAMES = ("replicate", "fsdp", "tensor")  # of a mesh of several dimensions
ALONE = ("fsdp", "tensor", "tp")  # of one dimension; others call tensor ranks "tp"


class MeshOptions(LoadOptions, total=False):
    """Keywords of `tigon.from_pretrained`."""

    mesh: DeviceMesh | None
    expert_parallel: bool  # whole experts on the mesh's ranks; docs/parallel.md


def from_pretrained(
    path_or_repo: str | os.PathLike[str], **options: Unpack[MeshOptions]
) -> CausalLM:
    """As `tigon.models.from_pretrained`; with `mesh`, each of its ranks gets a part of each layer.

    `mesh` has one dimension, or several with the names "tensor", which splits each layer, "fsdp",
    which shards the weights and gathers them block by block, and "replicate", whose ranks have the
    same weights. Every rank calls this, and reads only its part, to the mesh's type of device
    unless `device` is given. All ranks then make the same calls of the model, and get the losses,
    logits and tokens of the whole model (docs/parallel.md). `expert_parallel`: a "tensor" rank has
    some whole experts of each layer instead of a part of every expert. Raises ValueError for what
    is not supported on several ranks, `mmap` and `quantize`, and for heads, or whole experts, that
    the ranks do not divide.
    """
    given: dict[str, Any] = dict(options)
    check_keywords("from_pretrained", given, frozenset(MeshOptions.__annotations__))
    mesh, whole_experts = given.pop("mesh", None), given.pop("expert_parallel", False)
    if mesh is None:
        if whole_experts:
            raise ValueError("expert_parallel=True needs mesh=, whose ranks have the experts")
        return models.from_pretrained(path_or_repo, **given)
    tensor, fsdp = _divided(mesh)
    for name in ("mmap", "quantize"):
        if value := given.pop(name, None):
            raise ValueError(f"{name}={value!r} does not work with mesh=: leave one of them out")
    device = torch.device(given.pop("device", mesh.device_type))
    if device.type != mesh.device_type:
        raise ValueError(f"device={str(device)!r}, but the mesh is one of {mesh.device_type!r}")
    attention, staging = given.pop("attention", "auto"), given.pop("staging_bytes", STAGING_BYTES)
    how = {name: given.pop(name) for name in ("dtype", "gguf_file") if name in given}
    if how.get("gguf_file") is None:
        path_or_repo, how["gguf_file"] = split_gguf(path_or_repo)
    model, checkpoint = build(Repository(path_or_repo, **given), MODELS, **how)
    model.use_attention(attention)
    if whole_experts and tensor is None:
        raise ValueError('expert_parallel=True needs a mesh with ranks for "tensor"')
    if tensor is not None:
        cut_layers(model, tensor, expert_parallel=whole_experts)
    if fsdp is not None:
        shard_blocks(model, fsdp, keeps_ends=False)
        model.weights = Ranks.of(fsdp.get_group("fsdp"))
    elif tensor is not None:
        _share_writing(model, mesh, tensor)
    materialize(model, device)
    load_weights(model, checkpoint, staging_bytes=staging)
    model.files = repr(model.config) + checkpoint.sampled_digest()
    if model.together:
        check_first_call(model)
    return model.eval()


def cut_layers(model: CausalLM, mesh: DeviceMesh, *, expert_parallel: bool) -> None:
    """Keep only this rank's part of each layer, with some whole experts or a part of every expert.
    `mesh` has one dimension; `model` is on the meta device."""
    if expert_parallel and mesh.size() > 1:
        share_experts(model, mesh)
    cut_model(model, mesh)


def _divided(mesh: DeviceMesh) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """The dimension of tensor parallelism, and those of FSDP: the one that shards the weights, with
    that of replicas before it. ValueError for a mesh whose dimensions have other names."""
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f'mesh={mesh!r} is no DeviceMesh: give init_device_mesh("cuda", (2,))')
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {mesh.get_rank()} is not in the mesh, which has {mesh.mesh.tolist()}: start as "
            "many processes as it has ranks, or call this on those alone"
        )
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    for name, size in sizes.items():
        known = name in (NAMES if mesh.ndim > 1 else ALONE)
        if size > 1 and not known:
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
    """Ranks with the same part of each layer each write a share of it when saving."""
    coordinate, count, own = mesh.get_coordinate(), mesh.size() // tensor.size(), 0
    assert coordinate is not None
    names = mesh.mesh_dim_names or ("tensor",)
    for name, size, at in zip(names, mesh.shape, coordinate, strict=True):
        own = own if name == "tensor" or mesh.ndim == 1 else own * size + at
    for name, cut in model.cuts.items():
        pieces = [(rows, Copy(c.number + c.of * own, c.of * count)) for rows, c in cut.pieces]
        model.cuts[name] = replace(cut, pieces=tuple(pieces))
