"""Gemma 2: Gemma with every other layer sliding, four norms to a block, and softcaps.

Paper: arXiv 2408.00118; checked against transformers' modeling_gemma2.
"""

from dataclasses import dataclass

from tigon.kernels.gated_act import Activation
from tigon.models._blocks import SandwichBlock
from tigon.models._config import WindowedConfig, activation
from tigon.models.causal_lm import CausalLM
from tigon.models.gemma import GemmaConfig


@dataclass(frozen=True, kw_only=True)
class Gemma2Config(GemmaConfig, WindowedConfig):
    model_type = "gemma2"
    architecture = "Gemma2ForCausalLM"

    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    hidden_activation: str = "gelu_pytorch_tanh"  # not hidden_act, which vLLM wants to be equal
    query_pre_attn_scalar: float = 256
    final_logit_softcapping: float | None = 30.0
    attn_logit_softcapping: float | None = 50.0

    @property
    def act(self) -> Activation:
        return activation(self.hidden_activation)

    @property
    def attention_scale(self) -> float:
        return self.query_pre_attn_scalar**-0.5

    @property
    def attention_softcap(self) -> float | None:
        return self.attn_logit_softcapping

    @property
    def logits_softcap(self) -> float | None:
        return self.final_logit_softcapping

    def slides(self, layer: int) -> bool:
        return layer % 2 == 0


class Gemma2(CausalLM):
    config_class = Gemma2Config
    block_class = SandwichBlock
