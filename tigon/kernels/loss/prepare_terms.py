"""Checks the tensors of loss terms and flattens them to rows, and finds the rows that count.

# N rows, C and D model dims of student and teacher, V vocab, K tokens that a teacher stored
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from tigon.kernels.loss.fused_linear_pass import LossPlan
from tigon.kernels.loss.logits import (
    DEFAULT_OPTIONS,
    IGNORE_INDEX,
    METRICS,
    Options,
    check_head,
    check_logit_options,
    check_reduction,
    check_rows,
    check_targets,
)
from tigon.kernels.loss.terms import (
    KL,
    CrossEntropy,
    Divergence,
    Head,
    LogProbs,
    LossTerm,
    ValidRows,
    WeightedTerm,
)
from tigon.kernels.runtime import (
    autocast_dtype,
    check_devices,
    check_values,
    has_values,
    host_can_read,
    integer_labels,
)


class PreparedTerm(NamedTuple):
    """A loss term with its tensors as rows."""

    term: LossTerm
    plan: LossPlan
    tensors: tuple[Tensor | None, ...]  # the four of its pass
    targets: Tensor | None  # [N]
    weights: Tensor | None  # [N] fp32; 0 where a row does not count
    scale: Tensor | None  # of a sum
    teacher: Callable[..., Any] | None = None

    @property
    def weighs(self) -> bool:
        """Whether rows of weight 0 are left out: not if the weights require a gradient."""
        return self.weights is not None and not self.weights.requires_grad

    def counted(self) -> Tensor | None:
        """Returns bool [N], the rows that have a gradient, or None for all."""
        valid = None if self.targets is None else self.targets != IGNORE_INDEX
        if not self.weighs or self.weights is None:
            return valid
        return self.weights != 0 if valid is None else valid & (self.weights != 0)

    def needed(self) -> Tensor | None:
        """Returns bool [N], the rows that have a gradient or metrics, or None for all."""
        if self.plan.metrics and self.targets is not None:
            return self.targets != IGNORE_INDEX
        return self.counted()


def prepare_term(
    hidden: Tensor, c: LossTerm, options: Options, vocab: int, width: int
) -> PreparedTerm:
    """Returns the term with its tensors checked against the hidden states [..., C] and flattened.

    `width` of the head's `vocab` rows are on this rank, with padding.
    """
    weights = scale = targets = None
    if isinstance(c, WeightedTerm):
        check_reduction(c.reduction)
        weights = c.weights
        scale = _scale(c, hidden.device) if c.reduction == "sum" else None
    if c.targets is not None:
        targets = integer_labels(c.targets, "targets")
    check_rows(hidden, targets=targets, token_weights=weights)
    if targets is not None:
        check_targets(targets, vocab)
        targets = targets.flatten()
    if weights is not None:
        weights = weights.flatten().float()
    if isinstance(c, KL | Divergence):
        if not 0 <= c.beta <= 1:
            raise ValueError(f"beta={c.beta} is not in [0, 1]")
        if targets is not None and weights is None:
            weights = (targets != IGNORE_INDEX).float()
        elif targets is not None and weights is not None:
            weights = torch.where(targets != IGNORE_INDEX, weights, 0)
        if isinstance(c, Divergence):
            plan = LossPlan("divergence", DEFAULT_OPTIONS, float(c.beta), normalized=True)
            logprobs = c.teacher_logprobs.detach().flatten(0, -2)
            return PreparedTerm(c, plan, (logprobs, None, None, None), targets, weights, scale)
        plan, tensors, teacher = _prepare_teacher(hidden, c, options, vocab, width, targets)
        return PreparedTerm(c, plan, tensors, targets, weights, scale, teacher)
    if targets is None:
        raise ValueError(f"{type(c).__name__} has no targets: give them, or labels to the model")
    smoothing = z_loss = 0.0
    if isinstance(c, CrossEntropy):
        smoothing, z_loss = c.label_smoothing, c.z_loss
        if c.class_weights is not None:
            if c.class_weights.shape != (vocab,):
                shape = tuple(c.class_weights.shape)
                raise ValueError(f"class_weights {shape} is not [V] = [{vocab}]")
            check_devices(hidden=hidden, class_weights=c.class_weights)
            class_factor = c.class_weights.float()[targets.clamp(min=0)]
            weights = class_factor if weights is None else weights * class_factor
    if weights is not None:
        weights = torch.where(targets != IGNORE_INDEX, weights, 0)
    options = Options(options.softcap, options.logit_scale, smoothing, z_loss)
    plan = LossPlan("cross_entropy", options, metrics=_metric_rows(metrics_of_term(c)))
    return PreparedTerm(c, plan, (targets, None, None, None), targets, weights, scale)


def _scale(c: WeightedTerm, device: torch.device) -> Tensor:
    """Returns coefficient / denominator, fp32 on the device; ValueError if one needs a gradient."""
    denominator, coefficient = c.denominator, c.coefficient
    for name, x in (("denominator", denominator), ("coefficient", coefficient)):
        if isinstance(x, Tensor) and x.requires_grad:
            raise ValueError(
                f"{name} requires a gradient, and loss terms give it none: detach it, or multiply "
                "what the loss term returns"
            )
    if not isinstance(denominator, Tensor):
        # A fill, where as_tensor would copy from the host and wait
        value = 1.0 if denominator is None else denominator
        denominator = torch.full((), value, dtype=torch.float32, device=device)
    scale = denominator.to(device, torch.float32, non_blocking=True).reciprocal()
    return scale if is_one(coefficient) else scale * coefficient


def is_one(x: Tensor | float) -> bool:
    """Whether x is the number 1, and no tensor."""
    return not isinstance(x, Tensor) and x == 1


def _prepare_teacher(
    hidden: Tensor, c: KL, options: Options, vocab: int, width: int, targets: Tensor | None
) -> tuple[LossPlan, tuple[Tensor | None, ...], Callable[..., Any] | None]:
    """Returns a KL term's plan and tensors, and what gathers the teacher's head under FSDP."""
    if not c.temperature > 0:
        raise ValueError(f"temperature={c.temperature} is not positive")
    options = options.at_temperature(c.temperature)
    n = hidden.shape[:-1].numel()
    stored, head = c.teacher_tokens is not None, c.teacher_hidden is not None
    pairs = (c.teacher_logprobs is not None, c.teacher is not None)
    if stored == head or (stored, head) != pairs:
        raise ValueError("KL wants teacher_hidden and teacher, or teacher_tokens and its logprobs")
    if head and not hasattr(c.teacher, "options"):
        kind = type(c.teacher).__name__
        raise TypeError(f"KL's teacher is a {kind}: give the teacher's lm_head, or a Head")
    if c.teacher_tokens is not None and c.teacher_logprobs is not None:
        tokens, logprobs = _prepare_stored(c.teacher_tokens, c.teacher_logprobs, n, vocab, targets)
        check_devices(hidden=hidden, teacher_tokens=tokens, teacher_logprobs=logprobs)
        return LossPlan("topk", options, float(c.beta)), (tokens, logprobs, None, None), None
    states = cast(Tensor, c.teacher_hidden).detach().flatten(0, -2)
    head_options, module = c.teacher.options, None
    weight = bias = None
    if isinstance(c.teacher, Head) or not has_values(hidden):
        weight, bias = c.teacher.weight.detach(), c.teacher.bias
        bias = None if bias is None else bias.detach()
        if hasattr(weight, "to_local"):
            raise ValueError(
                "the teacher's head is sharded, which torch.compile cannot gather: "
                "call the head outside of what is compiled"
            )
        check_head(states, weight, bias, "teacher_")
        check_devices(hidden=hidden, teacher_hidden=states, teacher_weight=weight)
        if weight.shape[0] != width or len(states) != n:
            raise ValueError(
                f"the student has {n} rows and {width} tokens, the teacher {len(states)} and "
                f"{len(weight)}: both must be the same"
            )
        states, weight, bias = apply_autocast(states, weight, bias)
    else:
        module = c.teacher
        states = states.to(autocast_dtype(states.device) or states.dtype)
        if len(states) != n:
            raise ValueError(f"the student has {n} rows, the teacher {len(states)}")
    check_logit_options(head_options)
    teacher_options = head_options.at_temperature(c.temperature)
    plan = LossPlan("divergence", options, float(c.beta), teacher_options)
    return plan, (states, None, weight, bias), module


def _prepare_stored(
    tokens: Tensor, logprobs: Tensor, n: int, vocab: int, targets: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns stored tokens and log-probabilities [N, K]; rows without a target hold anything."""
    if tokens.shape != logprobs.shape or tokens.dim() < 2 or tokens.shape[:-1].numel() != n:
        raise ValueError(
            f"teacher_tokens {tuple(tokens.shape)} and teacher_logprobs {tuple(logprobs.shape)} "
            f"are not [..., K] for {n} rows"
        )
    tokens = integer_labels(tokens, "teacher_tokens").flatten(0, -2)
    if targets is not None:
        first = torch.arange(tokens.shape[1], device=tokens.device) == 0
        tokens = torch.where((targets != IGNORE_INDEX)[:, None], tokens, first.long() - 1)
    ok = (tokens < vocab).all() & (tokens[:, :1] >= 0).all()
    check_values(ok, f"teacher_tokens are not in [0, {vocab}), or a row's first is negative")
    return tokens, logprobs.detach().flatten(0, -2)


def apply_autocast(
    hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns all in autocast's dtype; without autocast as they are, ValueError if hidden and
    weight differ in dtype."""
    dtype = autocast_dtype(hidden.device)
    if dtype is not None:
        bias = None if bias is None else bias.to(dtype)
        return hidden.to(dtype), weight.to(dtype), bias
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype}, weight {weight.dtype}: cast one of them")
    return hidden, weight, bias


def metrics_of_term(c: LossTerm) -> Sequence[str]:
    """Returns the names of the metrics that a loss term requests, a single one as a tuple."""
    metrics = c.metrics if isinstance(c, CrossEntropy | LogProbs) else ()
    return (metrics,) if isinstance(metrics, str) else metrics


def _metric_rows(metrics: Sequence[str]) -> tuple[str, ...]:
    """Returns the per-row values that the metrics come from; ValueError for unknown ones."""
    unknown = [m for m in metrics if m not in METRICS]
    if unknown:
        raise ValueError(f"unknown metrics {unknown}; there are {', '.join(METRICS)}")
    return tuple(dict.fromkeys("predicted_tokens" if m == "accuracy" else m for m in metrics))


def select_rows(
    rows: Tensor, prepared: Sequence[PreparedTerm], active: ValidRows | None
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the rows to compute and, if not all of these have a gradient, which do; None: all."""
    if not host_can_read(rows):
        return None, _any_row([a.counted() for a in prepared])
    metrics = any(a.plan.metrics for a in prepared)
    if active is None or (metrics and active.weights is not None):
        keep = _any_row([a.needed() for a in prepared])
        index = None if keep is None else ValidRows(keep).index()
        extra = metrics and any(a.weighs for a in prepared)
    else:
        for a in prepared:
            _check_valid_rows(active, a, len(rows))
        index = active.index()
        weighted = (a for a in prepared if a.weights is not None)
        extra = any(active.weights is not _deciding_weights(a) for a in weighted)
    return index, _any_row([a.counted() for a in prepared]) if extra else None


def _any_row(keeps: Sequence[Tensor | None]) -> Tensor | None:
    """Returns bool [N], True where one of the terms counts the row; None if one counts all."""
    union = keeps[0]
    for keep in keeps[1:]:
        union = None if union is None or keep is None else union | keep
    return union


def _deciding_weights(a: PreparedTerm) -> Tensor | None:
    """Returns the term's own weights; None if it has none, or class weights multiply them."""
    if isinstance(a.term, CrossEntropy) and a.term.class_weights is not None:
        return None
    return a.term.weights if isinstance(a.term, WeightedTerm) else None


def _check_valid_rows(active: ValidRows, a: PreparedTerm, rows: int) -> None:
    """Raises ValueError unless `active` has every row that the term needs."""
    if len(active.keep) != rows:
        count = len(active.keep)
        raise ValueError(f"active has {count} rows, the loss term {rows}: make it of its targets")
    weights = a.term.weights if isinstance(a.term, WeightedTerm) else None
    same_weights = active.weights is None or active.weights is weights
    if active.targets is not None and active.targets is a.term.targets and same_weights:
        return
    needed = a.needed()
    absent = ~active.keep if needed is None else needed & ~active.keep
    check_values(~absent.any(), "active leaves out rows that count: make it from the same targets")
