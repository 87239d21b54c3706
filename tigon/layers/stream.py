"""The stream between blocks, of which each of several ranks has some tokens.

A product whose input was gathered keeps the rank's own tokens alone, or what these are computed
from, and gathers anew in backward. There the gather runs beside the product that makes the input's
gradient, and the sum of that over the ranks beside the product that makes the weight's.
Source: Korthikanti et al., Reducing activation recomputation (arXiv 2205.05198), section 4.2.

# R ranks, B batch, T tokens, N = B T, n = N / R rounded up, tokens of a rank, C model dim
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels._rebuilt import How, note, recipe_of
from tigon.layers.collectives import Ranks, alike, ranks_of, sum_over, waited
from tigon.layers.symmetric import sum_few


class GatheredTokens:
    """Tokens that were gathered, as readers' backward passes have them again.

    What is in flight or there stays until all of them have computed: the node that gathered comes
    last, if the tokens are `differentiated`. `own`: how the rank's are computed again; `alone`: one
    reader makes the whole gradient.
    """

    def __init__(
        self,
        ranks: Ranks,
        shape: tuple[int, ...],
        own: How | None,
        *,
        keeps: bool,
        alone: bool,
        differentiated: bool,
    ):
        self.ranks, self.shape, self.own, self.keeps = ranks, shape, own, keeps
        self.alone, self.differentiated = alone, differentiated
        self.again: Tensor | None = None  # [R n, C]
        self.sent: tuple[Tensor, int, Tensor] | None = None  # a gradient, its version, and its sum

    def fetch(self, kept: Sequence[Tensor | None]) -> None:
        """Begin to gather what was kept; `values` waits for it."""
        if self.again is None and not self.keeps:
            own = kept[0] if self.own is None else self.own.compute(*kept, *self.own.constants)
            assert own is not None
            self.again = self.ranks.begin_gather(own.flatten(0, 1))

    def values(self, *kept: Tensor | None) -> Tensor:
        """[B, T, C]."""
        self.fetch(kept)
        if self.keeps:
            assert kept[0] is not None
            return kept[0]
        assert self.again is not None
        y = _tokens(waited(self.again), self.shape)
        if not self.differentiated:
            self.again = None
        return y

    def reduce(self, gradient: Tensor) -> None:
        """Begin to add up over the ranks what the only reader has made."""
        if self.alone and self.sent is None:
            rows = _padded(gradient, self.ranks)
            self.sent = gradient, gradient._version, self.ranks.begin_scatter_sum(rows)

    def reduced(self, gradient: Tensor) -> Tensor:
        """[B, T, C] of all readers -> of the sum over ranks, this one's [n, C]."""
        sent, self.sent, self.again = self.sent, None, None
        if sent is not None:
            begun, version, total = sent
            total = waited(total)
            same = begun.data_ptr() == gradient.data_ptr() and begun.shape == gradient.shape
            if same and gradient._version == version:
                return total
        return self.ranks.scatter_sum(_padded(gradient, self.ranks))


class _Gathered(torch.autograd.Function):
    """The rank's tokens [1, n, C] -> [B, T, C], which each rank uses for a part of the loss."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ranks: Ranks, shape: tuple[int, int], gathering: Any
    ) -> Tensor:
        ctx.ranks, ctx.shape, ctx.gathering = ranks, x.shape, gathering
        return _tokens(ranks.gather(x.flatten(0, 1)), (*shape, x.shape[-1]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ranks, gathering = ranks_of(ctx), ctx.gathering
        if gathering is None:
            grad = ranks.scatter_sum(_padded(grad, ranks))
        else:
            grad = gathering.reduced(grad)
        return grad.view(ctx.shape), None, None, None


class _ShareOfSum(torch.autograd.Function):
    """Each rank's summands [R n, C], to a share of the sum [1, n, C]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return _as_row(ranks.scatter_sum(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ranks_of(ctx).gather(grad[0]), None


class _Share(torch.autograd.Function):
    """What all have [R n, C], to a share [1, n, C]; its whole gradient goes back to all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return _as_row(ranks.own(x).clone())  # a view would keep the memory of all

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ranks_of(ctx).gather(grad[0]), None


def _as_row(x: Tensor) -> Tensor:
    """[n, C] -> [1, n, C], no view: FSDP2 warns of views among what a block returns."""
    return torch.ops.aten._unsafe_view(x, [1, *x.shape])


def _tokens(rows: Tensor, shape: Sequence[int]) -> Tensor:
    """[R n, C] -> [B, T, C], no view either: of views, notes are not found."""
    return torch.ops.aten._unsafe_view(rows[: shape[0] * shape[1]], shape)


def _padded(x: Tensor, ranks: Ranks) -> Tensor:
    """[B, T, C] -> [R n, C], zeros behind the last token."""
    rows = x.flatten(0, 1)
    missing = -len(rows) % ranks.size
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


@dataclass(frozen=True)
class Stream:
    """Of which each rank has some tokens, or, `whole`, all of them.

    Some save the norms' time and the memory of what backward needs of them. A step of generation
    has too few tokens to share. `keeps`: what is gathered stays for backward, as where that has
    just gathered it to compute a block again.
    """

    ranks: Ranks
    shape: tuple[int, int]  # B, T
    whole: bool
    keeps: bool = False

    def begin(self, x: Tensor, *, summands: bool) -> Tensor:
        """[B, T, C], which all have or of which each has a summand -> the rank's [1, n, C], zeros
        behind the last token."""
        if summands:
            return self.summed(x)
        if self.whole:
            return x
        return _Share.apply(_padded(x, self.ranks), self.ranks)

    def gathered(self, x: Tensor, *, alone: bool) -> Tensor:
        """The rank's [1, n, C] -> [B, T, C], which each rank uses for a part of the loss.

        `alone`: one product is to read it. If others do, it takes longer.
        """
        if self.whole:
            return x
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return _Gathered.apply(x, self.ranks, self.shape, None)
        recipe = None if self.keeps else recipe_of(x)
        shape = (*self.shape, x.shape[-1])
        own = None if recipe is None else recipe.how
        how = {"keeps": self.keeps, "alone": alone, "differentiated": x.requires_grad}
        gathering = GatheredTokens(self.ranks, shape, own, **how)
        y = _Gathered.apply(x, self.ranks, self.shape, gathering)
        kept = (y if self.keeps else x,) if recipe is None else recipe.kept
        note(y, gathering.values, kept, remote=gathering)
        return y

    def summed(self, x: Tensor) -> Tensor:
        """Each rank's summands [B, T, C] -> of the sum, the rank's [1, n, C]."""
        if self.whole:
            return sum_few(x, self.ranks)
        return _ShareOfSum.apply(_padded(x, self.ranks), self.ranks)

    def own(self, x: Tensor) -> Tensor:
        """The stream on this rank -> [1, m, C]: m tokens that no other rank has, without what fills
        up the last shares. A rank may have none."""
        return self.part(x) if self.whole else x[:, : self._own.stop - self._own.start]

    def part(self, x: Tensor) -> Tensor:
        """What all have [B, T, ...] -> [1, m, ...], of the tokens that `own` gives."""
        return x.flatten(0, 1)[None, self._own]

    def joined(self, x: Tensor) -> Tensor:
        """The inverse of `own`."""
        if missing := self._share - x.shape[1]:
            x = F.pad(x, (0, 0, 0, missing))
        if self.whole:
            return _tokens(self.ranks.gather(x[0]), (*self.shape, x.shape[-1]))
        return x

    @property
    def _share(self) -> int:
        """n."""
        return -(-self.shape[0] * self.shape[1] // self.ranks.size)

    @property
    def _own(self) -> slice:
        """Of the N tokens, this rank's."""
        every = self.shape[0] * self.shape[1]
        first = self.ranks.rank * self._share
        return slice(min(first, every), min(first + self._share, every))

    def sum(self, x: Tensor) -> Tensor:
        """Over the ranks, of which all make the same."""
        return sum_over(x, self.ranks)

    def alike(self, x: Tensor) -> Tensor:
        """What all ranks computed alike, so that its gradient is counted once."""
        return alike(x, self.ranks)
