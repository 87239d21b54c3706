"""Labels to targets, weights and the denominator: the meaning of the loss, in one place.

# B batch, T tokens, n kept tokens
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from tigon.kernels.cross_entropy import IGNORE_INDEX
from tigon.models._inputs import check, on_host

Reduction = Literal["token", "sequence", "sum", "none"]
Keep = int | Tensor  # what logits_to_keep may be


def shift(
    labels: Tensor | None,
    shift_labels: Tensor | None,
    loss_weights: Tensor | None,
    segment_ids: Tensor | None,
    shape: tuple[int, int],
) -> tuple[Tensor, Tensor | None]:
    """Targets and weights [B, T]: position t predicts label t + 1 of its own sequence.

    `shift_labels` are targets already, and `loss_weights` belong to whichever was given.
    """
    given, name = (labels, "labels") if shift_labels is None else (shift_labels, "shift_labels")
    assert given is not None
    for what, value in ((name, given), ("loss_weights", loss_weights)):
        if value is not None and value.shape != shape:
            raise ValueError(f"{what} {tuple(value.shape)} is not [batch, tokens] = {list(shape)}")
    if shift_labels is not None:
        return shift_labels, loss_weights
    targets = _left(given, IGNORE_INDEX)
    if segment_ids is not None:
        crosses = segment_ids[:, 1:] != segment_ids[:, :-1]
        targets[:, :-1] = targets[:, :-1].masked_fill(crosses, IGNORE_INDEX)
    return targets, None if loss_weights is None else _left(loss_weights, 0)


def _left(x: Tensor, fill: int) -> Tensor:
    return torch.cat((x[:, 1:], x.new_full((x.shape[0], 1), fill)), dim=1)


@dataclass
class Denominator:
    """Token weights and divisor of a reduction over the targets [B, n]."""

    weights: Tensor | None
    items: Tensor  # number of targets, or of sequences with any; int64 scalar


def denominator(
    targets: Tensor,  # [B, n]
    segment_ids: Tensor | None,  # [B, n]
    reduction: Reduction,
    tokens: int,  # T: there are at most B * T segments, so no shape depends on the data
) -> Denominator:
    """What the reduction multiplies each loss by, and the number that it divides by."""
    if reduction not in get_args(Reduction):
        raise ValueError(f"loss_reduction={reduction!r} is not one of {get_args(Reduction)}")
    valid = targets != IGNORE_INDEX
    if reduction != "sequence":
        return Denominator(None, valid.sum())
    if segment_ids is None:
        segment_ids = torch.arange(targets.shape[0], device=targets.device)[:, None]
        segment_ids = segment_ids.expand_as(targets)
    segments = segment_ids.reshape(-1)
    counts = torch.zeros(targets.shape[0] * tokens, dtype=torch.long, device=targets.device)
    counts = counts.index_add(0, segments, valid.reshape(-1).long())
    weights = valid / counts[segments].view_as(targets).clamp(min=1)
    return Denominator(weights, (counts > 0).sum())


def divisor(items: Tensor, given: int | Tensor | None, reduction: Reduction) -> Tensor | float:
    """What the sum of weighted losses is divided by; 1 when there is nothing to divide by."""
    if reduction in ("sum", "none"):
        if given is not None:
            raise ValueError(
                f"num_items_in_batch={given} has no meaning with loss_reduction={reduction!r}"
            )
        return 1.0
    if given is None:
        return items.clamp(min=1)
    if not isinstance(given, Tensor):
        if given < 0:
            raise ValueError(f"num_items_in_batch={given} is negative")
        return float(given or 1)
    if given.numel() != 1:
        raise ValueError(f"num_items_in_batch {tuple(given.shape)} is not one number")
    given = given.reshape(())
    return torch.where(given == 0, torch.ones_like(given), given).to(items.device)


def resolve_keep(keep: Keep, batch: int, tokens: int, device: torch.device) -> slice | Tensor:
    """`logits_to_keep` as a slice, a 1-D index for every row or a 2-D index per row."""
    if isinstance(keep, bool) or not isinstance(keep, int | Tensor):
        raise TypeError(f"logits_to_keep must be an int or a tensor, not {keep!r}")
    if isinstance(keep, int):
        if keep < 0:
            raise ValueError(f"logits_to_keep={keep} is negative; k keeps the last k, 0 all")
        return slice(max(tokens - keep, 0) if keep else 0, tokens)
    keep = keep.to(device)
    if keep.dtype == torch.bool:
        if keep.shape != (tokens,):
            raise ValueError(
                f"logits_to_keep is a bool tensor {tuple(keep.shape)}; it must be [{tokens}]"
            )
        return keep.nonzero().squeeze(1)
    if keep.is_floating_point() or keep.dim() not in (1, 2):
        raise ValueError(
            f"logits_to_keep {keep.dtype} {tuple(keep.shape)} is not an index [n] or [batch, n]"
        )
    if keep.dim() == 2 and keep.shape[0] != batch:
        raise ValueError(f"logits_to_keep has {keep.shape[0]} rows, but the batch has {batch}")
    bad = (keep < -tokens) | (keep >= tokens)
    values = f": {keep[bad].tolist()}" if on_host(bad) else ""
    check(~bad.any(), f"logits_to_keep has an index outside [-{tokens}, {tokens}){values}")
    return torch.where(keep < 0, keep + tokens, keep).long()


def take(x: Tensor, keep: slice | Tensor) -> Tensor:
    """The kept positions of x [B, T, ...]."""
    if isinstance(keep, slice):
        return x[:, keep]
    if keep.dim() == 1:
        return x.index_select(1, keep)
    rows = torch.arange(x.shape[0], device=x.device)[:, None]
    return x[rows, keep]
