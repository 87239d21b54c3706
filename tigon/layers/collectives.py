"""What ranks that share a model or its rows exchange in a forward pass, and in its backward pass.

All ranks compute the same loss. The gradient of what they have alike is then the sum over ranks of
what each finds, and that of a rank's own is what it finds.

# R ranks, n rows of a rank
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tigon.kernels._triton import refuse_second_derivative

_ops = torch.ops._c10d_functional


class RowCounts(NamedTuple):
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
        return waited(self.begin_gather(x))

    def begin_gather(self, x: Tensor) -> Tensor:
        """As `gather`; nobody may read it but through `waited`."""
        return _ops.all_gather_into_tensor(x.contiguous(), self.size, self.group)

    def scatter_sum(self, x: Tensor) -> Tensor:
        """[R n, ...] -> of the sum over ranks, this one's [n, ...]."""
        return waited(self.begin_scatter_sum(x))

    def begin_scatter_sum(self, x: Tensor) -> Tensor:
        """As `scatter_sum`; nobody may read it but through `waited`."""
        return _ops.reduce_scatter_tensor(x.contiguous(), "sum", self.size, self.group)

    def sum(self, x: Tensor) -> Tensor:
        return waited(_ops.all_reduce(x.contiguous(), "sum", self.group))

    def own(self, x: Tensor) -> Tensor:
        """[R n, ...] -> this rank's [n, ...]."""
        return x.tensor_split(self.size)[self.rank]

    def exchange(self, x: Tensor, received: Sequence[int], sent: Sequence[int]) -> Tensor:
        """The first `sent[0]` rows of x go to the first rank, and so on, and `received[0]` come
        from it."""
        return self.exchange_all((x,), [RowCounts(received, sent)])[0]

    def exchange_all(self, xs: Sequence[Tensor], sizes: Sequence[RowCounts]) -> list[Tensor]:
        """As `exchange`; all are sent before the first is waited for."""
        send = _ops.all_to_all_single
        pairs = zip(xs, sizes, strict=True)
        out = [send(x.contiguous(), list(s.received), list(s.sent), self.group) for x, s in pairs]
        return [waited(x) for x in out]


def waited(x: Tensor) -> Tensor:
    """What was begun: the stream waits for it, not the host."""
    return x if x.is_meta else _ops.wait_tensor(x)


def ranks_of(ctx: Any) -> Ranks:
    """Of a backward pass."""
    refuse_second_derivative("an exchange between ranks")
    return ctx.ranks


class _All(torch.autograd.Function):
    """What ranks have a share of, to what all have and make the same of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.gather(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ranks_of(ctx).own(grad), None


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
        return ranks_of(ctx).sum(grad), None


class _PartOfGradient(torch.autograd.Function):
    """What all ranks compute alike from what they have alike: each finds a part of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        # No view: FSDP2 warns of views among what the head returns
        return torch.ops.aten._unsafe_view(x, x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.ranks.size, None


class _Exchange(torch.autograd.Function):
    """Rows to the ranks that need them; their gradients go the same way back, all of them even
    where a rank uses one alone."""

    @staticmethod
    def forward(
        ctx: Any, ranks: Ranks, sizes: Sequence[RowCounts], *xs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.ranks, ctx.sizes = ranks, [RowCounts(size.sent, size.received) for size in sizes]
        return tuple(ranks.exchange_all(xs, sizes))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ranks_of(ctx).exchange_all(grads, ctx.sizes)


def gather_all(x: Tensor, ranks: Ranks) -> Tensor:
    """[n, ...] of each rank -> [R n, ...], of which all make the same."""
    return _All.apply(x, ranks)


def exchange(
    x: Tensor, ranks: Ranks, received: Sequence[int] = (), sent: Sequence[int] = ()
) -> Tensor:
    """As `Ranks.exchange`, differentiable; without sizes [R, ...] -> [R, ...], a row each."""
    ones = [1] * ranks.size
    return exchange_all((x,), ranks, [RowCounts(received or ones, sent or ones)])[0]


def exchange_all(
    xs: Sequence[Tensor], ranks: Ranks, sizes: Sequence[RowCounts]
) -> tuple[Tensor, ...]:
    """As `Ranks.exchange_all`, differentiable. A backward pass that reaches one result exchanges
    the gradients of all, so that no rank waits for one that has no use for another."""
    return _Exchange.apply(ranks, sizes, *xs)


def alike(x: Tensor, ranks: Ranks) -> Tensor:
    """What all ranks computed alike, so that its gradient is counted once."""
    return _PartOfGradient.apply(x, ranks)


def sum_over(x: Tensor, ranks: Ranks) -> Tensor:
    """The sum over ranks, of which all make the same."""
    return _Sum.apply(x, ranks)


def sum_for_parts(x: Tensor, ranks: Ranks) -> Tensor:
    """The sum over ranks, which each uses for what it alone has."""
    return _SumForParts.apply(x, ranks)
