"""Ranks that share a model but read other files of one name, as on two hosts: an error, where there
was wrong text."""

import copy
import os
import pickle
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh

import tigon
from tests.parallel.ranks import run_on_ranks
from tests.support.small import EXPERTS, write_model

MATCH = r"first call of the model: the 2 ranks .* were given different files of the model"
IDS = torch.tensor([[5, 6, 7]])


def call_models(folders: list[Path]) -> None:
    os.chdir(folders[dist.get_rank()])
    for name in ("tensor", "fsdp"):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(name,))
        same = tigon.from_pretrained("same", mesh=mesh)
        same.generate(IDS, max_new_tokens=2)
        same(IDS)
        for how in ("generate", "forward"):
            model = tigon.from_pretrained("model", mesh=mesh)
            for _ in range(2):  # a caller may catch the error and go on
                with pytest.raises(ValueError, match=MATCH):
                    model.generate(IDS, max_new_tokens=2) if how == "generate" else model(IDS)


def write_two(root: Path, differs: str) -> list[Path]:
    """A folder for each of two hosts."""
    folders = [root / "0", root / "1"]
    for folder in folders:
        write_model(folder / "same")
    write_model(folders[0] / "model")
    changes = {"config": {"rms_norm_eps": 1e-2}, "layers": {"num_hidden_layers": 3}}
    write_model(folders[1] / "model", **changes.get(differs, {}))
    if differs == "weights":
        file = folders[1] / "model/model.safetensors"
        weights = {name: weight + 0.1 for name, weight in load_file(file).items()}
        save_file(weights, file, {"format": "pt"})
    return folders


@pytest.mark.parametrize("differs", ["weights", "config", "layers"])
def test_a_model(tmp_path, differs):
    run_on_ranks(2, call_models, write_two(tmp_path, differs))


def load_otherwise(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    for name, values in {
        "dtype": (torch.float32, torch.bfloat16),
        "expert_parallel": (0, 1),
    }.items():
        changed = {name: values[dist.get_rank()]}
        model = tigon.from_pretrained(folder, mesh=mesh, **changed)
        with pytest.raises(ValueError, match=f"were given different {name}"):
            model(IDS)
    model = tigon.from_pretrained(folder, mesh=mesh)
    with pytest.raises(ValueError, match="were given different position_ids"):
        model(IDS, position_ids=torch.arange(3)[None] + dist.get_rank())


def test_a_model_that_ranks_load_in_other_ways(tmp_path):
    model = write_model(tmp_path / "moe", **EXPERTS | {"num_experts": 4})
    run_on_ranks(2, load_otherwise, model)


def save_models(folders: list[Path]) -> None:
    os.chdir(folders[dist.get_rank()])
    # Replicas that write do not need each other otherwise
    for name, other in (("replicate", "tensor"), ("tensor", "fsdp")):
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=(name, other))
        tigon.from_pretrained("same", mesh=mesh).save_pretrained(folders[0] / f"{name}-same")
        model = tigon.from_pretrained("model", mesh=mesh)
        with pytest.raises(ValueError, match="rank 1 has read other files of the model than rank"):
            model.save_pretrained(folders[0] / f"{name}-model")
        assert not (folders[0] / f"{name}-model").exists()


def test_saving_a_mixture(tmp_path):
    run_on_ranks(2, save_models, write_two(tmp_path, "weights"))


def copy_models(folders: list[Path]) -> None:
    os.chdir(folders[dist.get_rank()])
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    for name in ("same", "model"):
        model = tigon.from_pretrained(name, mesh=mesh)
        alike = copy.deepcopy(model)
        for one in (alike, pickle.loads(pickle.dumps(model)), model):
            if name == "model":
                with pytest.raises(ValueError, match=MATCH):
                    one(IDS)
            else:
                one(IDS)
                assert one.first_call_hook is None
                assert not one._forward_pre_hooks
    alive = weakref.ref(model)
    del model, alike, one
    assert alive() is None  # without a collection of garbage


def test_a_copy(tmp_path):
    """It compares its own files, once."""
    run_on_ranks(2, copy_models, write_two(tmp_path, "weights"))
