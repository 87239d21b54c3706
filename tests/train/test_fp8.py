"""Runs whose products are of 8-bit floats, by their definition on a CPU."""

from typing import Any

import pytest
import torch

import tigon
from tests.support.small import EXPERTS, LLAMA
from tests.train.layouts import assert_same_metrics
from tests.train.ranks import train_on
from tigon.train import load, main
from tigon.train.model import apply_model_settings, check_fp8, named_projections
from tigon.train.notes import find_unquantized_layers

BF16 = {"dtype": "bfloat16"}
CPU = torch.device("cpu")


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.slow
def test_thirty_steps_reach_the_loss_of_bf16(workspace):
    changes = BF16 | {"steps": 30, "batch_size": 2, "seq_len": 64}
    main(workspace.settings("bf16", **changes))
    main(workspace.settings("fp8", fp8="true", **changes))
    expected, found = (workspace.metrics(run, "loss") for run in ("bf16", "fp8"))
    assert len(found) == 30 and found != expected
    assert mean(expected[-5:]) < 0.8 * expected[0]  # it has learned
    assert mean(found[-5:]) == pytest.approx(mean(expected[-5:]), rel=0.02)


def test_ranks_and_recomputed_blocks_match(workspace):
    """The scales are of a micro-batch, which is the same whichever rank runs it."""
    changes = BF16 | {"fp8": "true", "steps": 3, "batch_size": 2, "seq_len": 64}
    main(workspace.settings("one", **changes))
    main(workspace.settings("recomputed", activation_checkpointing="true", **changes))
    printed = train_on(2, workspace.settings("two", **changes))
    assert "fp8=true leaves" not in printed
    assert_same_metrics(workspace, "one", "recomputed", "loss", rel=0)
    assert_same_metrics(workspace, "one", "two", "loss", rel=1e-4)


def small(model_type: str, **changes: Any) -> tigon.CausalLM:
    values = (LLAMA if model_type == "llama" else EXPERTS) | {"model_type": model_type} | changes
    return tigon.models.MODELS[model_type].from_config(values, dtype=torch.bfloat16)


def settings(**changes: Any):
    values = {"run_dir": "x", "data": "x", "model": "x", "fp8": "true", **BF16} | changes
    return load(None, [f"{key}={value}" for key, value in values.items()])


def test_which_layers():
    """Attention, MLPs and shared experts, if 16 divides their sizes; no router and no head."""
    model = small("qwen2_moe", shared_expert_intermediate_size=48, decoder_sparse_step=1)
    model = apply_model_settings(model, settings())
    names = [name for name, layer in named_projections(model) if layer.fp8]
    assert names == [
        "model.layers.0.self_attn.qkv_proj",
        "model.layers.0.self_attn.o_proj",
        "model.layers.0.mlp.gate_up_proj",
        "model.layers.0.mlp.down_proj",
        "model.layers.1.self_attn.qkv_proj",
        "model.layers.1.self_attn.o_proj",
        "model.layers.1.mlp.shared_expert.gate_up_proj",
        "model.layers.1.mlp.shared_expert.down_proj",
    ]
    others = [m for m in model.modules() if getattr(m, "fp8", False)]
    assert len(others) == len(names)
    experts = "leaves the experts in 16 bits"
    assert find_unquantized_layers(settings(), model) == [f"fp8=true {experts}"]
    adapter = settings(fp8="false", **{"lora.rank": 4, "lora.quantize": "nf4"})
    assert find_unquantized_layers(adapter, model) == [f"lora.quantize=nf4 {experts}"]

    some = settings(fp8_except='["model.layers.0.*", "down_proj", "*shared_expert*"]')
    model = apply_model_settings(model, some)
    assert [n for n, layer in named_projections(model) if layer.fp8] == names[4:6]
    assert find_unquantized_layers(some, model) == [f"fp8=true {experts}"]
    with pytest.raises(ValueError, match=r"fp8_except='q_proj' matches no projection.*qkv_proj"):
        apply_model_settings(model, settings(fp8_except='["o_proj", "q_proj"]'))

    odd = apply_model_settings(small("llama", intermediate_size=40), settings())
    assert find_unquantized_layers(settings(), odd) == [
        "fp8=true leaves in bfloat16 what has sizes that 16 does not divide: "
        "model.layers.0.mlp.down_proj, model.layers.1.mlp.down_proj"
    ]
    assert find_unquantized_layers(settings(fp8="false"), odd) == []


def test_bf16_evaluation_and_frozen_weights():
    ids = torch.arange(24).view(2, 12)
    plain = small("llama").eval()
    model = small("llama")
    model.load_state_dict(plain.state_dict())
    apply_model_settings(model, settings())
    layer = model.model.layers[0].mlp.down_proj
    layer.weight.requires_grad_(False)
    trained = model(ids, labels=ids).loss
    trained.backward()
    assert layer.weight.grad is None and model.model.layers[1].mlp.down_proj.weight.grad is not None
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, plain(ids).logits)
        assert trained != plain(ids, labels=ids).loss


def test_where_there_are_no_such_products(monkeypatch):
    with pytest.raises(ValueError, match="fp8=true needs dtype=bfloat16, not float32"):
        check_fp8(settings(dtype="auto"), CPU)
    check_fp8(settings(), CPU)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(ValueError, match=r"from sm_89 on; NVIDIA A100 is sm_80"):
        check_fp8(settings(), torch.device("cuda", 0))
    check_fp8(settings(fp8="false"), torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    check_fp8(settings(), torch.device("cuda", 0))
