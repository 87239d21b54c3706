"""Criteria of the rows of a chunk of logits of which each rank has some columns.

Ranks exchange a few numbers of each row, once or twice, and compute the same of them.

# N rows, V vocab, R ranks
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from tigon.kernels._cross_entropy_rows import ELSEWHERE, Rows, loss_rows, whole_loss
from tigon.kernels._divergence_rows import (
    against_stored,
    divergence_rows,
    logit_masses,
    stored_gradient,
)
from tigon.kernels._logits import IGNORE_INDEX, Gradient, Options, scale_and_cap
from tigon.kernels._vocabulary import VocabularyShard, join_masses

NO_PEAK = -1.0e38  # of no logits: finite, as kernels begin


def shard_loss_rows(
    shard: VocabularyShard,
    logits: Tensor,  # [N, rows of the shard] raw
    targets: Tensor,  # [N] of all V
    options: Options,
    metrics: Sequence[str] = (),
    grad: Gradient | None = None,
    known: tuple[Tensor, Tensor] | None = None,
) -> Rows:
    """`loss_rows` of all ranks' logits; the gradient is of this rank's."""
    local = shard.local(targets)
    if known is None:
        rows = _joined_rows(shard, logits, targets, local, options, metrics)
    else:  # by the pass that found the losses
        rows = Rows(torch.zeros_like(known[0]), *known)
    if grad is not None and logits.shape[1]:
        known = rows.peak, rows.log_mass
        loss_rows(logits, local, options, (), grad, known, size=shard.size)
    return rows


def _joined_rows(
    shard: VocabularyShard,
    logits: Tensor,
    targets: Tensor,
    local: Tensor,
    options: Options,
    metrics: Sequence[str],
) -> Rows:
    names = ["target"] + ["total"] * bool(options.label_smoothing)
    names += [name for name in ("entropy", "predicted_tokens") if name in metrics]
    if logits.shape[1]:
        part = loss_rows(logits, local, options, names, size=shard.size)
    else:
        nothing = torch.zeros(len(logits), device=logits.device)
        part = Rows(nothing, nothing + NO_PEAK, nothing - torch.inf, dict.fromkeys(names, nothing))
    if "predicted_tokens" in names:  # their bits among the fp32 numbers
        tokens = part.metrics["predicted_tokens"] + shard.first
        part.metrics["predicted_tokens"] = tokens.int().view(torch.float32)
    columns = [part.peak, part.log_mass, *(part.metrics[name] for name in names)]
    peaks, log_masses, *found = shard.gather(torch.stack(columns, 1)).unbind(2)
    of = dict(zip(names, found, strict=True))
    peak, log_mass = join_masses(peaks, log_masses)

    lse, nll = peak + log_mass, log_mass + (peak - of["target"].sum(0))
    mean = of["total"].sum(0) / shard.size if "total" in of else None
    values = {"nll": nll, "z": lse, "max_logit": peak}
    if "entropy" in of:
        # A part's entropy is its log_mass less the mean of its logits below its peak
        log_share = log_masses + (peaks - peak) - log_mass
        below = log_masses - of["entropy"] + (peaks - peak)
        values["entropy"] = log_mass - (log_share.exp() * below).where(log_share > -1e30, 0).sum(0)
    valid = targets != IGNORE_INDEX
    kept = {name: values[name].where(valid, 0) for name in metrics if name in values}
    if "predicted_tokens" in of:
        tokens = of["predicted_tokens"].contiguous().view(torch.int32)
        first = peaks.argmax(0, keepdim=True)  # of equal ones
        best = tokens.gather(0, first).squeeze(0)
        kept["predicted_tokens"] = best.long().where(valid, IGNORE_INDEX)
    loss = whole_loss(nll, lse, mean, options).where(valid, 0)
    return Rows(loss, peak.where(valid, 0), log_mass.where(valid, 0), kept)


def shard_divergence_rows(
    shard: VocabularyShard,
    student: Tensor,  # [N, rows of the shard] raw
    teacher: Tensor,  # [N, rows of the shard] raw
    options: Options,
    teacher_options: Options,
    beta: float,
    grad: Gradient | None = None,
) -> Tensor:
    """`divergence_rows` of all ranks' logits; the gradient is of this rank's."""
    heads = options, teacher_options
    s_peak, s_mass, t_peak, t_mass = shard.gather(logit_masses(student, teacher, *heads)).unbind(2)
    masses = torch.stack((*join_masses(s_peak, s_mass), *join_masses(t_peak, t_mass)), 1)
    run = partial(divergence_rows, student, teacher, *heads, beta, masses=masses)
    losses, mean = shard.gather(run(grad if beta == 0 else None)).sum(0).unbind(1)
    if grad is not None and beta != 0:
        run(grad, mean=mean)
    return losses


def shard_topk_rows(
    shard: VocabularyShard,
    logits: Tensor,  # [N, rows of the shard] raw
    tokens: Tensor,  # [N, k] of all V
    logprobs: Tensor,  # [N, k]
    options: Options,
    beta: float,
    grad: Gradient | None = None,
) -> Tensor:
    """`topk_rows` of all ranks' logits; the gradient is of this rank's."""
    absent, local = tokens < 0, shard.local(tokens)
    here = local >= 0
    # A token here stands for those that are not; where there is none, column 0 stays as it is
    first, some = here.int().argmax(1, keepdim=True), here.any(1, keepdim=True)
    index = local.where(here, local.gather(1, first)).clamp(min=0)
    target = torch.full_like(tokens[:, 0], ELSEWHERE)
    plain = options.of_logits()
    if logits.shape[1]:
        raw = logits.gather(1, index)
        z = scale_and_cap(raw.float(), options).masked_fill(~here, -torch.inf)
        others = logits if grad is not None and grad.out is logits else logits.clone()
        others.scatter_(1, index, raw.masked_fill(some, -torch.inf))
        rest = loss_rows(others, target, plain, holes=True, size=shard.size)
        own = torch.cat((rest.peak[:, None], rest.log_mass[:, None], z), 1)
    else:
        others = logits
        own = torch.full((*tokens.shape[:1], tokens.shape[1] + 2), -torch.inf, device=logits.device)
        own[:, 0] = NO_PEAK
    found = shard.gather(own)
    peak, log_mass = join_masses(found[..., 0], found[..., 1])
    z = found[..., 2:].amax(0)
    lse = torch.where(log_mass == -torch.inf, -torch.inf, peak + log_mass)
    losses, d = against_stored(z, lse, logprobs, absent, beta, grad)
    if grad is not None and d is not None and logits.shape[1]:
        exact = stored_gradient(d, z, options)
        exact = exact.where(here, exact.gather(1, first))
        if grad.before is not None:
            exact = exact + grad.before.gather(1, index)
        of_rest = grad._replace(row_scale=d[:, -1].contiguous())
        loss_rows(others, target, plain, (), of_rest, (peak, log_mass), holes=True, size=shard.size)
        kept = grad.out.gather(1, index)
        grad.out.scatter_(1, index, exact.to(kept.dtype).where(some, kept))
    return losses
