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

from tigon.distributed.all_reduce import all_reduce_small
from tigon.distributed.collectives import Ranks, backward_ranks, wait_tensor
from tigon.kernels.recompute import RecomputeFn, find_recompute, note_recompute


class GatheredTokens:
    """Gathered tokens, gathered again in backward for the layers that read them.

    `recompute_local` recomputes the local tokens; None if they are saved. `saves_gathered`: the
    gathered tokens are saved. `single_reader`: the gradient of the only reader is the sum.
    `differentiated`: the gather's own backward comes last and frees the memory.
    """

    def __init__(
        self,
        ranks: Ranks,
        shape: tuple[int, ...],
        recompute_local: RecomputeFn | None,
        *,
        saves_gathered: bool,
        single_reader: bool,
        differentiated: bool,
    ):
        self.ranks, self.shape = ranks, shape
        self.recompute_local, self.saves_gathered = recompute_local, saves_gathered
        self.single_reader, self.differentiated = single_reader, differentiated
        self.gathering: Tensor | None = None  # [R n, C]
        # A gradient, its version, and its sum over ranks
        self.reduction: tuple[Tensor, int, Tensor] | None = None

    def fetch(self, saved: Sequence[Tensor | None]) -> None:
        """Starts the all-gather for `values`, unless it has started or tokens are saved."""
        if self.gathering is None and not self.saves_gathered:
            fn = self.recompute_local
            local = saved[0] if fn is None else fn.compute(*saved, *fn.constants)
            assert local is not None
            self.gathering = self.ranks.start_all_gather(local.flatten(0, 1))

    def values(self, *saved: Tensor | None) -> Tensor:
        """Returns the gathered tokens [B, T, C]: saved ones, or those of an all-gather.

        It starts one unless `fetch` has, and lets the current stream wait for it.
        """
        self.fetch(saved)
        if self.saves_gathered:
            assert saved[0] is not None
            return saved[0]
        assert self.gathering is not None
        y = _tokens(wait_tensor(self.gathering), self.shape)
        if not self.differentiated:
            self.gathering = None
        return y

    def reduce(self, gradient: Tensor) -> None:
        """Starts the reduce-scatter of the only reader's gradient; with more, does nothing."""
        if self.single_reader and self.reduction is None:
            rows = _pad_tokens(gradient, self.ranks)
            self.reduction = gradient, gradient._version, self.ranks.start_reduce_scatter(rows)

    def local_gradient(self, gradient: Tensor) -> Tensor:
        """Sums the gradient [B, T, C] of all readers over ranks; returns this rank's [n, C]."""
        reduction, self.reduction, self.gathering = self.reduction, None, None
        if reduction is not None:
            started, version, total = reduction
            total = wait_tensor(total)
            same = started.data_ptr() == gradient.data_ptr() and started.shape == gradient.shape
            if same and gradient._version == version:
                return total
        return self.ranks.reduce_scatter(_pad_tokens(gradient, self.ranks))


class _GatherTokens(torch.autograd.Function):
    """All-gather: local tokens [1, n, C] -> [B, T, C]; gradients are partial, reduce-scattered."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ranks: Ranks, shape: tuple[int, int], gathering: Any
    ) -> Tensor:
        ctx.ranks, ctx.shape, ctx.gathering = ranks, x.shape, gathering
        return _tokens(ranks.gather(x.flatten(0, 1)), (*shape, x.shape[-1]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ranks, gathering = backward_ranks(ctx), ctx.gathering
        if gathering is None:
            grad = ranks.reduce_scatter(_pad_tokens(grad, ranks))
        else:
            grad = gathering.local_gradient(grad)
        return grad.view(ctx.shape), None, None, None


class _ShardTokens(torch.autograd.Function):
    """[R n, C], `partial` sums or replicated, to local tokens [1, n, C]; backward all-gathers the
    gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, partial: bool) -> Tensor:
        ctx.ranks = ranks
        # A copy, as a view would keep all of x alive
        y = ranks.reduce_scatter(x) if partial else ranks.local_part(x).clone()
        # No view: FSDP2 warns of views among the outputs of a block
        return torch.ops.aten._unsafe_view(y, [1, *y.shape])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return backward_ranks(ctx).gather(grad[0]), None, None


def _tokens(rows: Tensor, shape: Sequence[int]) -> Tensor:
    """[R n, C] -> [B, T, C], not a view, through which notes are not found."""
    return torch.ops.aten._unsafe_view(rows[: shape[0] * shape[1]], shape)


def _pad_tokens(x: Tensor, ranks: Ranks) -> Tensor:
    """[B, T, C] -> [R n, C], padded with zeros."""
    rows = x.flatten(0, 1)
    missing = -len(rows) % ranks.size
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


@dataclass(frozen=True)
class SequenceParallelRegion:
    """The residual stream: sharded by tokens over the ranks or, if `replicated`, the same on all.

    Sharding saves the time of norms and the memory of their activations; a decoding step has too
    few tokens for it. `saves_gathered`: backward reuses gathered tokens, as in a block that it
    recomputes, where they have just been gathered.
    """

    ranks: Ranks
    shape: tuple[int, int]  # B, T
    replicated: bool
    saves_gathered: bool = False

    def scatter(self, x: Tensor) -> Tensor:
        """Turns replicated [B, T, C] into local tokens [1, n, C], or returns x if replicated."""
        if self.replicated:
            return x
        return _ShardTokens.apply(_pad_tokens(x, self.ranks), self.ranks, False)

    def gather_from_region(self, x: Tensor, *, single_reader: bool) -> Tensor:
        """Gathers local tokens [1, n, C] to [B, T, C]; backward sums their gradients over ranks.

        `single_reader`: one GEMM reads the result. With more the result is the same, but slower.
        """
        if self.replicated:
            return x
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return _GatherTokens.apply(x, self.ranks, self.shape, None)
        recompute = None if self.saves_gathered else find_recompute(x)
        gathering = GatheredTokens(
            self.ranks,
            (*self.shape, x.shape[-1]),
            None if recompute is None else recompute.fn,
            saves_gathered=self.saves_gathered,
            single_reader=single_reader,
            differentiated=x.requires_grad,
        )
        y = _GatherTokens.apply(x, self.ranks, self.shape, gathering)
        saved = (y if self.saves_gathered else x,) if recompute is None else recompute.saved
        note_recompute(y, gathering.values, saved, remote=gathering)
        return y

    def reduce_to_region(self, x: Tensor) -> Tensor:
        """Sums [B, T, C] over ranks to local tokens [1, n, C], or to [B, T, C] if replicated."""
        if self.replicated:
            return all_reduce_small(x, self.ranks)
        return _ShardTokens.apply(_pad_tokens(x, self.ranks), self.ranks, True)

    def local_tokens(self, x: Tensor) -> Tensor:
        """Returns this rank's m tokens [1, m, C] of the stream, without padding; m may be 0."""
        local = self._local_slice
        return self.slice_tokens(x) if self.replicated else x[:, : local.stop - local.start]

    def slice_tokens(self, x: Tensor) -> Tensor:
        """Takes the rows [1, m, ...] of `local_tokens` from a replicated [B, T, ...]."""
        return x.flatten(0, 1)[None, self._local_slice]

    def gather_tokens(self, x: Tensor) -> Tensor:
        """Returns the stream from x [1, m, C], what every rank computed of its `local_tokens`.

        If the stream is replicated, gathers [B, T, C]; else pads to this rank's [1, n, C].
        """
        if missing := self._tokens_per_rank - x.shape[1]:
            x = F.pad(x, (0, 0, 0, missing))
        if self.replicated:
            return _tokens(self.ranks.gather(x[0]), (*self.shape, x.shape[-1]))
        return x

    @property
    def _tokens_per_rank(self) -> int:  # n
        return -(-self.shape[0] * self.shape[1] // self.ranks.size)

    @property
    def _local_slice(self) -> slice:
        """This rank's tokens among the B T, without padding."""
        tokens = self.shape[0] * self.shape[1]
        first = self.ranks.rank * self._tokens_per_rank
        return slice(min(first, tokens), min(first + self._tokens_per_rank, tokens))
