"""Llama 1 to 3.3, and what shares its architecture (SmolLM, Yi, TinyLlama ...).

Pre-norm blocks, grouped queries, rotary positions, SwiGLU. Paper: arXiv 2407.21783; checked
against transformers' modeling_llama.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from tigon.kernels.attention import AttentionMask
from tigon.layers import AddRMSNorm, Attention, GatedMLP, KVCache
from tigon.models._base import CausalLM
from tigon.models._config import Config, activation


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(Config):
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


class LlamaBlock(nn.Module):
    """(x, residual) -> (x, residual): each norm adds the branch before it to the stream."""

    def __init__(self, c: LlamaConfig, layer: int):
        super().__init__()
        self.input_layernorm = AddRMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(
            c.hidden_size,
            c.num_attention_heads,
            c.num_key_value_heads,
            c.head_dim,
            layer=layer,
            bias=c.attention_bias,
            out_bias=c.attention_bias,
        )
        self.post_attention_layernorm = AddRMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = GatedMLP(
            c.hidden_size, c.intermediate_size, activation(c.hidden_act), bias=c.mlp_bias
        )

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        cos_sin: tuple[Tensor, Tensor],
        mask: AttentionMask,
        cache: KVCache | None,
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, cos_sin, mask, cache)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class Llama(CausalLM):
    config_class = LlamaConfig
    block_class = LlamaBlock
