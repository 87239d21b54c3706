"""The terms of a loss, and what a call returns of their values.

# B batch, T tokens, n kept tokens
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tigon.kernels.loss.logits import IGNORE_INDEX
from tigon.kernels.loss.terms import (
    KL,
    CrossEntropy,
    LogProbs,
    LossTerm,
    ValidRows,
    WeightedTerm,
    find_valid_rows,
)
from tigon.layers import balance
from tigon.layers.lm_head import HeadOutput
from tigon.models.arguments import BATCH, PASS, TARGETS, select_keys
from tigon.models.config import ModelConfig
from tigon.models.inputs import Batch, BatchModel
from tigon.models.moe import ROUTING_METRICS, ExpertsConfig, aux_loss_coef
from tigon.models.outputs import CausalLMOutput
from tigon.models.targets import Targets
from tigon.utils.config import check_keywords

TARGET_METRICS = ("accuracy", "nll")  # metrics that need labels
# Fields of criteria that have a value for each position
POSITION_FIELDS = ("targets", "weights", "teacher_hidden", "teacher_tokens", "teacher_logprobs")


# Not a list: a user's fully_shard would rebuild it, with weights and denominators in 16 bits
class LossTerms:
    """The loss terms of a call, which the head computes, and the call's output from their values.

    Built before the blocks run, so that the number of valid rows reaches the host without a sync.
    """

    def __init__(
        self,
        config: ModelConfig,
        targets: Targets,
        criteria: Sequence[LossTerm] | None,  # None: a cross-entropy if there are labels
        metrics: Sequence[str] | str | None,  # None: the model's defaults, with labels
    ):
        if metrics is None:
            metrics = () if targets.labels is None else targets.batch.defaults.metrics
        names = (metrics,) if isinstance(metrics, str) else tuple(metrics)
        self.router_metrics = tuple(name for name in names if name in ROUTING_METRICS)
        head_metrics = tuple(name for name in names if name not in ROUTING_METRICS)
        self.returns_criteria = criteria is not None
        if criteria is None:
            criteria = () if targets.labels is None else (CrossEntropy(),)
        _check_criteria(criteria, targets.options)
        self.config, self.targets = config, targets  # those that the loss counts
        self._has_labels = targets.labels is not None
        if targets.labels is None and any(isinstance(c, KL) for c in criteria):
            if targets.batch.shard is not None:
                raise ValueError("KL without labels under context parallelism: give labels")
            self.targets = targets.with_labels(_placeholder_labels(targets))
        self.active: ValidRows | None = None
        labels = self.targets.labels
        if criteria and labels is not None and all(c.targets is None for c in criteria):
            weighted = all(isinstance(c, WeightedTerm) and c.weights is None for c in criteria)
            weights = self.targets.weights if weighted and not head_metrics else None
            self.active = find_valid_rows(labels, weights)
        self._criteria = [self._resolve(c) for c in criteria]
        self._num_criteria = len(self._criteria)
        if head_metrics:
            self._add_metrics(head_metrics)

    def __iter__(self) -> Iterator[LossTerm]:
        return iter(self._criteria)

    def __len__(self) -> int:
        return len(self._criteria)

    @property
    def need_routing(self) -> bool:
        """Whether the output needs the routers' counts, for a loss or for metrics."""
        has_aux_loss = self.targets.labels is not None and aux_loss_coef(self.config) is not None
        return has_aux_loss or bool(self.router_metrics)

    def _resolve(self, c: LossTerm) -> LossTerm:
        """The criterion with targets, weights and denominator, at the head's positions."""
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
        """Adds the metrics to the first cross-entropy or LogProbs, or else appends for them a
        cross-entropy that is no part of the loss; ValueError for metrics that lack labels."""
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

    def output(self, head: HeadOutput, router_stats: Sequence[Tensor]) -> CausalLMOutput:
        """The call's output: loss, log-probabilities and metrics, from the terms' values."""
        out, values = CausalLMOutput(logits=head.logits, logits_at=head.logits_at), head.values
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
        self._add_aux_loss(out, router_stats)
        return out

    def _add_aux_loss(self, out: CausalLMOutput, router_stats: Sequence[Tensor]) -> None:
        """Adds routers' metrics, and if the config asks for it aux_loss, also to a mean loss."""
        shard, coef = self.targets.batch.shard, aux_loss_coef(self.config)
        if not isinstance(self.config, ExpertsConfig) or not router_stats:
            if self.router_metrics:
                name = self.config.architecture.removesuffix("ForCausalLM")
                raise ValueError(
                    f"metrics={self.router_metrics}: no layer of this {name} has experts"
                )
            return
        if shard is not None:  # of all tokens; each rank adds an equal part
            router_stats = shard.sum_for_parts(torch.stack(list(router_stats))).unbind()
        load, aux_loss = balance(router_stats, self.config.num_experts_per_tok)
        values = {"aux_loss": aux_loss.detach(), "expert_load": load}
        out.metrics |= {name: values[name] for name in self.router_metrics}
        if coef is not None:
            out.aux_loss = aux_loss if shard is None else aux_loss / shard.ranks.size
            if out.loss is not None and (share := self.targets.share) is not None:
                out.loss = out.loss + coef * share * out.aux_loss


def _check_criteria(criteria: Any, options: Mapping[str, Any]) -> None:
    """Raises TypeError unless these are criteria, and ValueError if none of them uses `options`."""
    if not isinstance(criteria, Sequence):
        raise TypeError(f"criteria={criteria!r} is not a sequence: give a tuple of criteria")
    for c in criteria:
        if not isinstance(c, LossTerm):
            raise TypeError(f"criteria has {c!r}: give CrossEntropy, LogProbs or KL objects")
    if options and not any(isinstance(c, CrossEntropy) for c in criteria):
        unused = ", ".join(options)
        raise ValueError(f"{unused} without a cross-entropy: give labels, or CrossEntropy()")


def _placeholder_labels(targets: Targets) -> Tensor:
    """Labels [B, n] of 0 at real positions and -100 on padding, of those that are kept, for
    criteria that need no labels."""
    batch = targets.batch
    labels = torch.zeros(batch.shape, dtype=torch.int64, device=batch.device)
    if batch.real is not None:
        labels = labels.masked_fill(~batch.real, IGNORE_INDEX)
    return targets.take(labels)


# The arguments of a call


def resolve_arguments(
    model: BatchModel,
    input_ids: Tensor | None = None,
    *,
    batch: Batch | None = None,
    targets: Targets | None = None,
    **arguments: Any,
) -> tuple[Batch, Targets, dict[str, Any]]:
    """Splits the arguments of a call of `forward` into its batch and targets, made here if they are
    not given, and a dictionary of the rest; raises for arguments that contradict each other."""
    check_keywords("forward", arguments, PASS)
    of_batch, of_targets, options = (
        select_keys(names, arguments) for names in (BATCH, TARGETS, PASS - BATCH - TARGETS)
    )
    if input_ids is not None:
        of_batch["input_ids"] = input_ids
    if batch is None:
        if targets is not None:
            raise TypeError("targets= without batch=: give the batch that they were made from")
        batch = Batch.of(model, **of_batch)
    elif of_batch:
        raise TypeError(f"batch= with {', '.join(of_batch)}: they are part of the batch")
    elif batch.defaults is not model.defaults:
        raise ValueError("batch= was made by Batch.of for another model: make one for this")
    batch.check_cache()
    if targets is None:
        targets = Targets.of(batch, **of_targets)
    elif of_targets:
        raise TypeError(f"targets= with {', '.join(of_targets)}: they are part of the targets")
    if model.config.labels and (targets.labels is not None or options.get("criteria")):
        raise ValueError(
            f"this {type(model).__name__} scores sequences and predicts no token: call it "
            "without labels and criteria, and its logits [B, T, labels] are the scores"
        )
    return batch, targets, options
