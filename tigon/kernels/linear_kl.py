"""Distillation: the divergence of a student's next-token distribution from a teacher's.

Both heads are inside the operator, so that neither model's [N, V] logits outlive a chunk.

# N rows (tokens), C and D model dims of student and teacher, V vocab
"""

import torch.nn.functional as F
from torch import Tensor

from tigon.kernels._divergence_rows import kl_ref
from tigon.kernels._logits import PLAIN, Options, Reduction, scale_and_cap
from tigon.kernels._run_criteria import LOGITS_BYTES, run_criteria
from tigon.kernels.criteria import KL, ActiveRows, Head


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
    options: Options = PLAIN,
    teacher_options: Options = PLAIN,
) -> Tensor:
    """The definition, fp32 throughout, with all logits at once and plain autograd."""
    teacher = F.linear(
        teacher_hidden.float(),
        teacher_weight.float(),
        None if teacher_bias is None else teacher_bias.float(),
    ).detach()
    student = F.linear(hidden.float(), weight.float(), None if bias is None else bias.float())
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
    options: Options = PLAIN,
    teacher_options: Options = PLAIN,
    active: ActiveRows | None = None,
    logits_bytes: int = LOGITS_BYTES,
) -> Tensor:
    """`sum(w_t * D_t) / denominator` in fp32, or every `w_t * D_t` [N].

    D is that of the criterion `KL`. Logits, scaled and capped by the options, are divided by
    `temperature`. At most `logits_bytes` of both models' logits exist at a time, and the sum's
    gradients are made in the forward pass. Rows of weight 0 are left out.
    """
    for name, h, w in (("", hidden, weight), ("teacher_", teacher_hidden, teacher_weight)):
        if h.dim() != 2 or w.dim() != 2 or h.shape[1] != w.shape[1]:
            raise ValueError(
                f"{name}hidden {tuple(h.shape)} and {name}weight {tuple(w.shape)} "
                "are not [N, C] and [V, C]"
            )
    for name, o in (("options", options), ("teacher_options", teacher_options)):
        if o != o.of_logits():
            raise ValueError(f"{name}={o}: a divergence has no label_smoothing and no z_loss")
    criterion = KL(
        teacher_hidden=teacher_hidden,
        teacher=Head(teacher_weight, teacher_bias, teacher_options),
        weights=token_weights,
        denominator=denominator,
        reduction=reduction,
        beta=beta,
        temperature=temperature,
    )
    (found,) = run_criteria(
        hidden, weight, bias, [criterion], options=options, active=active, logits_bytes=logits_bytes
    )
    return found.value
