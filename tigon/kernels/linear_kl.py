"""Distillation: the divergence of a student's next-token distribution from a teacher's.

Both heads are inside the operator, so that neither model's [N, V] logits outlive a chunk.

# N rows (tokens), n rows of a chunk, C and D model dims of student and teacher, V vocab
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels._triton import (
    check_devices,
    operator,
    refuse_second_derivative,
    runs_triton,
    tl,
    triton,
)
from tigon.kernels.cross_entropy import (
    LOG2E,
    PLAIN,
    Options,
    Reduction,
    check_reduction,
    check_rows,
    rescale,
    scale_and_cap,
    transform,
)
from tigon.kernels.linear_cross_entropy import LOGITS_BYTES, add_product, chunk_rows, head_logits


def kl_ref(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Per-row generalised Jensen-Shannon divergence of log-probabilities [N, V]."""
    if beta == 0:
        return F.kl_div(student, teacher, log_target=True, reduction="none").sum(-1)
    if beta == 1:
        return F.kl_div(teacher, student, log_target=True, reduction="none").sum(-1)
    mixture = (beta * teacher.exp() + (1 - beta) * student.exp()).log()
    return beta * kl_ref(mixture, teacher, 0) + (1 - beta) * kl_ref(mixture, student, 0)


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


@triton.jit
def _log2_sum(
    logits, V, SCALE: tl.constexpr, CAP: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr
):
    """log2 of the sum of 2^(z log2 e) over a row, z = transformed logits / T."""
    columns = tl.arange(0, BLOCK)
    peak = tl.full((BLOCK,), -1.0e38, tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        at = start + columns
        z = transform(tl.load(logits + at, mask=at < V, other=0.0), SCALE, CAP) / T
        z = tl.where(at < V, z, -float("inf"))
        higher = tl.maximum(peak, z)
        mass = mass * tl.exp2((peak - higher) * LOG2E) + tl.exp2((z - higher) * LOG2E)
        peak = higher
    highest = tl.max(peak, axis=0)
    return highest * LOG2E + tl.log2(tl.sum(mass * tl.exp2((peak - highest) * LOG2E), axis=0))


@triton.jit
def _divergence(a, b, BETA: tl.constexpr):
    """For log2-probabilities of student and teacher: the loss of a logit, and its g.

    The gradient of the student's logit is p (g - sum p g), all in units of log2.
    """
    p = tl.exp2(a)
    q = tl.exp2(b)
    if BETA == 0.0:
        loss = tl.where(q > 0, q * (b - a), 0.0)
        g = p * 0.0
    elif BETA == 1.0:
        g = tl.where(p > 0, a - b, 0.0)
        loss = p * g
    else:
        m = tl.log2(BETA * q + (1 - BETA) * p)
        g = tl.where(p > 0, (1 - BETA) * (a - m), 0.0)
        loss = tl.where(q > 0, BETA * q * (b - m), 0.0) + p * g
    return p, q, loss, g


@triton.jit
def _kl_kernel(
    student,
    teacher,
    row_scale,
    loss,
    V,
    s_stride,
    t_stride,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    T_SCALE: tl.constexpr,
    T_CAP: tl.constexpr,
    T: tl.constexpr,
    BETA: tl.constexpr,
    GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row per program; the gradient replaces the student's logits."""
    row = tl.program_id(0).to(tl.int64)
    student += row * s_stride
    teacher += row * t_stride
    columns = tl.arange(0, BLOCK)
    s_sum = _log2_sum(student, V, SCALE, CAP, T, BLOCK)
    t_sum = _log2_sum(teacher, V, T_SCALE, T_CAP, T, BLOCK)
    slope = 0.0
    if GRAD:
        slope = tl.load(row_scale + row).to(tl.float32) * (SCALE / T)

    total = tl.zeros((BLOCK,), tl.float32)
    mean_g = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        at = start + columns
        z = transform(tl.load(student + at, mask=at < V, other=0.0), SCALE, CAP)
        y = transform(tl.load(teacher + at, mask=at < V, other=0.0), T_SCALE, T_CAP)
        a = tl.where(at < V, z * (LOG2E / T) - s_sum, -float("inf"))
        b = tl.where(at < V, y * (LOG2E / T) - t_sum, -float("inf"))
        p, q, each, g = _divergence(a, b, BETA)
        total += each
        mean_g += p * g
        if GRAD and BETA == 0.0:
            d = (p - q) * slope
            if CAP != 0.0:
                d *= 1 - (z / CAP) * (z / CAP)
            tl.store(student + at, d.to(student.dtype.element_ty), mask=at < V)
    tl.store(loss + row, tl.sum(total, axis=0) / LOG2E)

    if GRAD and BETA != 0.0:
        mean = tl.sum(mean_g, axis=0)
        for start in range(0, V, BLOCK):
            at = start + columns
            z = transform(tl.load(student + at, mask=at < V, other=0.0), SCALE, CAP)
            y = transform(tl.load(teacher + at, mask=at < V, other=0.0), T_SCALE, T_CAP)
            p, q, each, g = _divergence(z * (LOG2E / T) - s_sum, y * (LOG2E / T) - t_sum, BETA)
            d = p * (g - mean) * (slope / LOG2E)
            if CAP != 0.0:
                d *= 1 - (z / CAP) * (z / CAP)
            tl.store(student + at, d.to(student.dtype.element_ty), mask=at < V)


def _reference_rows_(
    student: Tensor,
    teacher: Tensor,
    row_scale: Tensor,
    beta: float,
    temperature: float,
    options: Options,
    teacher_options: Options,
    needs_grad: bool,
) -> Tensor:
    z = scale_and_cap(student.float(), options)
    y = scale_and_cap(teacher.float(), teacher_options)
    a, b = (z / temperature).log_softmax(-1), (y / temperature).log_softmax(-1)
    if needs_grad:
        p, q = a.exp(), b.exp()
        d = p - q
        if beta:
            m = b if beta == 1 else (beta * q + (1 - beta) * p).log()
            g = (a - m).where(p > 0, 0) * (1 if beta == 1 else 1 - beta)
            d = p * (g - (p * g).sum(-1, keepdim=True))
        d *= (row_scale * (options.logit_scale / temperature))[:, None]
        if options.softcap is not None:
            d *= 1 - (z / options.softcap).square()
        student.copy_(d)
    return kl_ref(a, b, beta)


def _kl_rows_(
    student: Tensor,  # [n, V] raw, ours to overwrite
    teacher: Tensor,  # [n, V] raw
    row_scale: Tensor,  # [n]
    beta: float,
    temperature: float,
    options: Options,
    teacher_options: Options,
    needs_grad: bool,
) -> Tensor:
    """Losses [n]; the gradient of the student's logits takes their place."""
    if not runs_triton(student):
        return _reference_rows_(
            student, teacher, row_scale, beta, temperature, options, teacher_options, needs_grad
        )
    losses = torch.empty(len(student), dtype=torch.float32, device=student.device)
    if len(student):
        vocab = student.shape[1]
        block = min(8192, max(128, triton.next_power_of_2(vocab)))
        _kl_kernel[(len(student),)](
            student,
            teacher,
            row_scale.contiguous(),  # it may be one number, expanded
            losses,
            vocab,
            student.stride(0),
            teacher.stride(0),
            SCALE=float(options.logit_scale),
            CAP=float(options.softcap or 0.0),
            T_SCALE=float(teacher_options.logit_scale),
            T_CAP=float(teacher_options.softcap or 0.0),
            T=float(temperature),
            BETA=float(beta),
            GRAD=needs_grad,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
        )
    return losses


def _chunked_pass_fake(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    row_scale: Tensor,
    settings: list[float],
    needs: list[bool],
    logits_bytes: int,
) -> list[Tensor]:
    late = hidden.dtype == torch.float16
    grads = [
        x.new_empty(x.shape if need else (0,), dtype=dtype)
        for x, dtype, need in zip(
            (hidden, weight, weight[:, 0]),
            (torch.float32 if late else hidden.dtype, torch.float32, torch.float32),
            needs,
            strict=True,
        )
    ]
    return [hidden.new_empty(len(hidden), dtype=torch.float32), *grads]


@operator("linear_kl", _chunked_pass_fake)
def _chunked_pass(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    row_scale: Tensor,  # [N]: the gradient of row t's loss
    settings: list[float],  # beta, temperature, then softcap (0: none) and scale of either head
    needs: list[bool],  # gradients of hidden, weight and bias
    logits_bytes: int,
) -> list[Tensor]:
    """Unweighted losses and three gradients (empty unless needed); weight and bias in fp32."""
    beta, temperature, cap, scale, teacher_cap, teacher_scale = settings
    options = Options(softcap=cap or None, logit_scale=scale)
    teacher_options = Options(softcap=teacher_cap or None, logit_scale=teacher_scale)
    need_hidden, need_weight, need_bias = needs
    n = len(hidden)
    rows = chunk_rows(len(weight), hidden, logits_bytes // 2)  # two buffers share the budget
    losses = hidden.new_empty(n, dtype=torch.float32)
    d_hidden = hidden.new_empty(hidden.shape if need_hidden else (0,))
    d_weight: Tensor | None = None
    d_bias = weight.new_zeros(len(weight) if need_bias else 0, dtype=torch.float32)
    for start in range(0, n, rows):
        part = slice(start, start + rows)
        student = head_logits(hidden[part], weight, bias)
        teacher = head_logits(teacher_hidden[part], teacher_weight, teacher_bias)
        losses[part] = _kl_rows_(
            student,
            teacher,
            row_scale[part],
            beta,
            temperature,
            options,
            teacher_options,
            any(needs),
        )
        del teacher
        if need_hidden:
            d_hidden[part] = student @ weight
        if need_weight:
            d_weight = add_product(d_weight, student.T, hidden[part], only=False)
        if need_bias:
            d_bias += student.sum(0, dtype=torch.float32)
        del student
    if d_weight is None:
        d_weight = weight.new_zeros(weight.shape if need_weight else (0,), dtype=torch.float32)
    late = hidden.dtype == torch.float16
    return [losses, d_hidden.float() if late else d_hidden, d_weight, d_bias]


class _LinearKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher: tuple[Tensor, Tensor, Tensor | None],
        token_weights: Tensor | None,
        scale: Tensor,
        reduction: Reduction,
        settings: list[float],
        logits_bytes: int,
    ) -> Tensor:
        ctx.per_token, ctx.settings, ctx.logits_bytes = reduction == "none", settings, logits_bytes
        w = None if token_weights is None else token_weights.float()
        late = hidden.dtype == torch.float16  # as in linear_cross_entropy
        needs = [n and not ctx.per_token for n in ctx.needs_input_grad[:3]]
        ones = torch.ones(len(hidden), dtype=torch.float32, device=hidden.device)
        row_scale = ones if w is None else w
        losses, *grads = _chunked_pass(
            hidden,
            weight,
            bias,
            *teacher,
            row_scale if late else row_scale * scale,
            settings,
            needs,
            logits_bytes,
        )
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        if ctx.per_token:
            ctx.save_for_backward(hidden, weight, bias, *teacher, token_weights, losses)
        else:
            ctx.save_for_backward(
                *(g if n else None for g, n in zip(grads, needs, strict=True)),
                scale if late else None,
                losses * scale if ctx.needs_input_grad[4] else None,
            )
        weighted = losses * w if w is not None else losses.clone()
        return weighted if ctx.per_token else weighted.sum() * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("linear_kl", "linear_kl_ref has one")
        d_token_weights = None
        if ctx.per_token:
            *inputs, token_weights, losses = ctx.saved_tensors
            if ctx.needs_input_grad[4]:
                d_token_weights = (losses * grad).to(token_weights.dtype)
            needs = list(ctx.needs_input_grad[:3])
            row_scale = (grad if token_weights is None else grad * token_weights).float()
            kept = _chunked_pass(*inputs, row_scale, ctx.settings, needs, ctx.logits_bytes)[1:]
            grads = [
                g.to(dtype) if n else None
                for g, n, dtype in zip(kept, needs, ctx.dtypes, strict=True)
            ]
        else:
            *kept, scale, d_token_weights = ctx.saved_tensors
            factor = grad if scale is None else grad * scale
            grads = [
                None if g is None else rescale(g, factor, dtype)
                for g, dtype in zip(kept, ctx.dtypes, strict=True)
            ]
            if d_token_weights is not None:
                d_token_weights = d_token_weights * grad
        return *grads, None, d_token_weights, None, None, None, None


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
    logits_bytes: int = LOGITS_BYTES,
) -> Tensor:
    """`sum(w_t * D_t) / denominator` in fp32, or every `w_t * D_t` [N].

    D is KL(teacher || student) for beta 0, KL(student || teacher) for beta 1, and between them
    the generalised Jensen-Shannon divergence `beta KL(teacher || M) + (1 - beta) KL(student || M)`
    with `M = beta teacher + (1 - beta) student` (GKD, arXiv 2306.13649). Logits, scaled and
    capped by the options, are divided by `temperature`; multiply the loss by its square to keep
    the gradients' size (arXiv 1503.02531). The teacher gets no gradient. At most `logits_bytes`
    of both models' logits exist at a time, and the sum's gradients are made in the forward pass.
    """
    for name, h, w, b in (
        ("", hidden, weight, bias),
        ("teacher_", teacher_hidden, teacher_weight, teacher_bias),
    ):
        if h.dim() != 2 or w.dim() != 2 or h.shape[1] != w.shape[1]:
            raise ValueError(
                f"{name}hidden {tuple(h.shape)} and {name}weight {tuple(w.shape)} "
                "are not [N, C] and [V, C]"
            )
        if b is not None and b.shape != w.shape[:1]:
            raise ValueError(f"{name}bias {tuple(b.shape)} is not [V] = [{len(w)}]")
    if len(hidden) != len(teacher_hidden) or len(weight) != len(teacher_weight):
        raise ValueError(
            f"the student has {len(hidden)} rows and {len(weight)} tokens, the teacher "
            f"{len(teacher_hidden)} and {len(teacher_weight)}: both must be the same"
        )
    for name, o in (("options", options), ("teacher_options", teacher_options)):
        if replace(o, softcap=None, logit_scale=1.0) != PLAIN:
            raise ValueError(f"{name}={o}: a divergence has no label_smoothing and no z_loss")
    if not 0 <= beta <= 1:
        raise ValueError(f"beta={beta} is not in [0, 1]")
    if temperature <= 0:
        raise ValueError(f"temperature={temperature} is not positive")
    check_rows(hidden, token_weights=token_weights)
    check_devices(hidden=hidden, weight=weight, bias=bias, teacher_hidden=teacher_hidden)
    check_devices(hidden=hidden, teacher_weight=teacher_weight, teacher_bias=teacher_bias)
    check_reduction(reduction)
    if not torch.is_grad_enabled():
        hidden, weight = hidden.detach(), weight.detach()
        bias = None if bias is None else bias.detach()
    if not isinstance(denominator, Tensor):
        denominator = torch.full((), denominator, dtype=torch.float32, device=hidden.device)
    teacher = (
        teacher_hidden.detach(),
        teacher_weight.detach(),
        None if teacher_bias is None else teacher_bias.detach(),
    )
    settings = [
        float(x)
        for x in (
            beta,
            temperature,
            options.softcap or 0.0,
            options.logit_scale,
            teacher_options.softcap or 0.0,
            teacher_options.logit_scale,
        )
    ]
    return _LinearKL.apply(
        hidden,
        weight,
        bias,
        teacher,
        token_weights,
        denominator.float().reciprocal(),
        reduction,
        settings,
        logits_bytes,
    )
