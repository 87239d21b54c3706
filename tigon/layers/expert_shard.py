"""Expert parallelism: each rank of a group has some of the experts, and gets the tokens for them.

# N tokens of this rank, k experts per token, S = N k slots, R slots that this rank's experts get,
# E experts of all ranks, p ranks, C model dim
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tigon.kernels._triton import refuse_second_derivative
from tigon.kernels.expert_rows import combine_rows, spread_rows
from tigon.kernels.grouped_mlp import sorted_slots

Sizes = Sequence[int]


def _exchange(rows: Tensor, received: Sizes, sent: Sizes, group: dist.ProcessGroup) -> Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), list(received), list(sent), group=group)
    return out


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, received: Sizes, sent: Sizes, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sizes = sent, received
        ctx.group = group
        return _exchange(rows, received, sent, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        refuse_second_derivative("an exchange of rows between ranks")
        received, sent = ctx.sizes
        return _exchange(grad, received, sent, ctx.group), None, None, None


@dataclass(frozen=True)
class ExpertShard:
    """The group whose rank r has the experts from r E / p to (r + 1) E / p."""

    group: dist.ProcessGroup
    experts: int  # E

    def run(
        self,
        own: Callable[[Tensor, Tensor, Tensor], Tensor],
        x: Tensor,  # [N, C]
        experts: Tensor,  # [N, k] int64, in [0, E)
        weights: Tensor,  # [N, k]
    ) -> Tensor:
        """[N, C]: the weighted sum of what the experts of all ranks make of this rank's tokens.

        `own(x [R, C], experts [R, 1], weights [R, 1])` gives [R, C] by this rank's experts, whose
        numbers begin at 0. Every rank of the group calls it as often; one may have no tokens. No
        token is dropped, so the host waits for the device once, to learn how many rows come.
        """
        k, ranks = experts.shape[1], dist.get_world_size(self.group)
        each = self.experts // ranks
        order, inverse, ends = sorted_slots(experts, self.experts)
        counts = torch.diff(ends, prepend=ends.new_zeros(1))  # [E]
        arriving = torch.empty_like(counts)  # [p, E / p]: what each rank sends to own experts
        dist.all_to_all_single(arriving, counts, group=self.group)
        sums = torch.stack((arriving.view(ranks, each), counts.view(ranks, each))).sum(2)
        received, sent = sums.tolist()
        numbers = torch.arange(each, device=x.device).repeat(ranks)
        chosen = numbers.repeat_interleave(arriving, output_size=sum(received))

        rows = _Exchange.apply(spread_rows(x, inverse, k), received, sent, self.group)
        scales = _Exchange.apply(weights.flatten()[order], received, sent, self.group)
        y = own(rows, chosen[:, None], scales[:, None])
        return combine_rows(_Exchange.apply(y, sent, received, self.group), inverse, k)
