"""EXAONE 4.0: OLMo 2's norms after the branches, QK-norm per head, and no RoPE in full layers.

Paper: arXiv 2507.11407; checked against transformers' modeling_exaone4. Models without sliding
windows rotate in all layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from tigon.models.causal_lm import CausalLM
from tigon.models.config import SLIDING, ConfigError, WindowedConfig
from tigon.models.decoder import PostNormBlock
from tigon.utils.json import quote


@dataclass(frozen=True, kw_only=True)
class Exaone4Config(WindowedConfig):
    """The config of EXAONE 4.0: `sliding_window_pattern` is the interval of full layers, or a
    letter for each layer of a period, L where it slides and G where not."""

    model_type = "exaone4"
    architecture = "Exaone4ForCausalLM"

    vocab_size: int = 102400
    hidden_size: int = 4096
    intermediate_size: int = 16384
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    rms_norm_eps: float = 1e-5
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 2
    sliding_window_pattern: str | int | None = 4

    @classmethod
    def from_dict(cls, source: Mapping[str, Any]) -> Self:
        """As ModelConfig's; transformers writes a pattern of 0 for a model without windows."""
        pattern = source.get("sliding_window_pattern", cls.sliding_window_pattern)
        return super().from_dict({**source, "sliding_window_pattern": pattern or None})

    def __post_init__(self) -> None:
        super().__post_init__()
        pattern = self.sliding_window_pattern
        if isinstance(pattern, str) and not (pattern and set(pattern) <= {"L", "G"}):
            raise ConfigError(
                f"sliding_window_pattern={quote(pattern)} is not a number or letters L and G"
            )

    def slides(self, layer: int) -> bool:
        pattern = self.sliding_window_pattern
        if pattern is None:
            return False
        if isinstance(pattern, str):
            return pattern[layer % len(pattern)] == "L"
        return (layer + 1) % pattern != 0

    def rotates(self, layer: int) -> bool:
        return self.sliding_window is None or self.layer_type(layer) == SLIDING


class Exaone4Block(PostNormBlock):
    """A `PostNormBlock` with QK-norm per head and the layer's sliding window."""

    qk_norm = True


class Exaone4(CausalLM):
    """EXAONE 4.0: a decoder of `Exaone4Block`s."""

    config_class = Exaone4Config
    block_class = Exaone4Block
