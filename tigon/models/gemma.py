"""Gemma: Llama's blocks with GeGLU, norms that multiply by 1 + weight, and scaled embeddings.

Paper: arXiv 2403.08295; checked against transformers' modeling_gemma.
"""

from dataclasses import dataclass
from typing import ClassVar

from tigon.layers import GatedMLP
from tigon.models.causal_lm import CausalLM
from tigon.models.config import ModelConfig
from tigon.models.decoder import PreNormBlock, TransformerBlock, gated_mlp


@dataclass(frozen=True, kw_only=True)
class GemmaConfig(ModelConfig):
    """The config of Gemma: `ModelConfig` with `attention_bias`."""

    model_type = "gemma"
    architecture = "GemmaForCausalLM"
    overflows_float16 = True  # of Gemma 2 and 3 too
    ignored = frozenset({"hidden_activation"})

    vocab_size: int = 256000
    hidden_size: int = 3072
    intermediate_size: int = 24576
    num_hidden_layers: int = 28
    num_attention_heads: int = 16
    num_key_value_heads: int = 16
    head_dim: int = 256
    hidden_act: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 1
    bos_token_id: int | None = 2
    attention_bias: bool = False


class GemmaBlock(PreNormBlock):
    """A `PreNormBlock` whose norms multiply by 1 + weight in fp32, with GeGLU."""

    norm_offset = 1.0
    norm_cast = "after_weight"

    def make_mlp(self, c: GemmaConfig, layer: int) -> GatedMLP:
        """Makes a gated MLP, with the tanh approximation for "gelu" too."""
        # The first checkpoints say gelu and mean its approximation
        return gated_mlp(c, "gelu_tanh" if c.hidden_act == "gelu" else None)


class Gemma(CausalLM):
    """Gemma 1: `GemmaBlock`s, with embeddings multiplied by sqrt(hidden_size)."""

    config_class = GemmaConfig
    block_class: ClassVar[type[TransformerBlock]] = GemmaBlock
    scales_embedding = True
