"""Causal attention with grouped heads, packed sequences, padding, windows and softcap.

# B batch, T query tokens, S key tokens (cached ones first), H query heads, K kv heads, D head dim
"""

import torch
import torch.nn.functional as F
from torch import Tensor


class AttentionMask:
    """Which keys a query may see: causal, inside its own sequence, and never padding.

    `tokens` T queries follow `past` cached ones. `segment_ids` [B, T] number the packed
    sequences; `key_mask` bool [B, past + T] is False on padding. Dense masks are built at
    most once per window and shared by all layers.
    """

    def __init__(
        self,
        tokens: int,
        *,
        past: int = 0,
        segment_ids: Tensor | None = None,
        key_mask: Tensor | None = None,
    ):
        self.tokens = tokens
        self.past = past
        self.segment_ids = segment_ids
        self.key_mask = key_mask
        self._dense: dict[int | None, Tensor] = {}
        self._bias: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def needs_dense(self, window: int | None) -> bool:
        """Whether more than plain causality has to be said."""
        total = self.past + self.tokens
        windowed = window is not None and window < total
        masked = self.segment_ids is not None or self.key_mask is not None
        return windowed or masked or (self.past > 0 and self.tokens > 1)

    def dense(self, window: int | None, device: torch.device) -> Tensor:
        """Bool [B or 1, 1, T, S], True where a query may look."""
        if window not in self._dense:
            self._dense[window] = self._build(window, device)
        return self._dense[window]

    def bias(self, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
        """`dense` as something to add to the scores: 0 or -inf, [B or 1, 1, T, S]."""
        # Given a bool mask, SDPA makes this in every layer and saves each for the backward pass
        if (window, dtype) not in self._bias:
            seen = self.dense(window, device)
            zeros = torch.zeros_like(seen, dtype=dtype)
            self._bias[window, dtype] = zeros.masked_fill_(~seen, float("-inf"))
        return self._bias[window, dtype]

    def _build(self, window: int | None, device: torch.device) -> Tensor:
        query = torch.arange(self.past, self.past + self.tokens, device=device)[:, None]
        key = torch.arange(self.past + self.tokens, device=device)[None, :]
        seen = key <= query  # [T, S]
        if window is not None:
            seen = seen & (key > query - window)
        seen = seen[None]
        if self.segment_ids is not None:
            seen = seen & (self.segment_ids[:, :, None] == self.segment_ids[:, None, :])
        if self.key_mask is not None:
            # A padded query sees itself: a row without any key would be NaN
            seen = seen & self.key_mask[:, None, :] | (key == query)[None]
        return seen[:, None]


def attention_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: AttentionMask,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> Tensor:
    """`softmax(cap(q k^T * scale)) v`, fp32 inside, over the keys that `mask` allows."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q.float() @ k.float().transpose(-1, -2) * scale  # [B, H, T, S]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask.dense(window, q.device), float("-inf"))
    return (scores.softmax(-1) @ v.float()).to(q.dtype)


def attention(
    q: Tensor,  # [B, H, T, D]
    k: Tensor,  # [B, K, S, D]
    v: Tensor,  # [B, K, S, D]
    *,
    mask: AttentionMask,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention output [B, H, T, D]; head h reads kv head `h // (H / K)`.

    A window of W sees W tokens, the query's own among them. `scale` defaults to D ** -0.5.
    """
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k.shape[1]} key/value heads")
    if softcap is not None:
        return attention_ref(q, k, v, mask=mask, window=window, softcap=softcap, scale=scale)
    bias = mask.bias(window, q.dtype, q.device) if mask.needs_dense(window) else None
    b, h, t, d = q.shape
    kv_heads = k.shape[1]
    causal = bias is None
    if t == 1:  # an `and` would be symbolic when compiled for any length, which SDPA refuses
        causal = False
    if t == 1 and h != kv_heads:
        # One token per row: the heads of a group become the queries of their kv head
        out = F.scaled_dot_product_attention(
            q.reshape(b, kv_heads, h // kv_heads, d), k, v, attn_mask=bias, scale=scale
        )
        return out.reshape(b, h, t, d)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=bias,
        is_causal=causal,
        scale=scale,
        enable_gqa=h != kv_heads,
    )
