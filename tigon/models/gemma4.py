"""Gemma 4 (text): Gemma 3 with sizes per layer, shared keys and values, inputs for each layer.

Some models have experts beside the MLP. Checked against transformers' modeling_gemma4.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tigon.kernels.mlp.gated_act import act_fn
from tigon.layers import Attention, BlockInputs, GatedMLP, Linear, Rotation, ScaledRouter, SparseMoE
from tigon.layers.norm import add_normed
from tigon.layers.shared_attention import SharingAttention, ValueSource
from tigon.models.causal_lm import CausalLM
from tigon.models.config import FULL, SLIDING, ConfigError, TwoRopesConfig
from tigon.models.decoder import BlockOutput, SandwichBlock, TransformerBlock, layer_window
from tigon.models.gemma import GemmaConfig
from tigon.models.moe import ExpertsConfig, sparse_moe
from tigon.models.per_layer_inputs import PerLayerDecoder
from tigon.models.pretrained.names import CheckpointNames
from tigon.utils.config import check_range, check_type
from tigon.utils.json import quote

ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


@dataclass(frozen=True, kw_only=True)
class SharedKVConfig(TwoRopesConfig):
    """The config of a family whose last num_kv_shared_layers layers read earlier layers' KV."""

    num_kv_shared_layers: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        first = self.num_hidden_layers - self.num_kv_shared_layers
        kinds = {self.layer_type(layer) for layer in range(first)}
        for layer in range(max(first, 0), self.num_hidden_layers):
            if self.layer_type(layer) not in kinds:
                raise ConfigError(
                    f"num_kv_shared_layers={self.num_kv_shared_layers}: no layer before has "
                    f"{self.layer_type(layer)!r}, which layer {layer} reads keys and values of"
                )

    def kv_source(self, layer: int) -> int | None:
        """The layer whose KV this one reads, the last of its type that has KV; None: its own."""
        source = self._kv_sources[layer]
        return None if source == layer else source

    def kv_is_read(self, layer: int) -> bool:
        """Whether a later layer reads the keys and values of this one."""
        return layer in self._kv_sources[layer + 1 :]

    @cached_property
    def _kv_sources(self) -> list[int]:
        """For each layer the one whose keys and values it reads, its own included."""
        first = self.num_hidden_layers - self.num_kv_shared_layers
        last = {self.layer_type(layer): layer for layer in range(first)}
        readers = range(first, self.num_hidden_layers)
        return [*range(first), *(last[self.layer_type(layer)] for layer in readers)]


@dataclass(frozen=True, kw_only=True)
class Gemma4UnifiedConfig(GemmaConfig, SharedKVConfig):
    """The config of Gemma 4 12B's text model; `per_layer_config`, if given, has the sizes of
    attention in single layers, and else full layers have global_head_dim and, where keys are
    values too, num_global_key_value_heads."""

    model_type = "gemma4_unified_text"
    architecture = "Gemma4UnifiedForCausalLM"
    full_every = 6
    classifier_name = None
    overflows_float16 = False
    ignored = frozenset({"is_causal"})  # follows from use_bidirectional_attention

    vocab_size: int = 262144
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 30
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    global_head_dim: int = 512
    num_global_key_value_heads: int | None = None
    per_layer_config: dict[str, Any] | None = None
    hidden_activation: str = "gelu_pytorch_tanh"  # which counts
    max_position_embeddings: int = 262144
    sliding_window: int | None = 1024
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: str | None = "vision"  # which changes nothing for text
    attention_k_eq_v: bool = False
    use_double_wide_mlp: bool = False

    def __post_init__(self) -> None:
        last = self.num_hidden_layers - 1
        if self.layer_types and len(self.layer_types) == last + 1 and self.layer_types[-1] != FULL:
            object.__setattr__(self, "layer_types", [*self.layer_types[:-1], FULL])
        super().__post_init__()
        if self.use_bidirectional_attention not in (None, "vision", "all"):
            raise ConfigError(
                f"use_bidirectional_attention={quote(self.use_bidirectional_attention)} is not "
                "null, 'vision' or 'all'"
            )
        if self.per_layer_config is None:
            full = {"head_dim": self.global_head_dim}
            if self.attention_k_eq_v and self.num_global_key_value_heads is not None:
                full["num_key_value_heads"] = self.num_global_key_value_heads
            layers = range(self.num_hidden_layers)
            sizes = {str(i): dict(full) for i in layers if self.layer_type(i) == FULL}
        else:
            given = self.per_layer_config
            if unknown := [i for i in given if not re.fullmatch(r"[0-9]{1,9}", str(i))]:
                raise ConfigError(f"per_layer_config: {quote(unknown)} are not numbers of layers")
            sizes = {str(int(i)): changes for i, changes in given.items()}  # "05" is layer 5
        object.__setattr__(self, "per_layer_config", sizes)
        for layer in range(self.num_hidden_layers):
            self._check_layer(layer)

    def _check_layer(self, layer: int) -> None:
        """Raises ConfigError for sizes of a layer's attention that no layer can have."""
        changes = check_type("per_layer_config", self._layer_config(layer), dict)
        if unknown := changes.keys() - {"head_dim", "num_key_value_heads"}:
            raise ConfigError(f"per_layer_config: {quote(sorted(unknown))} is not known")
        for name, value in changes.items():
            check_range(f"per_layer_config: {name}", check_type(name, value, int), 1, 2**16)
        head_dim, kv_heads = self.attention_sizes(layer)
        if head_dim < 2 or head_dim % 2 or kv_heads < 1 or self.num_attention_heads % kv_heads:
            raise ConfigError(
                f"layer {layer} has head_dim={head_dim}, which must be even, and {kv_heads} kv "
                f"heads, which must divide num_attention_heads={self.num_attention_heads}"
            )

    def _layer_config(self, layer: int) -> dict[str, int]:
        """What `per_layer_config` changes in a layer."""
        return (self.per_layer_config or {}).get(str(layer)) or {}

    def attention_sizes(self, layer: int) -> tuple[int, int]:
        changes = self._layer_config(layer)
        kv_heads = changes.get("num_key_value_heads", self.num_key_value_heads)
        return changes.get("head_dim", self.head_dim), kv_heads

    def slides(self, layer: int) -> bool:
        """As in the base; the last layer never does."""
        return super().slides(layer) and layer + 1 != self.num_hidden_layers

    @classmethod
    def _read_rope(cls, source: Mapping[str, Any], longest: int) -> dict[str, Any]:
        """Reads `rope_parameters`, which has no other names here."""
        given = check_type("rope_parameters", source.get("rope_parameters") or {}, dict)
        return super()._read_rope({"rope_parameters": ROPES | given}, longest)

    def _rope_keys(self) -> dict[str, Any]:
        """The key of `to_dict` that describes both RoPEs."""
        return {"rope_parameters": dict(self.rope_parameters)}


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(Gemma4UnifiedConfig, ExpertsConfig):
    """The config of Gemma 4's text models: that of the 12B with inputs for each layer, and with
    experts beside the MLP if `enable_moe_block`."""

    model_type = "gemma4_text"
    architecture = "Gemma4ForCausalLM"

    max_position_embeddings: int = 131072
    sliding_window: int | None = 512
    use_bidirectional_attention: str | None = None
    vocab_size_per_layer_input: int = 262144
    hidden_size_per_layer_input: int = 256
    enable_moe_block: bool = False
    num_experts: int | None = None
    top_k_experts: int | None = None
    moe_intermediate_size: int | None = None

    def __post_init__(self) -> None:
        sizes = self.num_experts, self.top_k_experts, self.moe_intermediate_size
        if self.enable_moe_block and None in sizes:
            raise ConfigError(
                "enable_moe_block=true needs num_experts, top_k_experts and moe_intermediate_size"
            )
        object.__setattr__(self, "num_experts_per_tok", self.top_k_experts or 0)
        super().__post_init__()

    @property
    def experts(self) -> int:
        """The number of experts of a layer."""
        return (self.num_experts or 0) if self.enable_moe_block else 0

    def to_dict(self) -> dict[str, Any]:
        """As ModelConfig's, without the name that other families have for top_k_experts."""
        out = super().to_dict() | {"num_experts": self.num_experts}
        return {key: value for key, value in out.items() if key != "num_experts_per_tok"}


class Gemma4Block(SandwichBlock):
    """A `SandwichBlock` with a factor of its output and, in some models, an input of its own,
    experts beside the MLP, and attention that reads the keys and values of an earlier layer."""

    layer_scalar: Tensor  # [1]
    attention_class = SharingAttention
    norm_cast = "after_weight"
    qk_norm = True

    def __init__(self, c: Any, layer: int):
        super().__init__(c, layer)
        self.kv_source = c.kv_source(layer)
        self.kv_is_read = c.kv_is_read(layer)
        self.register_buffer("layer_scalar", torch.empty(1))
        self.moe: SparseMoE | None = None
        if experts := getattr(c, "experts", 0):
            router = ScaledRouter(c.hidden_size, experts, c.top_k_experts, c.rms_norm_eps)
            norm = self.make_norm(c)
            self.moe = sparse_moe(c, c.moe_intermediate_size, router=router, norm=norm)
            self.post_feedforward_layernorm_1 = self.make_norm(c)
            self.post_feedforward_layernorm_2 = self.make_norm(c)
        if dim := getattr(c, "hidden_size_per_layer_input", 0):
            self.act = c.mlp_activation
            self.per_layer_input_gate = Linear(c.hidden_size, dim, bias=False)
            self.per_layer_projection = Linear(dim, c.hidden_size, bias=False)
            self.post_per_layer_input_norm = self.make_norm(c)

    def init_weights(self) -> None:
        """Sets the factor of the output to 1."""
        nn.init.ones_(self.layer_scalar)

    def make_mixer(self, c: Any, layer: int) -> Attention:
        """Makes attention with the layer's sizes, window and source of values, and scale 1."""
        window = layer_window(c, layer)
        values: ValueSource = "keys" if c.attention_k_eq_v and window is None else "projection"
        if c.kv_source(layer) is not None:
            values = "layer"
        if window is not None and c.use_bidirectional_attention == "all":
            # The config gives the width of both sides, and transformers sees one token more of each
            window = window // 2 + 2
        return self.make_attention(c, layer, window=window, values_from=values, scale=1.0)

    def make_mlp(self, c: Any, layer: int) -> GatedMLP:
        """Makes a gated MLP, twice as wide with `use_double_wide_mlp` in layers that share KV."""
        wide = c.use_double_wide_mlp and c.kv_source(layer) is not None
        size = c.intermediate_size * (2 if wide else 1)
        return GatedMLP(c.hidden_size, size, c.mlp_activation)

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Rotation, state: Any, ctx: BlockInputs
    ) -> BlockOutput:
        """Returns the stream [B, T, C], to which nothing is to be added; the router's counts or
        None; and its keys and values, if later blocks read them."""
        pre_mixer, post_mixer, pre_mlp, post_mlp = (getattr(self, n) for n in self.NORMS)
        x, residual = pre_mixer(x, residual)
        x, kv = self.mixer(x, rotation, state, ctx)
        x, stream = pre_mlp(x, residual, post_mixer)
        y, routing = self.mlp_forward(x, ctx)
        if self.moe is not None:
            routed = self.moe(stream, *ctx.dropout_args)
            y = self.post_feedforward_layernorm_1(y) + self.post_feedforward_layernorm_2(routed.x)
            routing = self.moe.count_routing(routed, ctx.real) if ctx.routing else None
        stream = add_normed(y, stream, post_mlp)
        if ctx.layer_input is not None:
            gate = act_fn(self.per_layer_input_gate(stream, *ctx.dropout_args), self.act)
            y = self.per_layer_projection(gate * ctx.layer_input, *ctx.dropout_args)
            stream = add_normed(y, stream, self.post_per_layer_input_norm)
        stream = stream * self.layer_scalar.to(stream.dtype)  # which sharding does not cast
        return (stream, None, routing, kv) if self.kv_is_read else (stream, None, routing)


class Gemma4Unified(CausalLM):
    """Gemma 4 12B's text model: scaled embeddings, `Gemma4Block`s, and a softcap of the logits."""

    config: Gemma4UnifiedConfig
    config_class: ClassVar[type[Gemma4UnifiedConfig]] = Gemma4UnifiedConfig
    block_class: ClassVar[type[TransformerBlock]] = Gemma4Block
    scales_embedding = True

    @property
    def causal(self) -> bool:
        """False if the config has use_bidirectional_attention="all": then tokens see both sides."""
        return self.config.use_bidirectional_attention != "all"


class Gemma4(Gemma4Unified):
    """Gemma 4's text model: that of the 12B, with inputs for each layer."""

    config_class = Gemma4Config
    decoder_class = PerLayerDecoder
    checkpoint_names = CheckpointNames(
        experts={},  # stacked in every checkpoint
        renamed={
            "moe.gate": "router",
            "moe.norm": "pre_feedforward_layernorm_2",
            "moe.experts": "experts",
        },
    )
