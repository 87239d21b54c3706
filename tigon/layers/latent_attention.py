"""Multi-head latent attention: the keys and values of all heads come from one vector per token.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.

# B batch, T tokens, S tokens with those of the cache, H heads, C model dim, L dims of the latent,
# N dims of a head that have no position, R dims that are rotated, V dims of a head's values
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels.attention.api import attention
from tigon.kernels.attention.kv_buffers import KVBuffers
from tigon.kernels.rope.rope import rope
from tigon.layers.attention import SoftmaxAttention
from tigon.layers.context import BlockInputs
from tigon.layers.kv_state import GrowingKV, KVState, StateSpec, StaticKV, extend_buffer
from tigon.layers.linear import Linear
from tigon.layers.norm import RMSNorm
from tigon.layers.rope import Rotation

NORM_EPS = 1e-6  # of latents, whatever the other norms have


class LatentSizes(NamedTuple):
    """The sizes of latent attention."""

    q_lora_rank: int | None  # dims of queries' latent; None: they are projected from the input
    kv_lora_rank: int  # L
    qk_nope_head_dim: int  # N
    qk_rope_head_dim: int  # R
    v_head_dim: int  # V


class LatentAttention(SoftmaxAttention):
    """Self-attention over latents: x [B, T, C] -> [B, T, C].

    A key is N dims of its own head, computed from the token's latent, and R rotated dims that all
    heads share. Caches hold latent and rotated dims alone, L + R numbers per token. Steps of
    decoding attend to these: what would expand them is multiplied into queries and outputs. Other
    passes expand keys and values; if V is less than N + R, zeros are added to the values, as
    backends want one head dim (with V 128 of 192, a fifth of attention's products).

    `bias` is that of the projections from and to the model dim, except `q_proj`.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        sizes: LatentSizes,
        *,
        scale: float,
        bias: bool = False,
        interleaved: bool = False,
    ):
        head_dim = sizes.qk_nope_head_dim + sizes.qk_rope_head_dim
        options: dict[str, Any] = {"scale": scale, "interleaved": interleaved}
        super().__init__(heads, heads, head_dim, value_dim=sizes.v_head_dim, **options)
        self.sizes = sizes
        latent, rotated, inner = sizes.kv_lora_rank, sizes.qk_rope_head_dim, heads * self.head_dim
        if sizes.q_lora_rank is None:
            self.q_proj = Linear(dim, inner, bias=False)
        else:
            self.q_a_proj = Linear(dim, sizes.q_lora_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(sizes.q_lora_rank, NORM_EPS)
            self.q_b_proj = Linear(sizes.q_lora_rank, inner, bias=False)
        self.kv_a_proj_with_mqa = Linear(dim, latent + rotated, bias=bias)
        self.kv_a_layernorm = RMSNorm(latent, NORM_EPS)
        self.kv_b_proj = Linear(
            latent, heads * (sizes.qk_nope_head_dim + sizes.v_head_dim), bias=False
        )
        self.o_proj = Linear(heads * sizes.v_head_dim, dim, bias=bias)

    def make_state(self, spec: StateSpec) -> KVState:
        """Returns an empty cache of latents, static with a `capacity` of slots."""
        width = self.sizes.kv_lora_rank + self.sizes.qk_rope_head_dim
        if spec.capacity is None:
            return GrowingLatents(1, width)
        return StaticLatents(spec.capacity, width, spec)

    def forward(self, x: Tensor, rotation: Rotation, state: Any, ctx: BlockInputs) -> Tensor:
        """Returns [B, T, C] for x [B, T, C], which sees what `ctx.mask` allows.

        With a `state`, stores latents there and attends to earlier ones too; with `ctx.shard`,
        attends to the tokens of all ranks.
        """
        dropout_args, sizes = ctx.dropout_args, self.sizes
        queries, latent, k_rope = self.compress(x, *dropout_args)
        project = self.q_proj if sizes.q_lora_rank is None else self.q_b_proj
        q = project(queries, *dropout_args).unflatten(-1, (self.heads, self.head_dim))
        q_nope, q_rope = q.split((sizes.qk_nope_head_dim, sizes.qk_rope_head_dim), -1)
        cos, sin, query_scale = rotation
        q_rope, k_rope = rope(q_rope, k_rope.unsqueeze(2), cos, sin, interleaved=self.interleaved)
        q = torch.cat((q_nope, q_rope), -1)
        if query_scale is not None:
            q = q * query_scale.to(q.dtype)  # not wider under autocast
        if state is not None:
            latents = torch.cat((latent.unsqueeze(2), k_rope), -1)  # [B, T, 1, L + R]
            if _is_step(ctx):
                return self.o_proj(self._attend_to_latents(q, latents, state, ctx), *dropout_args)
            latents, _ = state.store(latents, latents, ctx, None)
            latent, k_rope = latents.split((sizes.kv_lora_rank, sizes.qk_rope_head_dim), -1)
            latent = latent.squeeze(2)
        kv = self.kv_b_proj(latent, *dropout_args).unflatten(-1, (self.heads, -1))
        k_nope, v = kv.split((sizes.qk_nope_head_dim, sizes.v_head_dim), -1)
        k = torch.cat((k_nope, k_rope.expand(-1, -1, self.heads, -1)), -1)
        return self.o_proj(self._attend(q, k, v, ctx).flatten(2), *dropout_args)

    def compress(self, x: Tensor, *dropout_args: Tensor) -> tuple[Tensor, ...]:
        """Returns what queries are projected from [B, T, ...], latents [B, T, L], and the dims that
        are yet to be rotated [B, T, R]."""
        queries = x
        if self.sizes.q_lora_rank is not None:
            queries = self.q_a_layernorm(self.q_a_proj(x, *dropout_args))
        kv = self.kv_a_proj_with_mqa(x, *dropout_args)
        latent, k_rope = kv.split((self.sizes.kv_lora_rank, self.sizes.qk_rope_head_dim), -1)
        return queries, self.kv_a_layernorm(latent), k_rope

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: BlockInputs) -> Tensor:
        """Returns attention [B, T, H, V] of q to k [B, S, H, N + R] and v [B, S, H, V]."""
        missing = q.shape[-1] - v.shape[-1]
        if missing > 0:
            v = F.pad(v, (0, missing))
        elif missing < 0:
            q, k = (F.pad(y, (0, -missing)) for y in (q, k))
        options: dict[str, Any] = {"window": None, "softcap": None, "scale": self.scale}
        if ctx.shard is not None:
            return ctx.shard.attend(q, k, v, ctx.mask, **options)[..., : self.sizes.v_head_dim]
        return attention(q, k, v, mask=ctx.mask, **options)[..., : self.sizes.v_head_dim]

    def _attend_to_latents(
        self, q: Tensor, latents: Tensor, state: KVState, ctx: BlockInputs
    ) -> Tensor:
        """Returns attention [B, T, H * V] of q [B, T, H, N + R] to the latents of the state and
        those [B, T, 1, L + R], which it stores."""
        sizes = self.sizes
        if isinstance(self.kv_b_proj, Linear) and not self.kv_b_proj.has_adapter:
            weight = self.kv_b_proj.values()
        else:  # a product with the identity has what an adapter, also of others, adds
            identity = torch.eye(sizes.kv_lora_rank, dtype=q.dtype, device=q.device)
            weight = self.kv_b_proj(identity).T
        keys, values = weight.unflatten(0, (self.heads, -1)).split(
            (sizes.qk_nope_head_dim, sizes.v_head_dim), 1
        )
        q_nope, q_rope = q.split((sizes.qk_nope_head_dim, sizes.qk_rope_head_dim), -1)
        q = torch.cat((torch.einsum("bthn,hnl->bthl", q_nope, keys), q_rope), -1)
        seen = state.store(latents, latents, ctx, None)
        out = state.read(q, seen, ctx, scale=self.scale)[..., : sizes.kv_lora_rank]
        return torch.einsum("bthl,hvl->bthv", out, values).flatten(2)


def _is_step(ctx: BlockInputs) -> bool:
    """Whether to attend to latents in a pass: with a static cache in a step of all rows, with one
    that grows for one token per row, and never in a prompt."""
    append = ctx.append
    steps = append is not None and append.lengths is not None
    return steps or (ctx.mask.tokens == 1 and (append is None or append.slots is None))


# States. Latents are keys and values of one head at once: the first L dims of a key are its value


class _Latents(KVState):
    """The base of both states."""

    @property
    def layout(self) -> str:
        """Names the numbers per token."""
        return f"latents of {self.head_dim} numbers"


class GrowingLatents(_Latents, GrowingKV):
    """Latents in memory that doubles when it is full."""

    def update(self, k: Tensor, v: Tensor, past: int) -> tuple[Tensor, Tensor]:
        """Stores k, which are also the values, after `past` tokens; returns all of them twice."""
        self.keys = extend_buffer(self.keys, k, past)
        keys = self.keys.narrow(2, 0, past + k.shape[2])
        return keys, keys


class StaticLatents(_Latents, StaticKV):
    """Latents in preallocated memory; slots without a token may hold anything."""

    def __init__(self, slots: int, width: int, spec: StateSpec):
        self.kv_heads, self.head_dim, self.history = 1, width, slots
        shape = spec.rows, 1, slots
        kind = torch.int8 if spec.quantize else spec.dtype
        self.latents = torch.empty(*shape, width, dtype=kind, device=spec.device)
        self.scales = None
        if spec.quantize:
            self.scales = torch.empty(shape, dtype=torch.float32, device=spec.device)

    @property
    def buffers(self) -> KVBuffers:  # type: ignore[override]
        """The latents as keys and values in the same memory."""
        return KVBuffers(self.latents, self.latents, self.scales, self.scales)
