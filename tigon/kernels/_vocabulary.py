"""A head whose vocabulary is cut over a process group: each rank's rows, and what ranks exchange.

# N rows (tokens), V vocab, W rows of a rank's weight with padding, R ranks
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels._cross_entropy_rows import ELSEWHERE
from tigon.kernels._logits import IGNORE_INDEX, Gradient
from tigon.kernels.criteria import Criterion, Divergence


class VocabularyShard(NamedTuple):
    """The rows of a head's weight and bias that this rank has; of the group's ranks in their order.

    Rows of the local weight after these are padding: no result depends on their finite numbers, and
    their gradient is 0.
    """

    group: str  # its name: graphs and copies of a model cannot hold the group itself
    ranks: int
    first: int
    rows: int
    size: int  # V

    @classmethod
    def of(cls, group: str, ranks: int, first: int, rows: int, size: int) -> Self:
        """ValueError for rows that are not among the `size` of the vocabulary."""
        if first < 0 or rows < 0 or first + rows > size:
            raise ValueError(f"rows {first} to {first + rows} are not all in [0, {size})")
        return cls(group, ranks, first, rows, size)

    def check(self, weight: Tensor | None, criteria: Sequence[Criterion]) -> int:
        """The size of the vocabulary, for criteria of a head whose `weight` this rank has."""
        if weight is None or any(isinstance(c, Divergence) for c in criteria):
            raise ValueError("a vocabulary is for a head's weight: of logits, gather the columns")
        if len(weight) < self.rows:
            raise ValueError(f"the weight has {len(weight)} rows, and its shard {self.rows}")
        return self.size

    def word(self) -> str:
        """As the operator takes it."""
        return ":".join(str(x) for x in (self.ranks, self.first, self.rows, self.size, self.group))

    @classmethod
    def read(cls, word: str) -> Self:
        *numbers, group = word.split(":", 4)
        return cls(group, *(int(x) for x in numbers))

    def local(self, targets: Tensor) -> Tensor:
        """Targets as columns of this rank's logits; `ELSEWHERE` where another rank has them."""
        columns = targets - self.first
        here = (columns >= 0) & (columns < self.rows)
        others = torch.where(targets == IGNORE_INDEX, IGNORE_INDEX, ELSEWHERE)
        return columns.where(here, others)

    @property
    def share(self) -> int:
        """Rows of a rank, about: the same number on all."""
        return -(-self.size // self.ranks)

    def without_padding(
        self, logits: Tensor, grad: Gradient | None
    ) -> tuple[Tensor, Gradient | None]:
        """What a criterion sees of a chunk's logits, and of their gradient, whose padding is 0."""
        if logits.shape[1] == self.rows:
            return logits, grad
        shown = logits[:, : self.rows]
        if grad is None:
            return shown, None
        grad.out[:, self.rows :] = 0
        out = shown if grad.out is logits else grad.out[:, : self.rows]
        before = None if grad.before is None else grad.before[:, : self.rows]
        return shown, grad._replace(out=out, before=before)

    def gather(self, x: Tensor) -> Tensor:
        """Every rank's `x`: [R, ...]."""
        if not x.numel():
            return x.new_zeros(self.ranks, *x.shape)
        ops = torch.ops._c10d_functional
        out = ops.all_gather_into_tensor(x.contiguous(), self.ranks, self.group)
        return ops.wait_tensor(out).view(self.ranks, *x.shape)


def join_masses(peaks: Tensor, log_masses: Tensor) -> tuple[Tensor, Tensor]:
    """The logsumexp of all ranks' logits in two numbers, from those of each [R, N]."""
    peak = peaks.amax(0)
    return peak, (log_masses + (peaks - peak)).logsumexp(0)


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, shard: VocabularyShard) -> Tensor:
        width = logits.shape[-1]
        ctx.shard, ctx.padding = shard, width - shard.rows
        left = (max(0, shard.size - i * width) for i in range(shard.ranks))
        return torch.cat([x[..., :n] for x, n in zip(shard.gather(logits), left, strict=True)], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        own = grad.narrow(-1, ctx.shard.first, ctx.shard.rows)
        return F.pad(own, (0, ctx.padding)), None


def join_logits(logits: Tensor, shard: VocabularyShard) -> Tensor:
    """This rank's logits [..., W] to those of all [..., V].

    Their gradient has to be the same on all ranks, as it is where all compute the same of them:
    each takes its own columns.
    """
    width, end = logits.shape[-1], shard.first + shard.rows
    if shard.rows and (shard.first % width or (shard.rows < width and end < shard.size)):
        raise ValueError(
            f"rows {shard.first} to {end} of {shard.size} are no whole part of {width} rows: all "
            "ranks need weights of the same number of rows, with padding only after the last"
        )
    return _Joined.apply(logits, shard)
