"""SmolLM3: Llama without RoPE in every fourth layer.

Checked against transformers' modeling_smollm3.
"""

from dataclasses import dataclass

from tigon.models.causal_lm import CausalLM
from tigon.models.config import NoRopeConfig, WindowedConfig
from tigon.models.llama import LlamaConfig


@dataclass(frozen=True, kw_only=True)
class SmolLM3Config(LlamaConfig, NoRopeConfig, WindowedConfig):
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

    def slides(self, layer: int) -> bool:
        return not self.rotates(layer)


class SmolLM3(CausalLM):
    """SmolLM3: a decoder of `PreNormBlock`s."""

    config_class = SmolLM3Config
