"""What of a batch this rank computes, and what all ranks of a context group make of it.

Everything is resolved for whole rows first, such as which label a token predicts, and split last.

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


class Whole:
    """The batch as it is: this rank computes all of it."""

    def __init__(self, batch: Batch):
        self.batch = batch  # of this rank
        self.options: dict[str, Any] = {}  # more arguments of the decoder

    def targets(self, counted: Targets) -> Targets:
        """Those that this rank's head is to predict."""
        return counted

    def part(self, x: Tensor) -> Tensor:
        """Of x [B, T, ...], what belongs to this rank's tokens."""
        return x

    def take(self, x: Tensor, counted: Targets) -> Tensor:
        """Of x [B, T, ...], what belongs to the positions of `targets(counted)`."""
        return counted.take(x)

    def kept(self, hidden: Tensor, targets: Targets, *, criteria: bool) -> Tensor:
        """The hidden states that the head reads, for criteria or for logits alone."""
        return targets.take(hidden)

    def rows(self, hidden: Tensor, index: Tensor) -> Tensor:
        """[n, C] of an index [n] into the flattened batch, without a gradient."""
        return hidden.detach().flatten(0, 1)[index]

    def head(self, found: HeadOutput, criteria: Iterable[LossTerm], of: Targets) -> HeadOutput:
        """What the head gives for the batch, from what it gave for `kept`."""
        return found

    def tallies(self, tallies: Sequence[Tensor]) -> Sequence[Tensor]:
        """Of the batch's tokens, from those of this rank."""
        return tallies


class Split(Whole):
    """Consecutive tokens of every row; in the end each rank has losses and values of all tokens.

    Hidden states alone stay [B, S, C]. Gradients are this rank's part: they add up over the group.
    """

    def __init__(self, batch: Batch, group: Ranks, vocab: int):
        self.whole, self.vocab = batch, vocab
        self.shard = ContextShard(group, batch.shape[1], batch.position_ids)
        real = batch.real
        if self.shard.behind and real is None:
            real = torch.ones(batch.shape, dtype=torch.bool, device=batch.device)
        self.shard = replace(self.shard, real=self._part(real))
        mine = Batch(
            self._part(batch.input_ids),
            self._part(batch.inputs_embeds),
            self.shard.part(batch.position_ids),
            None,
            batch.mask,
            None,
            batch.defaults,
            False,  # what the shards are of has padding
        )
        super().__init__(mine)
        self.options = {"shard": self.shard}

    def _part(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else self.part(x)

    def part(self, x: Tensor) -> Tensor:
        return self.shard.part(x)

    def targets(self, counted: Targets) -> Targets:
        """At all positions of the shard, ignored where they are not kept."""
        labels, weights = counted.labels, counted.weights
        self._check_once(counted.kept)
        if labels is not None:
            check_targets(labels, self.vocab)  # on all ranks, or the others would wait for one
            labels = self.shard.part(counted.place(labels, IGNORE_INDEX), IGNORE_INDEX)
        if weights is not None:
            weights = self.shard.part(counted.place(weights, 0))
        return counted.of_part(self.batch, labels, weights)

    def _check_once(self, kept: slice | Tensor) -> None:
        if isinstance(kept, slice):
            return
        kept = kept.expand(self.whole.shape[0], -1)
        count = kept.new_zeros(self.whole.shape).scatter_add(1, kept, torch.ones_like(kept))
        check_values(
            (count <= 1).all(),
            "logits_to_keep names a position twice, which cannot be where ranks share the tokens "
            "of a row: name each once",
        )

    def take(self, x: Tensor, counted: Targets) -> Tensor:
        return x if x.shape[:2] == self.batch.shape else self.shard.part(x)

    def kept(self, hidden: Tensor, targets: Targets, *, criteria: bool) -> Tensor:
        if criteria or not self._narrows(targets):
            return hidden
        index = torch.arange(self.shard.tokens, device=hidden.device).expand(self.whole.shape)
        rows = torch.arange(self.whole.shape[0], device=hidden.device)[:, None]
        index = targets.take(index) + self.shard.tokens * rows
        return self.rows(hidden, index.flatten()).view(*index.shape, -1)

    def _narrows(self, targets: Targets) -> bool:
        """Whether each rank has the head compute the same few positions of all ranks; never with
        gradients, which would count several times."""
        everything = isinstance(targets.kept, slice) and targets.kept.start == 0
        return not everything and not torch.is_grad_enabled()

    def rows(self, hidden: Tensor, index: Tensor) -> Tensor:
        row, token = index // self.shard.tokens, index % self.shard.tokens
        token = token - self.shard.to.rank * self.shard.size
        mine = (token >= 0) & (token < self.shard.size)
        found = hidden.detach()[row, token.clamp(0, self.shard.size - 1)]
        return self.shard.sum(torch.where(mine[:, None], found, 0))

    def head(self, found: HeadOutput, criteria: Iterable[LossTerm], of: Targets) -> HeadOutput:
        logits, values = found.logits, list(zip(criteria, found.values, strict=True))
        if logits is not None and (values or not self._narrows(of)):
            logits = of.take(self.shard.gather(logits))
            logits = reshape_unaliased(logits, logits.shape)
        return found._replace(logits=logits, values=[self._value(*value, of) for value in values])

    def _value(self, c: LossTerm, found: HeadValue, of: Targets) -> HeadValue:
        metrics = {}
        for name, x in found.metrics.items():
            if name == "accuracy":  # a mean over the targets
                assert c.targets is not None
                count = (c.targets != IGNORE_INDEX).sum()
                right, count = self.shard.sum(torch.stack([x * count, count])).unbind()
                metrics[name] = right / count.clamp(min=1)
            else:
                metrics[name] = self._all(x, of)
        return HeadValue(self._all(found.value, of), metrics)

    def _all(self, x: Tensor, of: Targets) -> Tensor:
        """A sum over this rank's tokens, or a value of each."""
        if not x.dim():
            return self.shard.sum(x)
        values = of.take(self.shard.gather(x))
        return reshape_unaliased(values, values.shape)

    def tallies(self, tallies: Sequence[Tensor]) -> Sequence[Tensor]:
        return self.shard.sum(torch.stack(list(tallies))).unbind() if tallies else tallies


def split(batch: Batch, group: Ranks | None, vocab: int) -> Whole:
    """Passes with a cache are not split: every rank makes all of them. `vocab`: V."""
    return Whole(batch) if group is None or batch.cache is not None else Split(batch, group, vocab)
