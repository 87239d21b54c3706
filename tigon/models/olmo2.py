"""OLMo 2: norms after the branches instead of before, and QK-norm across all heads.

Paper: arXiv 2501.00656; checked against transformers' modeling_olmo2.
"""

from dataclasses import dataclass

from tigon.models.causal_lm import CausalLM
from tigon.models.config import ModelConfig
from tigon.models.decoder import PostNormBlock


@dataclass(frozen=True, kw_only=True)
class Olmo2Config(ModelConfig):
    """The config of OLMo 2: `ModelConfig` with `attention_bias`."""

    model_type = "olmo2"
    architecture = "Olmo2ForCausalLM"

    vocab_size: int = 50304
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 50279
    attention_bias: bool = False


class Olmo2Block(PostNormBlock):
    """A `PostNormBlock` with norms of the whole queries and keys, across heads."""

    norm_cast = "after_weight"
    qk_norm = True
    rounded_angles = False
    attention_options = {"flat_qk_norm": True}


class Olmo2(CausalLM):
    """OLMo 2: `Olmo2Block`s, with RoPE's angles in fp32."""

    config_class = Olmo2Config
    block_class = Olmo2Block
