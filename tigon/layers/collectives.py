"""What ranks that share a model or its rows exchange in a forward pass, and in its backward pass.

All ranks compute the same loss. The gradient of what they have alike is then the sum over ranks of
what each finds, and that of a rank's own is what it finds.

# R ranks, B batch, T tokens, N = B T, n tokens of a rank, C model dim
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from tigon.kernels._triton import refuse_second_derivative

_ops = torch.ops._c10d_functional


class Sizes(NamedTuple):
    """Rows that a rank exchanges with each."""

    received: Sequence[int]
    sent: Sequence[int]


class Ranks(NamedTuple):
    """This rank among those of a group. Tensors on the meta device need none."""

    group: str  # its name: copies of a model cannot hold the group itself
    rank: int
    size: int

    @classmethod
    def of(cls, group: ProcessGroup) -> Self:
        return cls(group.group_name, group.rank(), group.size())

    def gather(self, x: Tensor) -> Tensor:
        """[n, ...] of each rank -> [R n, ...]."""
        return _waited(_ops.all_gather_into_tensor(x.contiguous(), self.size, self.group))

    def scatter_sum(self, x: Tensor) -> Tensor:
        """[R n, ...] -> of the sum over ranks, this one's [n, ...]."""
        return _waited(_ops.reduce_scatter_tensor(x.contiguous(), "sum", self.size, self.group))

    def sum(self, x: Tensor) -> Tensor:
        return _waited(_ops.all_reduce(x.contiguous(), "sum", self.group))

    def own(self, x: Tensor) -> Tensor:
        """[R n, ...] -> this rank's [n, ...]."""
        return x.tensor_split(self.size)[self.rank]

    def exchange(self, x: Tensor, received: Sequence[int], sent: Sequence[int]) -> Tensor:
        """The first `sent[0]` rows of x go to the first rank, and so on, and `received[0]` come
        from it."""
        return self.exchange_all((x,), [Sizes(received, sent)])[0]

    def exchange_all(self, xs: Sequence[Tensor], sizes: Sequence[Sizes]) -> list[Tensor]:
        """As `exchange`; all are sent before the first is waited for."""
        send = _ops.all_to_all_single
        pairs = zip(xs, sizes, strict=True)
        out = [send(x.contiguous(), list(s.received), list(s.sent), self.group) for x, s in pairs]
        return [_waited(x) for x in out]


def _waited(x: Tensor) -> Tensor:
    """The stream waits for it, not the host."""
    return x if x.is_meta else _ops.wait_tensor(x)


def _ranks(ctx: Any) -> Ranks:
    """Of a backward pass."""
    refuse_second_derivative("an exchange between ranks")
    return ctx.ranks


class _Whole(torch.autograd.Function):
    """What ranks have a share of, to what all have; each uses it for a part of the loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.gather(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _ranks(ctx).scatter_sum(grad), None


def _as_row(x: Tensor) -> Tensor:
    """[n, C] -> [1, n, C], no view: FSDP2 warns of views among what a block returns."""
    return torch.ops.aten._unsafe_view(x, [1, *x.shape])


class _ShareOfSum(torch.autograd.Function):
    """Each rank's summands [R n, C], to a share of the sum [1, n, C]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return _as_row(ranks.scatter_sum(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _ranks(ctx).gather(grad[0]), None


class _Share(torch.autograd.Function):
    """What all have [R n, C], to a share [1, n, C]; its whole gradient goes back to all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return _as_row(ranks.own(x).clone())  # a view would keep the memory of all

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _ranks(ctx).gather(grad[0]), None


class _All(torch.autograd.Function):
    """What ranks have a share of, to what all have and make the same of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.gather(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _ranks(ctx).own(grad), None


class _Sum(torch.autograd.Function):
    """Each rank's summands, to a sum of which all make the same: its gradient is there already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        return ranks.sum(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _SumForParts(torch.autograd.Function):
    """Each rank's summands, to a sum that each uses for a part of the loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.sum(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _ranks(ctx).sum(grad), None


class _PartOfGradient(torch.autograd.Function):
    """What all ranks compute alike from what they have alike: each finds a part of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.ranks.size, None


class _Exchange(torch.autograd.Function):
    """Rows to the ranks that need them; their gradients go the same way back, all of them even
    where a rank uses one alone."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, sizes: Sequence[Sizes], *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.ranks, ctx.sizes = ranks, [Sizes(size.sent, size.received) for size in sizes]
        return tuple(ranks.exchange_all(xs, sizes))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_ranks(ctx).exchange_all(grads, ctx.sizes)


def gather_all(x: Tensor, ranks: Ranks) -> Tensor:
    """[n, ...] of each rank -> [R n, ...], of which all make the same."""
    return _All.apply(x, ranks)


def exchange(
    x: Tensor, ranks: Ranks, received: Sequence[int] = (), sent: Sequence[int] = ()
) -> Tensor:
    """As `Ranks.exchange`, differentiable; without sizes [R, ...] -> [R, ...], a row each."""
    ones = [1] * ranks.size
    return exchange_all((x,), ranks, [Sizes(received or ones, sent or ones)])[0]


def exchange_all(xs: Sequence[Tensor], ranks: Ranks, sizes: Sequence[Sizes]) -> tuple[Tensor, ...]:
    """As `Ranks.exchange_all`, differentiable. A backward pass that reaches one result exchanges
    the gradients of all, so that no rank waits for one that has no use for another."""
    return _Exchange.apply(ranks, sizes, *xs)


def sum_over(x: Tensor, ranks: Ranks) -> Tensor:
    """The sum over ranks, of which all make the same."""
    return _Sum.apply(x, ranks)


def sum_for_parts(x: Tensor, ranks: Ranks) -> Tensor:
    """The sum over ranks, which each uses for what it alone has."""
    return _SumForParts.apply(x, ranks)


@dataclass(frozen=True)
class Stream:
    """The stream between blocks, of which each rank has some tokens, or, `whole`, all of them.

    Some save the norms' time and the memory of what backward needs of them. A step of generation
    has too few tokens to share.
    """

    ranks: Ranks
    shape: tuple[int, int]  # B, T
    whole: bool

    def begin(self, x: Tensor) -> Tensor:
        """[B, T, C], which all have -> the rank's [1, n, C], zeros behind the last token."""
        if self.whole:
            return x
        return _Share.apply(self._padded(x), self.ranks)

    def gathered(self, x: Tensor) -> Tensor:
        """The rank's [1, n, C] -> [B, T, C], which each rank uses for a part of the loss."""
        if self.whole:
            return x
        rows = _Whole.apply(x.flatten(0, 1), self.ranks)
        return rows[: self.shape[0] * self.shape[1]].view(*self.shape, -1)

    def summed(self, x: Tensor) -> Tensor:
        """Each rank's summands [B, T, C] -> of the sum, the rank's [1, n, C]."""
        if self.whole:
            return sum_over(x, self.ranks)
        return _ShareOfSum.apply(self._padded(x), self.ranks)

    def alike(self, x: Tensor) -> Tensor:
        """What all ranks computed alike, so that its gradient is counted once."""
        return _PartOfGradient.apply(x, self.ranks)

    def _padded(self, x: Tensor) -> Tensor:
        """[B, T, C] -> [R n, C]."""
        rows = x.flatten(0, 1)
        missing = -len(rows) % self.ranks.size
        return F.pad(rows, (0, 0, 0, missing)) if missing else rows
