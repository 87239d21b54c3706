"""Granite with sliding windows: Granite with sinks, and a RoPE base for each layer.

Checked against transformers' modeling_granite_swa.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tigon.layers import Attention
from tigon.models.config import WindowedConfig, check_layer_thetas
from tigon.models.decoder import PreNormBlock
from tigon.models.granite import Granite, GraniteConfig


@dataclass(frozen=True, kw_only=True)
class GraniteSWAConfig(GraniteConfig, WindowedConfig):
    """The config of Granite with sliding windows: rope_theta of each layer, 0 without RoPE."""

    model_type = "granite_swa"
    architecture = "GraniteSWAForCausalLM"

    vocab_size: int = 100352
    hidden_size: int = 2560
    intermediate_size: int = 8192
    num_hidden_layers: int = 24
    num_attention_heads: int = 20
    num_key_value_heads: int = 4
    max_position_embeddings: int = 8192
    rms_norm_eps: float = 1e-5
    bos_token_id: int | None = 100257
    eos_token_id: int | list[int] | None = 100257
    tie_word_embeddings: bool = True
    sliding_window: int | None = 128
    layer_rope_theta: list[float] | None = None  # None: that of rope_parameters everywhere

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_thetas(self.layer_rope_theta, self.num_hidden_layers)
        for theta in filter(None, self.layer_rope_theta or ()):  # raises where no RoPE can have it
            rope = {**self.rope_parameters, "rope_theta": theta}
            self._read_rope({"rope_parameters": rope}, self.max_position_embeddings)

    def slides(self, layer: int) -> bool:
        return layer % 4 != 0

    def layer_rope(self, layer: int) -> tuple[int, Mapping[str, Any]]:
        if self.layer_rope_theta is None:
            return super().layer_rope(layer)
        theta = self.layer_rope_theta[layer]
        return self.head_dim, self.rope_parameters | {"rope_theta": theta} if theta else {}


class GraniteSWABlock(PreNormBlock):
    """A `PreNormBlock` with sinks, which begin as zeros."""

    def make_mixer(self, c: Any, layer: int) -> Attention:
        mixer = self.make_attention(c, layer, sinks=True)
        mixer.zero_init = ("sinks",)
        return mixer


class GraniteSWA(Granite):
    """Granite with sliding windows: `GraniteSWABlock`s, with Granite's multipliers."""

    config_class = GraniteSWAConfig
    block_class = GraniteSWABlock
