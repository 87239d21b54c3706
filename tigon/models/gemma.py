"""Gemma: Llama's blocks with GeGLU, norms that multiply by 1 + weight, and scaled embeddings.

Paper: arXiv 2403.08295; checked against transformers' modeling_gemma.
"""

from dataclasses import dataclass

from tigon.kernels.gated_act import Activation
from tigon.models._blocks import PreNormBlock
from tigon.models._config import Config, activation
from tigon.models.causal_lm import CausalLM


@dataclass(frozen=True, kw_only=True)
class GemmaConfig(Config):
    model_type = "gemma"
    architecture = "GemmaForCausalLM"
    norm_offset = 1.0
    norm_cast = "after_weight"
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

    @property
    def act(self) -> Activation:
        # The first checkpoints say gelu and mean its approximation
        return "gelu_tanh" if self.hidden_act == "gelu" else activation(self.hidden_act)

    @property
    def qkv_bias(self) -> bool:
        return self.attention_bias

    @property
    def out_bias(self) -> bool:
        return self.attention_bias

    @property
    def embedding_scale(self) -> float:
        return self.hidden_size**0.5


class Gemma(CausalLM):
    config_class = GemmaConfig
    block_class = PreNormBlock
