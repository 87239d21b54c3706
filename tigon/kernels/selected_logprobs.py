"""Log-probabilities of given tokens, for preference and policy objectives.

# N rows (tokens), C model dim, V vocab
"""

from collections.abc import Sequence

from torch import Tensor

from tigon.kernels._logits import PLAIN, Options
from tigon.kernels._run_criteria import LOGITS_BYTES, HeadValue, run_criteria
from tigon.kernels.criteria import ActiveRows, LogProbs
from tigon.kernels.linear_cross_entropy import linear_cross_entropy_ref


def selected_logprobs_ref(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    options: Options = PLAIN,
) -> Tensor:
    """The definition, fp32 throughout, with all logits at once and plain autograd."""
    return -linear_cross_entropy_ref(
        hidden, weight, targets, bias=bias, reduction="none", options=options
    )


def selected_logprobs(
    hidden: Tensor,  # [N, C]
    weight: Tensor,  # [V, C]
    targets: Tensor,  # [N], -100 is ignored
    *,
    bias: Tensor | None = None,  # [V]
    options: Options = PLAIN,
    metrics: Sequence[str] = (),
    active: ActiveRows | None = None,
    logits_bytes: int = LOGITS_BYTES,
) -> HeadValue:
    """`log p(target)` of every row [N] in fp32, 0 where ignored, and metrics without gradient.

    Differentiable with any upstream gradient: one matrix product forward, three backward (the
    logits are computed again), and never more than `logits_bytes` of logits. A sampling
    temperature is `Options(logit_scale=1 / temperature)`. Metrics, `active` and errors are those
    of `linear_cross_entropy`.
    """
    if options.label_smoothing or options.z_loss:
        raise ValueError(f"{options}: a log-probability has no label_smoothing and no z_loss")
    if hidden.dim() != 2:
        raise ValueError(f"hidden {tuple(hidden.shape)} is not [N, C]")
    criterion = LogProbs(targets=targets, metrics=metrics)
    (found,) = run_criteria(
        hidden, weight, bias, [criterion], options=options, active=active, logits_bytes=logits_bytes
    )
    return found
