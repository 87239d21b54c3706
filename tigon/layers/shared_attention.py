"""Self-attention whose keys and values other layers may read, as in Gemma 3n and Gemma 4.

# B batch, T tokens, S tokens that are seen, H query heads, K kv heads, D head dim, C model dim
"""

from typing import Any, Literal, cast

from torch import Tensor

from tigon.kernels.norm.rms_norm import rms_norm
from tigon.kernels.recompute import forget_recompute
from tigon.kernels.rope.rope import rope
from tigon.layers.attention import Attention
from tigon.layers.context import BlockInputs, SharedKV
from tigon.layers.kv_state import KVState
from tigon.layers.linear import FusedLinear
from tigon.layers.norm import RMSNorm
from tigon.layers.rope import Rotation

# Where values come from: a projection; the keys, before their norm; or keys and values from the
# attention of an earlier layer
ValueSource = Literal["projection", "keys", "layer"]
PARTS = {"projection": 3, "keys": 2, "layer": 1}  # of the packed projection: q, k and v


class SharingAttention(Attention):
    """Attention with normed queries, keys and values: x [B, T, C] -> [B, T, C], and what it reads.

    The norm of values has no weight. `values_from="layer"`: keys and values are `ctx.shared_kv`,
    normed and rotated, and `state` is the one that holds them.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        qk_norm_eps: float,
        values_from: ValueSource = "projection",
        bias: bool = False,
        **options: Any,
    ):
        super().__init__(
            dim, heads, kv_heads, head_dim, qk_norm_eps=qk_norm_eps, bias=bias, **options
        )
        self.values_from = values_from
        if values_from != "projection":
            parts = self.qkv_proj.parts[: PARTS[values_from]]
            self.qkv_proj = FusedLinear(dim, parts, bias=bias)
        if values_from == "layer":
            self.k_norm = None

    def forward(  # type: ignore[override]
        self, x: Tensor, rotation: Rotation, state: KVState | None, ctx: BlockInputs
    ) -> tuple[Tensor, SharedKV]:
        """As in the base; also returns the keys and values [B, S, K, D] that q has seen."""
        out, kv = self._attend(x, rotation, state, ctx)
        forget_recompute(*kv)  # later layers that read them keep one memory
        return out, kv

    def _keys_and_values(
        self, k: Tensor, v: Tensor, state: KVState | None, ctx: BlockInputs
    ) -> SharedKV:
        """As in the base, or returns those of another layer."""
        if self.values_from != "layer":
            return super()._keys_and_values(k, v, state, ctx)
        assert ctx.shared_kv is not None
        return ctx.shared_kv

    def _rotate(
        self, qkv: Tensor, rotation: Rotation, *, overwrite: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As in the base, with normed values; k and v have no heads if another layer's are read."""
        q_norm = cast(RMSNorm, self.q_norm)
        if self.values_from == "projection":
            q, k, v = super()._rotate(qkv, rotation, overwrite=overwrite)
            return q, k, rms_norm(v, None, q_norm.eps)
        packed = qkv.unflatten(-1, (-1, self.head_dim))
        q, k = packed.split((self.heads, packed.shape[2] - self.heads), 2)
        v = k
        if self.k_norm is not None:
            k, v = self.k_norm(k), rms_norm(k, None, q_norm.eps)
        return *rope(q_norm(q), k, rotation.cos, rotation.sin), v
