"""The inputs that all blocks of a forward pass share.

# B batch, T new tokens of a row, N new tokens of all, R rows of the cache, S tokens that are seen,
# K kv heads, D head dim, P dims of a block's own input
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.distributed.context_attention import ContextShard
from tigon.kernels.attention.mask import AttentionMask

SharedKV = tuple[Tensor, Tensor]  # keys and values [B, S, K, D], normed and rotated


class TokenSlots(NamedTuple):
    """The cache positions of new tokens in rows of different lengths."""

    rows: Tensor  # [N]
    positions: Tensor  # [N]
    ends: Tensor  # [N], the length of the token's row after them
    bounds: Tensor  # [R + 1]: new token n is of row r if bounds[r] <= n < bounds[r + 1]


@dataclass
class CacheAppend:
    """How states store the new tokens of this pass.

    Without `slots`, every row of the batch is a row of the cache and appends T tokens.
    """

    cached_tokens: int = 0  # tokens of every row before this pass; 0 with `lengths`
    lengths: Tensor | None = None  # [R] int32, cached tokens if only the device may know them
    slots: TokenSlots | None = None
    masks: dict[int, AttentionMask] = field(default_factory=dict)  # by number of visible tokens


def real_tokens(mask: AttentionMask) -> Tensor | None:
    """Returns bool [B, T], False on padding; None if there is no padding."""
    return None if mask.key_mask is None else mask.key_mask[:, mask.past :]


@dataclass
class BlockInputs:
    """The inputs of one forward pass that its blocks share and do not change."""

    position_ids: Tensor  # [B or 1, T]
    mask: AttentionMask  # of full rows
    routing: bool = False  # whether blocks with experts return their routing
    append: CacheAppend | None = None  # None: there is no cache
    dropout_keys: Tensor | None = None  # int64 [B, T], seeds of an adapter's dropout in this block
    layer_input: Tensor | None = None  # [B, T, P], what this block alone gets beside the stream
    shared_kv: SharedKV | None = None  # of an earlier block, which this block's attention reads
    shard: ContextShard | None = None  # context parallelism: T are this rank's tokens

    @property
    def dropout_args(self) -> tuple[Tensor, ...]:
        """The arguments of products besides their input: none in passes without dropout."""
        return () if self.dropout_keys is None else (self.dropout_keys,)

    @property
    def real(self) -> Tensor | None:
        """Bool [B, T], False on padding, or None if there is none."""
        return real_tokens(self.mask) if self.shard is None else self.shard.real

    @property
    def starts(self) -> Tensor | None:
        """Bool [B, T], True at the first token of each row and of each packed sequence.

        None without packed sequences: rows continue their states. `shard`: only its tokens.
        """
        segments = self.mask.segment_ids
        if segments is None:
            return None
        first = torch.ones_like(segments[:, :1], dtype=torch.bool)
        starts = torch.cat((first, segments[:, 1:] != segments[:, :-1]), 1)
        return starts if self.shard is None else self.shard.part(starts)
