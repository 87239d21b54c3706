"""Tokens of each row divided over ranks.

Each of n ranks has S consecutive tokens of every row. All layers but attention compute with these
alone.

# B batch, T tokens of a row, n ranks, S tokens of a shard = T / n rounded up, H query heads,
# K kv heads, D head dim
"""

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from tigon.kernels.attention import AttentionMask
from tigon.layers.collectives import Ranks, gather_all, sum_over
from tigon.layers.shared_attention import Division


@dataclass(frozen=True)
class Shard:
    """This rank's tokens in one pass."""

    to: Ranks  # those with the same rows
    tokens: int  # T
    positions: Tensor  # [B or 1, T], of whole rows
    real: Tensor | None = None  # bool [B, S], False on padding; None: there is none

    @property
    def size(self) -> int:
        """S."""
        return -(-self.tokens // self.to.size)

    @property
    def behind(self) -> int:
        """Tokens of padding that make the last shard as long as the others."""
        return self.size * self.to.size - self.tokens

    def part(self, x: Tensor, fill: float = 0) -> Tensor:
        """[B, T, ...] -> [B, S, ...], this rank's; `fill` in the padding behind."""
        first = self.to.rank * self.size
        mine = x[:, first : first + self.size]
        if (short := self.size - mine.shape[1]) == 0:
            return mine.contiguous()
        return F.pad(mine, (0, 0) * (x.dim() - 2) + (0, short), value=fill)

    def gather(self, x: Tensor) -> Tensor:
        """The inverse: [B, S, ...] -> [B, T, ...] on every rank, which all make the same of."""
        return gather_all(x[None], self.to).transpose(0, 1).flatten(1, 2)[:, : self.tokens]

    def sum(self, x: Tensor) -> Tensor:
        """Over the ranks, which all make the same of it."""
        return sum_over(x, self.to)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, **how: Any) -> Tensor:
        """Attention of q [B, S, H, D] to keys and values [B, S, K, D] of all ranks: [B, S, H, D].

        `mask` is of whole rows.
        """
        return Division(self.to, self.tokens, q.shape[2]).attend(q, k, v, mask, **how)
