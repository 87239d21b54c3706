"""Qwen3: Qwen2 with normed heads of queries and keys, and without its biases.

Paper: arXiv 2505.09388; checked against transformers' modeling_qwen3.
"""

from dataclasses import dataclass

from tigon.models._blocks import PreNormBlock
from tigon.models.causal_lm import CausalLM
from tigon.models.qwen2 import Qwen2Config


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(Qwen2Config):
    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"

    head_dim: int = 128
    attention_bias: bool = False

    @property
    def qk_norm(self) -> bool:
        return True

    @property
    def qkv_bias(self) -> bool:
        return self.attention_bias

    @property
    def out_bias(self) -> bool:
        return self.attention_bias


class Qwen3(CausalLM):
    config_class = Qwen3Config
    block_class = PreNormBlock
