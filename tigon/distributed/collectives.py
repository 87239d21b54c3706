"""Differentiable collectives among ranks that split a model or its rows.

All ranks compute the same loss. The gradient of a replicated tensor is the sum over ranks of their
partial gradients; that of a sharded tensor is local.

# R ranks, n rows of a rank
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tigon.kernels.loss.vocab_parallel import VocabularyShard
from tigon.kernels.runtime import refuse_second_derivative

_ops = torch.ops._c10d_functional


class RowCounts(NamedTuple):
    """The numbers of rows that a rank receives from each rank, and sends to it."""

    received: Sequence[int]
    sent: Sequence[int]


class Ranks(NamedTuple):
    """This rank and its process group, which tensors on the meta device do not need."""

    group: str  # its name: a process group cannot be deep-copied with the model
    rank: int
    size: int

    @classmethod
    def of(cls, group: ProcessGroup) -> Self:
        return cls(group.group_name, group.rank(), group.size())

    @classmethod
    def sharing(cls, vocabulary: VocabularyShard) -> Self:
        return cls(vocabulary.group, vocabulary.first // vocabulary.share, vocabulary.ranks)

    def gather(self, x: Tensor) -> Tensor:
        """All-gather: [n, ...] of each rank -> [R n, ...]."""
        return wait_tensor(self.start_all_gather(x))

    def start_all_gather(self, x: Tensor) -> Tensor:
        """`gather`, asynchronous: pass the result to `wait_tensor` before reading it."""
        return _ops.all_gather_into_tensor(x.contiguous(), self.size, self.group)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Reduce-scatter: partial sums [R n, ...] -> this rank's [n, ...] of the sum."""
        return wait_tensor(self.start_reduce_scatter(x))

    def start_reduce_scatter(self, x: Tensor) -> Tensor:
        """`reduce_scatter`, asynchronous: pass the result to `wait_tensor` before reading it."""
        return _ops.reduce_scatter_tensor(x.contiguous(), "sum", self.size, self.group)

    def sum(self, x: Tensor) -> Tensor:
        """All-reduces: the sum of x over the ranks, in new memory on each."""
        return wait_tensor(_ops.all_reduce(x.contiguous(), "sum", self.group))

    def local_part(self, x: Tensor) -> Tensor:
        """Returns this rank's [n, ...] of [R n, ...]."""
        return x.tensor_split(self.size)[self.rank]

    def exchange(self, x: Tensor, received: Sequence[int], sent: Sequence[int]) -> Tensor:
        """All-to-all: sends the first `sent[0]` rows of x to rank 0, the next `sent[1]` to rank 1,
        and so on. Returns the rows from rank 0, `received[0]` of them, then from rank 1, ..."""
        return self.exchange_all((x,), [RowCounts(received, sent)])[0]

    def exchange_all(self, xs: Sequence[Tensor], sizes: Sequence[RowCounts]) -> list[Tensor]:
        """`exchange` of several tensors; all are sent before the first is waited for."""
        send = _ops.all_to_all_single
        pairs = zip(xs, sizes, strict=True)
        out = [send(x.contiguous(), list(s.received), list(s.sent), self.group) for x, s in pairs]
        return [wait_tensor(x) for x in out]


def wait_tensor(x: Tensor) -> Tensor:
    """Returns the result of a collective: the current stream waits for it, the host does not."""
    return x if x.is_meta else _ops.wait_tensor(x)


def backward_ranks(ctx: Any) -> Ranks:
    """Returns `ctx.ranks`; raises RuntimeError in a backward pass that is to be differentiated."""
    refuse_second_derivative("an exchange between ranks")
    return ctx.ranks


class _Collective(torch.autograd.Function):
    """Calls a method of `ranks` by its name, and in backward another one on the gradient, which
    without one is passed on as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, method: str, backward: str | None) -> Tensor:
        ctx.ranks, ctx.backward_method = ranks, backward
        return getattr(ranks, method)(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.backward_method is not None:
            grad = getattr(backward_ranks(ctx), ctx.backward_method)(grad)
        return grad, None, None, None


class _ScaleReplicatedGrad(torch.autograd.Function):
    """Identity of a tensor that is computed on every rank from replicated inputs: backward divides
    by the ranks, so that the sum of their gradients counts it once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        # Not a view: FSDP2 warns of views in the outputs of the head
        return torch.ops.aten._unsafe_view(x, x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.ranks.size, None


class _AllToAll(torch.autograd.Function):
    """All-to-all of rows; backward sends their gradients back."""

    @staticmethod
    def forward(
        ctx: Any, ranks: Ranks, sizes: Sequence[RowCounts], *xs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.ranks, ctx.sizes = ranks, [RowCounts(size.sent, size.received) for size in sizes]
        return tuple(ranks.exchange_all(xs, sizes))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *backward_ranks(ctx).exchange_all(grads, ctx.sizes)


def gather_from_group(x: Tensor, ranks: Ranks) -> Tensor:
    """Gathers [n, ...] of each rank to [R n, ...], whose gradient is the same on every rank:
    backward takes this rank's part."""
    return _Collective.apply(x, ranks, "gather", "local_part")


def all_to_all(
    x: Tensor, ranks: Ranks, received: Sequence[int] = (), sent: Sequence[int] = ()
) -> Tensor:
    """`Ranks.exchange`, differentiable; without sizes [R, ...] -> [R, ...], a row for each rank."""
    ones = [1] * ranks.size
    return all_to_all_many((x,), ranks, [RowCounts(received or ones, sent or ones)])[0]


def all_to_all_many(
    xs: Sequence[Tensor], ranks: Ranks, sizes: Sequence[RowCounts]
) -> tuple[Tensor, ...]:
    """`Ranks.exchange_all`, differentiable.

    A backward pass that reaches one result exchanges the gradients of all, so that no rank waits
    for a rank that does not use that result.
    """
    return _AllToAll.apply(ranks, sizes, *xs)


def scale_replicated_grad(x: Tensor, ranks: Ranks) -> Tensor:
    """Returns x, which is the same on all ranks; backward divides the gradient by their number."""
    return _ScaleReplicatedGrad.apply(x, ranks)


def reduce_from_group(x: Tensor, ranks: Ranks) -> Tensor:
    """Returns the sum over ranks; backward passes the gradient on as it is."""
    return _Collective.apply(x, ranks, "sum", None)


def all_reduce(x: Tensor, ranks: Ranks) -> Tensor:
    """Returns the sum over ranks, which each uses for its own part of the loss: gradients are
    partial, and backward sums them, too."""
    return _Collective.apply(x, ranks, "sum", "sum")


def check_same_on_all_ranks(
    groups: Sequence[Ranks], call: str, arguments: Mapping[str, Any], device: torch.device
) -> None:
    """Raises ValueError on all ranks if they passed different arguments to `call`.

    They would otherwise wait for each other without end, or compute a mix of both. `groups`: this
    rank's; each gets one message, of tensors on `device`. Arguments are tensors, or have a repr
    that shows all of them.
    """
    if not groups:
        return
    digests = torch.tensor([[_digest(value) for value in arguments.values()]], device=device)
    for ranks in groups:
        digests = ranks.gather(digests)  # [ranks, arguments], at last those of all groups
    differs = (digests != digests[:1]).any(0).tolist()
    if any(differs):
        names = ", ".join(name for name, differ in zip(arguments, differs, strict=True) if differ)
        raise ValueError(
            f"{call}: the {len(digests)} ranks that share the model were given different {names}. "
            "All of them compute the same: give each the same"
        )


def _digest(value: Any) -> int:
    """Returns a 64-bit hash, as an int64, of a tensor's shape and bytes or a value's repr."""
    if isinstance(value, Tensor):
        data_bytes = value.detach().cpu().reshape(-1).view(torch.uint8)  # numpy has no bfloat16
        data = repr(tuple(value.shape)).encode() + data_bytes.numpy().tobytes()
    else:
        data = repr(value).encode()
    hashed = hashlib.blake2b(data, digest_size=8).digest()
    return int.from_bytes(hashed, "little", signed=True)
