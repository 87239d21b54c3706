"""Gemma 3 (text): Gemma 2 with QK-norm, five sliding-window layers per full one, and two RoPEs.

EmbeddingGemma is the same with attention to both sides. Paper: arXiv 2503.19786; checked against
transformers' modeling_gemma3.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tigon.layers import Attention
from tigon.models.config import SLIDING, TwoRopesConfig
from tigon.models.decoder import layer_window
from tigon.models.gemma import GemmaConfig
from tigon.models.gemma2 import Gemma2, Gemma2Block
from tigon.utils.config import check_type


@dataclass(frozen=True, kw_only=True)
class LocalThetaConfig(TwoRopesConfig):
    """A `TwoRopesConfig` whose rope_local_base_freq is the theta of the sliding layers."""

    default_theta = 1e6

    @classmethod
    def _local_theta(cls, source: Mapping[str, Any]) -> float:
        """Theta of sliding layers if `rope_parameters` lacks it: rope_local_base_freq, or 1e4."""
        key = "rope_local_base_freq"
        return check_type(key, source.get(key, 1e4), float)

    def _rope_keys(self) -> dict[str, Any]:
        """The RoPE keys of `to_dict`, with the theta of sliding layers as rope_local_base_freq."""
        local = self.rope_parameters[SLIDING]["rope_theta"]
        return super()._rope_keys() | {"rope_local_base_freq": local}


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(GemmaConfig, LocalThetaConfig):
    """The config of Gemma 3's text models: Gemma's with two RoPEs, every sliding_window_pattern-th
    layer without window, and attention to both sides if `use_bidirectional_attention`."""

    model_type = "gemma3_text"
    architecture = "Gemma3ForCausalLM"
    classifier_name = "Gemma3TextForSequenceClassification"
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

    def slides(self, layer: int) -> bool:
        """Whether the layer has a sliding window if `layer_types` is None: all have but every
        sliding_window_pattern-th."""
        return (layer + 1) % self.sliding_window_pattern != 0


class Gemma3Block(Gemma2Block):
    """Gemma 2's block with QK-norm, no softcap, and another RoPE in sliding layers."""

    qk_norm = True

    def make_mixer(self, c: Any, layer: int) -> Attention:
        """Makes attention with the layer's sliding window, of which a bidirectional model has half
        on each side."""
        window = layer_window(c, layer)
        if window is not None and c.use_bidirectional_attention:
            window = window // 2 + 1  # the config gives the width of both sides
        return self.make_attention(c, layer, window=window)


class Gemma3(Gemma2):
    """Gemma 3's text model, or EmbeddingGemma, which attends to both sides."""

    config: Gemma3Config
    config_class = Gemma3Config
    block_class = Gemma3Block

    @property
    def causal(self) -> bool:
        """False if the config has use_bidirectional_attention: then tokens see both sides."""
        return not self.config.use_bidirectional_attention
