"""Qwen3.5-MoE (also 3.6): Qwen3.5 with many small experts and one shared expert in every layer.

Checked against transformers' modeling_qwen3_5_moe.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tigon.layers import SparseMoE
from tigon.models.causal_lm import CausalLM
from tigon.models.moe import MoEConfig, sparse_moe
from tigon.models.pretrained.names import CheckpointNames
from tigon.models.qwen3_5 import DECAY, PROJECTIONS, GatedDeltaBlock, Qwen3_5Config


@dataclass(frozen=True, kw_only=True)
class Qwen3_5MoeConfig(Qwen3_5Config, MoEConfig):
    """The config of Qwen3.5's mixtures: no layer has an MLP."""

    model_type = "qwen3_5_moe_text"
    architecture = "Qwen3_5MoeForCausalLM"
    classifier_name = None
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **Qwen3_5Config.neutral,
        "norm_topk_prob": (None, True),
        "decoder_sparse_step": (None, 1),
    }

    hidden_size: int = 2048
    intermediate_size: int = 512  # no layer has an MLP
    num_hidden_layers: int = 40
    num_key_value_heads: int = 2
    num_experts: int = 256
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512


class Qwen3_5MoeBlock(GatedDeltaBlock):
    """Qwen3.5's block with experts, a gated shared one among them, in place of the MLP."""

    def make_mlp(self, c: Qwen3_5MoeConfig, layer: int) -> SparseMoE:
        shared = c.shared_expert_intermediate_size
        return sparse_moe(c, c.moe_intermediate_size, normalize=True, shared=shared)


class Qwen3_5Moe(CausalLM):
    """Qwen3.5-MoE: a decoder of `Qwen3_5MoeBlock`s."""

    config_class = Qwen3_5MoeConfig
    block_class = Qwen3_5MoeBlock
    checkpoint_names = CheckpointNames(packed=PROJECTIONS, renamed=DECAY, extra=("mtp.",))
