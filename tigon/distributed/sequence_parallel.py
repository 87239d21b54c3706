"""The residual stream between blocks, sharded by tokens over ranks (sequence parallelism).

A GEMM with a gathered input saves only the local tokens, or what they are computed from, and
gathers again in backward. That all-gather overlaps with the GEMM of the input's gradient, and the
reduce-scatter of this gradient with the GEMM of the weight's gradient.
Source: Korthikanti et al., Reducing activation recomputation (arXiv 2205.05198), section 4.2.

# R ranks, B batch, T tokens, N = B T, n = N / R rounded up, tokens of a rank, C model dim
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.distributed.all_reduce import sum_few
from tigon.distributed.collectives import Ranks, alike, ranks_of, sum_over, waited
from tigon.kernels.recompute import How, note, recipe_of


class GatheredTokens:
    """Gathered tokens, gathered again for the backward passes of the layers that read them.

    The gathered tensor is kept until all readers have run: if the tokens are `differentiated`, the
    backward of the gather itself comes last. `own`: how the local tokens are recomputed; `alone`:
    there is a single reader, whose input gradient is the whole gradient.
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
        """Start the all-gather of the saved local tokens; `values` waits for it."""
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
        """Start the reduce-scatter of the only reader's gradient."""
        if self.alone and self.sent is None:
            rows = _padded(gradient, self.ranks)
            self.sent = gradient, gradient._version, self.ranks.begin_scatter_sum(rows)

    def reduced(self, gradient: Tensor) -> Tensor:
        """The gradient of all readers [B, T, C] -> this rank's [n, C] of its sum over ranks."""
        sent, self.sent, self.again = self.sent, None, None
        if sent is not None:
            begun, version, total = sent
            total = waited(total)
            same = begun.data_ptr() == gradient.data_ptr() and begun.shape == gradient.shape
            if same and gradient._version == version:
                return total
        return self.ranks.scatter_sum(_padded(gradient, self.ranks))


class _Gathered(torch.autograd.Function):
    """All-gather: local tokens [1, n, C] -> [B, T, C]; gradients are partial, reduce-scattered."""

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
    """Reduce-scatter: partial sums [R n, C] -> local tokens of the sum [1, n, C]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return _as_row(ranks.scatter_sum(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ranks_of(ctx).gather(grad[0]), None


class _Share(torch.autograd.Function):
    """Replicated [R n, C] -> local tokens [1, n, C]; backward all-gathers the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return _as_row(ranks.own(x).clone())  # a view would keep all of x alive

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ranks_of(ctx).gather(grad[0]), None


def _as_row(x: Tensor) -> Tensor:
    """[n, C] -> [1, n, C], not a view: FSDP2 warns of views in the outputs of a block."""
    return torch.ops.aten._unsafe_view(x, [1, *x.shape])


def _tokens(rows: Tensor, shape: Sequence[int]) -> Tensor:
    """[R n, C] -> [B, T, C], not a view either: notes are not found by a view."""
    return torch.ops.aten._unsafe_view(rows[: shape[0] * shape[1]], shape)


def _padded(x: Tensor, ranks: Ranks) -> Tensor:
    """[B, T, C] -> [R n, C], padded with zeros."""
    rows = x.flatten(0, 1)
    missing = -len(rows) % ranks.size
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


@dataclass(frozen=True, eq=False)
class Summands:
    """What each rank adds to a replicated stream, before the sum: the norm that adds it to the
    stream makes the sum, too, in one kernel (`AddRMSNorm`)."""

    x: Tensor  # [B, T, C]
    ranks: Ranks

    @property
    def total(self) -> Tensor:
        return sum_few(self.x, self.ranks)


@dataclass(frozen=True)
class Stream:
    """The residual stream: sharded by tokens over the ranks, or, if `whole`, replicated.

    Sharding saves the time of norms and the memory of their saved activations. A decoding step has
    too few tokens to shard. `keeps`: gathered tokens are saved for backward, as in a block that
    backward recomputes, where they have just been gathered. `defers`: sums of a replicated stream
    are left to the next norm.
    """

    ranks: Ranks
    shape: tuple[int, int]  # B, T
    whole: bool
    keeps: bool = False
    defers: bool = False

    def begin(self, x: Tensor, *, summands: bool) -> Tensor:
        """[B, T, C], replicated or partial sums (`summands`) -> local tokens [1, n, C], padded with
        zeros."""
        if summands:
            return self._summed(x)
        if self.whole:
            return x
        return _Share.apply(_padded(x, self.ranks), self.ranks)

    def gathered(self, x: Tensor, *, alone: bool) -> Tensor:
        """Local tokens [1, n, C] -> [B, T, C]; gradients are partial, summed over the ranks.

        `alone`: one GEMM reads it. If others do too, the result is the same, but slower.
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

    def summed(self, x: Tensor) -> Tensor | Summands:
        """Partial sums [B, T, C] -> local tokens of the sum [1, n, C], or yet to be summed."""
        return Summands(x, self.ranks) if self.whole and self.defers else self._summed(x)

    def _summed(self, x: Tensor) -> Tensor:
        if self.whole:
            return sum_few(x, self.ranks)
        return _ShareOfSum.apply(_padded(x, self.ranks), self.ranks)

    def own(self, x: Tensor) -> Tensor:
        """The stream on this rank -> [1, m, C]: its m tokens, without padding, each of them on one
        rank only. m may be 0."""
        return self.part(x) if self.whole else x[:, : self._own.stop - self._own.start]

    def part(self, x: Tensor) -> Tensor:
        """Replicated [B, T, ...] -> [1, m, ...], the rows of the tokens that `own` gives."""
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
        """This rank's slice of the N tokens."""
        every = self.shape[0] * self.shape[1]
        first = self.ranks.rank * self._share
        return slice(min(first, every), min(first + self._share, every))

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks, used identically on every rank."""
        return sum_over(x, self.ranks)

    def alike(self, x: Tensor) -> Tensor:
        """A tensor computed identically on every rank, whose gradient is to be counted once."""
        return alike(x, self.ranks)
