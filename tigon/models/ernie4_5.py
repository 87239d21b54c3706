"""ERNIE 4.5 (dense): Llama with interleaved RoPE, whose angles are in fp32.

Checked against transformers' modeling_ernie4_5.
"""

from dataclasses import dataclass

from tigon.layers import Attention, GatedMLP
from tigon.models.causal_lm import CausalLM
from tigon.models.config import ModelConfig
from tigon.models.decoder import PreNormBlock, gated_mlp


@dataclass(frozen=True, kw_only=True)
class Ernie4_5Config(ModelConfig):
    """The config of ERNIE 4.5's dense models, with biases of all projections (`use_bias`)."""

    model_type = "ernie4_5"
    architecture = "Ernie4_5ForCausalLM"
    classifier_name = None
    default_theta = 5e5

    vocab_size: int = 103424
    hidden_size: int = 1024
    intermediate_size: int = 3072
    num_hidden_layers: int = 18
    num_attention_heads: int = 16
    num_key_value_heads: int = 2
    head_dim: int = 128
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    use_bias: bool | None = False


class Ernie4_5Block(PreNormBlock):
    """A `PreNormBlock` with interleaved RoPE and the biases of Ernie4_5Config."""

    rounded_angles = False

    def make_mixer(self, c: Ernie4_5Config, layer: int) -> Attention:
        return self.make_attention(c, layer, bias=bool(c.use_bias), interleaved=True)

    def make_mlp(self, c: Ernie4_5Config, layer: int) -> GatedMLP:
        return gated_mlp(c, bias=bool(c.use_bias))


class Ernie4_5(CausalLM):
    """ERNIE 4.5's dense models: `Ernie4_5Block`s, with RoPE's angles in fp32."""

    config_class = Ernie4_5Config
    block_class = Ernie4_5Block
