"""Training on the GPU: the same curve as on the CPU, and the same on two GPUs as on one."""

import pytest
import torch

from tests.train.conftest import workspace
from tests.train.test_two_ranks import torchrun
from tigon.train import main

__all__ = ["workspace"]
pytestmark = pytest.mark.gpu

STEPS = {"steps": 8, "warmup_steps": 2, "eval_every": 4, "batch_size": 8, "weight_decay": 0.1}


def assert_same_curve(workspace, run: str, other: str, tolerance: float) -> None:
    for key in ("loss", "grad_norm", "eval_loss"):
        curve = workspace.metrics(run, key)
        assert len(curve) == (3 if key == "eval_loss" else 8)
        assert curve == pytest.approx(workspace.metrics(other, key), rel=tolerance), key


def test_float32_curve_equals_that_of_the_cpu(workspace):
    same = {**STEPS, "dtype": "float32", "eval_data": workspace.held_out}
    for device in ("cpu", "cuda"):
        main(workspace.settings(f"gpu-{device}", **{**same, "device": device}))
    assert_same_curve(workspace, "gpu-cuda", "gpu-cpu", 1e-4)


def test_bfloat16_over_float32_weights_on_one_gpu_and_two(workspace):
    """The default on a GPU: FSDP2 on one rank, then on two, with accumulation and a resume."""
    same = {**STEPS, "device": "cuda", "eval_data": workspace.held_out, "save_every": 4}
    main(workspace.settings("gpu-one", export="true", **same))
    main(workspace.settings("gpu-exact", dtype="float32", **same))
    assert_same_curve(workspace, "gpu-one", "gpu-exact", 2e-2)
    source = workspace.root / "gpu-one/checkpoints/step-00000004"
    main(workspace.settings("gpu-resumed", resume=source, **same))
    expected = workspace.metrics("gpu-one", "loss")[4:]
    assert workspace.metrics("gpu-resumed", "loss") == pytest.approx(expected, rel=1e-6)
    if torch.cuda.device_count() > 1:
        torchrun(workspace.settings("gpu-two", export="true", **same))
        assert_same_curve(workspace, "gpu-two", "gpu-one", 5e-3)
        torchrun(workspace.settings("gpu-two-exact", dtype="float32", **same))
        assert_same_curve(workspace, "gpu-two-exact", "gpu-exact", 1e-5)
