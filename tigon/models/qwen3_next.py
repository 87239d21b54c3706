"""Qwen3-Next: Gated DeltaNet and gated attention as in Qwen3.5, with experts and a shared one.

Checked against transformers' modeling_qwen3_next.
"""

from dataclasses import dataclass

from tigon.models.causal_lm import CausalLM
from tigon.models.pretrained.names import PACKED, CheckpointNames
from tigon.models.qwen2_moe import QwenMoEBlock, QwenMoEConfig
from tigon.models.qwen3_5 import DECAY, GatedDeltaBlock, GatedDeltaConfig


@dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(GatedDeltaConfig, QwenMoEConfig):
    """The config of Qwen3-Next: Qwen's mixtures with a shared expert, and Gated DeltaNet."""

    model_type = "qwen3_next"
    architecture = "Qwen3NextForCausalLM"

    vocab_size: int = 151936
    intermediate_size: int = 5632
    num_hidden_layers: int = 48
    num_experts: int = 512
    num_experts_per_tok: int = 10
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    norm_topk_prob: bool = True


class Qwen3NextBlock(QwenMoEBlock, GatedDeltaBlock):
    """Qwen3.5's block with experts or an MLP, and the rows of each key head together in files."""

    interleaved_heads = True


class Qwen3Next(CausalLM):
    """Qwen3-Next: `Qwen3NextBlock`s, with the names that its checkpoints have."""

    config_class = Qwen3NextConfig
    block_class = Qwen3NextBlock
    checkpoint_names = CheckpointNames(
        packed=PACKED | {"in_proj": ("in_proj_qkvz", "in_proj_ba")}, renamed=DECAY, extra=("mtp.",)
    )
