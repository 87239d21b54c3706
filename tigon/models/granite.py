"""Granite 3: Llama with multipliers on embeddings, attention scores, branches and logits.

Paper: arXiv 2407.13739 (Granite code), whose multipliers are those of muP, arXiv 2203.03466;
checked against transformers' modeling_granite.
"""

from dataclasses import dataclass
from typing import Any

from tigon.layers import Attention, LMHead
from tigon.models.causal_lm import CausalLM
from tigon.models.decoder import Decoder, PreNormBlock
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


class GraniteBlock(PreNormBlock):
    """Llama's block with branches times residual_multiplier, scores times attention_multiplier."""

    def make_mixer(self, c: Any, layer: int) -> Attention:
        return self.make_attention(c, layer, scale=c.attention_multiplier)


class Granite(CausalLM):
    """Granite 3: `GraniteBlock`s, embedding_multiplier, and logits_scaling, a divisor."""

    config_class = GraniteConfig
    block_class = GraniteBlock

    def make_decoder(self, c: GraniteConfig, **options: Any) -> Decoder:
        return super().make_decoder(c, input_scale=c.embedding_multiplier, **options)

    def make_head(self, c: GraniteConfig, **options: Any) -> LMHead:
        return super().make_head(c, logit_scale=1 / c.logits_scaling, **options)
