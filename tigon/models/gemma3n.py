"""Gemma 3n (text): four residual streams (AltUp), LAuReL, sparse gates, inputs for each layer.

As in Gemma 4, the last layers read the keys and values of earlier ones. Papers: arXiv 2301.13310
(AltUp), arXiv 2411.07501 (LAuReL); checked against transformers' modeling_gemma3n.

# S streams, B batch, T tokens, C model dim, P dims of a block's input
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tigon.kernels.mlp.gated_act import act_fn
from tigon.layers import Attention, BlockInputs, GatedMLP, Linear, RMSNorm, Rotation
from tigon.layers.mlp import TopKMLP
from tigon.layers.shared_attention import SharingAttention
from tigon.models.causal_lm import CausalLM
from tigon.models.config import ConfigError
from tigon.models.decoder import BlockOutput, TransformerBlock
from tigon.models.gemma import GemmaConfig
from tigon.models.gemma3 import LocalThetaConfig
from tigon.models.gemma4 import SharedKVConfig
from tigon.models.per_layer_inputs import PerLayerDecoder, multiply
from tigon.utils.json import quote
from tigon.weights import local_rows


@dataclass(frozen=True, kw_only=True)
class Gemma3nConfig(GemmaConfig, SharedKVConfig, LocalThetaConfig):
    """The config of Gemma 3n's text models; intermediate_size and activation_sparsity_pattern have
    a value for each layer, or one for all."""

    model_type = "gemma3n_text"
    architecture = "Gemma3nForCausalLM"
    full_every = 5
    classifier_name = None
    overflows_float16 = False
    ignored = frozenset({"rope_local_base_freq"})  # read with the RoPEs

    vocab_size: int = 262400
    hidden_size: int = 2048
    intermediate_size: int | list[int] = 16384  # type: ignore[assignment]
    num_hidden_layers: int = 35
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    hidden_activation: str = "gelu_pytorch_tanh"  # which counts
    max_position_embeddings: int = 32768
    sliding_window: int | None = 512
    final_logit_softcapping: float | None = 30.0
    vocab_size_per_layer_input: int = 262144
    hidden_size_per_layer_input: int = 256
    altup_active_idx: int = 0
    altup_coef_clip: float | None = 120.0
    altup_correct_scale: bool = True
    altup_num_inputs: int = 4
    num_kv_shared_layers: int = 15
    laurel_rank: int = 64
    activation_sparsity_pattern: list[float] | None = None

    def __post_init__(self) -> None:
        layers = self.num_hidden_layers
        sparsity, sizes = self.activation_sparsity_pattern, self.intermediate_size
        if sparsity is None:
            sparsity = [0.95 * (layers > 10 and i < 10) for i in range(layers)]
            object.__setattr__(self, "activation_sparsity_pattern", sparsity)
        if isinstance(sizes, int):
            object.__setattr__(self, "intermediate_size", [sizes] * layers)
        for name in ("activation_sparsity_pattern", "intermediate_size"):
            if len(values := getattr(self, name)) != layers:
                raise ConfigError(
                    f"{name}={quote(values)} is not a value for each of {layers} layers"
                )
        super().__post_init__()
        if not self.hidden_size_per_layer_input:
            raise ConfigError("hidden_size_per_layer_input=0: Gemma 3n needs inputs for each layer")
        if not 0 <= self.altup_active_idx < self.altup_num_inputs:
            raise ConfigError(
                f"altup_active_idx={self.altup_active_idx} is not one of "
                f"altup_num_inputs={self.altup_num_inputs} streams"
            )


class AltUp(nn.Module):
    """Predicts the streams [S, B, T, C] behind a block, and corrects them by what one became."""

    zero_init = ("correct_output_scale",)

    def __init__(self, c: Gemma3nConfig, norm: RMSNorm):
        super().__init__()
        streams = c.altup_num_inputs
        self.active, self.clip = c.altup_active_idx, c.altup_coef_clip
        self.correct_output_scale = nn.Parameter(torch.empty(c.hidden_size))
        self.correction_coefs = Linear(streams, streams, bias=False)
        self.prediction_coefs = Linear(streams, streams**2, bias=False)
        self.modality_router = Linear(c.hidden_size, streams, bias=False)
        self.router_norm = norm

    def _modalities(self, x: Tensor, *dropout_args: Tensor) -> Tensor:
        """Mix a token's streams by this [B, T, S], from one of them, x [B, T, C]."""
        normed = multiply(self.router_norm(x), 1 / x.shape[-1], rounded=True)
        return torch.tanh(self.modality_router(normed, *dropout_args).float()).to(x.dtype)

    def predict(self, x: Tensor, *dropout_args: Tensor) -> Tensor:
        """Adds to each stream a mixture of all: x [S, B, T, C] -> [S, B, T, C]."""
        modalities = self._modalities(x[self.active], *dropout_args)
        coefs = self.prediction_coefs(modalities, *dropout_args)
        coefs = coefs.unflatten(-1, (len(x), len(x)))  # [B, T, to, from]
        return (coefs @ x.permute(1, 2, 0, 3)).permute(2, 0, 1, 3) + x

    def correct(self, predicted: Tensor, activated: Tensor, *dropout_args: Tensor) -> Tensor:
        """Adds to each predicted stream [S, B, T, C] a share of the difference of `activated`
        [B, T, C] from the active one."""
        modalities, layer = self._modalities(activated, *dropout_args), self.correction_coefs
        is_native = isinstance(layer, Linear)  # PEFT may have put an adapter into its place
        plain = is_native and layer.quantized is None and not layer.has_adapter
        if self.training and self.clip is not None and plain:
            coefs = nn.functional.linear(modalities, layer.weight.clamp(-self.clip, self.clip))
        else:
            coefs = layer(modalities, *dropout_args)
        innovation = activated - predicted[self.active]
        return innovation * (coefs + 1.0).permute(2, 0, 1).unsqueeze(-1) + predicted


class Laurel(nn.Module):
    """x plus a normed low-rank product of it: [B, T, C] -> [B, T, C]."""

    def __init__(self, c: Gemma3nConfig, norm: RMSNorm):
        super().__init__()
        self.linear_left = Linear(c.hidden_size, c.laurel_rank, bias=False)
        self.linear_right = Linear(c.laurel_rank, c.hidden_size, bias=False)
        self.post_laurel_norm = norm

    def forward(self, x: Tensor, *dropout_args: Tensor) -> Tensor:
        low = self.linear_left(x, *dropout_args)
        return x + self.post_laurel_norm(self.linear_right(low, *dropout_args))


class Gemma3nBlock(TransformerBlock):
    """A block over S streams [S, B, T, C]: attention and MLP read the active one."""

    attention_class = SharingAttention
    norm_cast = "after_weight"
    qk_norm = True

    def __init__(self, c: Gemma3nConfig, layer: int):
        super().__init__()
        self.kv_source, self.kv_is_read = c.kv_source(layer), c.kv_is_read(layer)
        self.act, dim = c.mlp_activation, c.hidden_size_per_layer_input
        self.scales_active = c.altup_correct_scale
        self.add_mixer(c, layer)
        self.mlp = self.make_mlp(c, layer)
        self.input_layernorm = self.make_norm(c)
        self.post_attention_layernorm = self.make_norm(c)
        self.pre_feedforward_layernorm = self.make_norm(c)
        self.post_feedforward_layernorm = self.make_norm(c)
        self.post_per_layer_input_norm = self.make_norm(c)
        self.altup, self.laurel = AltUp(c, self.make_norm(c)), Laurel(c, self.make_norm(c))
        self.per_layer_input_gate = Linear(c.hidden_size, dim, bias=False)
        self.per_layer_projection = Linear(dim, c.hidden_size, bias=False)

    def make_mixer(self, c: Gemma3nConfig, layer: int) -> Attention:
        """Makes attention with scale 1, which may read another layer's keys and values."""
        source = "projection" if c.kv_source(layer) is None else "layer"
        return self.make_attention(c, layer, values_from=source, scale=1.0)

    def make_mlp(self, c: Any, layer: int) -> GatedMLP:
        """Makes a gated MLP of the layer's size, with a share of its units only if it is sparse."""
        sizes = c.hidden_size, c.intermediate_size[layer], c.mlp_activation
        sparsity = c.activation_sparsity_pattern[layer]
        return TopKMLP(*sizes, sparsity=sparsity) if sparsity else GatedMLP(*sizes)

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Rotation, state: Any, ctx: BlockInputs
    ) -> BlockOutput:
        """Returns the streams [S, B, T, C], to which nothing is to be added; None; and its keys and
        values, if later blocks read them."""
        predicted = self.altup.predict(x, *ctx.dropout_args)
        active = predicted[self.altup.active]
        normed = self.input_layernorm(active)
        y, kv = self.mixer(normed, rotation, state, ctx)
        stream = active + self.post_attention_layernorm(y)
        stream = (stream + self.laurel(normed, *ctx.dropout_args)) / math.sqrt(2)
        y, routing = self.mlp_forward(self.pre_feedforward_layernorm(stream), ctx)
        activated = stream + self.post_feedforward_layernorm(y)
        streams = self.altup.correct(predicted, activated, *ctx.dropout_args)
        first = streams[self.altup.active]
        if self.scales_active:
            first = first * self.altup.correct_output_scale
        assert ctx.layer_input is not None
        gate = act_fn(self.per_layer_input_gate(first, *ctx.dropout_args), self.act)
        y = self.per_layer_projection(gate * ctx.layer_input, *ctx.dropout_args)
        streams = torch.cat((streams[:1], streams[1:] + self.post_per_layer_input_norm(y)))
        return (streams, None, routing, kv) if self.kv_is_read else (streams, None, routing)


class Gemma3nDecoder(PerLayerDecoder):
    """A decoder with S streams, which begin as projections of the embedding and end as their mean,
    all with the magnitude of the first."""

    def __init__(self, c: Gemma3nConfig, block: type[TransformerBlock], **options: Any):
        super().__init__(c, block, rounded_scales=True, **options)

        def projections() -> nn.ModuleList:
            streams = range(1, c.altup_num_inputs)
            return nn.ModuleList(Linear(self.dim, self.dim, bias=False) for _ in streams)

        self.altup_projections, self.altup_unembed_projections = projections(), projections()

    @property
    def first_modules(self) -> list[nn.Module]:
        """Those of the base, and the projections."""
        return [*super().first_modules, *self.altup_projections]

    @property
    def last_modules(self) -> list[nn.Module]:
        """The projections back, and the norm."""
        return [*self.altup_unembed_projections, *super().last_modules]

    def begin(self, x: Tensor, *dropout_args: Tensor) -> tuple[Tensor, Sequence[Tensor] | None]:
        """The streams [S, B, T, C], and each block's input."""
        x, inputs = super().begin(x, *dropout_args)
        streams = [_rescale(layer(x, *dropout_args), x) for layer in self.altup_projections]
        return torch.stack([x, *streams]), inputs

    def end(self, x: Tensor, residual: Tensor | None, *dropout_args: Tensor) -> Tensor:
        """The norm of the streams' mean [B, T, C]."""
        pairs = zip(self.altup_unembed_projections, x[1:], strict=True)
        back = [_rescale(layer(y, *dropout_args), x[0]) for layer, y in pairs]
        return super().end(torch.stack([x[0], *back]).mean(0), residual)


def _rescale(x: Tensor, like: Tensor) -> Tensor:
    """Gives x [B, T, C] the magnitude of another tensor, token by token."""
    # A row of zeros, as that of padding, has no finite gradient otherwise
    least = torch.finfo(like.dtype).tiny
    magnitude = like.square().mean(-1, keepdim=True).clamp(min=least).sqrt()
    return x * magnitude / x.square().mean(-1, keepdim=True).clamp(min=1e-5).sqrt()


def bound_coefficients(model: nn.Module, _: Any) -> None:
    """Clamps AltUp's coefficients of predictions before a training pass, as in transformers."""
    for module in model.modules():
        if isinstance(module, AltUp) and module.training and module.clip is not None:
            weight = module.prediction_coefs.weight  # None if it is quantized
            if weight is not None and not weight.is_meta:
                # `data`, as another pass may have saved the weight
                local_rows("prediction_coefs", weight)[0].data.clamp_(-module.clip, module.clip)


class Gemma3n(CausalLM):
    """Gemma 3n's text model: `Gemma3nBlock`s over four streams, and a softcap of the logits."""

    config_class = Gemma3nConfig
    block_class: ClassVar[type[TransformerBlock]] = Gemma3nBlock
    decoder_class = Gemma3nDecoder
    scales_embedding = True

    def __init__(self, config: Gemma3nConfig):
        super().__init__(config)
        # Not in the blocks, where FSDP has gathered copies of the weights
        self.register_forward_pre_hook(bound_coefficients)
