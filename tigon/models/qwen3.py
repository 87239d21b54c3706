"""Qwen3: Qwen2 with QK-norm and without its biases.

Paper: arXiv 2505.09388; checked against transformers' modeling_qwen3.
"""

from dataclasses import dataclass

from tigon.models.causal_lm import CausalLM
from tigon.models.decoder import PreNormBlock
from tigon.models.qwen2 import Qwen2Config


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(Qwen2Config):
    """The config of Qwen3: Qwen2's with `attention_bias` and a head_dim of 128 by default."""

    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"

    head_dim: int = 128
    attention_bias: bool = False


class Qwen3Block(PreNormBlock):
    """A `PreNormBlock` with QK-norm per head, `attention_bias` and the layer's sliding window."""

    qk_norm = True


class Qwen3(CausalLM):
    """Qwen3: a decoder of `Qwen3Block`s."""

    config_class = Qwen3Config
    block_class = Qwen3Block
