"""Self-attention with one projection for queries, keys and values.

# B batch, T tokens, H query heads, K kv heads, D head dim, C model dim
"""

from torch import Tensor, nn

from tigon.kernels.attention import AttentionMask, attention
from tigon.kernels.rope import rope
from tigon.layers.cache import KVCache
from tigon.layers.linear import FusedLinear


class Attention(nn.Module):
    """x [B, T, C] -> [B, T, C]."""

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
    ):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.layer = heads, kv_heads, head_dim, layer
        parts = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        self.qkv_proj = FusedLinear(dim, parts, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, dim, bias=out_bias)

    def forward(
        self,
        x: Tensor,
        cos_sin: tuple[Tensor, Tensor],  # [B or 1, T, D / 2] each
        mask: AttentionMask,
        cache: KVCache | None = None,
    ) -> Tensor:
        b, t, _ = x.shape
        heads = (self.heads, self.kv_heads, self.kv_heads)
        q, k, v = self.qkv_proj(x).view(b, t, -1, self.head_dim).split(heads, dim=2)
        q, k = rope(q, k, *cos_sin)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, H or K, T, D]
        if cache is not None:
            k, v = cache.update(self.layer, k, v)
        out = attention(q, k, v, mask=mask)
        return self.o_proj(out.transpose(1, 2).reshape(b, t, -1))
