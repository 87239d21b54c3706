"""Shards a batch over the context-parallel group and gathers losses and metrics.

Labels are shifted on whole rows; sharding comes last.

# B batch, T tokens, S tokens of this rank's shard, n kept tokens, C model dim, V vocab
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tigon.distributed.collectives import Ranks
from tigon.kernels.loss.api import IGNORE_INDEX
from tigon.kernels.loss.fused_linear import HeadValue, reshape_unaliased
from tigon.kernels.loss.logits import check_targets
from tigon.kernels.loss.terms import LossTerm
from tigon.kernels.runtime import check_values
from tigon.layers import ContextShard
from tigon.layers.lm_head import HeadOutput
from tigon.models.inputs import Batch
from tigon.models.loss import Targets


class LocalBatch:
    """The tokens that this rank computes; without context parallelism these are all tokens."""

    def __init__(self, batch: Batch):
        self.batch = batch
        self.decoder_options: dict[str, Any] = {}

    def local_targets(self, targets: Targets) -> Targets:
        """The targets that this rank's head predicts."""
        return targets

    def shard_tokens(self, x: Tensor) -> Tensor:
        """x [B, T, ...] at this rank's tokens."""
        return x

    def take(self, x: Tensor, targets: Targets) -> Tensor:
        """x [B, T, ...] at the positions of `local_targets(targets)`."""
        return targets.take(x)

    def head_inputs(self, hidden: Tensor, targets: Targets, *, has_terms: bool) -> Tensor:
        """The hidden states that the head reads, for loss terms or for logits alone."""
        return targets.take(hidden)

    def gather_rows(self, hidden: Tensor, index: Tensor) -> Tensor:
        """Hidden states [n, C] at an index [n] into the flattened batch, without a gradient."""
        return hidden.detach().flatten(0, 1)[index]

    def gather_outputs(
        self, output: HeadOutput, criteria: Iterable[LossTerm], targets: Targets
    ) -> HeadOutput:
        """The head's output for the whole batch, from this rank's output."""
        return output

    def sum_router_stats(self, router_stats: Sequence[Tensor]) -> Sequence[Tensor]:
        """The routing statistics of the whole batch, from those of this rank's tokens."""
        return router_stats


class ContextParallelBatch(LocalBatch):
    """Consecutive tokens of every row. Every rank ends with losses and metrics of all tokens.

    Hidden states alone stay [B, S, C]. Gradients are partial: they add up over the group.
    """

    def __init__(self, batch: Batch, group: Ranks, vocab: int):
        self.full_shape, self.vocab = batch.shape, vocab
        self.shard = ContextShard(group, batch.shape[1], batch.position_ids)
        real = batch.real
        if self.shard.padding and real is None:
            real = torch.ones(batch.shape, dtype=torch.bool, device=batch.device)
        shard = self.shard.part
        self.shard = replace(self.shard, real=None if real is None else shard(real))
        local = Batch(
            None if batch.input_ids is None else shard(batch.input_ids),
            None if batch.inputs_embeds is None else shard(batch.inputs_embeds),
            shard(batch.position_ids),
            None,
            batch.mask,
            None,
            batch.defaults,
            False,  # the mask is that of whole rows, padding included
        )
        super().__init__(local)
        self.decoder_options = {"shard": self.shard}

    def shard_tokens(self, x: Tensor) -> Tensor:
        return self.shard.part(x)

    def local_targets(self, targets: Targets) -> Targets:
        """Targets at all positions of the shard, ignored where the position is not kept."""
        labels, weights = targets.labels, targets.weights
        self._check_unique(targets.kept)
        if labels is not None:
            check_targets(labels, self.vocab)  # on all ranks, or the others would wait for one
            labels = targets.scatter_to_positions(labels, IGNORE_INDEX)
            labels = self.shard.part(labels, IGNORE_INDEX)
        if weights is not None:
            weights = self.shard.part(targets.scatter_to_positions(weights, 0))
        return targets.for_shard(self.batch, labels, weights)

    def _check_unique(self, kept: slice | Tensor) -> None:
        """Raises ValueError if a position of a row is kept twice."""
        if isinstance(kept, slice):
            return
        kept = kept.expand(self.full_shape[0], -1)
        count = kept.new_zeros(self.full_shape).scatter_add(1, kept, torch.ones_like(kept))
        check_values(
            (count <= 1).all(),
            "logits_to_keep has a position twice, which context parallelism does not support: "
            "give each position once",
        )

    def take(self, x: Tensor, targets: Targets) -> Tensor:
        return x if x.shape[:2] == self.batch.shape else self.shard.part(x)

    def head_inputs(self, hidden: Tensor, targets: Targets, *, has_terms: bool) -> Tensor:
        if has_terms or not self._computes_kept_positions(targets):
            return hidden
        index = torch.arange(self.shard.tokens, device=hidden.device).expand(self.full_shape)
        rows = torch.arange(self.full_shape[0], device=hidden.device)[:, None]
        index = targets.take(index) + self.shard.tokens * rows
        return self.gather_rows(hidden, index.flatten()).view(*index.shape, -1)

    def _computes_kept_positions(self, targets: Targets) -> bool:
        """Whether every rank's head computes the kept positions of all ranks. Not with gradients,
        which would be counted on every rank."""
        keeps_all = isinstance(targets.kept, slice) and targets.kept.start == 0
        return not keeps_all and not torch.is_grad_enabled()

    def gather_rows(self, hidden: Tensor, index: Tensor) -> Tensor:
        row, token = index // self.shard.tokens, index % self.shard.tokens
        token = token - self.shard.ranks.rank * self.shard.size
        is_local = (token >= 0) & (token < self.shard.size)
        local = hidden.detach()[row, token.clamp(0, self.shard.size - 1)]
        return self.shard.sum(torch.where(is_local[:, None], local, 0))

    def gather_outputs(
        self, output: HeadOutput, criteria: Iterable[LossTerm], targets: Targets
    ) -> HeadOutput:
        logits, pairs = output.logits, list(zip(criteria, output.values, strict=True))
        if logits is not None and (pairs or not self._computes_kept_positions(targets)):
            logits = targets.take(self.shard.gather(logits))
            logits = reshape_unaliased(logits, logits.shape)
        values = [self._gather_value(term, value, targets) for term, value in pairs]
        return output._replace(logits=logits, values=values)

    def _gather_value(self, c: LossTerm, local: HeadValue, targets: Targets) -> HeadValue:
        """A criterion's value and metrics for the whole batch, from those of this rank's tokens."""
        metrics = {}
        for name, x in local.metrics.items():
            if name == "accuracy":  # a mean over the targets
                assert c.targets is not None
                count = (c.targets != IGNORE_INDEX).sum()
                correct, count = self.shard.sum(torch.stack([x * count, count])).unbind()
                metrics[name] = correct / count.clamp(min=1)
            else:
                metrics[name] = self._sum_or_gather(x, targets)
        return HeadValue(self._sum_or_gather(local.value, targets), metrics)

    def _sum_or_gather(self, x: Tensor, targets: Targets) -> Tensor:
        """Sums a scalar over the ranks; gathers a tensor that has a value for each token."""
        if not x.dim():
            return self.shard.sum(x)
        values = targets.take(self.shard.gather(x))
        return reshape_unaliased(values, values.shape)

    def sum_router_stats(self, router_stats: Sequence[Tensor]) -> Sequence[Tensor]:
        if not router_stats:
            return router_stats
        return self.shard.sum(torch.stack(list(router_stats))).unbind()


def make_local_batch(batch: Batch, group: Ranks | None, vocab: int) -> LocalBatch:
    """This rank's part of the batch. Passes with a cache are not sharded."""
    if group is None or batch.cache is not None:
        return LocalBatch(batch)
    return ContextParallelBatch(batch, group, vocab)
