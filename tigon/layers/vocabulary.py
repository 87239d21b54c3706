"""A vocabulary that ranks divide: embedding and head have the rows of some tokens.

# B batch, T tokens, C model dim, V vocab, W tokens of a rank
"""

from itertools import pairwise
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from tigon.layers.collectives import Ranks, all_columns, sum_over


class Vocabulary(NamedTuple):
    """The ranks, and the first token of each, behind which comes V."""

    ranks: Ranks
    bounds: tuple[int, ...]

    @property
    def first(self) -> int:
        return self.bounds[self.ranks.rank]

    def embed(self, ids: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
        """[B, T] -> [B, T, C], of this rank's rows [W, C]."""
        own = ids - self.first
        here = (own >= 0) & (own < len(weight))
        padding = None if padding_idx is None else padding_idx - self.first
        if padding is not None and not 0 <= padding < len(weight):
            padding = None
        x = F.embedding(own.where(here, 0), weight, padding)
        return sum_over(x.masked_fill(~here[..., None], 0), self.ranks)

    def whole(self, logits: Tensor) -> Tensor:
        """[..., W] -> [..., V]."""
        return all_columns(logits, self.ranks, tuple(b - a for a, b in pairwise(self.bounds)))
