"""Packed sequences of a flattened batch, which may continue a shared prefix and see its keys.

# B batch, T query tokens, N = B * T, S key tokens, n sequences
"""

from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor


class KeyCopies(NamedTuple):
    """The token of the flattened batch that each key is a copy of, and the keys of each token."""

    sources: Tensor  # int64 [S]
    order: Tensor  # int64 [S], where the keys of token 0 are, of token 1, ...
    bounds: Tensor  # int64 [N + 1], of each token in `order`


class PrefixedKeys(NamedTuple):
    """The keys of every sequence: those of its prefix, then its own."""

    cu: Tensor  # int32 [n + 1]
    longest: int  # keys of the longest, or more
    copies: KeyCopies | None = None  # None: they stand one behind the other, each once

    @classmethod
    def build(cls, prefixes: Tensor, cu: Tensor, longest: int, total: int) -> Self:
        """Builds the keys from `prefixes` int64 [n, 2] on the host without a sync. `total`: N."""
        lengths = prefixes.diff(dim=1)
        longest += int(lengths.max())
        size = total + int(lengths.sum())
        prefixes, cu = prefixes.to(cu.device, non_blocking=True), cu.long()
        starts = torch.stack((prefixes[:, 0], cu[:-1]), 1).flatten()
        sizes = torch.stack((prefixes.diff(dim=1)[:, 0], cu.diff()), 1).flatten()
        ends = sizes.cumsum(0)
        shifts = (starts - ends + sizes).repeat_interleave(sizes, output_size=size)
        sources = torch.arange(size, device=cu.device) + shifts
        ordered, order = sources.sort(stable=True)
        bounds = torch.searchsorted(ordered, torch.arange(total + 1, device=cu.device))
        cu = F.pad(ends[1::2], (1, 0)).int()
        return cls(cu, longest, KeyCopies(sources, order, bounds))

    def take(self, x: Tensor) -> Tensor:
        """Gathers the keys: x [N, K, D] -> [S, K, D]."""
        return x if self.copies is None else _GatherKeys.apply(x, *self.copies)


class _GatherKeys(torch.autograd.Function):
    """index_select whose backward sums the copies of a token in fp32 and without atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, order: Tensor, bounds: Tensor) -> Tensor:
        ctx.save_for_backward(order, bounds)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        order, bounds = ctx.saved_tensors
        options: dict[str, Any] = {"mode": "sum", "include_last_offset": True}
        dx = F.embedding_bag(order, upstream.flatten(1), bounds, **options)
        return dx.view(-1, *upstream.shape[1:]), None, None, None


class PrefixVisibility(NamedTuple):
    """The keys [first, last) that each token of a row sees before its own sequence.

    The query at q is q - shift - k positions after key k of them.
    """

    first: Tensor  # int64 [B, T], in the row
    last: Tensor  # the same where there is nothing
    shift: Tensor

    @classmethod
    def build(cls, prefixes: Tensor, cu: Tensor, batch: int, tokens: int) -> Self:
        """Builds the ranges from `prefixes` int64 [n, 2] on the host."""
        prefixes, cu = prefixes.to(cu.device, non_blocking=True), cu.long()
        token = torch.arange(batch * tokens, device=cu.device)
        sequence = torch.searchsorted(cu[1:].contiguous(), token, right=True)
        first, last = prefixes[sequence].unbind(1)
        row = token // tokens * tokens
        values = first - row, last - row, cu[sequence] - last
        return cls(*(x.view(batch, tokens) for x in values))

    def slice_queries(self, first: int, end: int) -> Self:
        """Returns the ranges of the tokens [first, end) of each row."""
        return type(self)(*(x[:, first:end] for x in self))

    def pad(self, tokens: int) -> Self:
        """Returns the ranges with `tokens` more tokens per row, which see nothing."""
        return type(self)(*(F.pad(x, (0, tokens)) for x in self))

    def visible(self, at: Any, query: Tensor, key: Tensor, window: int | None) -> Tensor:
        """Whether `query`, with the values at index `at`, sees `key` through its prefix."""
        first, last, shift = (x[at] for x in self)
        seen = (first <= key) & (key < last)
        return seen if window is None else seen & (query - shift - key < window)

    def blocks(self, q0: Tensor, k0: Tensor, block: int, window: int | None) -> Tensor:
        """Returns bool [B, n, m]: whether a block of queries may see a block of keys through
        prefixes.

        `q0` [n, 1] and `k0` [m] are the first tokens of the blocks in the row.
        """
        tokens = self.first.shape[1]
        nonempty = self.first < self.last
        nothing = (self.first, torch.iinfo(torch.int32).max), (self.last, 0), (self.shift, 0)
        each = (
            F.pad(torch.where(nonempty, x, fill), (0, -tokens % block), value=fill)
            .unflatten(1, (-1, block))
            for x, fill in nothing
        )  # fmt: skip
        first, last, shift = each
        k1 = k0 + block - 1
        seen = (k0 < last.amax(-1)[..., None]) & (k1 >= first.amin(-1)[..., None])
        if window is None:
            return seen
        return seen & (q0 - shift.amax(-1)[..., None] - k1 < window)


class Sequences(NamedTuple):
    """The sequences of a flattened batch."""

    cu: Tensor  # int32 [n + 1]: where each begins, and the end of the last
    longest: int  # tokens of the longest, or more; the host must know it to launch a kernel
    keys: PrefixedKeys | None = None  # where they are not those of the same tokens

    def even(self, tokens: int) -> bool:
        """Whether all sequences have one length, so that the batch is rows of it."""
        return self.keys is None and (self.cu.shape[0] - 1) * self.longest == tokens

    @property
    def furthest(self) -> int:
        """The largest number of keys that a query may see."""
        return self.longest if self.keys is None else self.keys.longest
