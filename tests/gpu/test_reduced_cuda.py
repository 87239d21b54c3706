"""Gradients that two ranks reduce over NCCL: the same bits in bfloat16 as in float32, and none are
lost."""

import pytest
import torch
from safetensors.torch import load_file

from tests.train.conftest import workspace
from tests.train.ranks import Ranks
from tests.train.test_reduced import BFLOAT16, run
from tigon.train import main

__all__ = ["workspace"]
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("changes", [{}, {"parallel.context": 2}], ids=["fsdp", "context"])
def test_bfloat16_as_float32(workspace, tmp_path, changes):
    share = 1 if changes else 2  # ranks of context have the same rows
    settings = BFLOAT16 | {"batch_size": 8, "micro_batch_size": 8 // share, "device": "cuda"}
    runs = {"own": False, "in float32": True}
    for name, in_float32 in runs.items():
        own = workspace.settings("", **settings | changes, run_dir=tmp_path / name)
        said = Ranks(2, run, own, in_float32, on_gpus=True).finish()
        expected = "float32" if in_float32 else "bfloat16"
        assert said.count(f"reduced in torch.{expected}\n") == 2, said
    ours, theirs = (load_file(tmp_path / name / "hf/model.safetensors") for name in runs)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    alone = settings | {"micro_batch_size": 8, "run_dir": tmp_path / "alone"}
    main(workspace.settings("", **alone))
    norms = {
        name: workspace.metrics(str(tmp_path / name), "grad_norm") for name in ("own", "alone")
    }
    assert norms["own"] == pytest.approx(norms["alone"], rel=3e-2)
    assert min(norms["alone"]) > 0
