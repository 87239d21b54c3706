"""GLM-4.5 to 4.7: Llama's attention with RoPE on half of each head, and DeepSeek-V3's experts.

Paper: arXiv 2508.06471; checked against transformers' modeling_glm4_moe.
"""

from dataclasses import dataclass

from tigon.layers import Attention
from tigon.models.causal_lm import CausalLM
from tigon.models.deepseek_v3 import GroupMoEBlock, GroupMoEConfig
from tigon.models.pretrained.names import CheckpointNames


@dataclass(frozen=True, kw_only=True)
class Glm4MoeConfig(GroupMoEConfig):
    """The config of GLM-4.5: experts chosen by groups, with `attention_bias` of queries, keys and
    values, an optional QK-norm, and RoPE on part of each head."""

    model_type = "glm4_moe"
    architecture = "Glm4MoeForCausalLM"
    classifier_name = None
    partial_rotary = True
    rotary_share = 0.5

    vocab_size: int = 151552
    hidden_size: int = 4096
    intermediate_size: int = 10944
    num_hidden_layers: int = 46
    num_attention_heads: int = 96
    num_key_value_heads: int = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    n_routed_experts: int = 128
    moe_intermediate_size: int = 1408
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    first_k_dense_replace: int = 1
    attention_bias: bool = False
    use_qk_norm: bool = False

    def __post_init__(self) -> None:
        if not self.head_dim:  # rounded down, as in transformers
            width = self.hidden_size // max(1, self.num_attention_heads)
            object.__setattr__(self, "head_dim", width)
        super().__post_init__()


class Glm4MoeBlock(GroupMoEBlock):
    """A `GroupMoEBlock` with an optional QK-norm."""

    def make_mixer(self, c: Glm4MoeConfig, layer: int) -> Attention:
        eps = c.rms_norm_eps if c.use_qk_norm else None
        return self.make_attention(c, layer, out_bias=False, qk_norm_eps=eps)


class Glm4Moe(CausalLM):
    """GLM-4.5, 4.6 and 4.7; layers of multi-token prediction past the last one are skipped."""

    config_class = Glm4MoeConfig
    block_class = Glm4MoeBlock
    checkpoint_names = CheckpointNames(extra_layers=True)
