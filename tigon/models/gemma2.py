"""Gemma 2: Gemma with sliding windows in every other layer, four norms per block, and softcaps.

Paper: arXiv 2408.00118; checked against transformers' modeling_gemma2.
"""

from dataclasses import dataclass
from typing import ClassVar

from tigon.models.config import WindowedConfig
from tigon.models.decoder import SandwichBlock
from tigon.models.gemma import Gemma, GemmaConfig


@dataclass(frozen=True, kw_only=True)
class Gemma2Config(GemmaConfig, WindowedConfig):
    """The config of Gemma 2: Gemma's with sliding windows, the scale of scores
    (query_pre_attn_scalar**-0.5) and softcaps."""

    model_type = "gemma2"
    architecture = "Gemma2ForCausalLM"
    full_every = 2

    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    hidden_activation: str = "gelu_pytorch_tanh"  # not hidden_act, which vLLM wants to be equal
    query_pre_attn_scalar: float = 256
    final_logit_softcapping: float | None = 30.0
    attn_logit_softcapping: float | None = 50.0


class Gemma2Block(SandwichBlock):
    """A `SandwichBlock` whose norms multiply by 1 + weight."""

    norm_offset = 1.0
    norm_cast = "after_weight"


class Gemma2(Gemma):
    """Gemma 2: Gemma's scaled embeddings, `Gemma2Block`s, and a softcap of the logits."""

    config_class: ClassVar[type[GemmaConfig]] = Gemma2Config
    block_class = Gemma2Block
