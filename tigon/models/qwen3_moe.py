"""Qwen3-MoE: Qwen3 with many small experts and no shared one.

Paper: arXiv 2505.09388; checked against transformers' modeling_qwen3_moe.
"""

from dataclasses import dataclass

from tigon.models.causal_lm import CausalLM
from tigon.models.qwen2_moe import QwenMoEBlock, QwenMoEConfig


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(QwenMoEConfig):
    """The config of Qwen3-MoE: `attention_bias`, and a window in all layers or none."""

    model_type = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"
    experts_keys = ("num_experts", "num_local_experts")
    ignored = frozenset({"max_window_layers"})  # all layers slide or none
    # Published configs say what every model of this type is
    neutral = {
        "qkv_bias": (None, False),
        "shared_expert_intermediate_size": (None, 0),
        "use_qk_norm": (None, True),
    }

    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 6144
    num_hidden_layers: int = 24
    num_attention_heads: int = 32
    num_key_value_heads: int = 4
    max_position_embeddings: int = 32768
    num_experts: int = 128
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 768
    attention_bias: bool = False
    sliding_window: int | None = 4096


class Qwen3MoeBlock(QwenMoEBlock):
    """A `QwenMoEBlock` with QK-norm per head."""

    qk_norm = True


class Qwen3Moe(CausalLM):
    """Qwen3-MoE: a decoder of `Qwen3MoeBlock`s."""

    config_class = Qwen3MoeConfig
    block_class = Qwen3MoeBlock
