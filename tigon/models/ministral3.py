"""Ministral 3: Mistral with YaRN, and queries scaled with the logarithm of their position.

Checked against transformers' modeling_ministral3; also the text model of Mistral 3 checkpoints
whose text_config names it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tigon.models.causal_lm import CausalLM
from tigon.models.config import ConfigError, ModelConfig
from tigon.utils.json import quote

# Where the config says nothing of RoPE
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


@dataclass(frozen=True, kw_only=True)
class ScaledQueriesConfig(ModelConfig):
    """The config of a family with Llama 4's scaling of queries in `rope_parameters`."""

    rope_extras = {"llama_4_scaling_beta": float, "max_position_embeddings": int}
    default_rope = YARN

    @classmethod
    def _read_rope(cls, source: Mapping[str, Any], longest: int) -> dict[str, Any]:
        """As ModelConfig's; raises ConfigError without llama_4_scaling_beta and
        original_max_position_embeddings."""
        rope = super()._read_rope(source, longest)
        for key in ("llama_4_scaling_beta", "original_max_position_embeddings"):
            if rope.get(key) is None:
                raise ConfigError(
                    f"{cls.model_type} needs {key} in rope_parameters={quote(rope, 500)}"
                )
        return rope


@dataclass(frozen=True, kw_only=True)
class Ministral3Config(ScaledQueriesConfig):
    """The config of Ministral 3: `ScaledQueriesConfig` with an optional sliding window."""

    model_type = "ministral3"
    architecture = "Ministral3ForCausalLM"

    vocab_size: int = 131072
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 34
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    max_position_embeddings: int = 262144
    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 11
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    sliding_window: int | None = None  # of every layer


class Ministral3(CausalLM):
    """Ministral 3: `PreNormBlock`s; queries are scaled where RoPE is applied."""

    config_class = Ministral3Config
