"""Runs loss terms over a head's logits: one pass, and one autograd node, for all terms.

# B batch, n positions, N = B n rows, C and D model dims of student and teacher, V vocab, k terms
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.kernels.loss.cross_entropy_rows import cross_entropy_ref, loss_rows
from tigon.kernels.loss.fused_linear_pass import (
    GRADIENTS,
    SLOTS,
    STATISTICS,
    LossArgs,
    LossPass,
    Slots,
    run_pass,
)
from tigon.kernels.loss.logits import (
    DEFAULT_OPTIONS,
    IGNORE_INDEX,
    Options,
    check_head,
    check_logit_options,
    rescale,
    rescale_and_join,
)
from tigon.kernels.loss.prepare_terms import (
    PreparedTerm,
    apply_autocast,
    is_one,
    metrics_of_term,
    prepare_term,
    select_rows,
)
from tigon.kernels.loss.terms import LogProbs, LossTerm, ValidRows, WeightedTerm
from tigon.kernels.loss.vocab_parallel import VocabularyShard
from tigon.kernels.runtime import (
    check_devices,
    is_eager,
    refuse_second_derivative,
    retains_graph,
    runs_triton,
)

SHARED = len(LossArgs._fields)
LEARNED = 5  # of them that may have gradients: hidden, weight, bias, low and up
# The largest row scale in fp16: gradients of flat distributions over V tokens, about 1 / V, are
# subnormal below it, and products with a weight below 128 are finite
HEADROOM = 256
INPUTS = 6  # of a term: four tensors of its pass, weights of the rows, scale of the sum
Grads = tuple[Tensor | None, ...]


def _run(
    p: LossPass,
    inputs: LossArgs,
    flat: Sequence[Tensor | None],
    row_scales: list[Tensor],
    needs: tuple[bool, ...],
    lse_parts: Slots,
) -> tuple[list[Tensor], list[dict[str, Tensor]], Tensor | None]:
    """Runs the pass inside the forward of the heads of all teachers that are modules.

    Returns what `run_pass` does, and a factor, if not None, that still has to multiply the
    gradients: in fp16 those of the logits could under- or overflow with the rows' own scales.
    """
    slots: Slots = []
    for i in range(len(p.plans)):
        slots += [*flat[INPUTS * i : INPUTS * i + 4], *lse_parts[2 * i : 2 * i + 2]]
    top = None
    if p.late and any(needs):
        top = torch.cat(row_scales).abs().amax() / HEADROOM
        top = torch.where(top > 0, top, 1)
        row_scales = [r / top for r in row_scales]

    run = partial(run_pass, p, inputs, slots, row_scales, needs)
    vocab = inputs.hidden.shape[1] if inputs.weight is None else len(inputs.weight)
    return *_with_teachers(p, 0, slots, vocab, run), top


def _with_teachers(
    p: LossPass, first: int, slots: Slots, vocab: int, run: Callable[[], Any]
) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Calls `run` while the teachers from term `first` on lend their heads; returns its result."""
    if first == len(p.plans):
        return run()
    teacher = p.teachers[first]
    if teacher is None:
        return _with_teachers(p, first + 1, slots, vocab, run)

    def use(head: Tensor, bias: Tensor | None) -> Any:
        at = SLOTS * first
        states = slots[at]
        assert states is not None
        if len(head) != vocab:
            raise ValueError(f"the student has {vocab} tokens, the teacher {len(head)}")
        slots[at + 2] = head.detach().to(states.dtype)
        slots[at + 3] = None if bias is None else bias.detach().to(states.dtype)
        return _with_teachers(p, first + 1, slots, vocab, run)

    return teacher(None, lend=use)


def _run_terms(
    p: LossPass,
    tensors: Sequence[Any],  # the fields of LossArgs, and INPUTS of each term
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Returns the values of k loss terms and then their metrics, and what the backward pass needs:
    losses of rows whose weights learn, the factor of the gradients if there is one, and these, or
    statistics."""
    args, flat = LossArgs(*tensors[:SHARED]), tensors[SHARED:]
    row_scales: list[Tensor] = []
    for w, scale in zip(flat[4::INPUTS], flat[5::INPUTS], strict=True):
        if p.ahead and scale is not None:
            n = args.hidden.shape[0]
            row_scales.append(scale.expand(n).contiguous() if w is None else w * scale)
    needs = p.needs if p.ahead else (False,) * len(p.needs)
    nothing: Slots = [None, None] * len(p.plans)
    grads, rows_by_term, top = _run(p, args, flat, row_scales, needs, nothing)
    values, metrics, losses = [], [], []
    for i, (plan, rows) in enumerate(zip(p.plans, rows_by_term, strict=True)):
        w, scale = flat[INPUTS * i + 4], flat[INPUTS * i + 5]
        loss = rows["loss"]
        weighted = loss if w is None else torch.where(w == 0, 0, loss * w)
        values.append(weighted if scale is None else weighted.sum() * scale)
        metrics += [rows[name] for name in plan.metrics]
        if p.learned[i]:
            losses.append(loss if scale is None else loss * scale)
    if not p.ahead:
        returned = zip(p.plans, rows_by_term, strict=True)
        statistics = [rows for plan, rows in returned if plan.statistics]
        grads = [rows[name] for rows in statistics for name in STATISTICS]
    return values + metrics, [*losses, *(() if top is None else (top,)), *grads]


class FusedLinearLoss(torch.autograd.Function):
    """`_run_terms` and its gradients: returns the values, then the metrics."""

    @staticmethod
    def forward(ctx: Any, p: LossPass, *tensors: Any) -> tuple[Tensor, ...]:
        hidden, weight, *_ = tensors
        results, extra = _run_terms(p, tensors)
        ctx.mark_non_differentiable(*results[len(p.plans) :])
        ctx.set_materialize_grads(False)
        ctx.p, ctx.count, ctx.grad = p, len(extra), None
        ctx.dtypes = [None if x is None else x.dtype for x in tensors[:LEARNED]]
        if p.ahead and weight is None:
            # The logits' gradient is scaled in place: saved_tensors would keep it alive
            first = -GRADIENTS
            ctx.grad, extra[first] = hidden.detach() if p.overwrite else extra[first], None
        # Gradients that autograd alone keeps may be overwritten by those that it is to get
        ctx.exclusive = not torch.compiler.is_compiling() and (
            torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        )
        ctx.save_for_backward(*(() if p.ahead and len(p.plans) == 1 else tensors), *extra)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Grads:
        p, saved = ctx.p, ctx.saved_tensors
        ups, split = grads[: len(p.plans)], len(saved) - ctx.count
        if all(up is None for up in ups):
            return (None,) * (1 + SHARED + INPUTS * len(ups))
        refuse_second_derivative(p.name, p.instead)
        losses, factor, extra = _unpack(p, saved[split:], ups)
        if not (p.ahead and factor is not None and _share_gradient(ups)):
            shared = _recompute_gradients(p, saved[:split], ups, extra, ctx.dtypes)
        elif ctx.grad is not None:
            grad, overwrite = ctx.grad, not retains_graph()
            if overwrite:
                ctx.grad = None
            d_logits = rescale(grad, factor, grad.dtype, overwrite=overwrite)
            shared = (d_logits, *(None,) * (LEARNED - 1))
        else:
            exclusive = ctx.exclusive and not retains_graph()
            shared = _scale_gradients(extra, p.needs, ctx.dtypes, factor, exclusive)
        flat_gradients: list[Tensor | None] = []
        rest = iter(losses)
        for learns in p.learned:
            flat_gradients += [None] * 4 + [next(rest) if learns else None, None]
        return (None, *shared, None, None, *flat_gradients)


def _share_gradient(ups: Sequence[Tensor | None]) -> bool:
    """Whether all values have the same upstream gradient, as the terms of a sum have."""
    if len(ups) == 1:
        return True
    if torch.compiler.is_compiling() or any(up is None for up in ups):
        return False
    return len({(up.data_ptr(), up.dtype) for up in ups if up is not None}) == 1


def _unpack(
    p: LossPass, extra: Sequence[Tensor], ups: Sequence[Tensor | None]
) -> tuple[Grads, Tensor | None, Sequence[Tensor]]:
    """Returns gradients of the rows' weights, the factor of precomputed gradients, and the rest."""
    learned = [up for up, learns in zip(ups, p.learned, strict=True) if learns]
    pairs = zip(learned, extra, strict=False)
    weight_gradients = [None if up is None else x * up for up, x in pairs]
    extra, factor = extra[len(learned) :], ups[0]
    if p.late and p.ahead:
        factor, extra = None if factor is None else factor * extra[0], extra[1:]
    return tuple(weight_gradients), factor, extra


def _scale_gradients(
    pass_gradients: Sequence[Tensor],
    needs: Sequence[bool],
    dtypes: Sequence[Any],
    factor: Tensor | None,  # None: 1
    exclusive: bool,
) -> Grads:
    """Returns the inputs' gradients from the six of a pass; with `exclusive` in their memory.

    Nothing else refers to them, so autograd keeps them without a copy.
    """

    def one(x: Tensor, dtype: torch.dtype) -> Tensor:
        if factor is None:
            return x.to(dtype)
        y = rescale(x, factor, dtype, overwrite=exclusive)
        return y.detach() if y is x else y

    hidden, first, rest, bias, low, up = pass_gradients
    parts = (
        (hidden, first, bias, low, up),
        dtypes,
        (needs[0], needs[1] and not len(rest), *needs[2:]),
    )
    gradients = [one(x, dtype) if want else None for x, dtype, want in zip(*parts, strict=True)]
    if needs[1] and len(rest):
        scale = first.new_ones(()) if factor is None else factor
        gradients[1] = rescale_and_join(first, rest, scale, dtypes[1], overwrite=exclusive)
    return tuple(gradients)


def _recompute_gradients(
    p: LossPass,
    saved: Sequence[Any],  # the tensors that `_run_terms` takes
    ups: Sequence[Tensor | None],
    statistics: Sequence[Tensor],
    dtypes: Sequence[Any],
) -> Grads:
    """Returns the gradients of the inputs that may learn, by a second pass over the logits."""
    inputs, flat = LossArgs(*saved[:SHARED]), saved[SHARED:]
    row_scales = []
    for i, up in enumerate(ups):
        w, scale = flat[INPUTS * i + 4], flat[INPUTS * i + 5]
        rows = inputs.hidden.new_zeros((), dtype=torch.float32) if up is None else up.float()
        rows = rows if p.per_token[i] else rows * scale
        rows = rows if w is None else rows * w
        row_scales.append(rows.expand(inputs.hidden.shape[0]))
    known = iter(statistics)
    lse_parts: Slots = []
    for plan in p.plans:
        lse_parts += [next(known), next(known)] if plan.statistics else [None, None]
    loss_plans = tuple(plan._replace(metrics=(), statistics=False) for plan in p.plans)
    loss_pass = p._replace(plans=loss_plans)
    computed, _, top = _run(loss_pass, inputs, flat, row_scales, p.needs, lse_parts)
    return _scale_gradients(computed, p.needs, dtypes, top, exclusive=True)


class HeadValue(NamedTuple):
    """The value of a loss term, summed or per row, and its metrics."""

    value: Tensor
    metrics: dict[str, Tensor]


def run_loss_terms(
    hidden: Tensor,  # [..., C]; or raw logits [..., V], where there is no weight
    weight: Tensor | None,  # [V, C]
    bias: Tensor | None,  # [V]
    criteria: Sequence[LossTerm],
    *,
    added: tuple[Tensor, Tensor] | None = None,  # [..., r], [V, r]: their product joins the logits
    options: Options = DEFAULT_OPTIONS,  # softcap and scale of the logits
    active: ValidRows | None = None,  # made ahead of time, it saves waiting for the device
    logits_bytes: int | None = None,
    overwrite: bool = False,
    vocabulary: VocabularyShard | None = None,
) -> list[HeadValue]:
    """Returns the value of each loss term, from one pass over the logits.

    At most `logits_bytes` of logits exist at a time. None means at most 1 GiB, less if that costs
    little time, or all if that costs no more memory. Rows whose target is ignored or whose weight
    is 0 cost nothing and give nothing, not even NaN. On a GPU the host must know how many remain.
    Under torch.compile and in CUDA graphs no row is left out.

    With a `vocabulary`, weight and bias (and a teacher's) are this rank's rows of V, and all ranks
    of the group make the same call with the same other tensors. Values and metrics are those of the
    full head, on every rank. The gradients of hidden and of the first of `added` are this rank's
    terms of their sums over the group.
    """
    if not criteria:
        return []
    check_logit_options(options)
    lead = hidden.shape[:-1]
    width = vocab = hidden.shape[-1] if weight is None else weight.shape[0]
    if vocabulary is not None:
        vocab = vocabulary.check(weight, criteria)
    if weight is not None:
        check_head(hidden, weight, bias)
        check_devices(hidden=hidden, weight=weight, bias=bias)
        hidden, weight, bias = apply_autocast(hidden, weight, bias)
    low, up = (None, None) if added is None else (t.to(hidden.dtype) for t in added)
    low = low if low is None else low.flatten(0, -2)
    prepared = [prepare_term(hidden, c, options, vocab, width) for c in criteria]
    rows = hidden if hidden.dim() == 2 else hidden.flatten(0, -2)
    plain = weight is None and not runs_triton(rows)
    if plain and all(a.plan.kind == "cross_entropy" for a in prepared):
        return [_eager_cross_entropy(rows, a, lead) for a in prepared]
    index, live = (None, None) if weight is None else select_rows(rows, prepared, active)
    shared: tuple[Tensor | None, ...] = (rows, weight, bias, low, up)
    p = _pass(shared, prepared, logits_bytes, overwrite)
    if vocabulary is not None:
        p = p._replace(shard=vocabulary.encode())
    if not torch.is_grad_enabled():
        shared = tuple(None if x is None else x.detach() for x in shared)
    flat = [x for a in prepared for x in (*a.tensors, a.weights, a.scale)]
    tensors, learns = (*shared, index, live, *flat), any(p.needs) or any(p.learned)
    out = iter(FusedLinearLoss.apply(p, *tensors) if learns else _run_terms(p, tensors)[0])
    if p.overwrite:
        torch.autograd.graph.increment_version(hidden)
    values = [next(out) for _ in prepared]
    metrics = [{name: next(out) for name in a.plan.metrics} for a in prepared]
    return [_finish(v, m, a, lead) for v, m, a in zip(values, metrics, prepared, strict=True)]


def run_loss_term(
    rows: Tensor, weight: Tensor | None, bias: Tensor | None, term: LossTerm, **more: Any
) -> HeadValue:
    """`run_loss_terms` of one term, over rows [N, C] or raw logits [N, V]."""
    if rows.dim() != 2:
        name, shape = ("logits", "[N, V]") if weight is None else ("hidden", "[N, C]")
        raise ValueError(f"{name} {tuple(rows.shape)} is not {shape}")
    return run_loss_terms(rows, weight, bias, [term], **more)[0]


def _pass(
    shared: tuple[Tensor | None, ...],  # those of LossArgs that may have gradients
    prepared: Sequence[PreparedTerm],
    logits_bytes: int | None,
    overwrite: bool,
) -> LossPass:
    """Returns the plan of one pass over the logits for all terms: which gradients, and when."""
    grad = torch.is_grad_enabled()
    rows, weight, *_ = shared
    assert rows is not None
    needs = tuple(grad and x is not None and x.requires_grad for x in shared)
    per_token = tuple(a.scale is None for a in prepared)
    # Upstream gradients of several sums can be compared only where tensors have values
    comparable = len(prepared) == 1 or not torch.compiler.is_compiling()
    ahead = any(needs) and comparable and not any(per_token)
    overlap = rows.stride(1) != 1 or (rows.stride(0) < rows.shape[1] and len(rows) > 1)
    exclusive = overwrite and ahead and not overlap and is_eager(rows)
    kinds = ["kl" if a.plan.kind != "cross_entropy" else a.plan.kind for a in prepared]
    if weight is not None:
        kinds = [f"linear_{kind}" for kind in kinds]
    return LossPass(
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
        overwrite=exclusive and runs_triton(rows),
        logits_bytes=logits_bytes or 0,
    )


def _finish(
    value: Tensor, outputs: dict[str, Tensor], a: PreparedTerm, lead: torch.Size
) -> HeadValue:
    """Returns the term's value and the requested metrics, [...] where per row."""
    c = a.term
    if isinstance(c, LogProbs):
        value = -value
    elif a.scale is None and isinstance(c, WeightedTerm) and not is_one(c.coefficient):
        value = value * c.coefficient
    metrics = {}
    for name in metrics_of_term(c):
        if name == "accuracy":
            assert a.targets is not None
            valid = a.targets != IGNORE_INDEX
            right = (outputs["predicted_tokens"] == a.targets) & valid
            metrics[name] = right.sum() / valid.sum().clamp(min=1)
        else:
            metrics[name] = reshape_unaliased(outputs[name], lead)
    return HeadValue(reshape_unaliased(value, lead) if a.scale is None else value, metrics)


def reshape_unaliased(x: Tensor, shape: torch.Size) -> Tensor:
    """Returns x.view(shape) as no view to autograd: FSDP2 warns of views among outputs."""
    return torch.ops.aten._unsafe_view(x, shape)


def _eager_cross_entropy(logits: Tensor, a: PreparedTerm, lead: torch.Size) -> HeadValue:
    """Returns the value and metrics of a cross-entropy of existing logits, by plain autograd."""
    assert a.targets is not None
    loss = cross_entropy_ref(logits, a.targets, options=a.plan.options)
    loss = loss if a.weights is None else torch.where(a.weights == 0, 0, loss * a.weights)
    if a.scale is not None and isinstance(a.term, WeightedTerm):
        loss = loss.sum() / (1.0 if a.term.denominator is None else a.term.denominator)
        loss = loss * a.term.coefficient
    outputs = {}
    if a.plan.metrics:
        outputs = loss_rows(logits.detach(), a.targets, a.plan.options, a.plan.metrics).metrics
    return _finish(loss, outputs, a, lead)
