"""Cases of losses: of logits, of a head, and of a student beside its teacher.

# N rows, C model dim, V vocab
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels import definitions as exact
from tests.kernels.conftest import CUDA
from tests.kernels.op_case import HALF, Call, Inputs, OpCase
from tigon.kernels import (
    cross_entropy,
    cross_entropy_ref,
    linear_cross_entropy,
    linear_kl,
    selected_logprobs,
)
from tigon.kernels.loss.logits import Options, scale_and_cap

SMALL = 2**14  # bytes of logits: several chunks of rows
LOSSES = {
    "plain": Options(),
    "softcap": Options(softcap=1.5),
    "logit scale": Options(logit_scale=0.3),
    "smoothing": Options(label_smoothing=0.2),
    "z-loss": Options(z_loss=1e-2),
    "all": Options(softcap=2.0, logit_scale=0.7, label_smoothing=0.1, z_loss=3e-3),
}


def targets(n: int, v: int) -> Tensor:
    drawn = torch.randint(0, v, (n,))
    drawn[::5] = -100
    return drawn


def head(n: int, c: int, v: int) -> Inputs:
    """A head, and rows of which some do not count."""
    return {
        "hidden": torch.randn(n, c),
        "weight": c**-0.5 * torch.randn(v, c),
        "bias": torch.randn(v),
        "targets": targets(n, v),
        "token_weights": torch.rand(n) + 0.1,
    }


def every_row(n: int, c: int, v: int) -> Inputs:
    return head(n, c, v) | {"targets": torch.randint(0, v, (n,))}


def logits(n: int, v: int) -> Inputs:
    return {
        "logits": 2 * torch.randn(n, v),
        "targets": targets(n, v),
        "token_weights": torch.rand(n) + 0.1,
    }


def narrow_linear(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Logits in the dtype of their factors."""
    return F.linear(hidden, weight, bias).float()


def head_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    token_weights: Tensor | None = None,
    linear: Call = exact.linear,
    losses: Call = exact.losses,
    **how: Any,
) -> Tensor:
    z = linear(hidden, weight, bias)
    return logits_loss(z, targets, token_weights, losses, **how)


def logits_loss(
    logits: Tensor, targets: Tensor, token_weights: Any, losses: Call = exact.losses, **how: Any
) -> Tensor:
    rows = losses(logits, targets, how["options"])
    return exact.reduced(rows if token_weights is None else rows * token_weights, **how)


def eager_losses(logits: Tensor, targets: Tensor, options: Options) -> Tensor:
    return cross_entropy_ref(logits.float(), targets, options=options)


eager_head_loss = partial(head_loss, linear=narrow_linear, losses=eager_losses)
eager_logits_loss = partial(logits_loss, losses=eager_losses)


def loss_case(name: str, reduction: str, **more: Any) -> OpCase:
    how = {"reduction": reduction, "options": LOSSES[name]}
    how |= {"denominator": 7.0, "metrics": ("accuracy",)} if reduction == "sum" else {}
    return OpCase(
        linear_cross_entropy, head_loss, head, eager_head_loss, how | more, [(37, 19, 211)],
        [(63, 96, 151), (1000, 2880, 151), (2047, 1152, 32003), (63, 96, 262144)],
        [(0, 19, 211)], whole=("token_weights",), result=torch.float32,
        autocast=("hidden", "weight", "bias"), second="linear_cross_entropy",
    )  # fmt: skip


def logits_case(name: str, reduction: str) -> OpCase:
    how = {"reduction": reduction, "options": LOSSES[name]}
    return OpCase(
        cross_entropy, logits_loss, logits, eager_logits_loss, how, [(37, 211), (1, 1)],
        [(63, 151), (100, 32003), (100, 262144)], [(0, 7)], whole=("token_weights",),
        halves=HALF if CUDA else HALF[1:],  # the interpreter rounds a target's twice to fp16
        result=torch.float32, second="cross_entropy",
    )  # fmt: skip


def teacher_and_student(n: int, c: int, d: int, v: int) -> Inputs:
    return {
        "hidden": torch.randn(n, c),
        "weight": c**-0.5 * torch.randn(v, c),
        "bias": torch.randn(v),
        "teacher_hidden": torch.randn(n, d),
        "teacher_weight": d**-0.5 * torch.randn(v, d),
        "teacher_bias": torch.randn(v),
        "token_weights": torch.rand(n) + 0.1,
    }


def kl(
    hidden: Tensor, weight: Tensor, bias: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor,
    teacher_bias: Tensor, token_weights: Tensor, *, beta: float, temperature: float = 1.0,
    options: Options = LOSSES["plain"], teacher_options: Options = LOSSES["plain"],
    linear: Call = exact.linear, **how: Any,
) -> Tensor:  # fmt: skip
    def probabilities(z: Tensor, o: Options) -> Tensor:
        return (scale_and_cap(z, o) / temperature).softmax(-1)

    p = probabilities(linear(hidden, weight, bias), options)
    q = probabilities(linear(teacher_hidden, teacher_weight, teacher_bias), teacher_options)
    return exact.reduced(exact.divergences(p, q, beta) * token_weights, **how)


eager_kl = partial(kl, linear=narrow_linear)


def kl_case(beta: float, reduction: str = "sum", **more: Any) -> OpCase:
    how = {"beta": beta, "reduction": reduction}
    how |= {"denominator": 7.0} if reduction == "sum" else {}
    return OpCase(
        linear_kl, kl, teacher_and_student, None if more else eager_kl, how | more,
        [(21, 19, 13, 211)], [(1000, 1152, 512, 32003)], [(0, 19, 13, 211)],
        ("teacher_hidden", "teacher_weight", "teacher_bias"), ("token_weights",),
        autocast=[n for n in teacher_and_student(1, 1, 1, 1) if n != "token_weights"],
        result=torch.float32, second="linear_kl", rtol=1e-3,
    )  # fmt: skip


def logprobs_case(options: Options, **more: Any) -> OpCase:
    def definition(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, **_: Any) -> Any:
        return -exact.losses(exact.linear(hidden, weight, bias), targets, options)

    def make(*size: int) -> Inputs:
        made = head(*size)
        del made["token_weights"]
        return made

    return OpCase(
        selected_logprobs, definition, make, None, {"options": options, **more}, [(37, 19, 211)],
        [], [(0, 19, 211)], result=torch.float32, second="linear_cross_entropy",
    )  # fmt: skip


def in_chunks(case: OpCase) -> OpCase:
    real = [(1000, 256, 5003)] if case.operator is linear_cross_entropy else []
    return replace(case, options=case.options | {"logits_bytes": SMALL}, real=real)


CAPPED = {
    "options": Options(softcap=2.0, logit_scale=0.7),
    "teacher_options": Options(softcap=3.0, logit_scale=1.3),
}
BETAS, BOTH = (0.0, 0.3, 1.0), ("sum", "none")
