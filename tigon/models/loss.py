"""Labels to targets, weights and the denominator: the meaning of the loss, in one place.

# B batch, T tokens, n kept tokens
"""

import math
from collections.abc import Mapping
from typing import Any, Self, Unpack, get_args

import torch
from torch import Tensor

from tigon.kernels.loss.api import IGNORE_INDEX
from tigon.kernels.runtime import check_values, integer_labels, on_host
from tigon.models.arguments import (
    TARGETS,
    Keep,
    Reduction,
    TargetArguments,
    among,
    check_keywords,
    spelled_out,
)
from tigon.models.inputs import Batch

MEANS = ("token", "sequence")  # reductions that divide by a number of items
OPTIONS = frozenset(("label_smoothing", "z_loss", "class_weights"))


# No dataclass: FSDP's mixed precision would rebuild it with weights and denominator in 16 bits
class Targets:
    """What the head is to predict of a batch, checked and resolved; made by `Targets.of`.

    Its labels, weights and `items` are of the kept positions alone.
    """

    def __init__(
        self,
        batch: Batch,
        kept: slice | Tensor,  # of each row: a slice, an index [n], or one per row [B, n]
        reduction: Reduction,
        options: Mapping[str, Any],  # of cross-entropy: label_smoothing, z_loss, class_weights
        num_items: float | Tensor | None = None,  # of all micro-batches and ranks
        labels: Tensor | None = None,  # int64 [B, n]: what is predicted there; -100 is ignored
        weights: Tensor | None = None,  # fp32 [B, n]
        items: Tensor | None = None,
    ):
        self.batch, self.kept, self.reduction, self.options = batch, kept, reduction, options
        self.labels, self.weights = labels, weights
        self._num_items, self._items = num_items, items
        self.denominator: Tensor | float = 1.0
        if reduction in MEANS:
            self.denominator = 1.0 if items is None else _denominator(num_items, items)
        elif num_items is not None:
            raise ValueError(
                f"num_items_in_batch={num_items} has no meaning with loss_reduction={reduction!r}"
            )

    @property
    def items(self) -> Tensor:
        """This batch's part of the denominator, an int64 scalar: its targets, or the sequences
        that have any."""
        if self._items is None:
            raise ValueError("items need labels or shift_labels: they are counted in them")
        return self._items

    @property
    def share(self) -> Tensor | None:
        """Which part of all items this batch has; None where the loss is no mean."""
        counted = self._items is not None and self.reduction in MEANS
        return self.items / self.denominator if counted else None

    @classmethod
    @spelled_out
    def of(cls, batch: Batch, **given: Unpack[TargetArguments]) -> Self:
        """Resolve what `forward` is given, for `model(batch=batch, targets=...)`.

        Position t predicts label t + 1 of its own sequence; then the same positions are kept of
        everything. What is not given comes from the model's `defaults`.
        """
        check_keywords("Targets.of", given, TARGETS)
        keep = given.get("logits_to_keep")
        keep = batch.defaults.logits_to_keep if keep is None else keep
        kept = resolve_keep(keep, *batch.shape, batch.device)
        reduction = given.get("loss_reduction") or batch.defaults.loss_reduction
        if reduction not in get_args(Reduction):
            raise ValueError(f"loss_reduction={reduction!r} is not one of {get_args(Reduction)}")
        options = {k: v for k, v in among(OPTIONS, given).items() if v is not None}
        resolved = cls(batch, kept, reduction, _checked(options), given.get("num_items_in_batch"))
        weights, shifted = given.get("loss_weights"), given.get("shift_labels")
        labels = check_labels(given.get("labels"), shifted, batch)
        if labels is None:
            if weights is not None:
                raise ValueError("loss_weights without labels")
            return resolved
        weights = None if weights is None else check_weights(weights, batch)
        if shifted is None:
            labels, weights = _shift(labels, weights, batch.segment_ids)
        return resolved.over(take(labels, kept), None if weights is None else take(weights, kept))

    def over(self, labels: Tensor, weights: Tensor | None = None) -> Self:
        """The same with other labels [B, n] and weights, which are shifted and kept already."""
        if weights is not None:
            weights = weights.where(labels != IGNORE_INDEX, 0)  # what ignored ones say, even NaN
        segment_ids = self.batch.segment_ids
        if segment_ids is not None:
            segment_ids = take(segment_ids, self.kept)
        factors, items = count(labels, segment_ids, self.reduction, self.batch.shape[1])
        if factors is not None:
            weights = factors if weights is None else weights * factors
        own = self.batch, self.kept, self.reduction, self.options, self._num_items
        return type(self)(*own, labels, weights, items)

    def with_num_items(self, num_items: float | Tensor) -> Self:
        """The same, with the loss divided by `num_items`: the `items` of all micro-batches and
        ranks."""
        own = self.batch, self.kept, self.reduction, self.options
        return type(self)(*own, num_items, self.labels, self.weights, self._items)

    def summed(self) -> Self:
        """The same weighted losses, added up and not divided, without the balance of experts."""
        own = None, self.labels, self.weights, self._items
        return type(self)(self.batch, self.kept, "sum", self.options, *own)

    def of_part(self, batch: Batch, labels: Tensor | None, weights: Tensor | None) -> Self:
        """The same denominator for all positions of a part of the batch, with these targets."""
        own = self.reduction, self.options, self._num_items, labels, weights, self._items
        return type(self)(batch, slice(0, batch.shape[1]), *own)

    def take(self, x: Tensor) -> Tensor:
        """The kept positions of x [B, T, ...]."""
        return take(x, self.kept)

    def place(self, x: Tensor, fill: float) -> Tensor:
        """The inverse: x [B, n] at its positions [B, T], and `fill` at those that are not kept."""
        if x.shape[1] == self.batch.shape[1] and isinstance(self.kept, slice):
            return x
        full = x.new_full(self.batch.shape, fill)
        if isinstance(self.kept, Tensor) and self.kept.dim() == 2:
            return full.scatter_(1, self.kept, x)
        full[:, self.kept] = x
        return full


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    smoothing, z_loss = options.get("label_smoothing", 0), options.get("z_loss", 0)
    if not 0 <= smoothing < 1:
        raise ValueError(f"label_smoothing={smoothing} is not in [0, 1)")
    if not 0 <= z_loss < math.inf:
        raise ValueError(f"z_loss={z_loss} is not a finite number of at least 0")
    class_weights = options.get("class_weights")
    if class_weights is not None and not isinstance(class_weights, Tensor):
        kind = type(class_weights).__name__
        raise TypeError(f"class_weights must be a tensor [vocabulary], not {kind}")
    return options


def check_labels(labels: Any, shift_labels: Any, batch: Batch) -> Tensor | None:
    """What is given of the two, `shift_labels` first, as int64 [B, T]."""
    name, given = ("labels", labels) if shift_labels is None else ("shift_labels", shift_labels)
    if given is None:
        return None
    given = integer_labels(given, name)
    _check_shape(name, given, batch)
    return given.to(batch.device, non_blocking=True)


def check_weights(weights: Any, batch: Batch) -> Tensor:
    """fp32 [B, T]."""
    if not isinstance(weights, Tensor) or weights.is_complex():
        kind = weights.dtype if isinstance(weights, Tensor) else type(weights).__name__
        raise TypeError(f"loss_weights must be a tensor of real numbers, not {kind}")
    _check_shape("loss_weights", weights, batch)
    return weights.to(device=batch.device, dtype=torch.float32, non_blocking=True)


def _check_shape(name: str, value: Tensor, batch: Batch) -> None:
    if value.shape != batch.shape:
        raise ValueError(
            f"{name} {tuple(value.shape)} is not [batch, tokens] = {list(batch.shape)}"
        )


def _shift(
    labels: Tensor, weights: Tensor | None, segment_ids: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    targets = _left(labels, IGNORE_INDEX)
    if segment_ids is not None:
        crosses = segment_ids[:, 1:] != segment_ids[:, :-1]
        targets[:, :-1] = targets[:, :-1].masked_fill(crosses, IGNORE_INDEX)
    return targets, None if weights is None else _left(weights, 0)


def _left(x: Tensor, fill: int) -> Tensor:
    return torch.cat((x[:, 1:], x.new_full((x.shape[0], 1), fill)), dim=1)


def count(
    labels: Tensor,  # [B, n]
    segment_ids: Tensor | None,  # [B, n]
    reduction: Reduction,
    tokens: int,  # T: there are at most B * T segments, so no shape depends on the data
) -> tuple[Tensor | None, Tensor]:
    """What a reduction multiplies each loss by, fp32 [B, n], and its items, an int64 scalar."""
    valid = labels != IGNORE_INDEX
    if reduction != "sequence":
        return None, valid.sum()
    if segment_ids is None:
        segment_ids = torch.arange(labels.shape[0], device=labels.device)[:, None]
        segment_ids = segment_ids.expand_as(labels)
    segments = segment_ids.reshape(-1)
    counts = torch.zeros(labels.shape[0] * tokens, dtype=torch.long, device=labels.device)
    counts = counts.index_add(0, segments, valid.reshape(-1).long())
    weights = valid / counts[segments].view_as(labels).clamp(min=1)
    return weights, (counts > 0).sum()


def _denominator(given: Any, items: Tensor) -> Tensor | float:
    """`num_items_in_batch`, or without it `items`, as a divisor; 0 of 0 items divides by 1."""
    if given is None:
        return items.clamp(min=1)
    rule = "give a finite number above 0, or 0 where no micro-batch has a target"
    if isinstance(given, Tensor):
        if given.numel() != 1 or given.is_complex():
            raise ValueError(f"num_items_in_batch {tuple(given.shape)} is not one number")
        values = f"={given.item()}" if on_host(given) else ""
        given = given.reshape(()).to(items.device, torch.float32, non_blocking=True)
        ok = ((given > 0) & (given < math.inf)) | (given == items)
        check_values(ok, f"num_items_in_batch{values} is no number of items: {rule}")
        return given + (given == 0)
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise TypeError(f"num_items_in_batch must be a number or a tensor, not {given!r}")
    if not 0 <= given < math.inf:
        raise ValueError(f"num_items_in_batch={given} is no number of items: {rule}")
    if given == 0:
        check_values(items == 0, f"num_items_in_batch=0, but this batch has targets: {rule}")
    return float(given or 1)


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
    if keep.is_floating_point() or keep.is_complex() or keep.dim() not in (1, 2):
        raise ValueError(
            f"logits_to_keep {keep.dtype} {tuple(keep.shape)} is not an index [n] or [batch, n]"
        )
    if keep.dim() == 2 and keep.shape[0] != batch:
        raise ValueError(f"logits_to_keep has {keep.shape[0]} rows, but the batch has {batch}")
    keep = keep.long()  # narrower ones cannot be compared with T
    bad = (keep < -tokens) | (keep >= tokens)
    values = f": {keep[bad].tolist()}" if on_host(bad) else ""
    check_values(~bad.any(), f"logits_to_keep has an index outside [-{tokens}, {tokens}){values}")
    return torch.where(keep < 0, keep + tokens, keep)


def positions_at(at: Any, batch: Batch) -> Tensor:
    """`logits_at` as an index [n] into the flattened batch."""
    b, t = batch.shape
    if not isinstance(at, Tensor) or at.is_floating_point() or at.is_complex():
        kind = at.dtype if isinstance(at, Tensor) else type(at).__name__
        raise TypeError(f"logits_at must be a tensor of integers or truth values, not {kind}")
    at = at.to(batch.device)
    if at.dtype == torch.bool:
        if at.shape != (b, t):
            raise ValueError(f"logits_at {tuple(at.shape)} is not [batch, tokens] = [{b}, {t}]")
        return at.flatten().nonzero().squeeze(1)
    if at.dim() != 1:
        raise ValueError(f"logits_at {tuple(at.shape)} is not an index [n] of the flattened batch")
    at = at.long()
    bad = (at < 0) | (at >= b * t)
    values = f": {at[bad].tolist()}" if on_host(bad) else ""
    check_values(
        ~bad.any(), f"logits_at has an index outside [0, {b * t}), batch times tokens{values}"
    )
    return at


def take(x: Tensor, keep: slice | Tensor) -> Tensor:
    """The kept positions of x [B, T, ...]."""
    if isinstance(keep, slice):
        return x[:, keep]
    if keep.dim() == 1:
        return x.index_select(1, keep)
    rows = torch.arange(x.shape[0], device=x.device)[:, None]
    return x[rows, keep]
