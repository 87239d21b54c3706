"""OLMo 2: no norms before the branches but after them, and queries and keys normed whole.

Paper: arXiv 2501.00656; checked against transformers' modeling_olmo2.
"""

from dataclasses import dataclass

from tigon.models._blocks import PostNormBlock
from tigon.models._config import Config
from tigon.models.causal_lm import CausalLM


@dataclass(frozen=True, kw_only=True)
class Olmo2Config(Config):
    model_type = "olmo2"
    architecture = "Olmo2ForCausalLM"
    norm_cast = "after_weight"
    rounded_angles = False
    flat_qk_norm = True

    vocab_size: int = 50304
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 50279
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


class Olmo2(CausalLM):
    config_class = Olmo2Config
    block_class = PostNormBlock
