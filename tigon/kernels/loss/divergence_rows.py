"""Divergences between rows of logits and a teacher's: losses and gradient.

# N rows, V vocab, k tokens whose log-probabilities a teacher stored
"""

import torch
from torch import Tensor

from tigon.kernels.loss.cross_entropy_rows import loss_rows
from tigon.kernels.loss.logits import (
    LOG2E,
    LogitGradient,
    Options,
    head_constants,
    scale_and_cap,
    transform,
    uncap,
)
from tigon.kernels.runtime import runs_triton, tl, triton

SMALLEST_REST = 2.0**-24  # in fp32, 1 less the sum of other probabilities says nothing below
# Less than any probability that matters: the logarithm of a mixture that underflows stays finite
SMALLEST_MIXTURE = 2.0**-120
_SMALLEST_MIXTURE = tl.constexpr(SMALLEST_MIXTURE)


def kl_ref(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Returns the generalized Jensen-Shannon divergence of rows of log-probabilities [..., V].

    It is KL(teacher || student) for beta 0, KL(student || teacher) for 1; see `KL`.
    """
    if beta == 0:
        difference = (teacher - student).masked_fill(teacher == -torch.inf, 0)
        return (teacher.exp() * difference).sum(-1)
    if beta == 1:
        return kl_ref(teacher, student, 0)
    mixture = _log_mixture(student.exp(), teacher, beta)
    return beta * kl_ref(mixture, teacher, 0) + (1 - beta) * kl_ref(mixture, student, 0)


def _log_mixture(p: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Returns log(beta exp(teacher) + (1 - beta) p), of the student's probabilities p."""
    return (beta * teacher.exp() + (1 - beta) * p).clamp(min=SMALLEST_MIXTURE).log()


def _kl_derivative(a: Tensor, b: Tensor, beta: float) -> Tensor:
    """Returns the derivative of `kl_ref(a, b, beta)` by a, up to multiples of exp(a)."""
    if beta == 0:
        return -b.exp()
    p = a.exp()
    m = b if beta == 1 else _log_mixture(p, b, beta)
    return p * (a - m).masked_fill(p == 0, 0) * (1 if beta == 1 else 1 - beta)


def _reference(
    student: Tensor,
    teacher: Tensor,
    options: Options,
    teacher_options: Options,
    beta: float,
    grad: LogitGradient | None,
    masses: Tensor | None,
    mean: Tensor | None,
) -> Tensor:
    """Computes the divergence of each row and its gradient in plain torch: the definition."""
    z = a = scale_and_cap(student.float(), options)
    b = scale_and_cap(teacher.float(), teacher_options)
    if masses is not None:
        s_peak, s_mass, t_peak, t_mass = masses.T[..., None]
        a, b = a - s_peak - s_mass, b - t_peak - t_mass
    else:
        a, b = a.log_softmax(-1), b.log_softmax(-1)
    losses = kl_ref(a, b, beta)
    if masses is not None and mean is None:
        losses = torch.stack((losses, _kl_derivative(a, b, beta).sum(-1)), 1)
        mean = masses.new_full(masses.shape[:1], -1.0)  # of a forward divergence, the only one here
    if grad is not None:
        d = _kl_derivative(a, b, beta)
        d -= a.exp() * (d.sum(-1, keepdim=True) if mean is None else mean[:, None])
        d *= (grad.row_scale * options.logit_scale)[:, None]
        if options.softcap is not None:
            d *= 1 - (z / options.softcap).square()
        d.masked_fill_((grad.row_scale == 0)[:, None], 0)
        grad.out.copy_(d if grad.before is None else d.add_(grad.before))
    return losses


@triton.jit
def _mass(logits, V, head, BLOCK):
    """Returns the largest logit of a row, and log2 of the sum of 2^((z - largest) log2 e)."""
    columns = tl.arange(0, BLOCK)
    peak = tl.full((BLOCK,), -1.0e38, tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        at = start + columns
        z = transform(tl.load(logits + at, mask=at < V, other=0.0), head)
        z = tl.where(at < V, z, -float("inf"))
        higher = tl.maximum(peak, z)
        mass = mass * tl.exp2((peak - higher) * LOG2E) + tl.exp2((z - higher) * LOG2E)
        peak = higher
    highest = tl.max(peak, axis=0)
    return highest, tl.log2(tl.sum(mass * tl.exp2((peak - highest) * LOG2E), axis=0))


@triton.jit
def _masses_kernel(student, teacher, out, V, s_stride, t_stride, head, t_head, BLOCK: tl.constexpr):
    """Computes the largest logit and the log of the sum of each row, for student and teacher."""
    row = tl.program_id(0).to(tl.int64)
    s_peak, s_mass = _mass(student + row * s_stride, V, head, BLOCK)
    t_peak, t_mass = _mass(teacher + row * t_stride, V, t_head, BLOCK)
    out += row * 4
    tl.store(out, s_peak)
    tl.store(out + 1, s_mass / LOG2E)
    tl.store(out + 2, t_peak)
    tl.store(out + 3, t_mass / LOG2E)


def logit_masses(
    student: Tensor,  # [N, V] raw
    teacher: Tensor,  # [N, V] raw
    options: Options,
    teacher_options: Options,
) -> Tensor:
    """Returns largest logit and log(sum(exp(logit - largest))), student then teacher: [N, 4]."""
    n, vocab = student.shape
    if not runs_triton(student):
        outputs = []
        for raw, o in ((student, options), (teacher, teacher_options)):
            z = scale_and_cap(raw.float(), o)
            peak = z.amax(-1).clamp(min=-1e38) if vocab else z.new_full((n,), -1e38)
            outputs += [peak, (z - peak[:, None]).exp().sum(-1).log()]
        return torch.stack(outputs, 1)
    student, teacher = (x if x.stride(1) == 1 else x.contiguous() for x in (student, teacher))
    out = torch.empty(n, 4, dtype=torch.float32, device=student.device)
    if n:
        block, num_warps = _blocks(vocab)
        strides, heads = (student.stride(0), teacher.stride(0)), (options, teacher_options)
        constants = (head_constants(o) for o in heads)
        _masses_kernel[(n,)](
            student, teacher, out, vocab, *strides, *constants, BLOCK=block, num_warps=num_warps
        )
    return out


@triton.jit
def _divergence(a, b, beta, MIX, REVERSE):
    """Returns p, q, the loss of a logit, and its g, from log2-probabilities of student and teacher.

    The gradient of the student's logit is p (g - sum p g), all in units of log2; a forward
    divergence needs no g.
    """
    p = tl.exp2(a)
    q = tl.exp2(b)
    if MIX:
        m = tl.log2(tl.maximum(beta * q + (1 - beta) * p, _SMALLEST_MIXTURE))
        g = tl.where(p == 0, 0.0, (1 - beta) * (a - m))
        loss = tl.where(q == 0, 0.0, beta * q * (b - m)) + p * g
    elif REVERSE:
        g = tl.where(p == 0, 0.0, a - b)
        loss = p * g
    else:
        g = p * 0.0
        loss = tl.where(q == 0, 0.0, q * (b - a))
    return p, q, loss, g


@triton.jit
def _divergence_kernel(
    student, teacher,
    masses,  # [N, 4]; None: of these logits, found here
    loss,
    means,  # None without masses
    row_scale,  # these two are None without a gradient
    out,
    before,  # may be None, or out
    V, s_stride, t_stride, out_stride, before_stride, beta,
    head,  # scale and softcap; None for none
    t_head,
    MIX: tl.constexpr, REVERSE: tl.constexpr, HAS_MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Processes a row per program: two passes to normalize, one or two for loss and gradient."""
    row = tl.program_id(0).to(tl.int64)
    student += row * s_stride
    teacher += row * t_stride
    columns = tl.arange(0, BLOCK)
    if masses is not None:
        masses += row * 4
        s_peak, s_mass = tl.load(masses), tl.load(masses + 1) * LOG2E
        t_peak, t_mass = tl.load(masses + 2), tl.load(masses + 3) * LOG2E
    else:
        s_peak, s_mass = _mass(student, V, head, BLOCK)
        t_peak, t_mass = _mass(teacher, V, t_head, BLOCK)
    FORWARD: tl.constexpr = not (MIX or REVERSE)
    slope = 0.0
    if row_scale is not None:
        out += row * out_stride
        if before is not None:
            before += row * before_stride
        slope = tl.load(row_scale + row).to(tl.float32)
        if head[0] is not None:
            slope = slope * head[0]

    total = tl.zeros((BLOCK,), tl.float32)
    mean_g = tl.zeros((BLOCK,), tl.float32)
    if not HAS_MEAN:
        for start in range(0, V, BLOCK):
            at = start + columns
            z = transform(tl.load(student + at, mask=at < V, other=0.0), head)
            y = transform(tl.load(teacher + at, mask=at < V, other=0.0), t_head)
            a = tl.where(at < V, (z - s_peak) * LOG2E - s_mass, -float("inf"))
            b = tl.where(at < V, (y - t_peak) * LOG2E - t_mass, -float("inf"))
            p, q, each, g = _divergence(a, b, beta, MIX, REVERSE)
            total += each
            mean_g += p * g
            if row_scale is not None and FORWARD:
                d = (p - q) * slope
                _store(out, before, at, V, d, z, slope, head)
        if means is not None:  # after the loss, Triton 3.9's compiler would crash
            tl.store(means + row, tl.sum(mean_g, axis=0))
        tl.store(loss + row, tl.sum(total, axis=0) / LOG2E)

    if row_scale is not None and not FORWARD:
        mean = tl.sum(mean_g, axis=0)
        if HAS_MEAN:
            mean = tl.load(means + row)
        for start in range(0, V, BLOCK):
            at = start + columns
            z = transform(tl.load(student + at, mask=at < V, other=0.0), head)
            y = transform(tl.load(teacher + at, mask=at < V, other=0.0), t_head)
            a, b = (z - s_peak) * LOG2E - s_mass, (y - t_peak) * LOG2E - t_mass
            p, q, each, g = _divergence(a, b, beta, MIX, REVERSE)
            d = p * (g - mean) * (slope / LOG2E)
            _store(out, before, at, V, d, z, slope, head)


@triton.jit
def _store(out, before, at, V, d, z, slope, head):
    """Stores `before` plus the gradient of raw logits, from that of capped ones z: d."""
    d = tl.where(slope == 0.0, 0.0, uncap(d, z, head))  # not 0 * NaN
    if before is not None:
        d += tl.load(before + at, mask=at < V, other=0.0).to(tl.float32)
    tl.store(out + at, d.to(out.dtype.element_ty), mask=at < V)


def divergence_rows(
    student: Tensor,  # [N, V] raw
    teacher: Tensor,  # [N, V] raw
    options: Options,
    teacher_options: Options,
    beta: float,
    grad: LogitGradient | None = None,
    *,
    masses: Tensor | None = None,  # [N, 4]
    mean: Tensor | None = None,  # [N]
) -> Tensor:
    """Returns losses [N] and writes the gradient of the student's logits to `grad`.

    With `masses`, the `logit_masses` of the full vocabulary, these logits are a part of it. The
    result is then their terms [N, 2] of the losses and of the `mean` that the gradient needs in a
    second call, unless beta is 0; the result of that call is undefined.
    """
    if not runs_triton(student):
        return _reference(student, teacher, options, teacher_options, beta, grad, masses, mean)
    n, vocab = student.shape
    student, teacher = (x if x.stride(1) == 1 else x.contiguous() for x in (student, teacher))
    losses = torch.empty(n, dtype=torch.float32, device=student.device)
    before = None if grad is None else grad.before
    means = torch.empty_like(losses) if masses is not None and mean is None else mean
    means = None if means is None else means.contiguous()
    if n:
        block, num_warps = _blocks(vocab)
        _divergence_kernel[(n,)](
            student, teacher, masses, losses, means,
            None if grad is None else grad.row_scale.contiguous(),  # perhaps one, expanded
            None if grad is None else grad.out, before, vocab, student.stride(0), teacher.stride(0),
            0 if grad is None else grad.out.stride(0), 0 if before is None else before.stride(0),
            float(beta), head_constants(options), head_constants(teacher_options),
            MIX=0 < beta < 1, REVERSE=beta == 1, HAS_MEAN=mean is not None,
            BLOCK=block, num_warps=num_warps,
        )  # fmt: skip
    return losses if means is None else torch.stack((losses, means), 1)


def _blocks(vocab: int) -> tuple[int, int]:
    """Returns the logits of a row at a time, and warps."""
    block = min(8192, max(128, triton.next_power_of_2(vocab)))
    # Of one warp, a mixture with its gradient crashes the compiler of Triton 3.9
    return block, min(16, max(2, block // 512))


def topk_rows(
    logits: Tensor,  # [N, V] raw
    tokens: Tensor,  # [N, k], each once in a row; negative after the last, where there are fewer
    logprobs: Tensor,  # [N, k]
    options: Options,
    beta: float,
    grad: LogitGradient | None = None,
) -> Tensor:
    """Returns losses [N] against stored log-probabilities: all other tokens are one outcome.

    The probability of the other tokens comes from a cross-entropy pass with -inf at the stored
    ones.
    """
    index = tokens.where(tokens >= 0, tokens[:, :1])
    raw = logits.gather(1, index)
    z = scale_and_cap(raw.float(), options)
    other_logits = logits if grad is not None and grad.out is logits else logits.clone()
    other_logits.scatter_(1, index, -torch.inf)
    target = index[:, 0].contiguous()
    plain = options.without_regularizers()
    rest = loss_rows(other_logits, target, plain, holes=True)
    lse = torch.where(rest.log_mass == -torch.inf, -torch.inf, rest.peak + rest.log_mass)
    absent = tokens < 0
    losses, d = stored_losses(z, lse, logprobs, absent, beta, grad)
    if grad is not None and d is not None:
        exact = stored_gradient(d, z, options)
        exact = exact.where(~absent, exact[:, :1])
        if grad.before is not None:
            exact = exact + grad.before.gather(1, index)
        rest_gradient, lse_parts = grad._replace(row_scale=d[:, -1]), (rest.peak, rest.log_mass)
        loss_rows(other_logits, target, plain, (), rest_gradient, lse_parts, holes=True)
        grad.out.scatter_(1, index, exact.to(grad.out.dtype))
    return losses


def stored_losses(
    z: Tensor,  # [N, k] the student's logits of the stored tokens
    lse: Tensor,  # [N] the logsumexp of its others; -inf without any
    logprobs: Tensor,  # [N, k]
    absent: Tensor,  # [N, k]
    beta: float,
    grad: LogitGradient | None,
) -> tuple[Tensor, Tensor | None]:
    """Returns losses [N] and, for a gradient, the derivatives by z and, last, lse: [N, k + 1],
    times the rows' scales."""
    student = torch.cat((z.masked_fill(absent, -torch.inf), lse[:, None]), 1).log_softmax(-1)
    teacher = logprobs.float().masked_fill(absent, -torch.inf)
    remaining = (1 - teacher.exp().sum(-1, keepdim=True)).clamp(min=SMALLEST_REST)
    # Where all tokens were stored there are no others, of either model
    remaining = remaining.log().masked_fill(lse[:, None] == -torch.inf, -torch.inf)
    teacher = torch.cat((teacher, remaining), 1)
    losses = kl_ref(student, teacher, beta)
    if grad is None:
        return losses, None
    d = _kl_derivative(student, teacher, beta)
    d -= student.exp() * d.sum(-1, keepdim=True)
    return losses, (d * grad.row_scale[:, None]).masked_fill_((grad.row_scale == 0)[:, None], 0)


def stored_gradient(slopes: Tensor, z: Tensor, options: Options) -> Tensor:
    """Returns the gradient [N, k] of the stored tokens' raw logits."""
    exact = slopes[:, :-1] * options.logit_scale
    return exact if options.softcap is None else exact * (1 - (z / options.softcap).square())
