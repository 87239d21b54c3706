"""The targets of a head: shifted labels, weights, the denominator of the loss, kept positions.

# B batch, T tokens, n kept tokens
"""

import math
from collections.abc import Mapping
from typing import Any, Self, Unpack, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels.loss.logits import IGNORE_INDEX
from tigon.kernels.runtime import check_values, integer_labels, on_host
from tigon.models.arguments import (
    TARGETS,
    Keep,
    Reduction,
    TargetArguments,
    expand_kwargs_signature,
    select_keys,
)
from tigon.models.inputs import Batch
from tigon.utils.config import check_keywords

MEAN_REDUCTIONS = ("token", "sequence")  # reductions that divide by a number of items
OPTIONS = frozenset(("label_smoothing", "z_loss", "class_weights"))


# No dataclass: see Batch
class Targets:
    """The targets of the head for a batch, checked and resolved by `Targets.of`.

    Labels, weights and `items` cover only the positions that logits_to_keep selects.
    """

    def __init__(
        self,
        batch: Batch,
        kept: slice | Tensor,  # positions of each row: a slice, an index [n], or one per row [B, n]
        reduction: Reduction,
        options: Mapping[str, Any],  # label_smoothing, z_loss, class_weights
        num_items: float | Tensor | None = None,  # of all micro-batches and ranks
        labels: Tensor | None = None,  # int64 [B, n], shifted; -100 is ignored
        weights: Tensor | None = None,  # fp32 [B, n]
        items: Tensor | None = None,
    ):
        self.batch, self.kept, self.reduction, self.options = batch, kept, reduction, options
        self.labels, self.weights = labels, weights
        self._num_items, self._items = num_items, items
        self.denominator: Tensor | float = 1.0
        if reduction in MEAN_REDUCTIONS:
            self.denominator = 1.0 if items is None else _denominator(num_items, items)
        elif num_items is not None:
            raise ValueError(
                f"num_items_in_batch={num_items} has no meaning with loss_reduction={reduction!r}"
            )

    @property
    def items(self) -> Tensor:
        """This batch's part of the denominator, an int64 scalar: the number of its targets, or of
        its sequences that have targets."""
        if self._items is None:
            raise ValueError("items need labels or shift_labels: give one of them")
        return self._items

    @property
    def mask(self) -> Tensor:
        """A mask [B, n] of the positions that predict a token, for targets with labels."""
        assert self.labels is not None
        return self.labels != IGNORE_INDEX

    @property
    def share(self) -> Tensor | None:
        """This batch's share of all items; None if the loss is not a mean."""
        is_mean = self._items is not None and self.reduction in MEAN_REDUCTIONS
        return self.items / self.denominator if is_mean else None

    @classmethod
    @expand_kwargs_signature
    def of(cls, batch: Batch, **kwargs: Unpack[TargetArguments]) -> Self:
        """Resolves the arguments of `forward`, for `model(batch=batch, targets=...)`.

        Position t predicts label t + 1 of its sequence; then logits_to_keep selects positions.
        Missing arguments come from the model's `defaults`.
        """
        check_keywords("Targets.of", kwargs, TARGETS)
        keep = kwargs.get("logits_to_keep")
        keep = batch.defaults.logits_to_keep if keep is None else keep
        kept = resolve_keep(keep, *batch.shape, batch.device)
        reduction = kwargs.get("loss_reduction") or batch.defaults.loss_reduction
        if reduction not in get_args(Reduction):
            raise ValueError(f"loss_reduction={reduction!r} is not one of {get_args(Reduction)}")
        options = select_keys(OPTIONS, kwargs)
        class_weights = options.get("class_weights")
        if not isinstance(class_weights, Tensor | None):
            kind = type(class_weights).__name__
            raise TypeError(f"class_weights must be a tensor [vocabulary], not {kind}")
        resolved = cls(batch, kept, reduction, options, kwargs.get("num_items_in_batch"))
        weights, shifted = kwargs.get("loss_weights"), kwargs.get("shift_labels")
        labels = check_labels(kwargs.get("labels"), shifted, batch)
        if labels is None:
            if weights is not None:
                raise ValueError("loss_weights without labels")
            return resolved
        weights = None if weights is None else check_weights(weights, batch)
        if shifted is None:
            labels, weights = _shift(labels, weights, batch.segment_ids)
        return resolved.with_labels(
            take(labels, kept), None if weights is None else take(weights, kept)
        )

    def with_labels(self, labels: Tensor, weights: Tensor | None = None) -> Self:
        """Copy with other labels [B, n] and weights, which are shifted and selected already; its
        items are counted anew, and weights of ignored labels are zero."""
        if self.batch.shard is not None:
            raise ValueError(
                "labels of one rank's tokens: make targets of whole rows, which context "
                "parallelism shards afterwards"
            )
        if weights is not None:
            # Weights of ignored targets may be NaN
            weights = weights.where(labels != IGNORE_INDEX, 0)
        segment_ids = self.batch.segment_ids
        if segment_ids is not None:
            segment_ids = take(segment_ids, self.kept)
        factors, items = count_items(labels, segment_ids, self.reduction, self.batch.shape[1])
        if factors is not None:
            weights = factors if weights is None else weights * factors
        return self.replace(labels=labels, weights=weights, items=items)

    def with_num_items(self, num_items: float | Tensor) -> Self:
        """Copy with another denominator: the `items` of all micro-batches and ranks."""
        return self.replace(num_items=num_items)

    def replace(self, **changes: Any) -> Self:
        """A copy with other arguments of the constructor; items are not counted again."""
        names = "batch", "kept", "reduction", "options", "labels", "weights"
        values = {name: getattr(self, name) for name in names}
        values |= {"num_items": self._num_items, "items": self._items}
        return type(self)(**values | changes)

    def take(self, x: Tensor) -> Tensor:
        """Selects the kept positions of x [B, T, ...]: [B, n, ...]."""
        return take(x, self.kept)

    def scatter_to_positions(self, x: Tensor, fill: float) -> Tensor:
        """The inverse of `take`: x [B, n] at its positions in [B, T], and `fill` elsewhere."""
        if x.shape[1] == self.batch.shape[1] and isinstance(self.kept, slice):
            return x
        full = x.new_full(self.batch.shape, fill)
        if isinstance(self.kept, Tensor) and self.kept.dim() == 2:
            return full.scatter_(1, self.kept, x)
        full[:, self.kept] = x
        return full


def check_labels(labels: Any, shift_labels: Any, batch: Batch) -> Tensor | None:
    """`shift_labels`, or `labels` if they are None, as int64 [B, T]; raises for a wrong shape."""
    name, values = ("labels", labels) if shift_labels is None else ("shift_labels", shift_labels)
    if values is None:
        return None
    values = integer_labels(values, name)
    _check_shape(name, values, batch)
    return values.to(batch.device, non_blocking=True)


def check_weights(weights: Any, batch: Batch) -> Tensor:
    """`loss_weights` as fp32 [B, T]; raises for another type or shape."""
    if not isinstance(weights, Tensor) or weights.is_complex():
        kind = weights.dtype if isinstance(weights, Tensor) else type(weights).__name__
        raise TypeError(f"loss_weights must be a tensor of real numbers, not {kind}")
    _check_shape("loss_weights", weights, batch)
    return weights.to(device=batch.device, dtype=torch.float32, non_blocking=True)


def _check_shape(name: str, value: Tensor, batch: Batch) -> None:
    """Raises ValueError, with the argument's name, unless the value is [B, T]."""
    if value.shape != batch.shape:
        raise ValueError(
            f"{name} {tuple(value.shape)} is not [batch, tokens] = {list(batch.shape)}"
        )


def _shift(
    labels: Tensor, weights: Tensor | None, segment_ids: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Moves labels and weights [B, T] to the token before: -100 where that is of another sequence,
    and at the end of each row, where the weight is 0."""
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    if segment_ids is not None:
        crosses = segment_ids[:, 1:] != segment_ids[:, :-1]
        targets[:, :-1] = targets[:, :-1].masked_fill(crosses, IGNORE_INDEX)
    return targets, None if weights is None else F.pad(weights[:, 1:], (0, 1))


def count_items(
    labels: Tensor,  # [B, n]
    segment_ids: Tensor | None,  # [B, n]
    reduction: Reduction,
    tokens: int,  # T: there are at most B * T segments, so no shape depends on the data
) -> tuple[Tensor | None, Tensor]:
    """The weight that the reduction gives to each loss, fp32 [B, n], or None if all have weight 1;
    and the number of its items, an int64 scalar."""
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


def _denominator(num_items: Any, items: Tensor) -> Tensor | float:
    """The divisor of the loss: `num_items_in_batch`, or `items` if it is None; 1 instead of 0.
    Raises unless it is one finite number, and 0 only without targets."""
    if num_items is None:
        return items.clamp(min=1)
    rule = "give a finite number above 0, or 0 where no micro-batch has a target"
    if isinstance(num_items, Tensor):
        if num_items.numel() != 1 or num_items.is_complex():
            raise ValueError(f"num_items_in_batch {tuple(num_items.shape)} is not one number")
        values = f"={num_items.item()}" if on_host(num_items) else ""
        num_items = num_items.reshape(()).to(items.device, torch.float32, non_blocking=True)
        ok = ((num_items > 0) & (num_items < math.inf)) | (num_items == items)
        check_values(ok, f"num_items_in_batch{values} is no number of items: {rule}")
        return num_items + (num_items == 0)
    if isinstance(num_items, bool) or not isinstance(num_items, int | float):
        raise TypeError(f"num_items_in_batch must be a number or a tensor, not {num_items!r}")
    if not 0 <= num_items < math.inf:
        raise ValueError(f"num_items_in_batch={num_items} is no number of items: {rule}")
    if num_items == 0:
        check_values(items == 0, f"num_items_in_batch=0, but this batch has targets: {rule}")
    return float(num_items or 1)


def resolve_keep(keep: Keep, batch: int, tokens: int, device: torch.device) -> slice | Tensor:
    """Returns `logits_to_keep` as a slice, an index [n] for all rows or one for each [B, n],
    without negative numbers; raises for what is none of these."""
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
    _check_index("logits_to_keep", keep, -tokens, tokens)
    return torch.where(keep < 0, keep + tokens, keep)


def take_logits_at(hidden: Tensor, at: Any) -> Tensor | None:
    """The hidden states [n, C] of [B, T, C] at `logits_at`, without a gradient; None without it."""
    if at is None:
        return None
    batch, tokens, _ = hidden.shape
    return hidden.detach().flatten(0, 1)[resolve_logits_at(at, batch, tokens, hidden.device)]


def resolve_logits_at(at: Any, batch: int, tokens: int, device: torch.device) -> Tensor:
    """`logits_at` as an index [n] into the flattened batch."""
    if not isinstance(at, Tensor) or at.is_floating_point() or at.is_complex():
        kind = at.dtype if isinstance(at, Tensor) else type(at).__name__
        raise TypeError(f"logits_at must be a tensor of integers or truth values, not {kind}")
    at = at.to(device)
    if at.dtype == torch.bool:
        if at.shape != (batch, tokens):
            shape = f"[batch, tokens] = [{batch}, {tokens}]"
            raise ValueError(f"logits_at {tuple(at.shape)} is not {shape}")
        return at.flatten().nonzero().squeeze(1)
    if at.dim() != 1:
        raise ValueError(f"logits_at {tuple(at.shape)} is not an index [n] of the flattened batch")
    at = at.long()
    _check_index("logits_at", at, 0, batch * tokens)
    return at


def _check_index(name: str, index: Tensor, first: int, end: int) -> None:
    """Raises ValueError, with the argument's name, for an index outside [first, end)."""
    bad = (index < first) | (index >= end)
    values = f": {index[bad].tolist()}" if on_host(bad) else ""
    check_values(~bad.any(), f"{name} has an index outside [{first}, {end}){values}")


def take(x: Tensor, keep: slice | Tensor) -> Tensor:
    """Selects positions of rows x [B, T, ...]: a slice, an index [n] for all, or [B, n]."""
    if isinstance(keep, slice):
        return x[:, keep]
    if keep.dim() == 1:
        return x.index_select(1, keep)
    rows = torch.arange(x.shape[0], device=x.device)[:, None]
    return x[rows, keep]
