"""The criteria of a forward pass, and its output from their values.

# B batch, T tokens, n kept tokens
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tigon.kernels.loss.api import IGNORE_INDEX
from tigon.kernels.loss.terms import (
    KL,
    CrossEntropy,
    LogProbs,
    LossTerm,
    ValidRows,
    WeightedTerm,
    find_valid_rows,
)
from tigon.models.context_batch import Whole
from tigon.models.loss import Targets
from tigon.models.outputs import CausalLMOutput

OF_TARGETS = ("accuracy", "nll")  # metrics that need one
PER_POSITION = ("targets", "weights", "teacher_hidden", "teacher_tokens", "teacher_logprobs")


# No list: FSDP's mixed precision would rebuild it with weights and denominators in 16 bits
class Asked:
    """The criteria of one pass, each with its targets, weights and denominator.

    Made before the blocks are launched, so that the number of rows that count is on the host when
    the head needs it.
    """

    def __init__(
        self,
        targets: Targets,
        metrics: tuple[str, ...],
        criteria: Sequence[LossTerm] | None,
        split: Whole,
    ):
        self.returned = criteria is not None
        if criteria is None:
            criteria = () if targets.labels is None else (CrossEntropy(),)
        elif not isinstance(criteria, Sequence):
            raise TypeError(f"criteria={criteria!r} is no sequence: give a tuple of criteria")
        for c in criteria:
            if not isinstance(c, LossTerm):
                raise TypeError(f"criteria has {c!r}: give CrossEntropy, LogProbs or KL objects")
        if targets.options and not any(isinstance(c, CrossEntropy) for c in criteria):
            names = ", ".join(targets.options)
            raise ValueError(f"{names} without a cross-entropy: give labels, or CrossEntropy()")
        self.targets = targets  # what the loss counts
        self._labelled = targets.labels is not None
        if targets.labels is None and any(isinstance(c, KL) for c in criteria):
            self.targets = _everywhere(targets)
        self._split, self._here = split, split.targets(self.targets)
        self.active: ValidRows | None = None
        labels = self._here.labels
        if criteria and labels is not None and all(c.targets is None for c in criteria):
            weighted = all(isinstance(c, WeightedTerm) and c.weights is None for c in criteria)
            weights = self._here.weights if weighted and not metrics else None
            self.active = find_valid_rows(labels, weights)
        self._criteria = [self._filled(c) for c in criteria]
        self._own = len(self._criteria)
        if metrics:
            self._ask_metrics(metrics)

    def __iter__(self) -> Iterator[LossTerm]:
        return iter(self._criteria)

    def __len__(self) -> int:
        return len(self._criteria)

    def _filled(self, c: LossTerm) -> LossTerm:
        """With the batch's targets, weights and denominator where it has none of its own.

        Its tensors [B, T, ...] are reduced to the positions that the head reads; a teacher's may be
        of these already, where ranks share a batch.
        """
        counted, here, shape = self.targets, self._here, self.targets.batch.shape
        mine: dict[str, Any] = {}
        for name in PER_POSITION:
            value = getattr(c, name, None)
            if value is not None:
                own = self._split.batch.shape if name.startswith("teacher") else shape
                if value.shape[:2] not in (shape, own):
                    raise ValueError(
                        f"{name} {tuple(value.shape)} of {type(c).__name__} is not [batch, tokens, "
                        f"...] = {[*shape]}"
                    )
                mine[name] = self._split.take(value, counted)
        if isinstance(c, CrossEntropy):
            for name in counted.options:
                own = getattr(c, name)
                if isinstance(own, Tensor) or own:
                    raise ValueError(f"{name} is given twice: to forward and to {type(c).__name__}")
            mine |= counted.options
        if isinstance(c, WeightedTerm) and counted.reduction == "none":
            mine["reduction"] = "none"
        if c.targets is not None:
            here = self._split.targets(counted.over(counted.take(c.targets)))
            mine["targets"] = here.labels
        elif counted.labels is None or not (self._labelled or isinstance(c, KL)):
            raise ValueError(f"{type(c).__name__} without labels: give labels, or targets=")
        assert here.labels is not None
        return replace(c, **mine).with_targets(here.labels, here.weights, here.denominator)

    def _ask_metrics(self, metrics: tuple[str, ...]) -> None:
        """Add the metrics to the first criterion that takes any, or else a criterion for them."""
        for i, c in enumerate(self._criteria):
            if isinstance(c, CrossEntropy | LogProbs):
                self._criteria[i] = replace(c, metrics=(*c.metrics, *metrics))
                return
        missing = tuple(name for name in metrics if name in OF_TARGETS)
        counted = self.targets
        if missing and not self._labelled:
            raise ValueError(f"metrics={missing} without labels: these are about targets")
        counted = _everywhere(counted) if counted.labels is None else counted
        labels = self._split.targets(counted).labels
        # Per-token losses: no gradient is computed in the forward pass
        alone = CrossEntropy(targets=labels, reduction="none", metrics=metrics)
        self._criteria.append(alone)

    def output(self, values: Sequence[Any], logits: Tensor | None, cache: Any) -> CausalLMOutput:
        """The sum of losses, log-probabilities and metrics, from the values of the criteria."""
        out = CausalLMOutput(logits=logits, past_key_values=cache)
        reduction = "none" if self.targets.reduction == "none" else "sum"
        for i, (c, (value, metrics)) in enumerate(zip(self._criteria, values, strict=True)):
            out.metrics |= metrics
            if i >= self._own:
                continue
            if isinstance(c, LogProbs) and out.logprobs is None:
                out.logprobs = value
            if isinstance(c, WeightedTerm) and c.reduction == reduction:
                out.loss = value if out.loss is None else out.loss + value
        if self.returned:
            out.criteria = tuple(value for value, _ in values[: self._own])
        return out


def _everywhere(targets: Targets) -> Targets:
    """With a placeholder target at every real position, for criteria that need none."""
    batch = targets.batch
    labels = torch.zeros(batch.shape, dtype=torch.int64, device=batch.device)
    if batch.real is not None:
        labels = labels.masked_fill(~batch.real, IGNORE_INDEX)
    return targets.over(targets.take(labels))
