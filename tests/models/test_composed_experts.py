"""Experts in any kind of block: families defined here, against plain torch."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.models.contract import TINY, assert_same_gradients, gradients, tiny
from tigon.layers import SparseMoE
from tigon.models import CausalLM
from tigon.models.decoder import PostNormBlock, PreNormBlock, SandwichBlock
from tigon.models.moe import MoEConfig, sparse_moe

E, K, LAYERS, COEF, SCALE = 5, 2, 2, 0.7, 0.3


@dataclass(frozen=True, kw_only=True)
class SparseConfig(MoEConfig):
    model_type = "sparse"
    architecture = "SparseForCausalLM"

    num_experts: int = E


class Experts:
    def make_mlp(self, c: SparseConfig, layer: int) -> SparseMoE:
        return sparse_moe(c, c.intermediate_size, normalize=True)


class SandwichExperts(Experts, SandwichBlock): ...


class ScaledExperts(Experts, PreNormBlock):
    branch_scale = SCALE


class PostNormExperts(Experts, PostNormBlock): ...


class Sandwich(CausalLM):
    config_class = SparseConfig
    block_class = SandwichExperts


class Scaled(CausalLM):
    config_class = SparseConfig
    block_class = ScaledExperts


class PostNorm(CausalLM):
    config_class = SparseConfig
    block_class = PostNormExperts


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + TINY["rms_norm_eps"]).rsqrt() * weight


def routed(x: Tensor, p: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The experts' branch, and [E] each: how often each was chosen, its mean probability."""
    probs = (x @ p["mlp.gate.weight"].T).softmax(-1)
    weights, chosen = probs.topk(K)
    weights, y = weights / weights.sum(-1, keepdim=True), torch.zeros_like(x)
    for e in range(E):
        gate, up = (x @ p["mlp.experts.gate_up_proj"][e].T).chunk(2, -1)
        out = (F.silu(gate) * up) @ p["mlp.experts.down_proj"][e].T
        y = y + out * (weights * (chosen == e)).sum(-1, keepdim=True)
    return y, torch.bincount(chosen.flatten(), minlength=E), probs.mean((0, 1))


def plain(model: CausalLM, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, load [layers, E] and aux_loss; attention is the model's own."""
    p = dict(model.named_parameters())
    x, counts, probs = p["model.embed_tokens.weight"][ids], [], []
    for i, block in enumerate(model.model.layers):
        own = {n.removeprefix(f"model.layers.{i}."): q for n, q in p.items() if f".{i}." in n}
        norms = {n.removesuffix(".weight"): q for n, q in own.items() if n.endswith("norm.weight")}
        kind, attn = model.block_class, attending(model, block, x.shape[1])
        before, after = norms.get("input_layernorm"), norms["post_attention_layernorm"]
        if kind is PostNormExperts:
            x = x + rms(attn(x), after)
            y, *routing = routed(x, own)
            x = x + rms(y, norms["post_feedforward_layernorm"])
        elif kind is ScaledExperts:
            x = x + SCALE * attn(rms(x, before))
            y, *routing = routed(rms(x, after), own)
            x = x + SCALE * y
        else:
            x = x + rms(attn(rms(x, before)), after)
            y, *routing = routed(rms(x, norms["pre_feedforward_layernorm"]), own)
            x = x + rms(y, norms["post_feedforward_layernorm"])
        counts.append(routing[0])
        probs.append(routing[1])
    load = torch.stack(counts) / (ids.numel() * K)
    aux_loss = E * (K * load.mean(0) * torch.stack(probs).mean(0)).sum()
    return rms(x, p["model.norm.weight"]) @ p["lm_head.weight"].T, load, aux_loss


def attending(model: CausalLM, block: Any, tokens: int) -> Any:
    """The block's attention as a function of x alone."""
    seen: list[tuple[Any, ...]] = []
    hook = block.self_attn.register_forward_pre_hook(lambda _, given: seen.append(given))
    with torch.no_grad():
        model(torch.zeros(1, tokens).long())
    hook.remove()
    return lambda x: block.self_attn(x, *seen[0][1:])


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("family", [Sandwich, Scaled, PostNorm])
def test_loss_balance_and_gradients(family: type[CausalLM], recomputed: bool) -> None:
    model = tiny(family, output_router_logits=True, router_aux_loss_coef=COEF)
    ids = torch.randint(0, 97, (2, 13))
    logits, load, aux_loss = plain(model, ids)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) + COEF * aux_loss
    model.activation_checkpointing = recomputed
    out = model(ids, labels=ids, return_logits=True, metrics=("expert_load", "aux_loss"))
    torch.testing.assert_close(out.logits, logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out.metrics["expert_load"], load)
    torch.testing.assert_close(out.metrics["aux_loss"], aux_loss)
    torch.testing.assert_close(out.loss, loss)
    assert_same_gradients(gradients(out.loss, model), gradients(loss, model), 2e-5)
