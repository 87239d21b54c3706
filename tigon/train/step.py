"""The passes of one step, over all micro-batches and ranks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tigon.parallel import find_tensor
from tigon.train.build import Run
from tigon.train.distributed import World, sync_gradients
from tigon.train.objectives import Part
from tigon.train.optim import clip, learning_rate
from tigon.train.watch import Watch


def backward(run: Run, step: int) -> dict[str, float]:
    """Gradients of the step, clipped at once or by the update; its loss, this rank's part of it,
    the gradients' norm before clipping, and what else the objective logs. With
    optimizer_in_backward the weights are updated, and there are no gradients."""
    world, model, objective = run.world, run.model, run.objective
    batches = [objective.resolve(model, rows) for rows in run.feed(step)]
    # One denominator for all micro-batches and ranks: a mean of their means would weigh wrongly
    sums = total(world, [objective.sums(model, batch) for batch in batches])
    watch = Watch(run, step + 1 - run.state.offset, training=True)
    parts, norm = [], None
    for i, batch in enumerate(batches):
        sync_gradients(model, i == len(batches) - 1)
        batch = watch.ask(batch)
        part = objective.loss(model, batch, sums)
        if run.in_backward is None:
            part.loss.backward()
        else:
            set_rates(run, step - run.state.offset)
            whole = world.all_reduce_sum(part.loss.detach().to(torch.double, copy=True))
            norm = run.in_backward.backward(part.loss, world.same_loss(whole))
        # What autograd knew of it goes: nodes of an eager pass must not be there in a capture
        part = replace(part, loss=part.loss.detach())
        parts.append(watch.show(part, i, batch))
    if norm is None:
        if (tensor := find_tensor(model)) is not None:
            tensor.sum_gradients(model)
        norm = clip(model, run.optimizer, run.config.max_grad_norm)
    own = torch.stack([part.loss.detach().double() for part in parts]).sum()
    values = numbers({"grad_norm": norm, "own_loss": own} | summed(run, parts))
    if run.in_backward is not None and not math.isfinite(values["loss"]):
        run.in_backward.take_back()
    return values


def set_rates(run: Run, step: int) -> None:
    """Learning rates of the update after so many steps."""
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(run.config, step, run.steps) * group["lr_scale"]


def summed(run: Run, parts: Sequence[Part]) -> dict[str, Tensor]:
    """The loss and what else is logged."""
    loss = run.world.all_reduce_sum(
        torch.stack([part.loss.detach().double() for part in parts]).sum()
    )
    metrics = total(run.world, [part.metrics for part in parts])
    return {"loss": run.world.same_loss(loss)} | run.objective.logged(metrics)


def total(world: World, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Each sum over all micro-batches and ranks; one exchange for all of a dtype."""
    sums = {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}
    for dtype in dict.fromkeys(value.dtype for value in sums.values()):
        same = {name: value for name, value in sums.items() if value.dtype == dtype}
        flat = world.all_reduce_sum(torch.cat([value.flatten() for value in same.values()]))
        each = flat.split([value.numel() for value in same.values()])
        sums |= {name: x.view_as(same[name]) for name, x in zip(same, each, strict=True)}
    return sums


def numbers(values: Mapping[str, Tensor]) -> dict[str, float]:
    """The values on the host, after one wait for the device: the step's only one."""
    host = torch.stack([value.double() for value in values.values()]).tolist()
    return dict(zip(values, host, strict=True))
