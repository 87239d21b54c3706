"""Qwen3.5 (also 3.6 and 3.8): Gated DeltaNet in three of four layers, gated attention in the rest.

Paper of the layers: arXiv 2412.06464; checked against transformers' modeling_qwen3_5.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from tigon.kernels.norm.rms_norm import Cast
from tigon.layers import GatedDeltaNet
from tigon.models.causal_lm import CausalLM
from tigon.models.config import ConfigError, ModelConfig
from tigon.models.decoder import PreNormBlock
from tigon.models.pretrained.names import PACKED, CheckpointNames
from tigon.models.rope_config import FULL
from tigon.utils.json import quote

LINEAR = "linear_attention"


@dataclass(frozen=True, kw_only=True)
class GatedDeltaConfig(ModelConfig):
    """The config of families with Gated DeltaNet: in every layer but each
    full_attention_interval-th, unless `layer_types` lists the kind of each layer."""

    layer_kinds = LINEAR, FULL
    partial_rotary = True
    rotary_share = 0.25
    ignored = frozenset({"mamba_ssm_dtype"})  # always float32 here
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"attn_output_gate": (None, True)}

    hidden_size: int = 2048
    num_attention_heads: int = 16
    num_key_value_heads: int = 2
    head_dim: int = 256
    max_position_embeddings: int = 32768
    attention_bias: bool = False
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    full_attention_interval: int = 4
    layer_types: list[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_act != "silu":
            raise ConfigError(f"hidden_act={quote(self.hidden_act)}: Gated DeltaNet has silu alone")

    def attends(self, layer: int) -> bool:
        if self.layer_types is not None:
            return self.layer_types[layer] == FULL
        return (layer + 1) % self.full_attention_interval == 0


class GatedDeltaBlock(PreNormBlock):
    """A `PreNormBlock` with Gated DeltaNet or gated attention; norms multiply by 1 + weight."""

    norm_offset = 1.0
    norm_cast: ClassVar[Cast] = "after_weight"
    qk_norm = True
    interleaved_heads = False  # whether checkpoints have the rows of each key head together

    def make_mixer(self, c: GatedDeltaConfig, layer: int) -> nn.Module:
        if c.attends(layer):
            return self.make_attention(c, layer, gate="q_proj")
        self.mixer_name = "linear_attn"
        heads = c.linear_num_key_heads, c.linear_num_value_heads
        dims = c.linear_key_head_dim, c.linear_value_head_dim
        options: dict[str, Any] = {"kernel_size": c.linear_conv_kernel_dim, "eps": c.rms_norm_eps}
        return GatedDeltaNet(
            c.hidden_size, *heads, *dims, interleaved_heads=self.interleaved_heads, **options
        )


@dataclass(frozen=True, kw_only=True)
class Qwen3_5Config(GatedDeltaConfig):
    """The config of Qwen3.5's text models."""

    model_type = "qwen3_5_text"
    architecture = "Qwen3_5ForCausalLM"
    classifier_name: ClassVar[str | None] = "Qwen3_5TextForSequenceClassification"
    rope_extras: ClassVar[Mapping[str, Any]] = {
        "mrope_section": list[int],  # of text the three positions are one
        "mrope_interleaved": bool,
    }
    ignored = GatedDeltaConfig.ignored | {
        *("mlp_only_layers", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
        *("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
    }

    vocab_size: int = 248320
    hidden_size: int = 4096
    intermediate_size: int = 12288
    num_hidden_layers: int = 32
    num_key_value_heads: int = 4


# Projections that are separate in checkpoints and computed by one product here
PROJECTIONS = PACKED | {"in_proj": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")}
DECAY = {"decay.A_log": "A_log", "decay.dt_bias": "dt_bias"}


class Qwen3_5(CausalLM):
    """Qwen3.5: a decoder of `GatedDeltaBlock`s."""

    config_class = Qwen3_5Config
    block_class = GatedDeltaBlock
    checkpoint_names = CheckpointNames(packed=PROJECTIONS, renamed=DECAY, extra=("mtp.",))
