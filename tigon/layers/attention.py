"""Self-attention with one projection for queries, keys and values.

# B batch, T tokens, H query heads, K kv heads, D head dim, C model dim
"""

import functools
from typing import Any

from torch import Tensor, nn

from tigon.kernels._norm import Cast
from tigon.kernels.attention import AttentionMask, attention
from tigon.kernels.qk_norm_rope import qk_norm_rope
from tigon.kernels.rope import rope
from tigon.layers.cache import Cache
from tigon.layers.linear import FusedLinear, Linear
from tigon.layers.norm import RMSNorm
from tigon.layers.rope import Rotation


class Attention(nn.Module):
    """x [B, T, C] -> [B, T, C].

    With `qk_norm_eps`, every head of q and k is normed before it is rotated; with `flat_qk_norm`,
    all heads of q together, and all of k. `interleaved` rotates pairs of neighbours.
    """

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
        flat_qk_norm: bool = False,
        interleaved: bool = False,
        offset: float = 0.0,
        cast: Cast = "before_weight",
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
    ):
        super().__init__()
        self.window, self.scale, self.softcap = window, scale, softcap
        self.flat_qk_norm, self.interleaved = flat_qk_norm, interleaved
        self.heads, self.kv_heads, self.head_dim, self.layer = heads, kv_heads, head_dim, layer
        parts = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        self.qkv_proj = FusedLinear(dim, parts, bias=bias)
        self.o_proj = Linear(heads * head_dim, dim, bias=out_bias)
        self.q_norm = self.k_norm = None
        if qk_norm_eps is not None:
            q_dim, k_dim = parts[:2] if flat_qk_norm else (head_dim, head_dim)
            self.q_norm = RMSNorm(q_dim, qk_norm_eps, offset=offset, cast=cast)
            self.k_norm = RMSNorm(k_dim, qk_norm_eps, offset=offset, cast=cast)

    def forward(
        self, x: Tensor, rotation: Rotation, mask: AttentionMask, cache: Cache | None = None
    ) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self._project(x, rotation)
        if rotation.query_scale is not None:
            q = q * rotation.query_scale.to(q.dtype)  # not wider under autocast
        attend = attention if cache is None else functools.partial(cache.attend, self.layer)
        out = attend(q, k, v, mask=mask, window=self.window, scale=self.scale, softcap=self.softcap)
        return self.o_proj(out.reshape(b, t, -1))

    def _project(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, T, H, D], k and v [B, T, K, D], normed and rotated."""
        qkv, (cos, sin, _) = self.qkv_proj(x), rotation
        if self.flat_qk_norm and self.q_norm is not None and self.k_norm is not None:
            sizes = [n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)]
            q, k, v = qkv.split(sizes, -1)
            q, k = self.q_norm(q), self.k_norm(k)
            q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (q, k, v))
            return *rope(q, k, cos, sin, interleaved=self.interleaved), v
        options: dict[str, Any] = {"heads": self.heads, "kv_heads": self.kv_heads}
        if self.q_norm is not None and self.k_norm is not None:
            n = self.q_norm
            options |= {"q_weight": n.weight, "k_weight": self.k_norm.weight}
            options |= {"eps": n.eps, "offset": n.offset, "cast": n.cast}
        return qk_norm_rope(qkv, cos, sin, interleaved=self.interleaved, **options)
