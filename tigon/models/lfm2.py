"""LFM2: Llama with short convolutions in place of attention in most layers, and QK-norm.

Paper: arXiv 2511.23404; checked against transformers' modeling_lfm2.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from torch import nn

from tigon.layers import GatedMLP, ShortConv
from tigon.models.causal_lm import CausalLM
from tigon.models.config import ModelConfig
from tigon.models.decoder import PreNormBlock
from tigon.models.pretrained.names import QKV, CheckpointNames
from tigon.models.rope_config import FULL

CONV = "conv"
# Keys of config.json -> fields here; such a key wins over one with the field's name
KEYS = {"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings"}


@dataclass(frozen=True, kw_only=True)
class ShortConvConfig(ModelConfig):
    """The config of models some of whose layers have a short convolution in place of attention:
    `ModelConfig` with the kinds of layers, and the convolution's size and biases."""

    classifier_name = None
    layer_kinds = CONV, FULL
    default_theta = 1e6
    keys: ClassVar[Mapping[str, str]] = KEYS
    ignored = frozenset(KEYS)

    vocab_size: int = 65536
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    max_position_embeddings: int = 128000
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    conv_bias: bool = False
    conv_L_cache: int = 3
    layer_types: list[str] | None

    @classmethod
    def from_dict(cls, source: Mapping[str, Any]) -> Self:
        """As ModelConfig's, with `keys` under the names here."""
        renamed = {cls.keys[key]: value for key, value in source.items() if key in cls.keys}
        known = {key: value for key, value in source.items() if key != "rms_norm_eps"}
        return super().from_dict(known | renamed)

    def to_dict(self) -> dict[str, Any]:
        """As ModelConfig's, with the keys of these models' config alone."""
        out = super().to_dict()
        del out["hidden_act"], out["rms_norm_eps"]
        stored = {key: getattr(self, name) for key, name in self.keys.items() if key in out}
        return out | {"norm_eps": self.rms_norm_eps} | stored

    def attends(self, layer: int) -> bool:
        """Whether the layer has attention: by layer_types, or else all have."""
        return self.layer_types is None or self.layer_types[layer] == FULL

    @property
    def mlp_size(self) -> int:
        return self.intermediate_size


@dataclass(frozen=True, kw_only=True)
class Lfm2Config(ShortConvConfig):
    """The config of LFM2: `ShortConvConfig` with another list of layers that have attention, and
    how the MLP's size follows from intermediate_size."""

    model_type = "lfm2"
    architecture = "Lfm2ForCausalLM"
    keys = KEYS | {"block_ff_dim": "intermediate_size"}
    # Copies of other keys, how weights were initialized, and keys with another name here
    ignored = frozenset(
        {
            *("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale"),
            *("block_use_swiglu", "block_use_xavier_init", "conv_dim", "conv_dim_out"),
            *("conv_use_xavier_init", "num_heads", "theta", "use_pos_enc", *keys),
        }
    )

    hidden_size: int = 2560
    intermediate_size: int = 12288
    block_multiple_of: int = 256
    block_ffn_dim_multiplier: float = 1.0
    block_auto_adjust_ff_dim: bool = True
    full_attn_idxs: list[int] | None = None
    layer_types: list[str] | None = None

    def to_dict(self) -> dict[str, Any]:
        """As ShortConvConfig's, with the widths of blocks and convolutions, which vLLM reads."""
        out = super().to_dict()
        return out | {key: out.get(key, self.hidden_size) for key in ("block_dim", "conv_dim")}

    def attends(self, layer: int) -> bool:
        if self.layer_types is None and self.full_attn_idxs is not None:
            return layer in self.full_attn_idxs
        return super().attends(layer)

    @property
    def mlp_size(self) -> int:
        """The MLP's size: intermediate_size, or two thirds of it times block_ffn_dim_multiplier,
        rounded up to a multiple of block_multiple_of."""
        if not self.block_auto_adjust_ff_dim:
            return self.intermediate_size
        size = int(self.block_ffn_dim_multiplier * int(2 * self.intermediate_size / 3))
        return -(-size // self.block_multiple_of) * self.block_multiple_of


class Lfm2Block(PreNormBlock):
    """A `PreNormBlock` with a short convolution, or attention with QK-norm per head."""

    qk_norm = True

    def make_mixer(self, c: ShortConvConfig, layer: int) -> nn.Module:
        """Makes attention with QK-norm, or a short convolution, which is called "conv"."""
        if c.attends(layer):
            return self.make_attention(c, layer)
        self.mixer_name = CONV
        return ShortConv(c.hidden_size, c.conv_L_cache, bias=c.conv_bias)

    def make_mlp(self, c: Any, layer: int) -> Any:
        return GatedMLP(c.hidden_size, c.mlp_size, "silu")


# The parts of packed projections, and other names of LFM2's checkpoints
PACKED = QKV | {"gate_up_proj": ("w1", "w3")}
RENAMED = {
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "norm": "embedding_norm",
    "q_norm": "q_layernorm",
    "k_norm": "k_layernorm",
    "o_proj": "out_proj",
    "mlp.down_proj": "feed_forward.w2",
    "mlp": "feed_forward",
}


class Lfm2(CausalLM):
    """LFM2: `Lfm2Block`s, with the names of its checkpoints."""

    config_class = Lfm2Config
    block_class = Lfm2Block
    checkpoint_names = CheckpointNames(packed=PACKED, renamed=RENAMED)
