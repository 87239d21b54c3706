"""LFM2-MoE (LFM2-8B-A1B, also 2.5): LFM2 with small experts, chosen by sigmoids, in most layers.

Paper: arXiv 2511.23404; checked against transformers' modeling_lfm2_moe.
"""

from dataclasses import dataclass

from tigon.layers import GatedMLP, GroupRouter, SparseMoE
from tigon.models.causal_lm import CausalLM
from tigon.models.lfm2 import PACKED, RENAMED, Lfm2Block, ShortConvConfig
from tigon.models.moe import ExpertsConfig, sparse_moe
from tigon.models.pretrained.names import CheckpointNames


@dataclass(frozen=True, kw_only=True)
class Lfm2MoeConfig(ShortConvConfig, ExpertsConfig):
    """The config of LFM2's mixtures: `ShortConvConfig` with experts in the layers from
    num_dense_layers on, and whether their choice is biased."""

    model_type = "lfm2_moe"
    architecture = "Lfm2MoeForCausalLM"
    ignored = ShortConvConfig.ignored | {"output_router_logits"}  # the loss has no balance

    hidden_size: int = 2048
    intermediate_size: int = 7168
    layer_types: list[str]
    num_dense_layers: int = 2
    num_experts: int = 32
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 1792
    use_expert_bias: bool = True
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0


class Lfm2MoeBlock(Lfm2Block):
    """LFM2's block with experts in place of the MLP in all but the first layers."""

    def make_mlp(self, c: Lfm2MoeConfig, layer: int) -> GatedMLP | SparseMoE:
        if layer < c.num_dense_layers:
            return super().make_mlp(c, layer)
        router = GroupRouter(
            *(c.hidden_size, c.num_experts, c.num_experts_per_tok),
            sigmoid=True,
            exact=False,
            eps=1e-6,
            corrected=c.use_expert_bias,
            normalize=c.norm_topk_prob,
            scale=c.routed_scaling_factor,
        )
        return sparse_moe(c, c.moe_intermediate_size, "silu", router=router)


class Lfm2Moe(CausalLM):
    """LFM2's mixtures: a decoder of `Lfm2MoeBlock`s, with the names of its checkpoints."""

    config_class = Lfm2MoeConfig
    block_class = Lfm2MoeBlock
    checkpoint_names = CheckpointNames(
        packed=PACKED,
        experts={
            "experts.gate_up_proj": ("experts.{}.w1.weight", "experts.{}.w3.weight"),
            "experts.down_proj": ("experts.{}.w2.weight",),
        },
        renamed={"gate.e_score_correction_bias": "expert_bias", **RENAMED},
    )
