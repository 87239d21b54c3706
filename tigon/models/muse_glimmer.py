"""Muse Glimmer (text): sandwich norms, gated attention, and no RoPE in every fourth layer.

Checked against transformers' modeling_muse_glimmer, which has no class of the text model alone:
exports have its multimodal config around the text's, and lack the weights of the vision tower.
"""

from dataclasses import dataclass
from typing import Any

from tigon.layers import Attention, LMHead, RMSNorm
from tigon.models.causal_lm import CausalLM
from tigon.models.config import WindowedConfig, check_layer_thetas
from tigon.models.decoder import Decoder, SandwichBlock
from tigon.models.pretrained.names import CheckpointNames


@dataclass(frozen=True, kw_only=True)
class MuseGlimmerConfig(WindowedConfig):
    """The config of Muse Glimmer's text model: sliding windows, a choice of layers without RoPE,
    multipliers of queries and logits, and an eps of its own for norms behind branches."""

    model_type = "muse_glimmer_text"
    architecture = "MuseGlimmerForConditionalGeneration"
    classifier_name = None
    wrapper_type = "muse_glimmer"

    vocab_size: int = 202048
    hidden_size: int = 6656
    intermediate_size: int = 19968
    num_hidden_layers: int = 52
    num_attention_heads: int = 32
    num_key_value_heads: int = 2
    head_dim: int = 128
    hidden_activation: str = "silu"
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    bos_token_id: int | None = 200000
    eos_token_id: int | list[int] | None = 200001
    sliding_window: int | None = 2048
    attention_bias: bool = False
    final_logit_softcapping: float = 20.0
    qk_scale_factor: float = 3.87
    output_multiplier: float = 0.19611613513818404
    post_norm_eps: float = 1e-8
    layer_rope_theta: list[float] | None = None  # 0: no RoPE; else rope_parameters' own

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_thetas(self.layer_rope_theta, self.num_hidden_layers)

    def rotates(self, layer: int) -> bool:
        thetas = self.layer_rope_theta
        return self.slides(layer) if thetas is None else thetas[layer] != 0

    def slides(self, layer: int) -> bool:
        return (self.num_hidden_layers - 1 - layer) % 4 != 0


class MuseGlimmerBlock(SandwichBlock):
    """A `SandwichBlock` with 1 + weight in norms, gated attention, and QK-norm without weights."""

    norm_offset = 1.0
    norm_cast = "after_weight"
    qk_norm = True

    def make_mixer(self, c: MuseGlimmerConfig, layer: int) -> Attention:
        scale = c.qk_scale_factor * c.head_dim**-0.5
        return self.make_attention(c, layer, scale=scale, qk_norm_weight=False, gate="gate_proj")

    def make_norm(self, c: Any) -> RMSNorm:
        return RMSNorm(c.hidden_size, c.post_norm_eps, offset=self.norm_offset, cast=self.norm_cast)


class MuseGlimmer(CausalLM):
    """Muse Glimmer's text model: normed embeddings, `MuseGlimmerBlock`s, a last norm that
    multiplies by its weight, and logits that are scaled and capped."""

    config_class = MuseGlimmerConfig
    block_class = MuseGlimmerBlock
    checkpoint_names = CheckpointNames(decoder="model.language_model.")

    def make_decoder(self, c: MuseGlimmerConfig, **options: Any) -> Decoder:
        return super().make_decoder(c, embedding_eps=c.rms_norm_eps, norm_offset=0.0, **options)

    def make_head(self, c: MuseGlimmerConfig, **options: Any) -> LMHead:
        return super().make_head(c, logit_scale=c.output_multiplier, **options)
