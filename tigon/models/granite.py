"""Granite 3: Llama with multipliers on embeddings, attention scores, branches and logits.

Paper: arXiv 2407.13739 (Granite code), whose multipliers are those of muP, arXiv 2203.03466;
checked against transformers' modeling_granite.
"""

from dataclasses import dataclass

from tigon.models.causal_lm import CausalLM
from tigon.models.llama import LlamaConfig


@dataclass(frozen=True, kw_only=True)
class GraniteConfig(LlamaConfig):
    """The config of Granite 3: Llama's with multipliers, and a divisor of logits."""

    model_type = "granite"
    architecture = "GraniteForCausalLM"
    classifier_name = None

    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0  # of the scores, in place of 1 / sqrt(head_dim)
    logits_scaling: float = 1.0


class Granite(CausalLM):
    """Granite 3: a decoder of `PreNormBlock`s, with the config's multipliers."""

    config_class = GraniteConfig
