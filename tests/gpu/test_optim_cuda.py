"""Optimizers on the GPU: Muon beside torch's, frozen parameters with the kernels, two GPUs."""

import pytest
import torch
from safetensors.torch import load_file

import tigon
from tests.support.small import EXPERTS, write_model
from tests.train.conftest import workspace
from tests.train.ranks import train_on_gpus
from tests.train.test_optim_groups import (
    FROZEN_SETS,
    OTHERS,
    RUN,
    assert_same_gradients,
    build,
    frozen_set,
)
from tigon.train import load, main
from tigon.train.optim import build_optimizer, hidden_matrices

__all__ = ["workspace"]
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("which", FROZEN_SETS)
@pytest.mark.parametrize("kind", [*OTHERS])
def test_frozen_sets_leave_other_gradients_alone(kind, which, recompute):
    """Sums of atomics may differ in their last bits."""
    assert_same_gradients(kind, recompute, frozen_set(kind, which), "cuda", 1e-5)


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_muon_is_that_of_torch_on_matrices_apart(adjust):
    """Both iterate in bf16, which rounds each product to three digits: a step's direction differs
    by that, its size hardly."""
    model = build("llama").cuda()
    settings = ["run_dir=a", "model=m", "data=d", "optimizer=muon", "lr=0.02", "weight_decay=0.1"]
    optimizer = build_optimizer(model, load(None, [*settings, f"adjust_lr_fn={adjust}"]))
    rows = hidden_matrices(model)
    hidden = {name: p for name, p in model.named_parameters() if name in rows}
    apart = {
        name: [torch.nn.Parameter(own.clone()) for own in p.detach().split(rows[name])]
        for name, p in hidden.items()
    }
    before = {name: p.detach().clone() for name, p in hidden.items()}
    reference = torch.optim.Muon(
        [p for parts in apart.values() for p in parts], 0.02, 0.1, 0.95, adjust_lr_fn=adjust
    )
    for _ in range(3):
        for name, p in hidden.items():
            p.grad = torch.randn_like(p)
            for part, own in zip(apart[name], p.grad.split(rows[name]), strict=True):
                part.grad = own.clone()
        optimizer.step()
        reference.step()
    for name, p in hidden.items():
        expected = torch.cat([part.detach() for part in apart[name]])
        step = (expected - before[name]).norm()
        assert (p.detach() - expected).norm() < 0.02 * step, name


def test_muon_on_two_gpus_as_on_one(workspace, tmp_path):
    model = write_model(tmp_path / "experts", **EXPERTS)
    same = {**RUN, "model": model, "device": "cuda", "dtype": "float32", "steps": 8}
    main(workspace.settings("muon-one", **same))
    source = workspace.root / "muon-one/checkpoints/step-00000002"
    train_on_gpus(workspace.settings("muon-two", resume=source, **same))
    # Newton-Schulz is in bf16 on both, in batches of other sizes
    expected = workspace.metrics("muon-one", "loss")[2:]
    assert workspace.metrics("muon-two", "loss") == pytest.approx(expected, rel=5e-3)
    before = tigon.from_pretrained(model).state_dict()
    after = tigon.from_pretrained(workspace.root / "muon-two/hf").state_dict()
    for name, weight in before.items():
        frozen = "layers.0." in name or "embed_tokens" in name or name == "lm_head.weight"
        assert torch.equal(after[name], weight) == frozen, name
    last = workspace.root / "muon-two/checkpoints/step-00000008"
    names = {name for path in last.glob("optimizer-*") for name in load_file(path)}
    assert any("momentum_buffer" in name for name in names)
    assert not any(".layers.0." in name or "embed_tokens" in name for name in names)
