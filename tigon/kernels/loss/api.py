"""Losses of logits, and of hidden states with the head's weight.

# N rows (tokens), C model dim, D that of a teacher, V vocab

Operators with a head never allocate [N, V]: logits exist chunk by chunk.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tigon.kernels.loss.cross_entropy_rows import cross_entropy_ref
from tigon.kernels.loss.divergence_rows import kl_ref
from tigon.kernels.loss.fused_linear import HeadValue, run_loss_term
from tigon.kernels.loss.logits import (
    DEFAULT_OPTIONS,
    IGNORE_INDEX,
    Options,
    Reduction,
    logits_ref,
    scale_and_cap,
)
from tigon.kernels.loss.terms import KL, CrossEntropy, Divergence, Head, LogProbs, ValidRows


def cross_entropy(
    logits: Tensor,  # [N, V], before scale and softcap
    targets: Tensor,  # [N], -100 is ignored
    *,
    token_weights: Tensor | None = None,  # [N]
    class_weights: Tensor | None = None,  # [V]
    denominator: Tensor | float = 1.0,
    reduction: Reduction = "sum",
    options: Options = DEFAULT_OPTIONS,
    metrics: Sequence[str] = (),
    overwrite: bool = False,
) -> HeadValue:
    """Returns `sum(w_t * ce_t) / denominator` in fp32, or every `w_t * ce_t` [N], and the metrics.

    Like `linear_cross_entropy`, for logits that exist. They are only written to with `overwrite`,
    by which the caller gives them away: then their gradient takes their place, and nothing else of
    their size is allocated, if no two logits share memory and those of a row are adjacent. With
    reduction "sum" the gradient is computed in the forward pass, and copied only for a backward
    pass that retains the graph.
    """
    term, options = _cross_entropy_term(
        options, targets=targets, weights=token_weights, denominator=denominator,
        reduction=reduction, class_weights=class_weights, metrics=metrics,
    )  # fmt: skip
    return run_loss_term(logits, None, None, term, options=options, overwrite=overwrite)


def _cross_entropy_term(options: Options, **fields: Any) -> tuple[CrossEntropy, Options]:
    """Returns the term with the regularizers of the options, and the options of the logits."""
    regularizers: dict[str, Any] = {
        "label_smoothing": options.label_smoothing,
        "z_loss": options.z_loss,
    }
    return CrossEntropy(**fields, **regularizers), options.without_regularizers()


def divergence(
    logprobs: Tensor,  # [N, V]
    teacher_logprobs: Tensor,  # [N, V]
    *,
    token_weights: Tensor | None = None,  # [N]
    denominator: Tensor | float = 1.0,
    reduction: Reduction = "sum",
    beta: float = 0.0,
) -> Tensor:
    """Returns `sum(w_t * D_t) / denominator` in fp32, or each `w_t * D_t` [N]; D: see `linear_kl`.

    For log-probabilities that exist, defined by `kl_ref`: they are not normalized again. The
    teacher's get no gradient.
    """
    if logprobs.shape != teacher_logprobs.shape:
        raise ValueError(
            f"logprobs {tuple(logprobs.shape)} and teacher_logprobs "
            f"{tuple(teacher_logprobs.shape)} are not [N, V] both"
        )
    term = Divergence(
        teacher_logprobs=teacher_logprobs,
        weights=token_weights,
        denominator=denominator,
        reduction=reduction,
        beta=beta,
    )
    return run_loss_term(logprobs, None, None, term).value


# Operators with a head


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
    options: Options = DEFAULT_OPTIONS,
) -> Tensor:
    """Returns the value of `linear_cross_entropy` by definition: fp32, all logits at once."""
    losses = cross_entropy_ref(logits_ref(hidden, weight, bias), targets, options=options)
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
    options: Options = DEFAULT_OPTIONS,
    metrics: Sequence[str] = (),
    active: ValidRows | None = None,
    logits_bytes: int | None = None,
) -> HeadValue:
    """Returns `sum(w_t * ce_t) / denominator` in fp32, or every `w_t * ce_t` [N], and the metrics.

    w_t is the token's weight times the class weight of its target. With reduction "sum" the
    gradients are computed while a chunk's logits exist: three matrix products, nothing recomputed.
    With "none" the upstream gradient is unknown, so backward computes the logits again: four. At
    most `logits_bytes` of logits exist at a time.

    Rows whose target is ignored or whose weight is 0 cost nothing and give nothing, not even NaN.
    On a GPU the host must know how many remain: `active` computed in advance avoids a sync. Under
    torch.compile and in CUDA graphs no row is left out.

    Metrics are those of `CrossEntropy`; with metrics only rows whose target is ignored are left
    out. Sources: the chunked gradient-in-forward form of Liger-Kernel (arXiv 2410.10989), defined
    by `linear_cross_entropy_ref`.
    """
    term, options = _cross_entropy_term(
        options, targets=targets, weights=token_weights, denominator=denominator,
        reduction=reduction, class_weights=class_weights, metrics=metrics,
    )  # fmt: skip
    return run_loss_term(
        hidden, weight, bias, term, options=options, active=active, logits_bytes=logits_bytes
    )


def selected_logprobs_ref(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    options: Options = DEFAULT_OPTIONS,
) -> Tensor:
    """Returns the value of `selected_logprobs` by definition: fp32, all logits at once."""
    return -linear_cross_entropy_ref(
        hidden, weight, targets, bias=bias, reduction="none", options=options
    )


def selected_logprobs(
    hidden: Tensor,  # [N, C]
    weight: Tensor,  # [V, C]
    targets: Tensor,  # [N], -100 is ignored
    *,
    bias: Tensor | None = None,  # [V]
    options: Options = DEFAULT_OPTIONS,
    metrics: Sequence[str] = (),
    active: ValidRows | None = None,
    logits_bytes: int | None = None,
) -> HeadValue:
    """Returns `log p(target)` of rows [N] in fp32, 0 where ignored, and metrics without gradient.

    Differentiable with any upstream gradient: one matrix product forward, three backward (the
    logits are computed again), and never more than `logits_bytes` of logits. A sampling temperature
    is `Options(logit_scale=1 / temperature)`. Metrics, `active` and errors are those of
    `linear_cross_entropy`.
    """
    term = LogProbs(targets=targets, metrics=metrics)
    return run_loss_term(
        hidden, weight, bias, term, options=options, active=active, logits_bytes=logits_bytes
    )


def linear_kl_ref(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    token_weights: Tensor | None = None,
    denominator: Tensor | float = 1.0,
    reduction: Reduction = "sum",
    beta: float = 0.0,
    temperature: float = 1.0,
    options: Options = DEFAULT_OPTIONS,
    teacher_options: Options = DEFAULT_OPTIONS,
) -> Tensor:
    """Returns the value of `linear_kl` by definition: fp32, all logits at once."""
    teacher = logits_ref(teacher_hidden, teacher_weight, teacher_bias).detach()
    student = logits_ref(hidden, weight, bias)
    losses = kl_ref(
        (scale_and_cap(student, options) / temperature).log_softmax(-1),
        (scale_and_cap(teacher, teacher_options) / temperature).log_softmax(-1),
        beta,
    )
    if token_weights is not None:
        losses = losses * token_weights
    return losses if reduction == "none" else losses.sum() / denominator


def linear_kl(
    hidden: Tensor,  # [N, C]
    weight: Tensor,  # [V, C]
    teacher_hidden: Tensor,  # [N, D]
    teacher_weight: Tensor,  # [V, D]
    *,
    bias: Tensor | None = None,  # [V]
    teacher_bias: Tensor | None = None,  # [V]
    token_weights: Tensor | None = None,  # [N]
    denominator: Tensor | float = 1.0,
    reduction: Reduction = "sum",
    beta: float = 0.0,
    temperature: float = 1.0,
    options: Options = DEFAULT_OPTIONS,
    teacher_options: Options = DEFAULT_OPTIONS,
    active: ValidRows | None = None,
    logits_bytes: int | None = None,
) -> Tensor:
    """Returns `sum(w_t * D_t) / denominator` in fp32, or every `w_t * D_t` [N].

    D is that of the loss term `KL`. Logits, scaled and capped by the options, are divided by
    `temperature`. At most `logits_bytes` of both models' logits exist at a time, and the sum's
    gradients are computed in the forward pass. Rows of weight 0 are left out.
    """
    term = KL(
        teacher_hidden=teacher_hidden,
        teacher=Head(teacher_weight, teacher_bias, teacher_options),
        weights=token_weights,
        denominator=denominator,
        reduction=reduction,
        beta=beta,
        temperature=temperature,
    )
    return run_loss_term(
        hidden, weight, bias, term, options=options, active=active, logits_bytes=logits_bytes
    ).value
