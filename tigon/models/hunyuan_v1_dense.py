"""Hunyuan V1 (dense): Llama with QK-norm after RoPE, whose theta may be stretched by a constant.

Checked against transformers' modeling_hunyuan_v1_dense; also Hunyuan-MT.
"""

from dataclasses import dataclass

from tigon.models.causal_lm import CausalLM
from tigon.models.config import ModelConfig
from tigon.models.decoder import PreNormBlock
from tigon.models.pretrained.names import CheckpointNames


@dataclass(frozen=True, kw_only=True)
class HunYuanV1DenseConfig(ModelConfig):
    """The config of Hunyuan's dense models, with `alpha` in a dynamic RoPE."""

    model_type = "hunyuan_v1_dense"
    architecture = "HunYuanDenseV1ForCausalLM"
    rope_extras = {"alpha": float | None}
    ignored = frozenset({"attention_head_dim", "eod_token_id"})
    neutral = {"use_qk_norm": (None, True)}  # published configs say what every model is

    vocab_size: int = 290943
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    attention_bias: bool = False


class HunYuanV1DenseBlock(PreNormBlock):
    """A `PreNormBlock` whose attention norms heads after it has rotated them."""

    qk_norm = True
    attention_options = {"rotates_first": True}


class HunYuanV1Dense(CausalLM):
    """Hunyuan's dense models: a decoder of `HunYuanV1DenseBlock`s."""

    config_class = HunYuanV1DenseConfig
    block_class = HunYuanV1DenseBlock
    checkpoint_names = CheckpointNames(
        renamed={"q_norm.weight": "query_layernorm.weight", "k_norm.weight": "key_layernorm.weight"}
    )
