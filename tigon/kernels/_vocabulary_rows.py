"""Criteria of the rows of a chunk of logits of which each rank has some columns.

Ranks exchange a few numbers of each row, once or twice, and compute the same of them.

# N rows, V vocab, R ranks
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tigon.kernels._cross_entropy_rows import Rows, loss_rows, whole_loss
from tigon.kernels._logits import IGNORE_INDEX, Gradient, Options
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
        best = tokens.gather(0, peaks.argmax(0, keepdim=True)).squeeze(
            0
        )  # of equal ones, the first
        kept["predicted_tokens"] = best.long().where(valid, IGNORE_INDEX)
    loss = whole_loss(nll, lse, mean, options).where(valid, 0)
    return Rows(loss, peak.where(valid, 0), log_mass.where(valid, 0), kept)
