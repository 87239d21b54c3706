"""Seed-OSS: Llama's blocks with biases on the query, key and value projections.

Checked against transformers' modeling_seed_oss.
"""

from dataclasses import dataclass

from tigon.models.causal_lm import CausalLM
from tigon.models.llama import LlamaConfig


@dataclass(frozen=True, kw_only=True)
class SeedOssConfig(LlamaConfig):
    """The config of Seed-OSS: Llama's with attention_out_bias, a switch of its own."""

    model_type = "seed_oss"
    architecture = "SeedOssForCausalLM"

    vocab_size: int = 155136
    intermediate_size: int = 27648
    num_hidden_layers: int = 64
    num_attention_heads: int = 80
    num_key_value_heads: int = 8
    head_dim: int = 128
    max_position_embeddings: int = 524288
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    attention_bias: bool = True
    attention_out_bias: bool = False


class SeedOss(CausalLM):
    """Seed-OSS: a decoder of `PreNormBlock`s."""

    config_class = SeedOssConfig
