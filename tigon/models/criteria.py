"""The loss terms of a forward pass, and its output from their values.

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
from tigon.models.loss import Targets
from tigon.models.outputs import CausalLMOutput

TARGET_METRICS = ("accuracy", "nll")  # metrics that need labels
# Fields of criteria that have a value for each position
POSITION_FIELDS = ("targets", "weights", "teacher_hidden", "teacher_tokens", "teacher_logprobs")


# No list: FSDP's mixed precision would rebuild it with weights and denominators in 16 bits
class LossTerms:
    """The loss terms of a forward pass.

    Built before the blocks run, so that the number of valid rows reaches the host without a sync.
    """

    def __init__(
        self, targets: Targets, metrics: tuple[str, ...], criteria: Sequence[LossTerm] | None
    ):
        self.returns_criteria = criteria is not None
        if criteria is None:
            criteria = () if targets.labels is None else (CrossEntropy(),)
        elif not isinstance(criteria, Sequence):
            raise TypeError(f"criteria={criteria!r} is not a sequence: give a tuple of criteria")
        for c in criteria:
            if not isinstance(c, LossTerm):
                raise TypeError(f"criteria has {c!r}: give CrossEntropy, LogProbs or KL objects")
        if targets.options and not any(isinstance(c, CrossEntropy) for c in criteria):
            names = ", ".join(targets.options)
            raise ValueError(f"{names} without a cross-entropy: give labels, or CrossEntropy()")
        self.targets = targets  # the targets that the loss counts
        self._has_labels = targets.labels is not None
        if targets.labels is None and any(isinstance(c, KL) for c in criteria):
            self.targets = targets.with_labels(_placeholder_labels(targets))
        self.active: ValidRows | None = None
        labels = self.targets.labels
        if criteria and labels is not None and all(c.targets is None for c in criteria):
            weighted = all(isinstance(c, WeightedTerm) and c.weights is None for c in criteria)
            weights = self.targets.weights if weighted and not metrics else None
            self.active = find_valid_rows(labels, weights)
        self._criteria = [self._resolve(c) for c in criteria]
        self._num_criteria = len(self._criteria)
        if metrics:
            self._add_metrics(metrics)

    def __iter__(self) -> Iterator[LossTerm]:
        return iter(self._criteria)

    def __len__(self) -> int:
        return len(self._criteria)

    def _resolve(self, c: LossTerm) -> LossTerm:
        """The criterion with the batch's targets, weights and denominator where it has none.

        Its tensors [B, T, ...] are indexed with the positions that the head reads.
        """
        targets, shape = self.targets, self.targets.batch.shape
        fields: dict[str, Any] = {}
        for name in POSITION_FIELDS:
            value = getattr(c, name, None)
            if value is not None:
                if value.shape[:2] != shape:
                    raise ValueError(
                        f"{name} {tuple(value.shape)} of {type(c).__name__} is not [batch, tokens, "
                        f"...] = {[*shape]}"
                    )
                fields[name] = targets.take(value)
        if isinstance(c, CrossEntropy):
            for name in targets.options:
                value = getattr(c, name)
                if isinstance(value, Tensor) or value:
                    raise ValueError(f"{name} is given twice: to forward and to {type(c).__name__}")
            fields |= targets.options
        if isinstance(c, WeightedTerm) and targets.reduction == "none":
            fields["reduction"] = "none"
        if c.targets is not None:
            targets = targets.with_labels(fields["targets"])
        elif targets.labels is None or not (self._has_labels or isinstance(c, KL)):
            raise ValueError(f"{type(c).__name__} without labels: give labels, or targets=")
        assert targets.labels is not None
        return replace(c, **fields).with_targets(
            targets.labels, targets.weights, targets.denominator
        )

    def _add_metrics(self, metrics: tuple[str, ...]) -> None:
        """Add the metrics to the first criterion that takes any, or else a criterion for them."""
        for i, c in enumerate(self._criteria):
            if isinstance(c, CrossEntropy | LogProbs):
                self._criteria[i] = replace(c, metrics=(*c.metrics, *metrics))
                return
        target_metrics = tuple(name for name in metrics if name in TARGET_METRICS)
        if target_metrics and not self._has_labels:
            raise ValueError(f"metrics={target_metrics} without labels: these are about targets")
        labels = self.targets.labels
        labels = _placeholder_labels(self.targets) if labels is None else labels
        # Per-token losses: no gradient is computed in the forward pass
        self._criteria.append(CrossEntropy(targets=labels, reduction="none", metrics=metrics))

    def output(self, values: Sequence[Any], logits: Tensor | None, cache: Any) -> CausalLMOutput:
        """The model's output: loss, log-probabilities and metrics, from the criteria's values."""
        out = CausalLMOutput(logits=logits, past_key_values=cache)
        reduction = "none" if self.targets.reduction == "none" else "sum"
        for i, (c, (value, metrics)) in enumerate(zip(self._criteria, values, strict=True)):
            out.metrics |= metrics
            if i >= self._num_criteria:
                continue
            if isinstance(c, LogProbs) and out.logprobs is None:
                out.logprobs = value
            if isinstance(c, WeightedTerm) and c.reduction == reduction:
                out.loss = value if out.loss is None else out.loss + value
        if self.returns_criteria:
            out.criteria = tuple(value for value, _ in values[: self._num_criteria])
        return out


def _placeholder_labels(targets: Targets) -> Tensor:
    """Label 0 at every real position that is kept, for criteria that need no labels."""
    batch = targets.batch
    labels = torch.zeros(batch.shape, dtype=torch.int64, device=batch.device)
    if batch.real is not None:
        labels = labels.masked_fill(~batch.real, IGNORE_INDEX)
    return targets.take(labels)
