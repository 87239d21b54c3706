"""Autograd of criteria over a head's logits: one node for all criteria of a pass.

# N rows (tokens), C model dim, V vocab, k criteria
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tigon.kernels._check import is_transformed
from tigon.kernels._head_pass import GRADIENTS, SLOTS, Inputs, Pass, Slots, run_pass
from tigon.kernels._logits import rescale, rescale_, rescale_and_join, rescale_and_join_
from tigon.kernels._triton import refuse_second_derivative, retains_graph

SHARED = len(Inputs._fields)
LEARNED = 5  # of them that may have gradients: hidden, weight, bias, low and up
INPUTS = 6  # of a criterion: four tensors of its pass, weights of the rows, scale of the sum
Grads = tuple[Tensor | None, ...]


def _run(
    p: Pass,
    inputs: Inputs,
    flat: Sequence[Tensor | None],
    row_scales: list[Tensor],
    needs: tuple[bool, ...],
    known: Slots,
) -> tuple[list[Tensor], list[dict[str, Tensor]], Tensor | None]:
    """The pass, inside the forward of the heads of all teachers that are modules.

    The last result, if not None, is still to multiply the gradients: in fp16 those of the logits
    could under- or overflow with the rows' own scales.
    """
    slots: Slots = []
    for i in range(len(p.plans)):
        slots += [*flat[INPUTS * i : INPUTS * i + 4], *known[2 * i : 2 * i + 2]]
    top = None
    if p.late and any(needs):
        top = torch.cat(row_scales).abs().amax()
        top = torch.where(top > 0, top, 1)
        row_scales = [r / top for r in row_scales]

    run = partial(run_pass, p, inputs, slots, row_scales, needs)
    vocab = inputs.hidden.shape[1] if inputs.weight is None else len(inputs.weight)
    return *_with_teachers(p, 0, slots, vocab, run), top


def _with_teachers(
    p: Pass, first: int, slots: Slots, vocab: int, run: Callable[[], Any]
) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """What `run` returns, called while the teachers from criterion `first` on lend their heads."""
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


class Criteria(torch.autograd.Function):
    """Values of k criteria, then metrics, then what the backward pass needs."""

    @staticmethod
    def forward(p: Pass, *tensors: Any) -> tuple[Tensor, ...]:
        given, flat = Inputs(*tensors[:SHARED]), tensors[SHARED:]
        row_scales: list[Tensor] = []
        for w, scale in zip(flat[4::INPUTS], flat[5::INPUTS], strict=True):
            if p.ahead and scale is not None:
                n = given.hidden.shape[0]
                row_scales.append(scale.expand(n).contiguous() if w is None else w * scale)
        needs = p.needs if p.ahead else (False,) * len(p.needs)
        nothing: Slots = [None, None] * len(p.plans)
        grads, rows_of, top = _run(p, given, flat, row_scales, needs, nothing)
        values, metrics, losses = [], [], []
        for i, (plan, rows) in enumerate(zip(p.plans, rows_of, strict=True)):
            w, scale = flat[INPUTS * i + 4], flat[INPUTS * i + 5]
            loss = rows["loss"]
            weighted = loss if w is None else torch.where(w == 0, 0, loss * w)
            values.append(weighted if scale is None else weighted.sum() * scale)
            metrics += [rows[name] for name in plan.metrics]
            if p.learned[i]:
                losses.append(loss if scale is None else loss * scale)
        if not p.ahead:
            of = [rows for plan, rows in zip(p.plans, rows_of, strict=True) if plan.statistics]
            grads = [rows[name] for rows in of for name in ("peak", "log_mass")]
        return *values, *metrics, *losses, *(() if top is None else (top,)), *grads

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        p, *given = inputs
        hidden, weight, bias, low, up = given[:LEARNED]
        k = len(p.plans)
        kept: list[Tensor | None] = [*output[k + sum(len(plan.metrics) for plan in p.plans) :]]
        ctx.mark_non_differentiable(*output[k:])
        ctx.set_materialize_grads(False)
        ctx.p, ctx.kept, ctx.grad = p, len(kept), None
        ctx.dtypes = [None if x is None else x.dtype for x in given[:LEARNED]]
        ctx.transformed = is_transformed(hidden, weight, bias, low, up)
        if p.ahead and weight is None and not ctx.transformed:
            # Returned last, the gradient is scaled in place: saved_tensors would keep it alive
            first = -GRADIENTS
            ctx.grad, kept[first] = hidden.detach() if p.overwrite else kept[first], None
        if p.ahead and len(p.plans) == 1 and not ctx.transformed:
            given = [None] * len(given)
        # Gradients that autograd alone keeps may be overwritten by those that it is to get
        ctx.ours = not (ctx.transformed or torch.compiler.is_compiling()) and (
            torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        )
        ctx.save_for_backward(*given, *kept)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Grads:
        p, saved = ctx.p, ctx.saved_tensors
        ups = grads[: len(p.plans)]
        if all(up is None for up in ups):
            return (None,) * (1 + SHARED + INPUTS * len(ups))
        if ctx.transformed:
            found = Backward.apply(p, False, ctx.kept, *ctx.dtypes, *ups, *saved)
        else:
            refuse_second_derivative(p.name, p.instead)
            if ctx.grad is not None and _same(ups):
                losses, factor, _ = _unpack(p, saved[len(saved) - ctx.kept :], ups)
                assert factor is not None
                if retains_graph():
                    d_logits = rescale(ctx.grad, factor, ctx.grad.dtype)
                else:
                    d_logits, ctx.grad = rescale_(ctx.grad, factor), None
                found = (d_logits, *(None,) * (LEARNED - 1), *losses)
            else:
                ours = ctx.ours and not retains_graph()
                found = _differentiate(p, ours, ctx.kept, *ctx.dtypes, *ups, *saved)
        of_flat: list[Tensor | None] = []
        rest = iter(found[LEARNED:])
        for learns in p.learned:
            of_flat += [None] * 4 + [next(rest) if learns else None, None]
        return (None, *found[:LEARNED], None, None, *of_flat)


class Backward(torch.autograd.Function):
    """`Criteria.backward` where torch.func would differentiate it again, which is an error."""

    @staticmethod
    def forward(p: Pass, *flat: Any) -> Grads:
        return _differentiate(p, *flat)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Grads) -> None:
        ctx.p = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(f"{ctx.p.name} has no second derivative; {ctx.p.instead}")


def _same(ups: Sequence[Tensor | None]) -> bool:
    """Whether all values have the same upstream gradient, as the terms of a sum have."""
    if len(ups) == 1:
        return True
    if torch.compiler.is_compiling() or any(up is None for up in ups) or is_transformed(*ups):
        return False
    return len({(up.data_ptr(), up.dtype) for up in ups if up is not None}) == 1


def _unpack(
    p: Pass, kept: Sequence[Tensor], ups: Sequence[Tensor | None]
) -> tuple[Grads, Tensor | None, Sequence[Tensor]]:
    """Gradients of the rows' weights, the factor of gradients made ahead, and what else is kept."""
    learned = [up for up, learns in zip(ups, p.learned, strict=True) if learns]
    of_weights = [None if up is None else x * up for up, x in zip(learned, kept, strict=False)]
    kept, factor = kept[len(learned) :], ups[0]
    if p.late and p.ahead:
        factor, kept = None if factor is None else factor * kept[0], kept[1:]
    return tuple(of_weights), factor, kept


def _scaled(
    made: Sequence[Tensor],
    needs: Sequence[bool],
    dtypes: Sequence[Any],
    factor: Tensor | None,  # None: 1
    ours: bool,
) -> Grads:
    """Gradients of the inputs that learn, from the six of a pass; `ours`: in their memory.

    Each is a tensor that nobody else refers to, which autograd keeps without a copy.
    """

    def one(x: Tensor, dtype: torch.dtype) -> Tensor:
        if factor is None:
            return x.to(dtype)
        if ours and x.dtype == dtype:
            return rescale_(x, factor).detach()
        return rescale(x, factor, dtype)

    hidden, first, rest, bias, low, up = made
    of_weight = None
    if needs[1] and not len(rest):
        of_weight = one(first, dtypes[1])
    elif needs[1]:
        join = rescale_and_join_ if ours else rescale_and_join
        of_weight = join(first, rest, first.new_ones(()) if factor is None else factor, dtypes[1])
    return (
        one(hidden, dtypes[0]) if needs[0] else None,
        of_weight,
        one(bias, dtypes[2]) if needs[2] else None,
        one(low, dtypes[3]) if needs[3] else None,
        one(up, dtypes[4]) if needs[4] else None,
    )


def _differentiate(p: Pass, ours: bool, count: int, *given: Any) -> Grads:
    """Gradients of hidden, weight, bias, low and up, then of the weights of rows that learn.

    `ours`: nobody else has the gradients made ahead, nor needs them again.
    """
    k = len(p.plans)
    dtypes, given = given[:LEARNED], given[LEARNED:]
    ups, saved = given[:k], given[k:]
    split = len(saved) - count
    of_weights, factor, kept = _unpack(p, saved[split:], ups)
    if p.ahead and factor is not None and _same(ups):
        return *_scaled(kept, p.needs, dtypes, factor, ours), *of_weights
    inputs, flat = Inputs(*saved[:SHARED]), saved[SHARED:split]
    row_scales = []
    for i, up in enumerate(ups):
        w, scale = flat[INPUTS * i + 4], flat[INPUTS * i + 5]
        rows = inputs.hidden.new_zeros((), dtype=torch.float32) if up is None else up.float()
        rows = rows if p.per_token[i] else rows * scale
        rows = rows if w is None else rows * w
        row_scales.append(rows.expand(inputs.hidden.shape[0]))
    statistics = iter(kept)
    known: Slots = []
    for plan in p.plans:
        known += [next(statistics), next(statistics)] if plan.statistics else [None, None]
    of_loss = tuple(plan._replace(metrics=(), statistics=False) for plan in p.plans)
    made, _, top = _run(p._replace(plans=of_loss), inputs, flat, row_scales, p.needs, known)
    return *_scaled(made, p.needs, dtypes, top, ours=True), *of_weights
