"""The head of a language model and its loss in one operator; no [N, V] tensor outlives a chunk.

# N rows (tokens), C model dim, V vocab
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from tigon.kernels._cross_entropy_rows import cross_entropy_ref
from tigon.kernels._logits import IGNORE_INDEX, PLAIN, Options, Reduction
from tigon.kernels._run_criteria import LOGITS_BYTES, HeadValue, run_criteria
from tigon.kernels.criteria import ActiveRows, CrossEntropy, active_rows

__all__ = [
    "LOGITS_BYTES",
    "ActiveRows",
    "active_rows",
    "linear_cross_entropy",
    "linear_cross_entropy_ref",
]


def linear_cross_entropy_ref(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    token_weights: Tensor | None = None,
    class_weights: Tensor | None = None,
    denominator: Tensor | float = 1.0,
    reduction: Reduction = "sum",
    options: Options = PLAIN,
) -> Tensor:
    """The definition, fp32 throughout, with all logits at once and plain autograd."""
    logits = F.linear(hidden.float(), weight.float(), None if bias is None else bias.float())
    losses = cross_entropy_ref(logits, targets, options=options)
    if class_weights is not None:
        losses = losses * class_weights[targets.clamp(min=0)]
    if token_weights is not None:
        losses = losses * token_weights.where(targets != IGNORE_INDEX, 0)
    return losses if reduction == "none" else losses.sum() / denominator


def linear_cross_entropy(
    hidden: Tensor,  # [N, C]
    weight: Tensor,  # [V, C]
    targets: Tensor,  # [N], -100 is ignored
    *,
    bias: Tensor | None = None,  # [V]
    token_weights: Tensor | None = None,  # [N]
    class_weights: Tensor | None = None,  # [V]
    denominator: Tensor | float = 1.0,
    reduction: Reduction = "sum",
    options: Options = PLAIN,
    metrics: Sequence[str] = (),
    active: ActiveRows | None = None,
    logits_bytes: int = LOGITS_BYTES,
) -> HeadValue:
    """`sum(w_t * ce_t) / denominator` in fp32, or every `w_t * ce_t` [N]; and the metrics.

    w_t is the token's weight times the class weight of its target. With reduction "sum" the
    gradients are made while a chunk's logits exist: three matrix products, nothing recomputed.
    With "none" the upstream gradient is unknown, so the logits are computed again in the backward
    pass: four. At most `logits_bytes` of logits exist at a time.

    Rows whose target is ignored or whose weight is 0 cost nothing and give nothing, not even NaN.
    On a GPU the host must know how many remain: `active` made ahead of time saves waiting for the
    device. Under torch.compile and in CUDA graphs no row is left out.

    Metrics are those of `CrossEntropy`; with metrics only rows whose target is ignored are left
    out. Sources: the chunked gradient-in-forward form of Liger-Kernel (arXiv 2410.10989), defined
    by `linear_cross_entropy_ref`.
    """
    if hidden.dim() != 2:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} "
            "are not [N, C] and [V, C]"
        )
    criterion = CrossEntropy(
        targets=targets,
        weights=token_weights,
        denominator=denominator,
        reduction=reduction,
        label_smoothing=options.label_smoothing,
        z_loss=options.z_loss,
        class_weights=class_weights,
        metrics=metrics,
    )
    (found,) = run_criteria(
        hidden,
        weight,
        bias,
        [criterion],
        options=options.of_logits(),
        active=active,
        logits_bytes=logits_bytes,
    )
    return found
