"""Routers that score experts, against those of transformers: choices, weights, gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config, Lfm2MoeConfig, Mistral4Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeTopKRouter
from transformers.models.mistral4.modeling_mistral4 import Mistral4TopkRouter

import tigon
from tigon.layers import GroupRouter

N, C, E, K = 300, 24, 20, 4


def routers(
    sigmoid: bool, groups: int, top_groups: int, normalize: bool, dtype: torch.dtype
) -> tuple[GroupRouter, Any]:
    """Ours and theirs with the same weights; most experts' correction makes scores negative."""
    torch.manual_seed(0)
    options = {"normalize": normalize, "scale": 1.7, "groups": groups, "top_groups": top_groups}
    ours = GroupRouter(C, E, K, sigmoid=sigmoid, **options)
    config: dict[str, Any] = {"hidden_size": C, "n_routed_experts": E, "num_experts_per_tok": K}
    config |= {"n_group": groups, "topk_group": top_groups, "norm_topk_prob": normalize}
    config["routed_scaling_factor"] = 1.7
    theirs: Any
    if sigmoid:
        theirs = DeepseekV3TopkRouter(DeepseekV3Config(**config))
    else:
        theirs = Mistral4TopkRouter(Mistral4Config(**config))
    with torch.no_grad():
        ours.weight.normal_(std=0.5)
        theirs.weight.copy_(ours.weight)
        if sigmoid:
            bias = torch.randn(E) * 0.3 - 1.2
            ours.e_score_correction_bias.copy_(bias)
            theirs.e_score_correction_bias.copy_(bias)
    ours.to(dtype)
    if dtype != torch.float32:
        theirs.weight.data = theirs.weight.data.to(dtype)
    return ours, theirs


def by_expert(weights: Tensor, experts: Tensor) -> Tensor:
    return torch.zeros(N, E, dtype=weights.dtype).scatter(1, experts, weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("normalize", [True, False], ids=["normed", "as they are"])
@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (5, 2), (4, 3), (2, 2)])
@pytest.mark.parametrize("sigmoid", [True, False], ids=["sigmoid", "softmax"])
def test_as_transformers_routes(
    sigmoid: bool, groups: int, top_groups: int, normalize: bool, dtype: torch.dtype
) -> None:
    ours, theirs = routers(sigmoid, groups, top_groups, normalize, dtype)
    x = torch.randn(N, C).to(dtype)
    probs, experts, weights, _ = ours(x)
    logits, expected, chosen = theirs(x)
    assert weights.dtype == expected.dtype
    assert torch.equal(by_expert(weights, experts), by_expert(expected, chosen))
    torch.testing.assert_close(probs.sum(-1), torch.ones(N), rtol=1e-2, atol=0)
    shares = torch.sigmoid(logits) if sigmoid else logits.float().softmax(-1)
    torch.testing.assert_close(probs, shares / shares.sum(-1, keepdim=True), rtol=2e-2, atol=1e-4)
    check_gradients(ours, by_expert(weights, experts), theirs, by_expert(expected, chosen))


def check_gradients(ours: GroupRouter, weights: Tensor, theirs: Any, expected: Tensor) -> None:
    upstream = torch.randn(N, E).to(weights.dtype)
    (weights * upstream).sum().backward()
    (expected * upstream).sum().backward()
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("normalize", [True, False], ids=["normed", "as they are"])
@pytest.mark.parametrize("corrected", [True, False], ids=["corrected", "plain"])
def test_as_lfm2_routes(corrected: bool, normalize: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": C, "num_experts": E, "num_experts_per_tok": K}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 8}
    layers: dict[str, Any] = {
        "num_hidden_layers": 1,
        "num_dense_layers": 0,
        "layer_types": ["full_attention"],
    }
    options = {"norm_topk_prob": normalize, "use_expert_bias": corrected}
    config = Lfm2MoeConfig(**sizes, **layers, **options, routed_scaling_factor=1.7)
    theirs = Lfm2MoeTopKRouter(config).to(dtype)
    model: Any = tigon.Lfm2Moe.from_config(config.to_dict())
    ours = model.model.layers[0].mlp.gate.to(dtype)
    bias = torch.randn(E) * 0.3 - 1.2 if corrected else None
    with torch.no_grad():
        theirs.weight.normal_(std=0.5)
        ours.weight.copy_(theirs.weight)
        if bias is not None and ours.e_score_correction_bias is not None:
            ours.e_score_correction_bias.copy_(bias)
    x = torch.randn(N, C).to(dtype)
    probs, experts, weights, logits = ours(x)
    expected_logits, expected, chosen = theirs(x, bias)
    assert weights.dtype == dtype and torch.equal(logits, expected_logits)
    found, wanted = by_expert(weights, experts), by_expert(expected, chosen)
    # The sum of a token's weights has another order
    torch.testing.assert_close(found, wanted, rtol=3e-7 if dtype == torch.float32 else 4e-3, atol=0)
    assert torch.equal(found != 0, wanted != 0)
    assert probs.dtype == torch.float32
    torch.testing.assert_close(probs.sum(-1), torch.ones(N))
    check_gradients(ours, found, theirs, wanted)


def test_autocast_changes_no_sigmoid() -> None:
    ours, _ = routers(True, 5, 2, True, torch.float32)
    x = torch.randn(N, C)
    expected = ours(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = ours(x)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
