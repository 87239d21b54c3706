"""sharding=gradients on two ranks: the bits of FSDP2, and one process's numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch

import tigon
from tests.small import EXPERTS, write_model
from tests.train.ranks import Ranks, train_on
from tests.train.test_equality import run_all
from tigon.train import main, prepare
from tigon.train.config import load
from tigon.train.parallel import World, reshard, sync_gradients

BF16 = {"dtype": "bfloat16", "param_dtype": "bfloat16"}
FROZEN = "[{match: '*.layers.0.*', freeze: true}, {match: '*norm*', lr: 1e-3}]"
# Two micro-batches a rank; all sizes are odd for two ranks but the hidden one
KINDS: dict[str, dict[str, Any]] = {
    "tied": {"ema_decay": 0.9},
    "frozen": {"model": "untied", "parameter_groups": FROZEN, "optimizer": "sgd", "momentum": 0.9},
    "8bit": {"optimizer": "adamw_8bit", "dtype": "bfloat16"},
    "bf16": BF16 | {"optimizer": "adamw_bf16", "accumulate_fp32": "true"},
    "experts": {
        "model": "experts", "router_aux_loss_coef": 0.5, "optimizer": "muon",
        "activation_checkpointing": "true",
    },
}  # fmt: skip
STEPS = 3


@pytest.fixture(scope="module")
def settings(workspace):
    models = {
        "untied": write_model(workspace.root / "untied", tie_word_embeddings=False),
        "experts": write_model(workspace.root / "experts", **EXPERTS),
    }

    def make(kind: str, sharding: str, **changes: Any) -> list[str]:
        values = {"steps": STEPS, **KINDS[kind]} | changes
        values["model"] = models.get(str(values.get("model")), workspace.model)
        return workspace.settings(f"{kind}-{sharding}", **{"sharding": sharding} | values)

    ways = [(kind, sharding) for kind in KINDS for sharding in ("full", "gradients")]
    Ranks(2, run_all, [make(kind, sharding, export="true") for kind, sharding in ways]).finish(540)
    return make


def weights(workspace, run: str) -> dict[str, torch.Tensor]:
    return torch.load(workspace.root / run / "weights.pt")


@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_of_fsdp2(workspace, settings, kind):
    full, ours = f"{kind}-full", f"{kind}-gradients"
    for key in ("loss", "grad_norm"):
        assert workspace.metrics(ours, key) == workspace.metrics(full, key)
        assert len(workspace.metrics(ours, key)) == STEPS
    expected, found = weights(workspace, full), weights(workspace, ours)
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
    for path in (workspace.root / full).glob("hf*/*.safetensors"):
        other = workspace.root / ours / path.parent.name / path.name
        assert other.read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize("kind", ["tied", "frozen"])
def test_one_process_has_the_same_curve(workspace, settings, kind):
    """On one rank weights are divided, too, where a sum in float32 was asked for; it is the same
    as that of the whole ones."""
    run_all([settings(kind, "one", sharding="gradients")])
    for key in ("loss", "grad_norm"):
        expected = workspace.metrics(f"{kind}-one", key)
        assert workspace.metrics(f"{kind}-gradients", key) == pytest.approx(expected, rel=1e-6)
    found = weights(workspace, f"{kind}-gradients")
    for name, weight in weights(workspace, f"{kind}-one").items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-6)
