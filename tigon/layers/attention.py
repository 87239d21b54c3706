"""Self-attention with one projection for queries, keys and values.

# B batch, T tokens, H query heads, K kv heads, D head dim, C model dim
"""

from collections.abc import Collection
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tigon.kernels.attention.api import attention
from tigon.kernels.attention.sigmoid_gate import sigmoid_gate
from tigon.kernels.norm.rms_norm import Cast
from tigon.kernels.rope.qk_norm_rope import qk_norm_rope
from tigon.kernels.rope.rope import rope
from tigon.layers.context import BlockInputs, SharedKV
from tigon.layers.kv_state import GrowingKV, KVState, StateSpec, StaticKV
from tigon.layers.linear import FusedLinear, Linear, RowOrder, is_unpatched
from tigon.layers.norm import RMSNorm, can_fuse_norm
from tigon.layers.rope import Rotation


class SoftmaxAttention(nn.Module):
    """The numbers of any softmax attention, which ranks that share heads and estimates of costs
    read: H query and K kv heads of D dims, whose values have `value_dim`, D if it is None.

    A query sees `window` tokens at most, itself included; scores are multiplied by `scale`, D **
    -0.5 if it is None. `interleaved` rotates pairs of neighbors.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        window: int | None = None,
        scale: float | None = None,
        interleaved: bool = False,
    ):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.value_dim = head_dim if value_dim is None else value_dim
        self.window, self.scale, self.interleaved = window, scale, interleaved


class Attention(SoftmaxAttention):
    """Self-attention: x [B, T, C] -> [B, T, C].

    With `qk_norm_eps`, every head of q and k is normed before it is rotated, or after it if
    attention `rotates_first`; with `flat_qk_norm`, all heads of q at once, and all of k, and then
    q, k and v are bounded by `clip`, if there is a bound. Norms have no weights unless
    `qk_norm_weight`. Scaled scores are capped by `softcap`, if there is one. With `sinks` each head
    has a learned score more in its softmax, whose value is 0. With `gate`, sigmoids of a projection
    of x multiply the heads' outputs: one of its own, `gate_proj`, or half of checkpoints' `q_proj`.
    """

    zero_init: Collection[str] = ()  # parameters that begin as zeros

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        bias: bool = False,
        out_bias: bool = False,
        qk_norm_eps: float | None = None,
        flat_qk_norm: bool = False,
        qk_norm_weight: bool = True,
        rotates_first: bool = False,
        clip: float | None = None,
        interleaved: bool = False,
        offset: float = 0.0,
        cast: Cast = "before_weight",
        window: int | None = None,
        chunked: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        gate: Literal["gate_proj", "q_proj"] | None = None,
    ):
        options: dict[str, Any] = {"window": window, "scale": scale, "interleaved": interleaved}
        super().__init__(heads, kv_heads, head_dim, **options)
        if window is not None and window < 1:
            raise ValueError(f"sliding_window={window} must be at least 1: a query sees itself")
        self.chunked, self.softcap, self.flat_qk_norm = chunked, softcap, flat_qk_norm
        self.rotates_first, self.clip = rotates_first, clip
        parts = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        self.gate, sizes, order = gate, parts, None
        if gate == "q_proj":  # checkpoints have [q | gate] in each head, here gates precede q, k, v
            sizes, order = (2 * parts[0], *parts[1:]), RowOrder(heads, (head_dim, head_dim), (1, 0))
        self.qkv_proj = FusedLinear(dim, sizes, bias=bias, orders=(order, None, None))
        self.o_proj = Linear(heads * head_dim, dim, bias=out_bias)
        self.sinks = nn.Parameter(torch.empty(heads)) if sinks else None
        self.gate_proj = FusedLinear(dim, parts[:1]) if gate == "gate_proj" else None
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if qk_norm_eps is not None:
            options = {"offset": offset, "cast": cast} if qk_norm_weight else {"learned": False}
            dims = parts[:2] if flat_qk_norm else (head_dim, head_dim)
            # Two without weights: Dynamo traces no function of autograd that gets one tensor twice
            self.q_norm, self.k_norm = (RMSNorm(size, qk_norm_eps, **options) for size in dims)

    def make_state(self, spec: StateSpec) -> KVState:
        """Returns an empty cache: without `capacity` one that grows, else a static one.

        A static one has `capacity` slots, or with a window a ring of at most window + chunk - 1.
        """
        if (slots := spec.capacity) is None:
            return GrowingKV(self.kv_heads, self.head_dim)
        if self.window is not None:
            slots = min(slots, self.window + spec.chunk - 1)
        return StaticKV(self.kv_heads, slots, self.head_dim, spec)

    def forward(
        self, x: Tensor, rotation: Rotation, state: KVState | None, ctx: BlockInputs
    ) -> Tensor:
        """Returns [B, T, C] for x [B, T, C], which sees what `ctx.mask` and `window` allow.

        With a `state`, stores keys and values there and attends to earlier ones too; with
        `ctx.shard`, attends to the tokens of all ranks.
        """
        return self._attend(x, rotation, state, ctx)[0]

    def _attend(
        self, x: Tensor, rotation: Rotation, state: KVState | None, ctx: BlockInputs
    ) -> tuple[Tensor, SharedKV]:
        """Returns what `forward` does, and the keys and values [B, S, K, D] that q has seen."""
        # Asked before the call, since a hook may keep what it sees and take itself away
        unobserved = self._is_unobserved()
        qkv, gates = self.qkv_proj(x, *ctx.dropout_args), None
        if self.gate == "q_proj":
            size = self.heads * self.head_dim
            gates, qkv = qkv.split((size, qkv.shape[-1] - size), -1)
        elif self.gate_proj is not None:
            gates = self.gate_proj(x, *ctx.dropout_args)
        kwargs: dict[str, Any] = {
            "window": self.window,
            "scale": self.scale,
            "softcap": self.softcap,
            "sinks": self.sinks,
        }
        if state is not None and self._rotates_last(rotation) and state.rotates(x, ctx):
            q, k, v = self._heads(qkv)
            kwargs["angles"] = rotation.cos, rotation.sin
        else:
            q, k, v = self._rotate(qkv, rotation, overwrite=unobserved)
        if rotation.query_scale is not None:
            q = q * rotation.query_scale.to(q.dtype)  # not wider under autocast
        kv = self._keys_and_values(k, v, state, ctx)
        if state is not None:
            out = state.read(q, kv, ctx, **kwargs, **{"chunked": True} if self.chunked else {})
        else:
            mask = ctx.mask
            if self.chunked and self.window is not None:
                mask = mask.chunks(self.window, len(k), k.device)
                kwargs["window"] = None
            if ctx.shard is not None:
                out = ctx.shard.attend(q, *kv, mask, **kwargs)
            else:
                out = attention(q, *kv, mask=mask, **kwargs)
        out = out.flatten(2)
        if gates is not None:
            out = sigmoid_gate(out, gates)
        return self.o_proj(out, *ctx.dropout_args), kv

    def _keys_and_values(
        self, k: Tensor, v: Tensor, state: KVState | None, ctx: BlockInputs
    ) -> SharedKV:
        """Returns the keys and values that q sees; stores k and v if there is a state."""
        return (k, v) if state is None else state.store(k, v, ctx, self.window)

    def _rotate(
        self, qkv: Tensor, rotation: Rotation, *, overwrite: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q [B, T, H, D], k and v [B, T, K, D], normed and rotated, perhaps in place."""
        cos, sin, _ = rotation
        if self.flat_qk_norm:
            q, k, v = self._heads(qkv)
            return *rope(q, k, cos, sin, interleaved=self.interleaved), v
        options: dict[str, Any] = {}
        if self.q_norm is not None and self.k_norm is not None and not self.rotates_first:
            n = self.q_norm
            if not (can_fuse_norm(n) and can_fuse_norm(self.k_norm)):
                q, k, v = self._heads(qkv)
                return *rope(n(q), self.k_norm(k), cos, sin, interleaved=self.interleaved), v
            options = {"q_weight": n.weight, "k_weight": self.k_norm.weight}
            options |= {"eps": n.eps, "offset": n.offset, "cast": n.cast}
        q, k, v = qk_norm_rope(
            qkv,
            cos,
            sin,
            heads=self.heads,
            kv_heads=self.kv_heads,
            interleaved=self.interleaved,
            overwrite=overwrite and self.q_norm is None,
            **options,
        )
        if self.rotates_first and self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q [B, T, H, D], k and v [B, T, K, D]: views, or with `flat_qk_norm` normed."""
        sizes = [n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = qkv.split(sizes, -1)
        if self.flat_qk_norm and self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.clip is not None:
            q, k, v = (y.clamp(-self.clip, self.clip) for y in (q, k, v))
        return (*(y.unflatten(-1, (-1, self.head_dim)) for y in (q, k, v)),)

    def _rotates_last(self, rotation: Rotation) -> bool:
        """Whether q and k of `_heads` need nothing more than to be rotated by halves."""
        normed = self.q_norm is not None and not self.flat_qk_norm
        return not (normed or self.interleaved) and rotation.query_scale is None

    def _is_unobserved(self) -> bool:
        """Whether a graph would save the output of qkv_proj and no hook can see it."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return False
        return is_unpatched(self.qkv_proj, FusedLinear)
