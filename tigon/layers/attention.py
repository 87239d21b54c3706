"""Self-attention with one projection for queries, keys and values.

# B batch, T tokens, H query heads, K kv heads, D head dim, C model dim
"""

from typing import Any

from torch import Tensor, nn

from tigon.kernels.attention import AttentionMask, attention
from tigon.kernels.qk_norm_rope import qk_norm_rope
from tigon.kernels.rms_norm import Cast
from tigon.layers.cache import KVCache
from tigon.layers.linear import FusedLinear
from tigon.layers.norm import RMSNorm


class Attention(nn.Module):
    """x [B, T, C] -> [B, T, C]; with `qk_norm_eps`, every head of q and k is normed."""

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        layer: int,
        bias: bool = False,
        out_bias: bool = False,
        qk_norm_eps: float | None = None,
        offset: float = 0.0,
        cast: Cast = "before_weight",
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
    ):
        super().__init__()
        self.window, self.scale, self.softcap = window, scale, softcap
        self.heads, self.kv_heads, self.head_dim, self.layer = heads, kv_heads, head_dim, layer
        parts = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        self.qkv_proj = FusedLinear(dim, parts, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, dim, bias=out_bias)
        self.q_norm = self.k_norm = None
        if qk_norm_eps is not None:
            self.q_norm = RMSNorm(head_dim, qk_norm_eps, offset=offset, cast=cast)
            self.k_norm = RMSNorm(head_dim, qk_norm_eps, offset=offset, cast=cast)

    def forward(
        self,
        x: Tensor,
        cos_sin: tuple[Tensor, Tensor],  # [B or 1, T, D / 2] each
        mask: AttentionMask,
        cache: KVCache | None = None,
    ) -> Tensor:
        b, t, _ = x.shape
        norms: dict[str, Any] = {}
        if self.q_norm is not None and self.k_norm is not None:
            n = self.q_norm
            norms = {"q_weight": n.weight, "k_weight": self.k_norm.weight}
            norms |= {"eps": n.eps, "offset": n.offset, "cast": n.cast}
        q, k, v = qk_norm_rope(
            self.qkv_proj(x), *cos_sin, heads=self.heads, kv_heads=self.kv_heads, **norms
        )
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, H or K, T, D]
        if cache is not None:
            k, v = cache.update(self.layer, k, v)
        out = attention(
            q, k, v, mask=mask, window=self.window, scale=self.scale, softcap=self.softcap
        )
        return self.o_proj(out.transpose(1, 2).reshape(b, t, -1))
