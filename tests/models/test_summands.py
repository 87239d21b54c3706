"""Branches that are yet to be summed over ranks, of blocks whose norms sum them."""

import pytest
import torch
from torch import Tensor, nn

import tigon
from tests.small import LLAMA
from tigon.distributed.collectives import Ranks
from tigon.distributed.sequence_parallel import PartialSum, SequenceParallelRegion
from tigon.layers import AddRMSNorm, Attention
from tigon.models.decoder import (
    PostNormBlock,
    PreNormBlock,
    SandwichBlock,
    fuses_all_reduce,
    norm_fuses_all_reduce,
)

# Overrides that compute the same, but that a norm cannot know to
OVERRIDES = {
    "forward": lambda self, *given: PreNormBlock.forward(self, *given),
    "mlp_forward": lambda self, *given: PreNormBlock.mlp_forward(self, *given),
    "_scaled": lambda self, branch: 0.5 * branch,
    "mixer": property(lambda self: self.self_attn.forward),
}


def config():
    return tigon.Llama.from_config(LLAMA, device="meta").config


def test_whose_norms_sum():
    changed = [type("Changed", (PreNormBlock,), {k: v}) for k, v in OVERRIDES.items()]
    kinds = PreNormBlock, *changed, SandwichBlock, PostNormBlock
    assert [fuses_all_reduce(kind(config(), 0)) for kind in kinds] == [True, *6 * [False]]
    block = PreNormBlock(config(), 0)
    block._scaled = lambda branch: 0.5 * branch
    assert not fuses_all_reduce(block)


@pytest.mark.parametrize("name", ["", "self_attn", "mlp", "post_attention_layernorm"])
def test_who_is_watched_sees_sums(name):
    block = PreNormBlock(config(), 0)
    handle = block.get_submodule(name).register_forward_hook(lambda *_: None)
    assert not fuses_all_reduce(block)
    handle.remove()
    assert fuses_all_reduce(block)
    everywhere = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert not fuses_all_reduce(block)
    everywhere.remove()


class OwnNorm(AddRMSNorm):
    def forward(self, x, residual, post=None):
        return super().forward(x * 1, residual, post)


def test_modules_of_others_get_sums(monkeypatch):
    """In place of ours, around them, or in the classes."""
    assert not norm_fuses_all_reduce(OwnNorm(8, 1e-5))
    for name in "input_layernorm", "post_attention_layernorm":
        block = PreNormBlock(config(), 0)
        setattr(block, name, OwnNorm(8, 1e-5))
        assert not fuses_all_reduce(block)
    block = PreNormBlock(config(), 0)
    assert not fuses_all_reduce(nn.Sequential(block))
    assert not fuses_all_reduce(torch.compile(block))
    block.mlp_forward = lambda *given: PreNormBlock.mlp_forward(block, *given)
    assert not fuses_all_reduce(block)
    for kind in PreNormBlock, Attention, AddRMSNorm:
        with monkeypatch.context() as patch:
            own = kind.forward
            patch.setattr(kind, "forward", lambda *given, own=own: own(*given))
            assert not fuses_all_reduce(PreNormBlock(config(), 0))


class Two(Ranks):
    """Two ranks that have the same."""

    def sum(self, x: Tensor) -> Tensor:
        return 2 * x


def test_a_norm_sums():
    ranks, norm = Two("none", 0, 2), AddRMSNorm(8, 1e-5)
    norm.init_weights()
    x, residual = torch.randn(2, 1, 3, 8).unbind()
    with torch.no_grad():
        branch = SequenceParallelRegion(
            ranks, (1, 3), replicated=True, defers_sum=True
        ).reduce_to_region(x)
        assert isinstance(branch, PartialSum)
        for given in residual, None:
            for found, expected in zip(norm(branch, given), norm(2 * x, given), strict=True):
                assert torch.equal(found, expected)
        block = PreNormBlock(config(), 0)
        assert block._scaled(branch) is branch
        block.branch_scale = 0.5
        assert torch.equal(block._scaled(branch), x)
    assert torch.equal(
        SequenceParallelRegion(ranks, (1, 3), replicated=True).reduce_to_region(x), 2 * x
    )
