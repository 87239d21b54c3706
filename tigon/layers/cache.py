"""Keys and values of the tokens that a decoder has already read.

# B batch, T new tokens, S all tokens, K kv heads, D head dim
"""

import torch
from torch import Tensor


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
