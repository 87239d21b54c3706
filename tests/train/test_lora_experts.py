"""Runs that adapt the experts of a mixture: ranks, resuming, merging, what PEFT makes of it."""

from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import tigon
from tests.small import EXPERTS, write_model
from tests.train.ranks import train_on
from tests.train.test_lora import SETTINGS, step, tensors
from tigon.train import main


@pytest.fixture(scope="module")
def settings(workspace):
    base = write_model(workspace.root / "mixture", **EXPERTS)
    own = {"model": base, "steps": 4, "lora.merge": "true"}
    own["lora.targets"] = "[q_proj, experts.gate_up_proj, experts.down_proj]"

    def make(run: str, **changes: Any) -> list[str]:
        return workspace.settings(run, **SETTINGS | own | changes)

    main(make("experts"))
    return make


def test_experts_learn_and_peft_reads_them(workspace, settings, capsys):
    losses = workspace.metrics("experts", "loss")
    assert losses[-1] < losses[0] - 0.04
    stored = tensors(step(workspace, "experts", 4))
    a = "model.layers.1.mlp.experts.base_layer.lora_A.default.weight"
    assert stored[a].shape == (5 * 4, 64)
    run, ids = workspace.root / "experts", torch.arange(3, 40)[None]
    base = AutoModelForCausalLM.from_pretrained(workspace.root / "mixture")
    expected = PeftModel.from_pretrained(base, str(run / "adapter")).eval()(ids).logits
    found = tigon.from_pretrained(run / "hf")(ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    main([*settings("planned"), "--dry-run"])
    trained = sum(t.numel() for t in stored.values())
    assert f"{trained:,} of them trained" in capsys.readouterr().out


def test_resumed_and_on_two_ranks(workspace, settings):
    main(settings("experts-again", resume=step(workspace, "experts", 2)))
    train_on(2, settings("experts-two", activation_checkpointing="true"))
    for run, first in (("experts-again", 2), ("experts-two", 0)):
        for key in ("loss", "grad_norm"):
            expected = workspace.metrics("experts", key)[first:]
            assert workspace.metrics(run, key) == pytest.approx(expected, rel=1e-5), key
    last = tensors(step(workspace, "experts", 4))
    for name, values in tensors(step(workspace, "experts-again", 4)).items():
        assert torch.equal(values, last[name])
    for name in ("adapter/adapter_model.safetensors", "hf/model.safetensors"):
        one, two = (load_file(workspace.root / run / name) for run in ("experts", "experts-two"))
        assert one.keys() == two.keys()
        for tensor in one:
            torch.testing.assert_close(two[tensor], one[tensor], rtol=1e-4, atol=1e-5)
