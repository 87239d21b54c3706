"""Llama 1 to 3.3, and models of the same architecture (SmolLM, Yi, TinyLlama ...).

Pre-norm blocks, grouped queries, rotary positions, SwiGLU. Paper: arXiv 2407.21783; checked
against transformers' modeling_llama.
"""

from dataclasses import dataclass

from tigon.models.causal_lm import CausalLM
from tigon.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """The config of Llama: `ModelConfig` with `attention_bias` and `mlp_bias`."""

    model_type = "llama"
    architecture = "LlamaForCausalLM"

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    attention_bias: bool = False
    mlp_bias: bool = False


class Llama(CausalLM):
    """Llama 1 to 3.3, and models of the same architecture: a decoder of `PreNormBlock`s."""

    config_class = LlamaConfig
