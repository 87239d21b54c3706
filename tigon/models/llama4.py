"""Llama 4 (text): chunked attention, no RoPE in every fourth layer, experts with scaled inputs.

Checked against transformers' modeling_llama4. Chunks and the growth of queries follow each
sequence, also in packed rows, where transformers counts the slots of the row.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tigon.layers import Attention, GatedMLP, SparseMoE
from tigon.layers.rope import SCALED
from tigon.models.causal_lm import CausalLM
from tigon.models.config import FULL, NoRopeConfig
from tigon.models.decoder import PreNormBlock
from tigon.models.moe import ExpertsConfig, sparse_moe
from tigon.models.pretrained.names import CheckpointNames

CHUNKED = "chunked_attention"


@dataclass(frozen=True, kw_only=True)
class Llama4Config(NoRopeConfig, ExpertsConfig):
    """The config of Llama 4's text models; `moe_layers` are those with experts of size
    intermediate_size."""

    model_type = "llama4_text"
    architecture = "Llama4ForCausalLM"
    classifier_name = None
    experts_keys = ("num_local_experts",)
    layer_kinds = CHUNKED, FULL
    default_theta = 5e5
    ignored = frozenset({"output_router_logits", "router_aux_loss_coef"})  # the loss has no balance

    vocab_size: int = 202048
    hidden_size: int = 5120
    intermediate_size: int = 8192
    intermediate_size_mlp: int = 16384
    num_hidden_layers: int = 48
    num_attention_heads: int = 40
    num_key_value_heads: int = 8
    head_dim: int = 128
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    attention_bias: bool = False
    num_experts_per_tok: int = 1
    num_local_experts: int = 16
    moe_layers: list[int] | None = None
    interleave_moe_layer_step: int = 1
    use_qk_norm: bool = True
    attention_chunk_size: int | None = 8192
    layer_types: list[str] | None = None
    attn_temperature_tuning: bool = True
    floor_scale: int = 8192
    attn_scale: float = 0.1

    def sparse(self, layer: int) -> bool:
        """Whether the layer has experts: by moe_layers, or else by the interval."""
        if self.moe_layers is not None:
            return layer in self.moe_layers
        return (layer + 1) % self.interleave_moe_layer_step == 0

    def layer_rope(self, layer: int) -> tuple[int, Mapping[str, Any]]:
        """The layer's head dim, and the RoPE parameters, or how its queries grow without RoPE."""
        if self.rotates(layer) or not self.attn_temperature_tuning:
            return super().layer_rope(layer)
        return self.head_dim, {"attn_scale": self.attn_scale, "floor_scale": self.floor_scale}

    def chunk(self, layer: int) -> int | None:
        """The size of the layer's chunks, by default those with RoPE; None: full attention."""
        types = self.layer_types
        chunked = self.rotates(layer) if types is None else types[layer] == CHUNKED
        return self.attention_chunk_size if chunked else None


class Llama4Block(PreNormBlock):
    """A `PreNormBlock` with attention in chunks, and with experts and a shared one, or an MLP."""

    rounded_angles = False

    def make_mixer(self, c: Llama4Config, layer: int) -> Attention:
        """Makes attention in the layer's chunks; with RoPE, which is interleaved, heads are normed
        without weights. The norm follows the rotation, and comes before it if this has no factor,
        where both orders give the same."""
        normed = c.use_qk_norm and c.rotates(layer)
        options: dict[str, Any] = {"window": c.chunk(layer), "chunked": True, "interleaved": True}
        options |= {"qk_norm_eps": c.rms_norm_eps if normed else None, "qk_norm_weight": False}
        options["rotates_first"] = c.rope_parameters["rope_type"] in SCALED
        return self.make_attention(c, layer, **options)

    def make_mlp(self, c: Llama4Config, layer: int) -> GatedMLP | SparseMoE:
        if not c.sparse(layer):
            return GatedMLP(c.hidden_size, c.intermediate_size_mlp, c.mlp_activation)
        size = c.intermediate_size
        options: dict[str, Any] = {"normalize": False, "transposed": True, "scales_input": True}
        return sparse_moe(c, size, shared_experts=size, **options)


class Llama4(CausalLM):
    """Llama 4's text models: `Llama4Block`s, with RoPE's angles in fp32."""

    config_class = Llama4Config
    block_class = Llama4Block
    checkpoint_names = CheckpointNames(
        experts={},
        renamed={
            "mlp.gate": "feed_forward.router",
            "mlp.shared_experts": "feed_forward.shared_expert",
            "mlp": "feed_forward",
        },
    )
