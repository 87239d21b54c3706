"""Experts in any kind of block: equal experts compute what one MLP of their weights does."""

from dataclasses import dataclass

import pytest
import torch

from tests.support.contract import assert_same_gradients, gradients, tiny
from tigon.layers import SparseMoE
from tigon.models import CausalLM
from tigon.models.decoder import PostNormBlock, PreNormBlock, SandwichBlock, TransformerBlock
from tigon.models.moe import MoEConfig, sparse_moe


@dataclass(frozen=True, kw_only=True)
class SparseConfig(MoEConfig):
    model_type = "sparse"
    architecture = "SparseForCausalLM"

    num_experts: int = 5


class ScaledBlock(PreNormBlock):
    branch_scale = 0.3


class Experts:
    def make_mlp(self, c: SparseConfig, layer: int) -> SparseMoE:
        return sparse_moe(c, c.intermediate_size, normalize=True)


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("block", [SandwichBlock, ScaledBlock, PostNormBlock])
def test_equal_experts_are_one_mlp(block: type[TransformerBlock], recomputed: bool) -> None:
    blocks = block, type("SparseBlock", (Experts, block), {})
    names = {"config_class": SparseConfig}
    dense, sparse = (
        tiny(type("Model", (CausalLM,), names | {"block_class": kind})) for kind in blocks
    )
    plain = dict(dense.named_parameters())
    experts = {n: n.replace(".experts", "") + ".weight" for n, p in sparse.named_parameters()
               if p.dim() == 3}  # fmt: skip
    with torch.no_grad():
        for name, p in sparse.named_parameters():
            if "mlp.gate.weight" not in name:
                p.copy_(plain[experts.get(name, name)])  # the same for all experts
    sparse.activation_checkpointing = recomputed
    ids = torch.randint(0, 97, (2, 13))
    out, expected = sparse(ids, labels=ids, metrics=("expert_load",)), dense(ids, labels=ids)
    torch.testing.assert_close(out.loss, expected.loss)
    assert (out.metrics["expert_load"] > 0).sum() > 5
    found = gradients(out.loss, sparse)
    found = {
        experts.get(name, name): grad.sum(0) if name in experts else grad
        for name, grad in found.items()
        if "mlp.gate.weight" not in name  # which expert is chosen changes nothing
    }
    assert_same_gradients(found, gradients(expected.loss, dense), 5e-5)
