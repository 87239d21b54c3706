"""Loss terms of a head: what is computed from its logits, several in one pass.

No term allocates a [N, V] tensor: logits exist chunk by chunk, for all terms at once. The gradients
of sums are computed with them in the forward pass. Per-token values, and sums with different
upstream gradients, compute the logits again in the backward pass, once for all terms.

# B batch, n positions, N = B n rows, C and D model dims of student and teacher, V vocab,
# K tokens whose log-probabilities were stored
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from tigon.kernels.loss.logits import DEFAULT_OPTIONS, IGNORE_INDEX, Options, Reduction
from tigon.kernels.runtime import host_can_read


class ValidRows:
    """The rows that count in a loss; their number is copied to the host asynchronously.

    `index` waits for this copy. Create it before the model's blocks are launched, so that the host
    does not wait for these.
    """

    def __init__(self, keep: Tensor, targets: Tensor | None = None, weights: Tensor | None = None):
        self.keep, self.targets, self.weights = keep.flatten(), targets, weights
        self._count, self._arrived = self.keep.sum(), None
        if keep.is_cuda:
            counted = self._count
            self._count = torch.empty((), dtype=counted.dtype, device="cpu", pin_memory=True)
            self._count.copy_(counted, non_blocking=True)
            self._arrived = torch.cuda.Event()
            # The stream that copies, which is not the current device's if the tensor is elsewhere
            self._arrived.record(torch.cuda.current_stream(keep.device))

    def index(self) -> Tensor | None:
        """Returns the rows that count, int64 in order, or None if all do; the host waits."""
        if self._arrived is not None:
            self._arrived.synchronize()
        count = int(self._count)
        if count == len(self.keep):
            return None
        return torch.argsort(self.keep, descending=True, stable=True)[:count]


def find_valid_rows(targets: Tensor, token_weights: Tensor | None = None) -> ValidRows | None:
    """Returns the rows with a target that is not ignored and, with weights, a weight that is not 0.

    Weights that require a gradient leave no row out. Returns None if the host cannot read values of
    the device: in graphs, traced or captured, and for tensors without values.
    """
    if not host_can_read(targets):
        return None
    keep = targets != IGNORE_INDEX
    if token_weights is not None and token_weights.requires_grad:
        token_weights = None
    if token_weights is not None:
        keep = keep & (token_weights != 0)
    return ValidRows(keep, targets, token_weights)


@dataclass(frozen=True, eq=False, kw_only=True)
class LossTerm:
    """Base class of loss terms. Per-row tensors are [B, n] or [N]."""

    targets: Tensor | None = None  # -100 is ignored

    def with_targets(
        self, targets: Tensor, weights: Tensor | None, denominator: Tensor | float | None
    ) -> Self:
        """Returns a copy with the batch's targets, weights and denominator where it has none."""
        values: dict[str, Any] = {"targets": targets, "weights": weights}
        values["denominator"] = denominator
        missing = [n for n in values if getattr(self, n, values) is None]
        return replace(self, **{n: values[n] for n in missing})


@dataclass(frozen=True, eq=False, kw_only=True)
class WeightedTerm(LossTerm):
    """A loss `coefficient * sum(w_t * value_t) / denominator` in fp32 or, with reduction "none",
    every `coefficient * w_t * value_t`.

    Set a loss's factor as the coefficient rather than multiplying the result: the gradients of sums
    that are only added are computed together, in the forward pass.
    """

    weights: Tensor | None = None
    denominator: Tensor | float | None = None  # None: 1
    reduction: Reduction = "sum"
    coefficient: Tensor | float = 1.0


@dataclass(frozen=True, eq=False, kw_only=True)
class CrossEntropy(WeightedTerm):
    """Cross-entropy; class weights multiply the weight of the rows with that target.

    Metrics are per row without gradient: nll, z (logsumexp), max_logit, entropy (nats),
    predicted_tokens; 0 (predicted_tokens -100) where the target is ignored. "accuracy" is the share
    of targets predicted right.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    class_weights: Tensor | None = None  # [V]
    metrics: Sequence[str] = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class LogProbs(LossTerm):
    """`log p(target)` of every row in fp32, 0 where ignored; any upstream gradient."""

    metrics: Sequence[str] = ()


class Head(NamedTuple):
    """The tensors of a head. A teacher's head that FSDP shards is passed as the module."""

    weight: Tensor  # [V, D]
    bias: Tensor | None = None  # [V]
    options: Options = DEFAULT_OPTIONS


@dataclass(frozen=True, eq=False, kw_only=True)
class KL(WeightedTerm):
    """Divergence from a teacher: KL(teacher || student) for beta 0, KL(student || teacher) for 1.

    In between it is the generalized Jensen-Shannon divergence `beta KL(teacher || M) + (1 - beta)
    KL(student || M)` with `M = beta teacher + (1 - beta) student` (GKD, arXiv 2306.13649). Logits
    are divided by `temperature`; multiply by its square (coefficient) to keep the gradients' size
    (arXiv 1503.02531). The teacher gets no gradient.

    The teacher is hidden states with a head, or stored log-probabilities of some tokens, at the
    same temperature: then all other tokens are one outcome, for both models. Rows without a target
    do not count; without targets all do.
    """

    teacher_hidden: Tensor | None = None  # [..., D]
    # A module is called as `teacher(None, lend=f)` and calls `f(weight, bias)` inside its forward
    teacher: Any = None  # Head, or LMHead
    teacher_tokens: Tensor | None = None  # [..., K], each once; negative where there are fewer
    teacher_logprobs: Tensor | None = None  # [..., K]
    beta: float = 0.0
    temperature: float = 1.0
