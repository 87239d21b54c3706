"""Expert parallelism: each rank of a group has some of the experts and receives their tokens.

A token is sent once to each rank that has any of its experts, with the numbers and weights of all
of them, and one row returns from each: the weighted sum over the experts there.

# N tokens of this rank, k experts per token, E experts of all ranks, p ranks, M rows that this rank
# sends, R that it receives, C model dim
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.distributed.all_reduce import all_reduce_small
from tigon.distributed.collectives import Ranks
from tigon.kernels.mlp.grouped_mlp_passes import UNKNOWN_SLOTS
from tigon.kernels.mlp.permute import combine_rows, spread_rows
from tigon.kernels.runtime import refuse_second_derivative


class DispatchSizes(NamedTuple):
    """The numbers of rows that the host has to know."""

    sent: list[int]  # [p], rows to each rank
    received: list[int]  # [p], rows from each
    slots: int  # experts of this rank that the received rows are for, of all rows together


@dataclass(frozen=True)
class TokenRoute:
    """Where the tokens of one pass go; the row counts are on their way to the host."""

    send_rows: Tensor  # [N p], a token's row among those sent; M or more if the rank needs none
    counts: Tensor  # [2 p + 1] on the host
    counts_ready: torch.cuda.Event | None  # None: they are on the host

    def sizes(self) -> DispatchSizes:
        """Waits until the row counts are on the host and returns them."""
        if self.counts_ready is not None:
            self.counts_ready.synchronize()
        *rows, slots = self.counts.tolist()
        ranks = len(rows) // 2
        return DispatchSizes(rows[:ranks], rows[ranks:], slots)


class _ToExperts(torch.autograd.Function):
    """Sends `rows`, copies of tokens x, to the ranks that need them; returns those that come.

    Backward sums the gradients that return for each token of x.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rows: Tensor, send_rows: Tensor, ranks: Ranks, sizes: DispatchSizes
    ) -> Tensor:
        ctx.save_for_backward(send_rows)
        ctx.ranks, ctx.sizes = ranks, sizes
        return ranks.exchange(rows[: sum(sizes.sent)], sizes.received, sizes.sent)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("an exchange between ranks")
        (send_rows,), sizes = ctx.saved_tensors, ctx.sizes
        rows = ctx.ranks.exchange(grad, sizes.sent, sizes.received)
        return combine_rows(rows, send_rows, None, ctx.ranks.size), None, None, None, None


class _FromExperts(torch.autograd.Function):
    """Sends rows back to their ranks; returns [N, C], each token's sum of those that come."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, send_rows: Tensor, ranks: Ranks, sizes: DispatchSizes
    ) -> Tensor:
        ctx.save_for_backward(send_rows)
        ctx.ranks, ctx.sizes = ranks, sizes
        rows = ranks.exchange(y, sizes.sent, sizes.received)
        return combine_rows(rows, send_rows, None, ranks.size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("an exchange between ranks")
        (send_rows,), sizes = ctx.saved_tensors, ctx.sizes
        rows = spread_rows(grad.contiguous(), send_rows, ctx.ranks.size, sum(sizes.sent))
        return ctx.ranks.exchange(rows, sizes.received, sizes.sent), None, None, None


@dataclass(frozen=True)
class ExpertShard:
    """Experts divided over ranks: rank r has those from r E / p to (r + 1) E / p."""

    ranks: Ranks
    experts: int  # E

    @property
    def experts_per_rank(self) -> int:
        """E / p, the experts of each rank."""
        return self.experts // self.ranks.size

    def rows(self, tokens: int, k: int) -> int:
        """Estimates the rows that a rank sends to each rank, for evenly chosen experts."""
        without = math.comb(self.experts - self.experts_per_rank, k) / math.comb(self.experts, k)
        return round(tokens * (1 - without))

    def route(self, experts: Tensor) -> TokenRoute:
        """Routes tokens to experts [N, k] int64 in [0, E), without waiting for the device.

        Every rank of the group calls it equally often; one may have no tokens.
        """
        ranks = self.ranks.size
        numbers = torch.arange(ranks, device=experts.device)
        chosen = (experts // self.experts_per_rank)[..., None] == numbers
        slots = chosen.sum(1)  # [N, p], of each rank
        needed = slots > 0
        first = needed.T.flatten()  # those of the first rank, then of the second ...
        send_rows = torch.where(first, first.cumsum(0) - 1, len(first))
        sent = torch.stack((needed.sum(0), slots.sum(0)), 1)  # [p, 2]
        ones = [1] * ranks
        received = self.ranks.exchange(sent, ones, ones)
        counts = torch.cat((sent[:, 0], received[:, 0], received[:, 1].sum(0, keepdim=True)))
        counts_ready = None
        if counts.is_meta:  # without numbers: as it would be on average
            each = self.rows(*experts.shape)
            counts = torch.tensor([each] * (2 * ranks) + [experts.numel()], device="cpu")
        if counts.is_cuda:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "tokens for experts on other ranks are in no CUDA graph: the host has to know "
                    "how many come. generate(cache_implementation='dynamic') captures none"
                )
            counts = counts.to("cpu", non_blocking=True)  # to pinned memory
            counts_ready = torch.cuda.Event()
            counts_ready.record()
        return TokenRoute(send_rows.view(ranks, -1).T.flatten(), counts, counts_ready)

    def run(
        self,
        run_local: Callable[[Tensor, Tensor, Tensor, int], Tensor],
        route: TokenRoute,
        x: Tensor,  # [N, C]
        experts: Tensor,  # [N, k] int64, of which the route was made
        weights: Tensor,  # [N, k]
    ) -> Tensor:
        """Returns [N, C], the weighted sum over all ranks' experts for this rank's tokens.

        `run_local(x [R, C], experts [R, k], weights [R, k], slots)` computes [R, C] by this rank's
        experts, numbered from 0; `slots` of the experts are valid, the rest are E / p. No token is
        dropped, so the host waits for the device once, to learn how many rows come.
        """
        ranks, k = self.ranks, experts.shape[1]
        exact = torch.promote_types(weights.dtype, torch.float32)  # has all numbers of experts
        chosen = torch.cat((weights.to(exact), experts.to(exact)), 1)
        # Copied before it is known how many are sent, to have work while the host waits
        most = min(k, ranks.size) * len(x)
        copies = [spread_rows(t.detach(), route.send_rows, ranks.size, most) for t in (chosen, x)]
        sizes = route.sizes()
        args = route.send_rows, ranks, sizes
        chosen = _ToExperts.apply(chosen, copies.pop(0), *args)
        rows = _ToExperts.apply(x, copies.pop(), *args)
        weights, numbers = chosen[:, :k].to(weights.dtype), chosen[:, k:].detach()
        y = run_local(rows, self._numbers(numbers.to(torch.int64)), weights, sizes.slots)
        return _FromExperts.apply(y, *args)

    def run_replicated(
        self,
        run_local: Callable[[Tensor, Tensor, Tensor, int], Tensor],
        x: Tensor,  # [N, C]
        experts: Tensor,  # [N, k] int64
        weights: Tensor,  # [N, k]
    ) -> Tensor:
        """`run` of tokens that all ranks have, as in a step of generation, without gradients.

        Each rank runs its own experts and the results are summed: one message of known size, so
        that the host waits for nothing and a CUDA graph can capture it.
        """
        numbers = self._numbers(experts)
        slots = UNKNOWN_SLOTS if x.is_cuda else int((numbers < self.experts_per_rank).sum())
        return all_reduce_small(run_local(x, numbers, weights, slots), self.ranks)

    def _numbers(self, experts: Tensor) -> Tensor:
        """Numbers the experts within this rank; E / p if it does not have the expert."""
        numbers = (experts - self.ranks.rank * self.experts_per_rank).remainder(self.experts)
        return numbers.clamp_(max=self.experts_per_rank)  # those of other ranks come behind its own
