"""Expert parallelism: each rank of a group has some of the experts, and gets the tokens for them.

# N tokens of this rank, k experts per token, S = N k slots, R slots that this rank's experts get,
# E experts of all ranks, p ranks, C model dim
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tigon.kernels.expert_rows import combine_rows, spread_rows
from tigon.kernels.grouped_mlp import sorted_slots
from tigon.layers.collectives import Ranks, exchange


@dataclass(frozen=True)
class ExpertShard:
    """Ranks of which rank r has the experts from r E / p to (r + 1) E / p."""

    ranks: Ranks
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
        k, ranks = experts.shape[1], self.ranks.size
        each = self.experts // ranks
        order, inverse, ends = sorted_slots(experts, self.experts)
        counts = torch.diff(ends, prepend=ends.new_zeros(1))  # [E]
        evenly = [each] * ranks
        # [p, E / p]: what each rank sends to own experts
        arriving = self.ranks.exchange(counts, evenly, evenly)
        sums = torch.stack((arriving.view(ranks, each), counts.view(ranks, each))).sum(2)
        # On the meta device there are no numbers: as many for each rank
        received, sent = [evenly_split(len(order), ranks)] * 2 if x.is_meta else sums.tolist()
        numbers = torch.arange(each, device=x.device).repeat(ranks)
        chosen = numbers.repeat_interleave(arriving, output_size=sum(received))

        rows = exchange(spread_rows(x, inverse, k), self.ranks, received, sent)
        scales = exchange(weights.flatten()[order], self.ranks, received, sent)
        y = own(rows, chosen[:, None], scales[:, None])
        return combine_rows(exchange(y, self.ranks, sent, received), inverse, k)


def evenly_split(count: int, parts: int) -> list[int]:
    return [count // parts + (i < count % parts) for i in range(parts)]
