"""Seed-OSS: Llama's blocks with biases on queries, keys and values.

Checked against transformers' modeling_seed_oss.
"""

from dataclasses import dataclass

from tigon.layers import Attention, GatedMLP
from tigon.models._blocks import PreNormBlock, gated_mlp
from tigon.models._config import Config
from tigon.models.causal_lm import CausalLM


@dataclass(frozen=True, kw_only=True)
class SeedOssConfig(Config):
    model_type = "seed_oss"
    architecture = "SeedOssForCausalLM"

    vocab_size: int = 155136
    hidden_size: int = 4096
    intermediate_size: int = 27648
    num_hidden_layers: int = 64
    num_attention_heads: int = 80
    num_key_value_heads: int = 8
    head_dim: int = 128
    max_position_embeddings: int = 524288
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 2
    attention_bias: bool = True
    attention_out_bias: bool = False
    mlp_bias: bool = False


class SeedOssBlock(PreNormBlock):
    def make_mixer(self, c: SeedOssConfig, layer: int) -> Attention:
        return self.make_attention(c, bias=c.attention_bias, out_bias=c.attention_out_bias)

    def make_mlp(self, c: SeedOssConfig, layer: int) -> GatedMLP:
        return gated_mlp(c, bias=c.mlp_bias)


class SeedOss(CausalLM):
    config_class = SeedOssConfig
    block_class = SeedOssBlock
