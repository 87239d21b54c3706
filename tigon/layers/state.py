"""What mixers remember of the tokens before: one state for each layer of a cache.

# B batch, T new tokens of a row, R slots, S all tokens, H query heads, K kv heads, D head dim
"""

import copy
from collections.abc import Callable
from typing import Any, Literal, Protocol, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from tigon.kernels._triton import autocast_dtype
from tigon.kernels.append_attention import append_attention, rotates
from tigon.kernels.attention import AttentionMask, attention
from tigon.kernels.kv_buffers import KVBuffers, append_tokens
from tigon.layers.context import Context

Quantize = Literal["int8"] | None


class State:
    """What one mixer remembers, in attributes; its tensors have the rows of a batch first.

    Those of a static cache are changed in place, and without waiting for the device, so that a
    CUDA graph can repeat a step.
    """

    # How many of a row's last tokens are held one by one, so that `Cache.crop` can forget some;
    # None: they cannot be told apart
    history: int | None = None

    @property
    def holds(self) -> str:
        """What a row of it is, in messages: two states of one mixer hold the same."""
        shapes = " and ".join(str(tuple(x.shape[1:])) for x in self._tensors())
        return f"{type(self).__name__} of {shapes}"

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self._tensors())

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """A copy whose tensors are `change` of these."""
        new = copy.copy(self)
        vars(new).update(tree_map_only(Tensor, change, vars(self)))
        return new

    def resized(self, larger: Self) -> Self:
        """A copy with the sizes of `larger`, which is on the meta device; new slots are empty."""
        shapes = iter([x.shape for x in larger._tensors()])

        def extend(x: Tensor) -> Tensor:
            if x.shape == (shape := next(shapes)):
                return x
            new = x.new_empty(shape)
            new[tuple(map(slice, x.shape))] = x
            return new

        new = self.map(extend)
        new.history = larger.history
        return new

    def _tensors(self) -> list[Tensor]:
        return [x for x in tree_leaves(vars(self)) if isinstance(x, Tensor)]


class MakeStates(Protocol):
    """Makes an empty state for each layer; a mixer's `make_state` does the same for its own."""

    def __call__(
        self,
        rows: int,
        capacity: int | None,  # tokens of a row; None: the states grow
        *,
        chunk: int,  # tokens that a step appends, or that can be forgotten again
        dtype: torch.dtype,
        device: torch.device | str,
        quantize: Quantize = None,
    ) -> list[State]:
        """ValueError for what a mixer cannot do."""


class KVState(State):
    """Keys and values of attention."""

    kv_heads: int
    head_dim: int

    @property
    def holds(self) -> str:
        return f"{self.kv_heads} kv heads with head dim {self.head_dim}"

    def rotates(self, x: Tensor, ctx: Context) -> bool:
        """Whether `attend` is to be given heads that are yet to be rotated, and `angles`: cos and
        sin [B or 1, T, R/2]. x [B, T, C] is what they are made of."""
        return False

    def attend(
        self,
        q: Tensor,  # [B, T, H, D], or [1, N, H, D] of packed prompts
        k: Tensor,  # [B, T, K, D]
        v: Tensor,  # [B, T, K, D]
        ctx: Context,
        *,
        window: int | None = None,
        softcap: float | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Store k and v; attention of q to them and to what is before them: [B, T, H, D]."""
        raise NotImplementedError


class GrowingKV(KVState):
    """Grows by doubling, so that decoding N tokens copies O(N) and not O(N^2)."""

    def __init__(self, kv_heads: int, head_dim: int):
        self.kv_heads, self.head_dim = kv_heads, head_dim
        self.keys: Tensor | None = None  # [B, K, capacity, D]
        self.values: Tensor | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context, **how: Any) -> Tensor:
        past = 0 if ctx.append is None else ctx.append.held
        keys, values = self.update(k.transpose(1, 2), v.transpose(1, 2), past)
        k, v = keys.transpose(1, 2), values.transpose(1, 2)
        return attention(q, k, v, mask=ctx.mask, **how)

    def update(self, k: Tensor, v: Tensor, past: int) -> tuple[Tensor, Tensor]:
        """Put k, v [B, K, T, D] behind `past` tokens; all keys and values [B, K, S, D]."""
        self.keys, self.values = _extend(self.keys, k, past), _extend(self.values, v, past)
        total = past + k.shape[2]
        return self.keys.narrow(2, 0, total), self.values.narrow(2, 0, total)


def _extend(buffer: Tensor | None, new: Tensor, past: int) -> Tensor:
    """The buffer, or a larger one, with `new` behind its first `past` tokens."""
    if buffer is None or not past:
        return new
    if torch.is_grad_enabled() and (new.requires_grad or buffer.requires_grad):
        # Writing in place would overwrite what the backward pass still needs
        return torch.cat((buffer[:, :, :past], new), dim=2)
    total = past + new.shape[2]
    if total > buffer.shape[2]:
        b, heads, _, d = buffer.shape
        grown = buffer.new_empty(b, heads, max(256, 2 * total), d)
        grown[:, :, :past] = buffer[:, :, :past]
        buffer = grown
    buffer.narrow(2, past, new.shape[2]).copy_(new)
    return buffer


class StaticKV(KVState):
    """In memory that is allocated once; what lies in slots without a token does not matter."""

    def __init__(
        self,
        rows: int,
        kv_heads: int,
        slots: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        quantize: Quantize = None,
    ):
        self.kv_heads, self.head_dim, self.history = kv_heads, head_dim, slots
        shape = 2, rows, kv_heads, slots, head_dim
        scales = torch.empty(shape[:4] if quantize else 0, dtype=torch.float32, device=device)
        kind = torch.int8 if quantize else dtype
        self.buffers = KVBuffers(*torch.empty(shape, dtype=kind, device=device), *scales)

    def rotates(self, x: Tensor, ctx: Context) -> bool:
        """A kernel less in a decoding step."""
        assert ctx.append is not None
        few = ctx.append.places is None and autocast_dtype(x.device) is None
        return few and rotates(x.shape[1], self.buffers)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, ctx: Context, window: int | None = None, **how: Any
    ) -> Tensor:
        if q.requires_grad or k.requires_grad or v.requires_grad:
            raise ValueError(
                "a StaticCache keeps no gradients: call the model inside torch.no_grad() or "
                "torch.inference_mode(), or give it a KVCache"
            )
        now, mask, buffers = ctx.append, ctx.mask, self.buffers
        assert now is not None
        dtype = autocast_dtype(q.device)
        if dtype is not None:
            # A scale may have made q wider than that; a cache from outside of autocast stays so
            dtype = buffers.keys.dtype if buffers.key_scales is None else dtype
            q, k, v = (x.to(dtype) for x in (q, k, v))
        if now.places is None:
            assert now.lengths is not None
            return append_attention(q, k, v, buffers, now.lengths, window=window, **how)
        keys, values = k, v
        seen = now.held if window is None else min(now.held, window - 1)
        if seen:
            earlier = _read(buffers, now.held - seen, now.held, k.dtype)
            keys, values = (torch.cat(x, 1) for x in zip(earlier, (k, v), strict=True))
        if seen < now.held:
            own = AttentionMask(mask.tokens, past=seen, backend=mask.backend)
            mask = now.masks.setdefault(seen, own)
        out = attention(q, keys, values, mask=mask, window=window, **how)
        append_tokens(k.flatten(0, 1), v.flatten(0, 1), buffers, *now.places[:3])
        return out


def _read(buffers: KVBuffers, start: int, stop: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values [B, S, K, D] of the positions from start to stop."""
    slots = torch.arange(start, stop, device=buffers.keys.device) % buffers.keys.shape[2]

    def read(x: Tensor, scales: Tensor | None) -> Tensor:
        x = x[:, :, slots]
        if scales is not None:
            x = x.float() * scales[:, :, slots, None]
        return x.to(dtype).transpose(1, 2)

    return read(buffers.keys, buffers.key_scales), read(buffers.values, buffers.value_scales)
