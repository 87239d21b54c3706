"""SmolLM3: Llama without RoPE in every fourth layer.

Checked against transformers' modeling_smollm3.
"""

from dataclasses import dataclass

from tigon.models.causal_lm import CausalLM
from tigon.models.config import ConfigError, WindowedConfig
from tigon.models.decoder import PreNormBlock
from tigon.models.llama import LlamaConfig
from tigon.utils.json import quote


@dataclass(frozen=True, kw_only=True)
class SmolLM3Config(LlamaConfig, WindowedConfig):
    """The config of SmolLM3: Llama's with layers without RoPE, and sliding windows."""

    model_type = "smollm3"
    architecture = "SmolLM3ForCausalLM"
    default_theta = 2e6

    vocab_size: int = 128256
    hidden_size: int = 2048
    num_hidden_layers: int = 36
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    max_position_embeddings: int = 32768
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 128004
    bos_token_id: int | None = 128000
    eos_token_id: int | list[int] | None = 128001
    use_sliding_window: bool = False
    sliding_window: int | None = None
    no_rope_layers: list[int] | None = None  # 1 where a layer does rotate, in spite of the name
    no_rope_layer_interval: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        layers, flags = self.num_hidden_layers, self.no_rope_layers
        if flags is not None and len(flags) != layers:
            raise ConfigError(
                f"no_rope_layers={quote(flags)} is not 0 or 1 for each of {layers} layers"
            )

    def rotates(self, layer: int) -> bool:
        if self.no_rope_layers is not None:
            return bool(self.no_rope_layers[layer])
        return (layer + 1) % self.no_rope_layer_interval != 0

    def slides(self, layer: int) -> bool:
        return not self.rotates(layer)


class SmolLM3(CausalLM):
    """SmolLM3: a decoder of `PreNormBlock`s."""

    config_class = SmolLM3Config
    block_class = PreNormBlock
