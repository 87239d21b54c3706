"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with many small experts and one shared expert.

Paper: arXiv 2407.10671; checked against transformers' modeling_qwen2_moe.
"""

from dataclasses import dataclass, field
from typing import Any

from tigon.layers import Attention, GatedMLP, SparseMoE
from tigon.models.causal_lm import CausalLM
from tigon.models.config import ConfigError, WindowedConfig
from tigon.models.decoder import PreNormBlock, gated_mlp
from tigon.models.moe import MoEConfig, sparse_moe


@dataclass(frozen=True, kw_only=True)
class QwenMoEConfig(MoEConfig):
    """The config of Qwen's mixtures: which layers have experts."""

    num_experts: int = 60
    moe_intermediate_size: int = 1408
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = field(default_factory=list)
    use_sliding_window: bool = False

    def __post_init__(self) -> None:
        if self.mlp_only_layers is None:
            object.__setattr__(self, "mlp_only_layers", [])
        super().__post_init__()

    def sparse(self, layer: int) -> bool:
        on_step = (layer + 1) % self.decoder_sparse_step == 0
        return self.num_experts > 0 and on_step and layer not in (self.mlp_only_layers or ())


class QwenMoEBlock(PreNormBlock):
    """A `PreNormBlock` with experts, and a shared one if the config has it, or with an MLP."""

    def make_mlp(self, c: Any, layer: int) -> GatedMLP | SparseMoE:
        if not c.sparse(layer):
            return gated_mlp(c)
        shared = getattr(c, "shared_expert_intermediate_size", 0)
        return sparse_moe(c, c.moe_intermediate_size, normalize=c.norm_topk_prob, shared=shared)


@dataclass(frozen=True, kw_only=True)
class Qwen2MoeConfig(QwenMoEConfig, WindowedConfig):
    """The config of Qwen2-MoE: a shared expert, sliding windows and `qkv_bias`."""

    model_type = "qwen2_moe"
    architecture = "Qwen2MoeForCausalLM"

    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int = 16
    max_position_embeddings: int = 32768
    num_experts_per_tok: int = 4
    shared_expert_intermediate_size: int = 5632
    max_window_layers: int = 28
    qkv_bias: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shared_expert_intermediate_size < 1:
            raise ConfigError(
                f"shared_expert_intermediate_size={self.shared_expert_intermediate_size} is not "
                "positive: every mixture of this type has a shared expert"
            )

    def slides(self, layer: int) -> bool:
        return layer % 2 == 0 and layer < self.max_window_layers


class Qwen2MoeBlock(QwenMoEBlock):
    """A `QwenMoEBlock` with sliding windows, and biases by `qkv_bias`."""

    def make_mixer(self, c: Qwen2MoeConfig, layer: int) -> Attention:
        return self.make_attention(c, layer, bias=c.qkv_bias, out_bias=False)


class Qwen2Moe(CausalLM):
    """Qwen1.5-MoE and Qwen2-MoE: a decoder of `Qwen2MoeBlock`s."""

    config_class = Qwen2MoeConfig
    block_class = Qwen2MoeBlock
