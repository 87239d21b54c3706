"""Checkpoints to models that ranks share."""

import os
from typing import Any, Unpack

import torch
from torch.distributed.device_mesh import DeviceMesh

from tigon import models
from tigon.models import MODELS, CausalLM, LoadOptions, build, load_weights, materialize, split_gguf
from tigon.parallel.plan import cut_model
from tigon.weights import STAGING_BYTES, Repository


class MeshOptions(LoadOptions, total=False):
    """Keywords of `tigon.from_pretrained`."""

    mesh: DeviceMesh | None


def from_pretrained(
    path_or_repo: str | os.PathLike[str], **options: Unpack[MeshOptions]
) -> CausalLM:
    """As `tigon.models.from_pretrained`; with `mesh`, each of its ranks gets a part of each layer.

    `mesh`: of one dimension, or with one of several named "tensor". Every rank calls this, and
    reads its part alone, to the mesh's kind of device unless `device` is given; all make the same
    calls of the model, whose losses, logits and tokens are those of the whole one
    (docs/parallel.md). Raises ValueError for what ranks cannot share: `mmap` and `quantize`, and
    heads that they do not divide.
    """
    given: dict[str, Any] = dict(options)
    mesh = given.pop("mesh", None)
    if mesh is None:
        return models.from_pretrained(path_or_repo, **given)
    of = tensor_dimension(mesh)
    for name in ("mmap", "quantize"):
        if value := given.pop(name, None):
            raise ValueError(f"{name}={value!r} is not there for a model that ranks share (mesh=)")
    device = torch.device(given.pop("device", mesh.device_type))
    attention, staging = given.pop("attention", "auto"), given.pop("staging_bytes", STAGING_BYTES)
    how = {name: given.pop(name) for name in ("dtype", "gguf_file") if name in given}
    if how.get("gguf_file") is None:
        path_or_repo, how["gguf_file"] = split_gguf(path_or_repo)
    model, checkpoint = build(Repository(path_or_repo, **given), MODELS, **how)
    model.use_attention(attention)
    cut_model(model, of)
    materialize(model, device)
    load_weights(model, checkpoint, staging_bytes=staging)
    return model.eval()


def tensor_dimension(mesh: DeviceMesh) -> DeviceMesh:
    """Of one dimension; ValueError if it is not clear which."""
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f'mesh={mesh!r} is no DeviceMesh: give init_device_mesh("cuda", (2,))')
    if mesh.ndim == 1:
        return mesh
    if "tensor" not in (mesh.mesh_dim_names or ()):
        names = mesh.mesh_dim_names or "without names"
        raise ValueError(
            f"mesh has {mesh.ndim} dimensions, {names}: give one of one dimension, or name one of "
            'them "tensor"'
        )
    return mesh["tensor"]
