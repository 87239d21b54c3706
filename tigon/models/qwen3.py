"""Qwen3: Qwen2 with QK-norm and without its biases.

Paper: arXiv 2505.09388; checked against transformers' modeling_qwen3.
"""

from dataclasses import dataclass

from tigon.layers import Attention
from tigon.models.causal_lm import CausalLM
from tigon.models.decoder import PreNormBlock, layer_window
from tigon.models.qwen2 import Qwen2Config


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(Qwen2Config):
    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"

    head_dim: int = 128
    attention_bias: bool = False


class Qwen3Block(PreNormBlock):
    def make_mixer(self, c: Qwen3Config, layer: int) -> Attention:
        window = layer_window(c, layer) if c.use_sliding_window else None
        bias, eps = c.attention_bias, c.rms_norm_eps
        return self.make_attention(c, bias=bias, qk_norm_eps=eps, window=window)


class Qwen3(CausalLM):
    config_class = Qwen3Config
    block_class = Qwen3Block
