"""Cross-entropy and divergences of logits that exist; a head's own never need to.

# N rows, V vocab
"""

from collections.abc import Sequence

from torch import Tensor

from tigon.kernels._cross_entropy_rows import cross_entropy_ref
from tigon.kernels._divergence_rows import kl_ref
from tigon.kernels._logits import IGNORE_INDEX, METRICS, PLAIN, Options, Reduction, scale_and_cap
from tigon.kernels._run_criteria import HeadValue, run_one
from tigon.kernels.criteria import CrossEntropy, Divergence

__all__ = [
    "IGNORE_INDEX",
    "METRICS",
    "PLAIN",
    "Options",
    "Reduction",
    "cross_entropy",
    "cross_entropy_ref",
    "divergence",
    "kl_ref",
    "scale_and_cap",
]


def cross_entropy(
    logits: Tensor,  # [N, V], before scale and softcap
    targets: Tensor,  # [N], -100 is ignored
    *,
    token_weights: Tensor | None = None,  # [N]
    class_weights: Tensor | None = None,  # [V]
    denominator: Tensor | float = 1.0,
    reduction: Reduction = "sum",
    options: Options = PLAIN,
    metrics: Sequence[str] = (),
    overwrite: bool = False,
) -> HeadValue:
    """`sum(w_t * ce_t) / denominator` in fp32, or every `w_t * ce_t` [N]; and the metrics.

    As `linear_cross_entropy`, for logits that exist. They are never written to, unless
    `overwrite` says that they belong to the operator: then their gradient takes their place, and
    nothing else of their size is allocated, if no two logits share memory and those of a row are
    adjacent. With reduction "sum" the gradient is made in the forward pass, and copied only for a
    backward pass that retains the graph.
    """
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
    options = options.of_logits()
    return run_one(logits, None, None, criterion, options=options, overwrite=overwrite)


def divergence(
    logprobs: Tensor,  # [N, V]
    teacher_logprobs: Tensor,  # [N, V]
    *,
    token_weights: Tensor | None = None,  # [N]
    denominator: Tensor | float = 1.0,
    reduction: Reduction = "sum",
    beta: float = 0.0,
) -> Tensor:
    """`sum(w_t * D_t) / denominator` in fp32, or every `w_t * D_t` [N], D as in `linear_kl`.

    For log-probabilities that exist, defined by `kl_ref`: they are not normalised again. The
    teacher's get no gradient.
    """
    if logprobs.shape != teacher_logprobs.shape:
        raise ValueError(
            f"logprobs {tuple(logprobs.shape)} and teacher_logprobs "
            f"{tuple(teacher_logprobs.shape)} are not [N, V] both"
        )
    if not 0 <= beta <= 1:
        raise ValueError(f"beta={beta} is not in [0, 1]")
    criterion = Divergence(
        teacher_logprobs=teacher_logprobs,
        weights=token_weights,
        denominator=denominator,
        reduction=reduction,
        beta=beta,
    )
    return run_one(logprobs, None, None, criterion).value
