"""Granite 3: Llama with multipliers on embeddings, scores, branches and logits.

Paper: arXiv 2407.13739 (Granite code), whose multipliers are those of muP, arXiv 2203.03466;
checked against transformers' modeling_granite.
"""

from dataclasses import dataclass

from tigon.models._blocks import PreNormBlock
from tigon.models.causal_lm import CausalLM
from tigon.models.llama import LlamaConfig


@dataclass(frozen=True, kw_only=True)
class GraniteConfig(LlamaConfig):
    model_type = "granite"
    architecture = "GraniteForCausalLM"

    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0  # of the scores, in place of 1 / sqrt(head_dim)
    logits_scaling: float = 1.0

    @property
    def input_scale(self) -> float:
        return self.embedding_multiplier

    @property
    def attention_scale(self) -> float:
        return self.attention_multiplier

    @property
    def logits_scale(self) -> float:
        return 1 / self.logits_scaling

    @property
    def branch_scale(self) -> float:
        return self.residual_multiplier


class Granite(CausalLM):
    config_class = GraniteConfig
    block_class = PreNormBlock
