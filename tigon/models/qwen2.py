"""Qwen2 and Qwen2.5: Llama's blocks with biases on the query, key and value projections.

Paper: arXiv 2407.10671; checked against transformers' modeling_qwen2.
"""

from dataclasses import dataclass

from tigon.models.causal_lm import CausalLM
from tigon.models.config import WindowedConfig
from tigon.models.decoder import PreNormBlock


@dataclass(frozen=True, kw_only=True)
class Qwen2Config(WindowedConfig):
    """The config of Qwen2 and Qwen2.5: windows count only with use_sliding_window."""

    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"

    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 22016
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    max_position_embeddings: int = 32768
    use_sliding_window: bool = False
    max_window_layers: int = 28

    def slides(self, layer: int) -> bool:
        return layer >= self.max_window_layers


class Qwen2Block(PreNormBlock):
    """A `PreNormBlock` with biases of queries, keys and values, and the layer's sliding window."""

    attention_options = {"bias": True, "out_bias": False}


class Qwen2(CausalLM):
    """Qwen2 and Qwen2.5: a decoder of `Qwen2Block`s."""

    config_class = Qwen2Config
    block_class = Qwen2Block
