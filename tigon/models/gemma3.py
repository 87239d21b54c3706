"""Gemma 3, text: Gemma 2 with normed heads, five sliding layers to a full one, and two RoPEs.

Paper: arXiv 2503.19786; checked against transformers' modeling_gemma3.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tigon.kernels.gated_act import Activation
from tigon.models._base import CausalLM
from tigon.models._blocks import SandwichBlock
from tigon.models._config import FULL, SLIDING, ConfigError, WindowedConfig, activation, read_rope
from tigon.models.gemma import GemmaConfig


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(GemmaConfig, WindowedConfig):
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

    @classmethod
    def _read_rope(cls, source: Mapping[str, Any], longest: int) -> dict[str, Any]:
        """Of full and of sliding layers; rope_theta and rope_scaling are of the former."""
        given = source.get("rope_parameters") or {}
        full, sliding = (given.get(name) or {} for name in (FULL, SLIDING))
        if not given.keys() <= {FULL, SLIDING}:
            raise ConfigError(f"rope_parameters={given} is not given per {FULL!r} and {SLIDING!r}")
        full = full | (source.get("rope_scaling") or {})
        theta = source.get("rope_theta", cls.default_theta)
        local = source.get("rope_local_base_freq", 1e4)
        return {
            FULL: read_rope({"rope_parameters": full}, theta, longest),
            SLIDING: read_rope({"rope_parameters": sliding}, local, longest),
        }

    def __post_init__(self) -> None:
        if not self.rope_parameters:
            rope = self._read_rope({}, self.max_position_embeddings)
            object.__setattr__(self, "rope_parameters", rope)
        super().__post_init__()

    def _rope_keys(self) -> dict[str, Any]:
        full, sliding = self.rope_parameters[FULL], self.rope_parameters[SLIDING]
        return {
            "rope_parameters": self.rope_parameters,
            "rope_theta": full["rope_theta"],
            "rope_local_base_freq": sliding["rope_theta"],
            "rope_scaling": full if full["rope_type"] != "default" else None,
        }

    @property
    def ropes(self) -> dict[str, dict[str, Any]]:
        return self.rope_parameters

    def rope(self, layer: int) -> str:
        return self.layer_type(layer)

    def slides(self, layer: int) -> bool:
        return (layer + 1) % self.sliding_window_pattern != 0

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
