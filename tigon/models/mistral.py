"""Mistral 7B (sliding window in v0.1 only), Nemo, and Ministral (sliding window in some layers).

Llama's blocks with a window. Paper: arXiv 2310.06825; checked against transformers'
modeling_mistral and modeling_ministral.
"""

from dataclasses import dataclass

from tigon.models.causal_lm import CausalLM
from tigon.models.config import WindowedConfig


@dataclass(frozen=True, kw_only=True)
class MistralConfig(WindowedConfig):
    """The config of Mistral: a window in all layers unless sliding_window is None."""

    model_type = "mistral"
    architecture = "MistralForCausalLM"

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    max_position_embeddings: int = 131072
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2


class MinistralConfig(MistralConfig):
    """Mistral's config for model_type "ministral", which chooses layers by layer_types."""

    model_type = "ministral"
    architecture = "MinistralForCausalLM"


class Mistral(CausalLM):
    """Mistral 7B and Nemo: a decoder of `PreNormBlock`s."""

    config_class = MistralConfig


class Ministral(Mistral):
    """Mistral for configs of model_type "ministral", with the same blocks."""

    config_class = MinistralConfig
