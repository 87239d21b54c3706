"""Tokens of each row divided over ranks, and attention over whole rows nevertheless.

Each of n ranks has S consecutive tokens of every row. All layers but attention compute with these
alone. For attention the ranks exchange heads for tokens: each gets all tokens of H / n heads, and
gives their output back. Source: DeepSpeed Ulysses, Jacobs et al. (arXiv 2309.14509).

# B batch, T tokens of a row, n ranks, S tokens of a shard = T / n rounded up, H query heads,
# K kv heads, h heads of one rank, D head dim
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.layers.collectives import Ranks, exchange, gather_all, sum_over


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

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, S, H, D], k and v [B, S, K, D] -> all T tokens of this rank's heads.

        Where ranks share a kv head, each gets a copy.
        """
        n, heads, kv_heads = self.to.size, q.shape[2], k.shape[2]
        if heads % n:
            raise ValueError(too_few_heads(heads, n))
        copies = n // math.gcd(kv_heads, n)
        k, v = (x.repeat_interleave(copies, 2) if copies > 1 else x for x in (k, v))
        parts = [x.unflatten(2, (n, -1)).permute(2, 0, 1, 3, 4) for x in (q, k, v)]
        sizes = [part.shape[3] for part in parts]
        y = exchange(torch.cat(parts, 3), self.to)  # [n, B, S, h, D], of the shard of each rank
        q, k, v = y.transpose(0, 1).flatten(1, 2)[:, : self.tokens].split(sizes, 2)
        return q, k, v

    def to_tokens(self, x: Tensor) -> Tensor:
        """[B, T, h, D], of this rank's heads -> [B, S, H, D], of its tokens."""
        x = F.pad(x, (0, 0, 0, 0, 0, self.behind)) if self.behind else x
        x = x.unflatten(1, (self.to.size, -1)).transpose(0, 1).contiguous()
        return exchange(x, self.to).permute(1, 2, 0, 3, 4).flatten(2, 3)


def exchanged_heads(heads: int, kv_heads: int, ranks: int) -> int:
    """Of all ranks, whose tokens are exchanged in one layer: those of queries, keys and values, and
    of the output."""
    return 2 * heads + 2 * math.lcm(kv_heads, ranks)


def too_few_heads(heads: int, ranks: int) -> str:
    return (
        f"{heads} query heads cannot be divided over {ranks} ranks, and context parallelism gives "
        f"each rank as many: give parallel.context a divisor of {heads}"
    )
