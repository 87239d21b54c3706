"""Gemma 3, text: Gemma 2 with normed heads, five sliding layers to a full one, and two RoPEs.

EmbeddingGemma is the same with attention to both sides. Paper: arXiv 2503.19786; checked against
transformers' modeling_gemma3.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tigon.kernels.gated_act import Activation
from tigon.models._blocks import SandwichBlock
from tigon.models._config import SLIDING, TwoRopesConfig, activation
from tigon.models.causal_lm import CausalLM
from tigon.models.gemma import GemmaConfig


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(GemmaConfig, TwoRopesConfig):
    model_type = "gemma3_text"
    architecture = "Gemma3ForCausalLM"
    default_theta = 1e6
    # Read with the RoPEs; and a copy of sliding_window_pattern
    ignored = frozenset({"rope_local_base_freq", "_sliding_window_pattern"})

    vocab_size: int = 262208
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    hidden_activation: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = 131072
    query_pre_attn_scalar: float = 256
    final_logit_softcapping: float | None = None
    sliding_window_pattern: int = 6
    use_bidirectional_attention: bool | None = False

    @classmethod
    def _local_theta(cls, source: Mapping[str, Any]) -> float:
        return source.get("rope_local_base_freq", 1e4)

    def _rope_keys(self) -> dict[str, Any]:
        local = self.rope_parameters[SLIDING]["rope_theta"]
        return super()._rope_keys() | {"rope_local_base_freq": local}

    def slides(self, layer: int) -> bool:
        return (layer + 1) % self.sliding_window_pattern != 0

    def window(self, layer: int) -> int | None:
        window = super().window(layer)
        if window is None or self.causal:
            return window
        return window // 2 + 1  # the config gives the width of both sides

    @property
    def causal(self) -> bool:
        return not self.use_bidirectional_attention

    @property
    def act(self) -> Activation:
        return activation(self.hidden_activation)

    @property
    def qk_norm(self) -> bool:
        return True

    @property
    def attention_scale(self) -> float:
        return self.query_pre_attn_scalar**-0.5

    @property
    def logits_softcap(self) -> float | None:
        return self.final_logit_softcapping


class Gemma3(CausalLM):
    config_class = Gemma3Config
    block_class = SandwichBlock
