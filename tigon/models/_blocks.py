"""The two residual blocks of the zoo; a family's config says everything that differs."""

from torch import Tensor, nn

from tigon.kernels.attention import AttentionMask
from tigon.layers import AddRMSNorm, Attention, GatedMLP, KVCache, RMSNorm
from tigon.models._config import Config


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


def mlp_of(c: Config) -> GatedMLP:
    return GatedMLP(c.hidden_size, c.intermediate_size, c.act, bias=c.mlp_bias)


class PreNormBlock(nn.Module):
    """(x, residual) -> (x, residual): each norm adds the branch before it to the stream."""

    def __init__(self, c: Config, layer: int):
        super().__init__()
        self.input_layernorm = add_norm_of(c)
        self.self_attn = attention_of(c, layer)
        self.post_attention_layernorm = add_norm_of(c)
        self.mlp = mlp_of(c)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        cos_sin: tuple[Tensor, Tensor],
        mask: AttentionMask,
        cache: KVCache | None,
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, cos_sin, mask, cache)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class SandwichBlock(nn.Module):
    """As PreNormBlock, but each branch is normed once more before it joins the stream."""

    def __init__(self, c: Config, layer: int):
        super().__init__()
        self.input_layernorm = add_norm_of(c)
        self.self_attn = attention_of(c, layer)
        self.post_attention_layernorm = norm_of(c)
        self.pre_feedforward_layernorm = add_norm_of(c)
        self.mlp = mlp_of(c)
        self.post_feedforward_layernorm = norm_of(c)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        cos_sin: tuple[Tensor, Tensor],
        mask: AttentionMask,
        cache: KVCache | None,
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, cos_sin, mask, cache)
        x, residual = self.pre_feedforward_layernorm(x, residual, self.post_attention_layernorm)
        return self.post_feedforward_layernorm(self.mlp(x)), residual
