"""A run's checkpoint that somebody gave away reads nothing but its own files."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from tests.train.conftest import Workspace
from tigon.models import MODELS, build, materialize
from tigon.train import checkpoint
from tigon.train.export import load_checkpoint, meta_model_from_checkpoint
from tigon.weights import Repository


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "run.json", "weights-00000.safetensors", "new.json"]
)
@pytest.mark.parametrize("pipe", [False, True])
def test_nothing_in_a_checkpoint_leads_out_of_it(
    workspace: Workspace, finished: Path, tmp_path: Path, name: str, pipe: bool
) -> None:
    source = tmp_path / "step-00000003"
    shutil.copytree(finished / "checkpoints/step-00000003", source)
    private = tmp_path / name
    if (source / name).exists():
        (source / name).rename(private)
    else:
        private.write_text("{}")
    if pipe:
        os.mkfifo(source / name)
    else:
        (source / name).symlink_to(private)
    match = f"{source / name} is no file but a pipe" if pipe else f"{name} is a link to {private}"
    model = build(Repository(workspace.model), MODELS, dtype=torch.float32)[0]
    materialize(model, torch.device("cpu"))
    for read in (
        lambda: checkpoint.verify(source),
        lambda: load_checkpoint(source),
        lambda: meta_model_from_checkpoint(source),
        lambda: checkpoint.load(source, model),
    ):
        with pytest.raises(ValueError, match=match):
            read()


def test_a_checkpoint_on_another_disk(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "step-00000003").symlink_to(finished / "checkpoints/step-00000003")
    load_checkpoint(tmp_path / "step-00000003")
