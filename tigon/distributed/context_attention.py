"""Context parallelism: attention over rows whose tokens are divided over ranks.

Each of n ranks has S consecutive tokens of every row, and all layers but attention compute with
these alone.

# B batch, T tokens of a row, n ranks, S tokens of a shard = T / n rounded up, g ranks of a group,
# R groups, Q queries of a group, H query heads, K kv heads, h and k those of one rank, D head dim

g of the n ranks, the most that divide both n and the heads, form a group: together they have all
heads, each for all tokens (DeepSpeed Ulysses, Jacobs et al., arXiv 2309.14509). With several
groups, each computes a part of the queries against the keys up to them, and every rank gets all
keys and values of its heads (as Llama 3, arXiv 2407.21783, section 3.3.2). A row is cut into 2 R
chunks, and a group computes an early and a late one, so that all have the same work in causal
attention.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.distributed.collectives import (
    Ranks,
    RowCounts,
    all_reduce,
    all_to_all,
    all_to_all_many,
    gather_from_group,
    reduce_from_group,
)
from tigon.kernels.attention.api import attention
from tigon.kernels.attention.mask import AttentionMask
from tigon.kernels.runtime import refuse_second_derivative


@dataclass(frozen=True)
class ContextShard:
    """This rank's tokens in one pass."""

    ranks: Ranks  # those with the same rows
    tokens: int  # T
    positions: Tensor  # [B or 1, T], of whole rows
    real: Tensor | None = None  # bool [B, S], False on padding; None: there is none

    @property
    def size(self) -> int:
        """S, the tokens of a shard."""
        return -(-self.tokens // self.ranks.size)

    @property
    def padding(self) -> int:
        """The tokens of padding that make the last shard as long as the rest."""
        return self.size * self.ranks.size - self.tokens

    def part(self, x: Tensor, fill: float = 0) -> Tensor:
        """Returns this rank's [B, S, ...] of [B, T, ...], with `fill` in the padding at the end."""
        first = self.ranks.rank * self.size
        local = x[:, first : first + self.size]
        if (short := self.size - local.shape[1]) == 0:
            return local.contiguous()
        return F.pad(local, (0, 0) * (x.dim() - 2) + (0, short), value=fill)

    def gather(self, x: Tensor) -> Tensor:
        """Gathers [B, S, ...] to [B, T, ...], which every rank uses in the same way."""
        return (
            gather_from_group(x[None], self.ranks).transpose(0, 1).flatten(1, 2)[:, : self.tokens]
        )

    def tokens_before(self, x: Tensor, count: int, segments: Tensor | None) -> Tensor:
        """Returns the `count` tokens [B, count, ...] before this rank's first, of the ranks' x
        [B, S, ...]; zeros before the first token of its row, and of its sequence by `segments`
        [B, T] of packed rows."""
        last = x[:, max(self.size - count, 0) :]
        every = all_to_all(last[None].expand(self.ranks.size, *last.shape), self.ranks)
        before = every[: self.ranks.rank].transpose(0, 1).flatten(1, 2)
        before = before[:, max(before.shape[1] - count, 0) :]
        if segments is not None:
            first = self.ranks.rank * self.size
            segments = F.pad(segments, (0, self.padding), value=-1)[:, max(first - count, 0) :]
            same = segments[:, : before.shape[1]] == segments[:, before.shape[1], None]
            before = before.masked_fill(~same.view(*same.shape, *[1] * (x.dim() - 2)), 0)
        return F.pad(before, (0, 0) * (x.dim() - 2) + (count - before.shape[1], 0))

    def sum(self, x: Tensor) -> Tensor:
        """Returns the sum over ranks, which every rank uses in the same way."""
        return reduce_from_group(x, self.ranks)

    def sum_for_parts(self, x: Tensor) -> Tensor:
        """Returns the sum over ranks, which each rank uses for its own part of a loss."""
        return all_reduce(x, self.ranks)

    def local_index(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Returns which positions [n] of flattened rows [B T] are this rank's, bool [n], and these
        as positions in the flattened shard [B S]."""
        row, token = index // self.tokens, index % self.tokens - self.ranks.rank * self.size
        is_local = (token >= 0) & (token < self.size)
        return is_local, (row * self.size + token)[is_local]

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, **options: Any
    ) -> Tensor:
        """Returns attention [B, S, H, D] to keys of all ranks; `mask` is that of full rows."""
        return ContextParallelAttention(self.ranks, self.tokens, q.shape[2]).attend(
            q, k, v, mask, **options
        )


# Heads divided over ranks, in one copy, for all-to-all


class StackHeads(torch.autograd.Function):
    """Stacks several [B, S, H, D] to [n, B, S, the sum of their h, D], each rank's heads of all;
    backward unstacks the gradient."""

    @staticmethod
    def forward(ctx: Any, ranks: int, *xs: Tensor) -> Tensor:
        ctx.heads = [x.shape[2] for x in xs]
        return _stack_heads(xs, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("heads of ranks")
        return None, *_unstack_heads(grad, ctx.heads)


class UnstackHeads(torch.autograd.Function):
    """Returns [B, S, n h, D] from the heads of each rank [n, B, S, h, D]; backward stacks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.ranks = len(x)
        return _unstack_heads(x, [len(x) * x.shape[3]])[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        refuse_second_derivative("heads of ranks")
        return _stack_heads([grad], ctx.ranks)


def _stack_heads(xs: Sequence[Tensor], ranks: int) -> Tensor:
    """Computes `StackHeads`, without a gradient."""
    batch, tokens, _, dim = xs[0].shape
    local = [x.shape[2] // ranks for x in xs]
    out = xs[0].new_empty(ranks, batch, tokens, sum(local), dim)
    for x, part in zip(xs, out.split(local, 3), strict=True):
        _copy(part, _by_rank(x, ranks))
    return out


def _unstack_heads(x: Tensor, heads: Sequence[int]) -> list[Tensor]:
    """Returns all heads of each tensor: the inverse of `_stack_heads`."""
    ranks, batch, tokens, _, dim = x.shape
    out = [x.new_empty(batch, tokens, count, dim) for count in heads]
    parts = x.split([count // ranks for count in heads], 3)
    for full, part in zip(out, parts, strict=True):
        _copy(_by_rank(full, ranks), part)
    return out


def _by_rank(x: Tensor, ranks: int) -> Tensor:
    """Views [B, S, H, D] as [n, B, S, h, D]."""
    return x.unflatten(2, (ranks, -1)).permute(2, 0, 1, 3, 4)


def _copy(out: Tensor, x: Tensor) -> None:
    """Copies in units of 16 bytes if possible: a strided copy on a GPU moves one at a time."""
    wide = torch.complex128
    count = wide.itemsize // x.itemsize
    starts = [(t.storage_offset(), t.shape[-1], *t.stride()[:-1]) for t in (out, x)]
    is_aligned = not any(start % count for start in (*starts[0], *starts[1]))
    if is_aligned and out.stride(-1) == x.stride(-1) == 1:
        out, x = out.view(wide), x.view(wide)
    out.copy_(x)


@dataclass(frozen=True)
class ContextParallelAttention:
    """Divides a layer's attention over the ranks that have the same rows."""

    ranks: Ranks
    tokens: int  # T
    heads: int  # H

    @property
    def size(self) -> int:
        """g, the number of ranks of a group, which are neighbors."""
        return math.gcd(self.ranks.size, self.heads)

    @property
    def groups(self) -> int:
        """R, the number of groups."""
        return self.ranks.size // self.size

    @property
    def group(self) -> int:
        """The index of this rank's group."""
        return self.ranks.rank // self.size

    @property
    def share(self) -> int:
        """S, the tokens of a rank."""
        return -(-self.tokens // self.ranks.size)

    def chunks(self, group: int) -> list[range]:
        """Returns the two ranges of queries that a group computes; one is in its first half."""
        count = 2 * self.groups
        pair = sorted((2 * group, count - 1 - 2 * group))
        return [range(*(j * self.tokens // count for j in (i, i + 1))) for i in pair]

    def local_query_ranges(self, rank: int, group: int) -> list[range]:
        """Returns the ranges of a rank's tokens whose queries the group computes: 0, 1 or 2."""
        first = rank * self.share
        ends = (
            (max(c.start - first, 0), min(c.stop - first, self.share)) for c in self.chunks(group)
        )
        return [range(start, stop) for start, stop in ends if start < stop]

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMask,
        sinks: Tensor | None = None,  # [H]
        **options: Any,
    ) -> Tensor:
        """Returns [B, S, H, D] for q [B, S, H, D], k and v [B, S, K, D] of this rank's tokens.

        `mask` is that of full rows. The gradient of `sinks` is this rank's part of it.
        """
        if sinks is not None:  # of the heads that this rank computes
            options["sinks"] = sinks.unflatten(0, (self.size, -1))[self.ranks.rank % self.size]
        k, v = self._repeat_kv_heads(k), self._repeat_kv_heads(v)
        if self.groups == 1:
            return self._to_tokens(attention(*self._to_heads(q, k, v), mask=mask, **options))
        q, k, v = self._to_groups(q, k, v)
        chunks, parts = self.chunks(self.group), []
        for queries, chunk in zip(q.split([*map(len, chunks)], 1), chunks, strict=True):
            if chunk:
                part = mask.slice_queries(chunk.start, chunk.stop)
                keys = k[:, : part.keys], v[:, : part.keys]
                parts.append(attention(queries, *keys, mask=part, **options))
        return self._from_groups(concat_parts(parts, 1) if parts else q)

    def _repeat_kv_heads(self, x: Tensor) -> Tensor:
        """Repeats the heads of [B, S, K, D] to a multiple of g, as ranks may share a head."""
        copies = self.size // math.gcd(x.shape[2], self.size)
        return x.repeat_interleave(copies, 2) if copies > 1 else x

    def _to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns all T tokens of this rank's heads; there must be one group."""
        sizes = [x.shape[2] // self.size for x in (q, k, v)]
        stacked = StackHeads.apply(self.size, q, k, v)
        y = all_to_all(stacked, self.ranks)  # [n, B, S, h + 2 k, D]
        q, k, v = y.transpose(0, 1).flatten(1, 2)[:, : self.tokens].split(sizes, 2)
        return q, k, v

    def _to_tokens(self, x: Tensor) -> Tensor:
        """Returns [B, S, H, D] from [B, T, h, D], the inverse of `_to_heads`."""
        padding = self.share * self.size - self.tokens
        x = F.pad(x, (0, 0, 0, 0, 0, padding)) if padding else x
        x = x.unflatten(1, (self.size, -1)).transpose(0, 1).contiguous()
        return UnstackHeads.apply(all_to_all(x, self.ranks))

    def _to_groups(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the group's queries of this rank's heads [B, Q, h, D], and all keys and values.

        Backward sums the gradients of keys and values over all groups at once.
        """
        heads = q.unflatten(2, (self.size, -1)).permute(2, 1, 0, 3, 4)  # [g, S, B, h, D]
        ranges = [self.local_query_ranges(self.ranks.rank, group) for group in range(self.groups)]
        runs = [[heads[:, r.start : r.stop] for r in group] for group in ranges if group]
        rows = [concat_parts(run, 1).flatten(0, 1) for run in runs]
        queries = concat_parts(rows, 0) if rows else heads[0, :0]
        pair = [x.unflatten(2, (self.size, -1)).permute(2, 0, 1, 3, 4) for x in (k, v)]
        each = [x.expand(self.groups, *x.shape) for x in pair]
        ones = [1] * self.ranks.size
        sizes = [exchange_sizes(self), RowCounts(ones, ones)]
        q, kv = all_to_all_many((queries, torch.cat(each, 4).flatten(0, 1)), self.ranks, sizes)
        k, v = kv.transpose(0, 1).flatten(1, 2)[:, : self.tokens].chunk(2, 2)
        return q.transpose(0, 1), k, v

    def _from_groups(self, x: Tensor) -> Tensor:
        """Returns the output [B, S, H, D] from that of the group's queries [B, Q, h, D]."""
        received, sent = exchange_sizes(self)
        rows = all_to_all(x.transpose(0, 1), self.ranks, sent, received)  # [g S, B, h, D]
        parts_in_order = []
        for group, y in enumerate(rows.split([self.size * n for n in sent[:: self.size]])):
            runs = self.local_query_ranges(self.ranks.rank, group)
            parts = y.unflatten(0, (self.size, -1)).split([*map(len, runs)], 1) if runs else ()
            parts_in_order += [(run.start, part) for run, part in zip(runs, parts, strict=True)]
        parts = [part for _, part in sorted(parts_in_order, key=lambda entry: entry[0])]
        out = concat_parts(parts, 1) if parts else rows.unflatten(0, (self.size, 0))
        out = out.permute(2, 1, 0, 3, 4).flatten(2, 3)
        return F.pad(out, (0, 0, 0, 0, 0, self.share - out.shape[1]))


@functools.lru_cache  # for all layers: in a large group it takes the host milliseconds
def exchange_sizes(division: ContextParallelAttention) -> RowCounts:
    """Returns the tokens whose queries of one rank's heads come from each rank, and go to each."""
    n, local = range(division.ranks.size), division.ranks.rank
    counts = (
        [sum(map(len, division.local_query_ranges(rank, division.group))) for rank in n],
        [sum(map(len, division.local_query_ranges(local, rank // division.size))) for rank in n],
    )
    return RowCounts(*counts)


def concat_parts(parts: list[Tensor], dim: int) -> Tensor:
    """Concatenates the parts; a single one is returned without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def heads_sent_per_token(heads: int, kv_heads: int, ranks: int) -> float:
    """Returns the heads that a rank sends per layer and token on average: q, k, v and output."""
    size = math.gcd(heads, ranks)
    saved = 1 / size if size == ranks else 0.5 / size  # another group computes half of the queries
    return 2 * heads * (1 - saved) + 2 * math.lcm(kv_heads, size) / size * (ranks - 1)
