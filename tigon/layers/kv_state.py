"""What a mixer keeps of earlier tokens: the base class, and keys and values of attention.

# B batch, T new tokens of a row, N new tokens of all, S all tokens, H query heads, K kv heads,
# D head dim
"""

import copy
import sys
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from tigon.kernels.attention.api import attention
from tigon.kernels.attention.decode import append_attention, fuses_rope
from tigon.kernels.attention.kv_buffers import KVBuffers, append_tokens
from tigon.kernels.attention.mask import AttentionMask
from tigon.kernels.runtime import autocast_dtype
from tigon.layers.context import BlockInputs, SharedKV

Quantize = Literal["int8"] | None


class LayerState:
    """What one mixer keeps of earlier tokens; its tensors have the batch dimension first.

    The tensors of a static cache are changed in place and without waiting for the device, so that a
    CUDA graph can repeat a step.
    """

    # How many of a row's last tokens are stored one by one, so that `Cache.crop` can drop some;
    # None: one state stands for all tokens
    history: int | None = None
    # How many of these `crop` can drop, if it is not a cache's `chunk`
    rollback: int | None = None

    @property
    def layout(self) -> str:
        """Describes a row in messages; two states of one mixer have the same layout."""
        shapes = " and ".join(str(tuple(x.shape[1:])) for x in self._tensors())
        return f"{type(self).__name__} of {shapes}"

    @property
    def nbytes(self) -> int:
        """The bytes of the layer's tensors."""
        return sum(x.nbytes for x in self._tensors())

    def keep_history(self, tokens: int) -> None:
        """Makes room in an empty state to drop a row's last `tokens`, if that needs any."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Returns a copy with `change` applied to the tensors."""
        new = copy.copy(self)
        vars(new).update(tree_map_only(Tensor, change, vars(self)))
        return new

    def resized(self, larger: Self) -> Self:
        """Returns a copy with the sizes and the `history` of `larger`, a state on the meta device.

        What is in a tensor stays at its beginning; the rest is uninitialized.
        """
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
        """Returns the tensors among the attributes, also those inside of tuples."""
        return [x for x in tree_leaves(vars(self)) if isinstance(x, Tensor)]


class StateSpec(NamedTuple):
    """What a mixer's `make_state` makes an empty state for; ValueError for what it cannot do."""

    rows: int
    capacity: int | None  # tokens of a row; None: the state grows
    dtype: torch.dtype
    device: torch.device | str
    chunk: int = 16  # tokens that a step appends, or that can be forgotten again
    quantize: Quantize = None


MakeStates = Callable[[StateSpec], list[LayerState]]  # of all layers, in their order


class KVState(LayerState):
    """Keys and values of attention."""

    kv_heads: int
    head_dim: int

    @property
    def layout(self) -> str:
        """Names kv heads and head dim alone."""
        return f"{self.kv_heads} kv heads with head dim {self.head_dim}"

    def rotates(self, x: Tensor, ctx: BlockInputs) -> bool:
        """Whether `read` rotates: pass heads without rotation, and it `angles`.

        `angles` are cos and sin [B or 1, T, R/2]. x [B, T, C] is the input of the projection.
        Returns False unless a subclass overrides it.
        """
        return False

    def store(self, k: Tensor, v: Tensor, ctx: BlockInputs, window: int | None) -> SharedKV:
        """Stores k and v [B, T, K, D]; returns the keys and values that `read` takes.

        A static cache in decoding leaves it to `read` to store them.
        """
        raise NotImplementedError

    def read(
        self, q: Tensor, kv: SharedKV, ctx: BlockInputs, window: int | None = None, **kwargs: Any
    ) -> Tensor:
        """Returns attention [B, T, H, D] of q [B, T, H, D], or [1, N, H, D] of packed prompts, to
        the keys and values that `store` returned; layers that share them all call it. The keywords
        are those of `attention`."""
        raise NotImplementedError


class GrowingKV(KVState):
    """Keys and values in memory that doubles when it is full: N steps copy O(N), not O(N^2)."""

    history = sys.maxsize  # all tokens, whatever the window

    def __init__(self, kv_heads: int, head_dim: int):
        self.kv_heads, self.head_dim = kv_heads, head_dim
        self.keys: Tensor | None = None  # [B, K, capacity, D]
        self.values: Tensor | None = None

    def store(self, k: Tensor, v: Tensor, ctx: BlockInputs, window: int | None) -> SharedKV:
        past = 0 if ctx.append is None else ctx.append.cached_tokens
        keys, values = self.update(k.transpose(1, 2), v.transpose(1, 2), past)
        return keys.transpose(1, 2), values.transpose(1, 2)

    def read(
        self, q: Tensor, kv: SharedKV, ctx: BlockInputs, window: int | None = None, **kwargs: Any
    ) -> Tensor:
        """Returns attention [B, T, H, D] of q to all tokens by `ctx.mask`."""
        mask = ctx.mask
        if kwargs.pop("chunked", False) and window is not None:
            mask, window = mask.chunks(window, len(kv[0]), kv[0].device), None
        return attention(q, *kv, mask=mask, window=window, **kwargs)

    def update(self, k: Tensor, v: Tensor, past: int) -> tuple[Tensor, Tensor]:
        """Stores k, v [B, K, T, D] after `past` tokens; returns all of them [B, K, S, D]."""
        self.keys = extend_buffer(self.keys, k, past)
        self.values = extend_buffer(self.values, v, past)
        total = past + k.shape[2]
        return self.keys.narrow(2, 0, total), self.values.narrow(2, 0, total)


def extend_buffer(buffer: Tensor | None, new: Tensor, past: int) -> Tensor:
    """Returns the buffer, or a larger one, with `new` after its first `past` tokens.

    Returns `new` itself if `past` is 0, and a new tensor if a gradient is needed.
    """
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
    """Keys and values in preallocated memory; slots without a token may hold anything."""

    def __init__(self, kv_heads: int, slots: int, head_dim: int, spec: StateSpec):
        self.kv_heads, self.head_dim, self.history = kv_heads, head_dim, slots
        shape, device = (2, spec.rows, kv_heads, slots, head_dim), spec.device
        scales = torch.empty(shape[:4] if spec.quantize else 0, dtype=torch.float32, device=device)
        kind = torch.int8 if spec.quantize else spec.dtype
        self.buffers = KVBuffers(*torch.empty(shape, dtype=kind, device=device), *scales)

    def rotates(self, x: Tensor, ctx: BlockInputs) -> bool:
        """Whether this is a step that the kernel of `append_attention` can rotate.

        All rows then append equally many tokens, at most 16, outside of autocast, to a cache that
        is not int8.
        """
        assert ctx.append is not None
        fused = ctx.append.slots is None and autocast_dtype(x.device) is None
        return fused and fuses_rope(x.shape[1], self.buffers)

    def store(self, k: Tensor, v: Tensor, ctx: BlockInputs, window: int | None) -> SharedKV:
        """Returns k and v after earlier ones that they see; in a step k and v alone."""
        _refuse_gradients(k, v)
        cache_append = ctx.append
        assert cache_append is not None
        k, v = (self._cast(x) for x in (k, v))
        if cache_append.slots is None:
            return k, v
        keys, values, cached = k, v, cache_append.cached_tokens
        visible = cached if window is None else min(cached, window - 1)
        if visible:
            earlier = _read(self.buffers, cached - visible, cached, k.dtype)
            keys, values = (torch.cat(x, 1) for x in zip(earlier, (k, v), strict=True))
        append_tokens(k.flatten(0, 1), v.flatten(0, 1), self.buffers, *cache_append.slots[:3])
        return keys, values

    def read(
        self, q: Tensor, kv: SharedKV, ctx: BlockInputs, window: int | None = None, **kwargs: Any
    ) -> Tensor:
        """As in the base; a step stores k and v, each time the same, and rotates q and k by
        `angles` where `rotates` is True."""
        _refuse_gradients(q)
        (keys, values), cache_append, mask = kv, ctx.append, ctx.mask
        assert cache_append is not None
        q = self._cast(q)
        if cache_append.slots is None:
            assert cache_append.lengths is not None
            return append_attention(
                q, keys, values, self.buffers, cache_append.lengths, window=window, **kwargs
            )
        visible = keys.shape[1] - mask.tokens
        if visible < cache_append.cached_tokens:
            visible_mask = AttentionMask(mask.tokens, past=visible, backend=mask.backend)
            mask = cache_append.masks.setdefault(visible, visible_mask)
        if kwargs.pop("chunked", False) and window is not None:
            first = cache_append.cached_tokens - visible
            mask, window = mask.chunks(window, len(keys), keys.device, first), None
        return attention(q, keys, values, mask=mask, window=window, **kwargs)

    def _cast(self, x: Tensor) -> Tensor:
        """Returns x in the dtype that attention under autocast takes; else x itself.

        A scale may have made it wider; a cache from outside of autocast keeps its dtype.
        """
        dtype = autocast_dtype(x.device)
        if dtype is None:
            return x
        return x.to(self.buffers.keys.dtype if self.buffers.key_scales is None else dtype)


def _refuse_gradients(*tensors: Tensor) -> None:
    """Raises ValueError if one of the tensors requires a gradient."""
    if any(x.requires_grad for x in tensors):
        raise ValueError(
            "a StaticCache keeps no gradients: call the model inside torch.no_grad() or "
            "torch.inference_mode(), or give it a KVCache"
        )


def _read(buffers: KVBuffers, start: int, stop: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns keys and values [B, S, K, D] of positions [start, stop) in `dtype`, dequantized."""
    slots = torch.arange(start, stop, device=buffers.keys.device) % buffers.keys.shape[2]

    def read(x: Tensor, scales: Tensor | None) -> Tensor:
        x = x[:, :, slots]
        if scales is not None:
            x = x.float() * scales[:, :, slots, None]
        return x.to(dtype).transpose(1, 2)

    return read(buffers.keys, buffers.key_scales), read(buffers.values, buffers.value_scales)
