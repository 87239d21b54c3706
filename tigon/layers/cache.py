"""Keys and values of the tokens that a decoder has already read.

# B batch, T new tokens, S all tokens, H query heads, K kv heads, D head dim
"""

from typing import Protocol

import torch
from torch import Tensor

from tigon.kernels.attention import AttentionMask, attention


class Cache(Protocol):
    """What a forward pass asks of a cache: first `begin`, then `attend` in every layer."""

    @property
    def length(self) -> int | None:
        """Tokens that every row holds; None if the host knows of no such number."""

    @property
    def shape(self) -> tuple[int, int, int] | None:
        """Layers, kv heads and head dim of its model; None while it may be anyone's."""

    def begin(
        self,
        batch: int,
        tokens: int,
        *,
        attention_mask: Tensor | None = None,
        cu_seq_lens: Tensor | None = None,
    ) -> int | Tensor:
        """Prepare for [batch, tokens] new tokens; how many the rows hold.

        A tensor [batch] of them says that the cache itself knows who may see whom.
        """

    def attend(
        self,
        layer: int,
        q: Tensor,  # [B, T, H, D]
        k: Tensor,  # [B, T, K, D]
        v: Tensor,  # [B, T, K, D]
        mask: AttentionMask,
        *,
        window: int | None = None,
        softcap: float | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Store k and v; attention of q to them and to what is before them: [B, T, H, D]."""


class KVCache:
    """Grows by doubling, so that decoding N tokens copies O(N) and not O(N^2)."""

    def __init__(self) -> None:
        self._keys: list[Tensor] = []  # per layer [B, K, capacity, D]
        self._values: list[Tensor] = []
        self._lengths: list[int] = []
        self.packed = False  # a batch of packed sequences has no single end to continue from

    @property
    def length(self) -> int:
        """Tokens held."""
        return self._lengths[0] if self._lengths else 0

    @property
    def shape(self) -> tuple[int, int, int] | None:
        """Layers, kv heads and head dim, None while empty."""
        if not self._keys:
            return None
        _, heads, _, dim = self._keys[0].shape
        return len(self._keys), heads, dim

    def begin(
        self,
        batch: int,
        tokens: int,
        *,
        attention_mask: Tensor | None = None,
        cu_seq_lens: Tensor | None = None,
    ) -> int:
        """Tokens held, if this cache can be continued with these."""
        if self.packed:
            raise ValueError("past_key_values holds packed sequences; they have no single end")
        if self.length and cu_seq_lens is not None:
            raise ValueError(f"cu_seq_lens with a cache that already holds {self.length} tokens")
        return self.length

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMask,
        *,
        window: int | None = None,
        softcap: float | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Attention of q [B, T, H, D] to all keys, those of the new k, v [B, T, K, D] the last."""
        self.packed = mask.segment_ids is not None
        k, v = (x.transpose(1, 2) for x in self.update(layer, k.transpose(1, 2), v.transpose(1, 2)))
        return attention(q, k, v, mask=mask, window=window, softcap=softcap, scale=scale)

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k, v [B, K, T, D] of one layer; all of its keys and values [B, K, S, D]."""
        if layer == len(self._keys):
            self._keys.append(k)
            self._values.append(v)
            self._lengths.append(k.shape[2])
            return k, v
        past = self._lengths[layer]
        if k.shape[0] != self._keys[layer].shape[0]:
            raise ValueError(
                f"the cache holds {self._keys[layer].shape[0]} rows, this batch has {k.shape[0]}"
            )
        self._lengths[layer] = past + k.shape[2]
        return (
            self._append(self._keys, layer, k, past),
            self._append(self._values, layer, v, past),
        )

    def select(self, rows: Tensor) -> None:
        """Keep the batch rows `rows` (an index tensor), in that order."""
        self._keys = [k.index_select(0, rows) for k in self._keys]
        self._values = [v.index_select(0, rows) for v in self._values]

    def _append(self, buffers: list[Tensor], layer: int, new: Tensor, past: int) -> Tensor:
        buffer, total = buffers[layer], past + new.shape[2]
        if torch.is_grad_enabled() and (new.requires_grad or buffer.requires_grad):
            # Writing in place would overwrite what the backward pass still needs
            buffers[layer] = torch.cat((buffer[:, :, :past], new), dim=2)
            return buffers[layer]
        if total > buffer.shape[2]:
            b, heads, _, d = buffer.shape
            grown = buffer.new_empty(b, heads, max(256, 2 * total), d)
            grown[:, :, :past] = buffer[:, :, :past]
            buffers[layer] = buffer = grown
        buffer.narrow(2, past, new.shape[2]).copy_(new)
        return buffer.narrow(2, 0, total)
