"""Runs criteria: checks and flattens their tensors, makes one pass over the logits.

# B batch, n positions, N = B n rows, C and D model dims of student and teacher, V vocab
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from tigon.kernels._check import check, has_values, integer_labels, is_transformed
from tigon.kernels._cross_entropy_rows import cross_entropy_ref, loss_rows
from tigon.kernels._head_autograd import Criteria
from tigon.kernels._head_pass import Pass, Plan
from tigon.kernels._logits import (
    IGNORE_INDEX,
    METRICS,
    PLAIN,
    Options,
    check_head,
    check_of_logits,
    check_reduction,
    check_rows,
    check_targets,
)
from tigon.kernels._triton import autocast_dtype, check_devices, runs_triton
from tigon.kernels._vocabulary import VocabularyShard
from tigon.kernels.criteria import (
    KL,
    ActiveRows,
    Criterion,
    CrossEntropy,
    Divergence,
    Head,
    LogProbs,
    Weighted,
    host_may_count,
)


class HeadValue(NamedTuple):
    """A criterion's value, summed or for each row, and its metrics."""

    value: Tensor
    metrics: dict[str, Tensor]


class Prepared(NamedTuple):
    """A criterion with its tensors as rows."""

    given: Criterion
    plan: Plan
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
        """The rows [N] that have a gradient; None: all."""
        valid = None if self.targets is None else self.targets != IGNORE_INDEX
        if not self.weighs or self.weights is None:
            return valid
        return self.weights != 0 if valid is None else valid & (self.weights != 0)

    def needed(self) -> Tensor | None:
        """The rows [N] that have a gradient or metrics; None: all."""
        if self.plan.metrics and self.targets is not None:
            return self.targets != IGNORE_INDEX
        return self.counted()


def run_criteria(
    hidden: Tensor,  # [..., C]; or raw logits [..., V], where there is no weight
    weight: Tensor | None,  # [V, C]
    bias: Tensor | None,  # [V]
    criteria: Sequence[Criterion],
    *,
    added: tuple[Tensor, Tensor] | None = None,  # [..., r], [V, r]: their product joins the logits
    options: Options = PLAIN,  # softcap and scale of the logits
    active: ActiveRows | None = None,  # made ahead of time, it saves waiting for the device
    logits_bytes: int | None = None,
    overwrite: bool = False,
    vocabulary: VocabularyShard | None = None,
) -> list[HeadValue]:
    """The value of each criterion, in one pass. At most `logits_bytes` of logits exist at a time.

    None: at most 1 GiB, and less where it costs little time, or all where it costs no more memory.
    Rows whose target is ignored or whose weight is 0 cost nothing and give nothing, not even NaN.
    On a GPU the host must know how many remain. Under torch.compile and in CUDA graphs no row is
    left out.

    With a `vocabulary`, this rank's weight and bias (and a teacher's) are some rows of V, and all
    ranks of the group make the same call with the same other tensors. The values and metrics are
    those of the whole head, on every rank. The gradients of hidden and of the first of `added` are
    this rank's terms of their sums over the group.
    """
    if not criteria:
        return []
    check_of_logits(options)
    lead = hidden.shape[:-1]
    width = vocab = hidden.shape[-1] if weight is None else weight.shape[0]
    if vocabulary is not None:
        vocab = vocabulary.check(weight, criteria)
    if weight is not None:
        check_head(hidden, weight, bias)
        check_devices(hidden=hidden, weight=weight, bias=bias)
        hidden, weight, bias = narrow(hidden, weight, bias)
    low, up = (None, None) if added is None else (t.to(hidden.dtype) for t in added)
    low = low if low is None else low.flatten(0, -2)
    prepared = [prepare(hidden, c, options, vocab, width) for c in criteria]
    rows = hidden if hidden.dim() == 2 else hidden.flatten(0, -2)
    if (
        weight is None
        and not runs_triton(rows)
        and all(a.plan.kind == "cross_entropy" for a in prepared)
    ):
        return [_plain(rows, a, lead) for a in prepared]
    index, live = (None, None) if weight is None else select(rows, prepared, active)
    shared: tuple[Tensor | None, ...] = (rows, weight, bias, low, up)
    p = _pass(shared, prepared, logits_bytes, overwrite)
    if vocabulary is not None:
        p = p._replace(shard=vocabulary.word())
    if not torch.is_grad_enabled():
        shared = tuple(None if x is None else x.detach() for x in shared)
    flat: list[Tensor | None] = []
    for a in prepared:
        flat += [*a.tensors, a.weights, a.scale]
    differentiable = any(p.needs) or any(p.learned) or is_transformed(rows)
    # Without a gradient to trace, Dynamo would take p for the context of `apply`
    run = Criteria.apply if differentiable else Criteria.forward
    out = iter(run(p, *shared, index, live, *flat))
    if p.overwrite:
        torch.autograd.graph.increment_version(hidden)
    values = [next(out) for _ in prepared]
    metrics = [{name: next(out) for name in a.plan.metrics} for a in prepared]
    return [_finish(v, m, a, lead) for v, m, a in zip(values, metrics, prepared, strict=True)]


def run_one(
    rows: Tensor, weight: Tensor | None, bias: Tensor | None, criterion: Criterion, **more: Any
) -> HeadValue:
    """`run_criteria` of one criterion, over rows [N, C] or raw logits [N, V]."""
    if rows.dim() != 2:
        name, shape = ("logits", "[N, V]") if weight is None else ("hidden", "[N, C]")
        raise ValueError(f"{name} {tuple(rows.shape)} is not {shape}")
    return run_criteria(rows, weight, bias, [criterion], **more)[0]


def _pass(
    shared: tuple[Tensor | None, ...],  # those of Inputs that may have gradients
    prepared: Sequence[Prepared],
    logits_bytes: int | None,
    overwrite: bool,
) -> Pass:
    grad = torch.is_grad_enabled()
    rows, weight, *_ = shared
    assert rows is not None
    needs = tuple(grad and x is not None and x.requires_grad for x in shared)
    per_token = tuple(a.scale is None for a in prepared)
    # Upstream gradients of several sums can be compared only where tensors have values
    comparable = len(prepared) == 1 or not (torch.compiler.is_compiling() or is_transformed(rows))
    ahead = any(needs) and comparable and not any(per_token)
    overlap = rows.stride(1) != 1 or (rows.stride(0) < rows.shape[1] and len(rows) > 1)
    ours = overwrite and ahead and not overlap and has_values(rows) and not is_transformed(rows)
    kinds = ["kl" if a.plan.kind != "cross_entropy" else a.plan.kind for a in prepared]
    if weight is not None:
        kinds = [f"linear_{kind}" for kind in kinds]
    return Pass(
        name=" and ".join(dict.fromkeys(kinds)),
        plans=tuple(
            a.plan._replace(statistics=any(needs) and not ahead and a.plan.kind == "cross_entropy")
            for a in prepared
        ),
        per_token=per_token,
        learned=tuple(grad and a.weights is not None and a.weights.requires_grad for a in prepared),
        teachers=tuple(a.teacher for a in prepared),
        needs=needs,
        late=rows.dtype == torch.float16 and len(rows) > 0 and any(needs),
        ahead=ahead,
        overwrite=ours and runs_triton(rows),
        logits_bytes=logits_bytes or 0,
    )


def _finish(value: Tensor, found: dict[str, Tensor], a: Prepared, lead: torch.Size) -> HeadValue:
    """The value as the criterion has it, and the metrics asked for, [...] where per row."""
    c = a.given
    if isinstance(c, LogProbs):
        value = -value
    elif a.scale is None and isinstance(c, Weighted) and not _is_one(c.coefficient):
        value = value * c.coefficient
    metrics = {}
    for name in rows_of(c):
        if name == "accuracy":
            assert a.targets is not None
            valid = a.targets != IGNORE_INDEX
            right = (found["predicted_tokens"] == a.targets) & valid
            metrics[name] = right.sum() / valid.sum().clamp(min=1)
        else:
            metrics[name] = unview(found[name], lead)
    return HeadValue(unview(value, lead) if a.scale is None else value, metrics)


def unview(x: Tensor, shape: torch.Size) -> Tensor:
    """x.view(shape), no view to autograd: FSDP2 warns of views among what a module returns."""
    return torch.ops.aten._unsafe_view(x, shape)


def rows_of(c: Criterion) -> Sequence[str]:
    """The metrics that a criterion asks for."""
    metrics = c.metrics if isinstance(c, CrossEntropy | LogProbs) else ()
    return (metrics,) if isinstance(metrics, str) else metrics


def prepare(hidden: Tensor, c: Criterion, options: Options, vocab: int, width: int) -> Prepared:
    """The criterion's tensors, checked against the hidden states [..., C] and flattened.

    `width` of the head's `vocab` rows are on this rank, with padding.
    """
    weights = scale = targets = None
    if isinstance(c, Weighted):
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
        if targets is not None and weights is None:
            weights = (targets != IGNORE_INDEX).float()
        elif targets is not None and weights is not None:
            weights = torch.where(targets != IGNORE_INDEX, weights, 0)
        if isinstance(c, Divergence):
            plan = Plan("divergence", PLAIN, float(c.beta), normalized=True)
            given = c.teacher_logprobs.detach().flatten(0, -2)
            return Prepared(c, plan, (given, None, None, None), targets, weights, scale)
        plan, tensors, teacher = _teacher(hidden, c, options, vocab, width, targets)
        return Prepared(c, plan, tensors, targets, weights, scale, teacher)
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
            of_class = c.class_weights.float()[targets.clamp(min=0)]
            weights = of_class if weights is None else weights * of_class
    if weights is not None:
        weights = torch.where(targets != IGNORE_INDEX, weights, 0)
    options = Options(options.softcap, options.logit_scale, smoothing, z_loss)
    plan = Plan("cross_entropy", options, metrics=_rows_behind(rows_of(c)))
    return Prepared(c, plan, (targets, None, None, None), targets, weights, scale)


def _scale(c: Weighted, device: torch.device) -> Tensor:
    """What the sum is multiplied by."""
    denominator, coefficient = c.denominator, c.coefficient
    for name, x in (("denominator", denominator), ("coefficient", coefficient)):
        if isinstance(x, Tensor) and x.requires_grad:
            raise ValueError(
                f"{name} requires a gradient, and criteria give it none: detach it, or multiply "
                "what the criterion returns"
            )
    if not isinstance(denominator, Tensor):
        # A fill, where as_tensor would copy from the host and wait
        value = 1.0 if denominator is None else denominator
        denominator = torch.full((), value, dtype=torch.float32, device=device)
    scale = denominator.to(device, torch.float32, non_blocking=True).reciprocal()
    return scale if _is_one(coefficient) else scale * coefficient


def _is_one(x: Tensor | float) -> bool:
    return not isinstance(x, Tensor) and x == 1


def _teacher(
    hidden: Tensor, c: KL, options: Options, vocab: int, width: int, targets: Tensor | None
) -> tuple[Plan, tuple[Tensor | None, ...], Callable[..., Any] | None]:
    if not 0 <= c.beta <= 1:
        raise ValueError(f"beta={c.beta} is not in [0, 1]")
    if not c.temperature > 0:
        raise ValueError(f"temperature={c.temperature} is not positive")
    options = options.at_temperature(c.temperature)
    n = hidden.shape[:-1].numel()
    stored, head = c.teacher_tokens is not None, c.teacher_hidden is not None
    if (
        stored == head
        or stored != (c.teacher_logprobs is not None)
        or head != (c.teacher is not None)
    ):
        raise ValueError(
            "KL wants teacher_hidden and teacher, or teacher_tokens and teacher_logprobs"
        )
    if head and not hasattr(c.teacher, "options"):
        kind = type(c.teacher).__name__
        raise TypeError(f"KL's teacher is a {kind}: give the teacher's lm_head, or a Head")
    if c.teacher_tokens is not None and c.teacher_logprobs is not None:
        tokens, logprobs = _stored(c.teacher_tokens, c.teacher_logprobs, n, vocab, targets)
        check_devices(hidden=hidden, teacher_tokens=tokens, teacher_logprobs=logprobs)
        return Plan("topk", options, float(c.beta)), (tokens, logprobs, None, None), None
    states = cast(Tensor, c.teacher_hidden).detach().flatten(0, -2)
    of_teacher, module = c.teacher.options, None
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
        states, weight, bias = narrow(states, weight, bias)
    else:
        module = c.teacher
        states = states.to(autocast_dtype(states.device) or states.dtype)
        if len(states) != n:
            raise ValueError(f"the student has {n} rows, the teacher {len(states)}")
    check_of_logits(of_teacher)
    teacher_options = of_teacher.at_temperature(c.temperature)
    plan = Plan("divergence", options, float(c.beta), teacher_options)
    return plan, (states, None, weight, bias), module


def _stored(
    tokens: Tensor, logprobs: Tensor, n: int, vocab: int, targets: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Tokens and log-probabilities [N, K]; rows that do not count may hold anything."""
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
    check(ok, f"teacher_tokens are not in [0, {vocab}), or a row's first is negative")
    return tokens, logprobs.detach().flatten(0, -2)


def narrow(
    hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """In autocast's dtype; without autocast, dtypes that differ are an error."""
    dtype = autocast_dtype(hidden.device)
    if dtype is not None:
        bias = None if bias is None else bias.to(dtype)
        return hidden.to(dtype), weight.to(dtype), bias
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype}, weight {weight.dtype}: cast one of them")
    return hidden, weight, bias


def select(
    rows: Tensor, prepared: Sequence[Prepared], active: ActiveRows | None
) -> tuple[Tensor | None, Tensor | None]:
    """The rows to compute and, if not all of these have a gradient, which do; None: all."""
    if not host_may_count(rows):
        return None, _union([a.counted() for a in prepared])
    metrics = any(a.plan.metrics for a in prepared)
    if active is None or (metrics and active.weights is not None):
        keep = _union([a.needed() for a in prepared])
        index = None if keep is None else ActiveRows(keep).index()
        extra = metrics and any(a.weighs for a in prepared)
    else:
        for a in prepared:
            _check_active(active, a, len(rows))
        index = active.index()
        extra = any(a.weights is not None and active.weights is not _given(a) for a in prepared)
    return index, _union([a.counted() for a in prepared]) if extra else None


def _union(keeps: Sequence[Tensor | None]) -> Tensor | None:
    found = keeps[0]
    for keep in keeps[1:]:
        found = None if found is None or keep is None else found | keep
    return found


def _given(a: Prepared) -> Tensor | None:
    """The weights, if they alone decide which rows are left out."""
    if isinstance(a.given, CrossEntropy) and a.given.class_weights is not None:
        return None
    return a.given.weights if isinstance(a.given, Weighted) else None


def _check_active(active: ActiveRows, a: Prepared, rows: int) -> None:
    """Raises unless `active` has every row that the criterion needs."""
    if len(active.keep) != rows:
        raise ValueError(
            f"active has {len(active.keep)} rows, the criterion {rows}: make it from its targets"
        )
    weights = a.given.weights if isinstance(a.given, Weighted) else None
    same_weights = active.weights is None or active.weights is weights
    if active.targets is not None and active.targets is a.given.targets and same_weights:
        return
    needed = a.needed()
    missing = ~active.keep if needed is None else needed & ~active.keep
    check(~missing.any(), "active leaves out rows that count: make it from the same targets")


def _plain(logits: Tensor, a: Prepared, lead: torch.Size) -> HeadValue:
    """Cross-entropy by autograd, of logits that exist."""
    assert a.targets is not None
    loss = cross_entropy_ref(logits, a.targets, options=a.plan.options)
    loss = loss if a.weights is None else torch.where(a.weights == 0, 0, loss * a.weights)
    if a.scale is not None and isinstance(a.given, Weighted):
        loss = loss.sum() / (1.0 if a.given.denominator is None else a.given.denominator)
        loss = loss * a.given.coefficient
    found = {}
    if a.plan.metrics:
        found = loss_rows(logits.detach(), a.targets, a.plan.options, a.plan.metrics).metrics
    return _finish(loss, found, a, lead)


def _rows_behind(metrics: Sequence[str]) -> tuple[str, ...]:
    """The per-row values that the metrics asked for are made of."""
    unknown = [m for m in metrics if m not in METRICS]
    if unknown:
        raise ValueError(f"unknown metrics {unknown}; there are {', '.join(METRICS)}")
    return tuple(dict.fromkeys("predicted_tokens" if m == "accuracy" else m for m in metrics))
