"""The residual blocks of the zoo; a family's config says everything that differs."""

from torch import Tensor, nn

from tigon.kernels.attention import AttentionMask
from tigon.layers import (
    AddRMSNorm,
    Attention,
    Cache,
    GatedMLP,
    RMSNorm,
    Rotation,
    Routed,
    SparseMoE,
)
from tigon.models._config import Config
from tigon.models._moe import MoEConfig


def attention_of(c: Config, layer: int) -> Attention:
    return Attention(
        c.hidden_size,
        c.num_attention_heads,
        c.num_key_value_heads,
        c.head_dim,
        layer=layer,
        bias=c.qkv_bias,
        out_bias=c.out_bias,
        qk_norm_eps=c.rms_norm_eps if c.qk_norm else None,
        flat_qk_norm=c.flat_qk_norm,
        interleaved=c.interleaved,
        offset=c.norm_offset,
        cast=c.norm_cast,
        window=c.window(layer),
        scale=c.attention_scale,
        softcap=c.attention_softcap,
    )


def norm_of(c: Config) -> RMSNorm:
    return RMSNorm(c.hidden_size, c.rms_norm_eps, offset=c.norm_offset, cast=c.norm_cast)


def add_norm_of(c: Config) -> AddRMSNorm:
    return AddRMSNorm(c.hidden_size, c.rms_norm_eps, offset=c.norm_offset, cast=c.norm_cast)


def mlp_of(c: Config, layer: int) -> GatedMLP | SparseMoE:
    if not isinstance(c, MoEConfig) or not c.sparse(layer):
        return GatedMLP(c.hidden_size, c.intermediate_size, c.act, bias=c.mlp_bias)
    return SparseMoE(
        c.hidden_size,
        c.expert_size,
        c.experts,
        c.num_experts_per_tok,
        c.act,
        normalize=c.normalize,
        exact_weights=c.exact_weights,
        shared=c.shared_size,
    )


class PreNormBlock(nn.Module):
    """(x, residual) -> (x, residual): each norm adds the branch before it to the stream.

    With experts for an MLP, x is returned as Routed.
    """

    def __init__(self, c: Config, layer: int):
        super().__init__()
        self.input_layernorm = add_norm_of(c)
        self.self_attn = attention_of(c, layer)
        self.post_attention_layernorm = add_norm_of(c)
        self.mlp = mlp_of(c, layer)
        self.branch_scale = c.branch_scale

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        rotation: Rotation,
        mask: AttentionMask,
        cache: Cache | None,
    ) -> tuple[Tensor | Routed, Tensor]:
        scale = self.branch_scale
        x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, rotation, mask, cache)
        x, residual = self.post_attention_layernorm(x if scale == 1 else x * scale, residual)
        y = self.mlp(x)
        return y if scale == 1 else y * scale, residual


class SandwichBlock(nn.Module):
    """As PreNormBlock, but each branch is normed once more before it joins the stream."""

    # Before and after attention, before and after the MLP
    NORMS = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )

    def __init__(self, c: Config, layer: int):
        super().__init__()
        self.self_attn = attention_of(c, layer)
        self.mlp = mlp_of(c, layer)
        norms = add_norm_of(c), norm_of(c), add_norm_of(c), norm_of(c)
        for name, norm in zip(self.NORMS, norms, strict=True):
            self.add_module(name, norm)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        rotation: Rotation,
        mask: AttentionMask,
        cache: Cache | None,
    ) -> tuple[Tensor, Tensor]:
        pre_attention, post_attention, pre_mlp, post_mlp = (getattr(self, n) for n in self.NORMS)
        x, residual = pre_attention(x, residual)
        x = self.self_attn(x, rotation, mask, cache)
        x, residual = pre_mlp(x, residual, post_attention)
        return post_mlp(self.mlp(x)), residual


class PostNormBlock(nn.Module):
    """Branches read the stream as it is, and are normed before they join it."""

    def __init__(self, c: Config, layer: int):
        super().__init__()
        self.self_attn = attention_of(c, layer)
        self.post_attention_layernorm = norm_of(c)
        self.mlp = mlp_of(c, layer)
        self.post_feedforward_layernorm = norm_of(c)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        rotation: Rotation,
        mask: AttentionMask,
        cache: Cache | None,
    ) -> tuple[Tensor, Tensor]:
        stream = x if residual is None else residual + x
        x = self.self_attn(stream, rotation, mask, cache)
        stream = stream + self.post_attention_layernorm(x)
        return self.post_feedforward_layernorm(self.mlp(stream)), stream
