"""What operators compute, from formulas, in float64: the truth of tests.

# B batch, T tokens, H query heads, K kv heads, D head dim, C model dim, I inner dim, E experts
"""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels import KL, LogProbs, kl_ref
from tigon.kernels.loss.logits import scale_and_cap
from tigon.kernels.mlp.clamped_swiglu import ClampedSwiGLU

EPS = 1e-2  # large, so that it counts


def norm(x: Tensor, weight: Tensor | None, offset: float = 0.0, eps: float = EPS) -> Tensor:
    x = x.double()
    y = x / ((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps) ** 0.5
    return y if weight is None else y * (weight.double() + offset)


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    offset: float = 0.0,
    **_: Any,
) -> tuple[Tensor, ...]:
    total = x.double() if residual is None else x.double() + residual.double()
    y = norm(total, weight, offset)
    if gate is not None:
        y = y * activation(gate, "silu")
    return (y,) if residual is None else (y, total)


def sandwich_norm(
    x: Tensor, residual: Tensor, post_weight: Tensor, weight: Tensor, offset: float = 1.0,
    post_eps: float = EPS, **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    total = residual.double() + norm(x, post_weight, offset, post_eps)
    return norm(total, weight, offset), total


def rms_norm_add(
    x: Tensor, residual: Tensor, weight: Tensor, offset: float = 0.0, **_: Any
) -> Tensor:
    return residual.double() + norm(x, weight, offset)


def round_to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: x.to(dtype).double()


def rounded_norm(x: Tensor, weight: Tensor, dtype: torch.dtype, offset: float, cast: str) -> Tensor:
    """Of float64 numbers, to be rounded to `dtype` next."""
    if cast == "before_weight":
        return norm(x, None).to(dtype).double() * (weight + offset).double()
    return norm(x, weight, offset)


def rounded_rms_norm(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    gate: Tensor | None = None,
    offset: float = 0.0,
    cast: str = "before_weight",
    **_: Any,
) -> tuple[Tensor, Tensor]:
    cut = round_to(x.dtype)
    total = cut(x.double() + residual.double())
    y = rounded_norm(total, weight, x.dtype, offset, cast)
    if gate is not None:
        y = y.to(weight.dtype).double() * activation(gate, "silu")
    return cut(y), total


def rounded_sandwich_norm(
    x: Tensor, residual: Tensor, post_weight: Tensor, weight: Tensor, offset: float = 1.0,
    cast: str = "after_weight", **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    cut, how = round_to(x.dtype), (x.dtype, offset, cast)
    total = cut(residual.double() + cut(rounded_norm(x.double(), post_weight, *how)))
    return cut(rounded_norm(total, weight, *how)), total


def rounded_rms_norm_add(
    x: Tensor, residual: Tensor, weight: Tensor, offset: float = 0.0,
    cast: str = "before_weight", **_: Any,
) -> Tensor:  # fmt: skip
    cut, how = round_to(x.dtype), (x.dtype, offset, cast)
    return cut(residual.double() + cut(rounded_norm(x.double(), weight, *how)))


def activation(x: Tensor, act: str) -> Tensor:
    x = x.double()
    if act == "silu":
        return x / (1 + (-x).exp())
    if act == "gelu":
        return x * (1 + torch.erf(x / math.sqrt(2))) / 2
    return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


silu = partial(activation, act="silu")


def gated_act(gate_up: Tensor, act: str, **_: Any) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return activation(gate, act) * up.double()


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    return x.double() / (1 + (-gate.double()).exp())


def rounded_sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    cut = round_to(x.dtype)
    return cut(x.double() * cut(1 / (1 + (-gate.double()).exp())))


def rounded_gated_act(gate_up: Tensor, act: str, **_: Any) -> Tensor:
    cut, (gate, up) = round_to(gate_up.dtype), gate_up.chunk(2, -1)
    return cut(cut(activation(gate, act)) * up.double())


def delta_gates(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    x = a.double() + dt_bias.double()
    return -A_log.double().exp() * torch.logaddexp(x, 0 * x), 1 / (1 + (-b.double()).exp())


def causal_conv(
    x: Tensor,
    weight: Tensor,
    state: Tensor | None = None,
    starts: Tensor | None = None,
    activation: str | None = None,
    cut: Callable[[Tensor], Tensor] = Tensor.double,
) -> Tensor:
    """Sums over those of the last tokens that are of the same sequence."""
    (b, t, c), w = x.shape, weight.shape[1]
    before = x.new_zeros(b, w - 1, c) if state is None else state
    inputs = torch.cat((before, x), 1).double()
    sequence = torch.zeros(b, w - 1 + t) if starts is None else F.pad(starts, (w - 1, 0)).cumsum(1)
    rows = []
    for n in range(t):
        same = sequence[:, n : n + w] == sequence[:, n + w - 1, None]
        window = torch.where(same[..., None], inputs[:, n : n + w], 0.0)
        rows.append(torch.einsum("bwc,cw->bc", window, weight.double()))
    y = cut(torch.stack(rows, 1) if rows else inputs[:, :0])
    return cut(silu(y)) if activation else y


def causal_conv_qkv(
    x: Tensor,
    weight: Tensor,
    key_heads: int,
    key_dim: int,
    cut: Callable[[Tensor], Tensor] = Tensor.double,
    **rows: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    y = causal_conv(x, weight, activation="silu", cut=cut, **rows)
    parts = y[..., : 2 * key_heads * key_dim].unflatten(-1, (2, key_heads, key_dim))
    q, k = (parts / (parts.square().sum(-1, keepdim=True) + 1e-6).sqrt()).unbind(2)
    return cut(q / key_dim**0.5), cut(k), y[..., 2 * key_heads * key_dim :]


def rounded_causal_conv(x: Tensor, **rows: Any) -> Tensor:
    return causal_conv(x, cut=round_to(x.dtype), **rows)


def rounded_causal_conv_qkv(x: Tensor, **rows: Any) -> tuple[Tensor, Tensor, Tensor]:
    return causal_conv_qkv(x, cut=round_to(x.dtype), **rows)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """[B, T, H, D] with its first 2 R dims as complex numbers, times cos + i sin."""
    half = cos.shape[-1]
    head, rest = x[..., : 2 * half].double(), x[..., 2 * half :].double()
    parts = (head[..., 0::2], head[..., 1::2]) if interleaved else head.split(half, -1)
    turned = torch.complex(*parts) * torch.complex(cos.double(), sin.double())[:, :, None]
    pair = turned.real, turned.imag
    out = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((out, rest), -1)


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    return rotate(q, cos, sin, interleaved), rotate(k, cos, sin, interleaved)


def qk_norm_rope(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    *,
    heads: int,
    kv_heads: int,
    offset: float = 0.0,
    interleaved: bool = False,
    **_: Any,
) -> tuple[Tensor, ...]:
    packed = qkv.double().unflatten(-1, (heads + 2 * kv_heads, -1))
    *qk, v = packed.split((heads, kv_heads, kv_heads), 2)
    if q_weight is not None:
        qk = [norm(x, w, offset) for x, w in zip(qk, (q_weight, k_weight), strict=True)]
    return *(rotate(x, cos, sin, interleaved) for x in qk), v


def rounded_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **_: Any) -> list[Tensor]:
    return [round_to(q.dtype)(x) for x in rope(q, k, cos, sin)]


def rounded_qk_norm_rope(
    qkv: Tensor, cos: Tensor, sin: Tensor, q_weight: Tensor, k_weight: Tensor, *, heads: int,
    kv_heads: int, offset: float = 0.0, cast: str = "before_weight", **_: Any,
) -> list[Tensor]:  # fmt: skip
    cut, packed = round_to(qkv.dtype), qkv.double().unflatten(-1, (heads + 2 * kv_heads, -1))
    *qk, v = packed.split((heads, kv_heads, kv_heads), 2)
    weights = zip(qk, (q_weight, k_weight), strict=True)
    normed = [cut(rounded_norm(x, w, qkv.dtype, offset, cast)) for x, w in weights]
    return [*(cut(rotate(x, cos, sin)) for x in normed), v]


def clamped_swiglu(gate_up: Tensor, act: ClampedSwiGLU) -> Tensor:
    """Of neighbors (gate, up); the gate has no lower bound."""
    gate, up = gate_up.double().unflatten(-1, (-1, 2)).unbind(-1)
    gate = torch.where(gate > act.limit, act.limit, gate)
    up = torch.where(up > act.limit, act.limit, torch.where(up < -act.limit, -act.limit, up))
    return gate / (1 + (-act.alpha * gate).exp()) * (up + 1)


def grouped_mlp(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    experts: Tensor,
    weights: Tensor,
    act: Any,
    biases: Any = None,
    transposed: bool = False,
    **_: Any,
) -> Tensor:
    """Token by token; an expert past the last is absent."""
    x, gate_up, down, weights = (t.double() for t in (x, gate_up, down, weights))
    if transposed:
        gate_up, down = gate_up.mT, down.mT
    of_up, of_down = (None, None) if biases is None else (t.double() for t in biases)
    apply = clamped_swiglu if isinstance(act, ClampedSwiGLU) else gated_act
    rows = []
    for n in range(x.shape[0]):
        row = 0 * x[n]
        for j, e in enumerate(experts[n].tolist()):
            if e < len(gate_up):
                hidden = gate_up[e] @ x[n] + (0 if of_up is None else of_up[e])
                y = down[e] @ apply(hidden, act) + (0 if of_down is None else of_down[e])
                row = row + weights[n, j] * y
        rows.append(row)
    unused = 0 * (gate_up.sum() + down.sum() + weights.sum())  # has gradients where all are absent
    unused = unused + (0 if of_up is None else 0 * (of_up.sum() + of_down.sum()))
    return torch.stack(rows) + unused if rows else x * 1


def rounded_grouped_mlp(
    x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, weights: Tensor, act: str, **_: Any
) -> Tensor:
    """Products in the input's dtype; the sum over a token's experts is rounded once."""
    cut, rows = round_to(x.dtype), []
    for n in range(x.shape[0]):
        row = torch.zeros_like(x[n]).double()
        for j, e in enumerate(experts[n].tolist()):
            hidden = rounded_gated_act((gate_up[e].double() @ x[n].double()).to(x.dtype), act)
            row += weights[n, j].double() * cut(down[e].double() @ hidden)
        rows.append(cut(row))
    return torch.stack(rows)


def softmax_topk(logits: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """Row by row: all probabilities, and the largest, of which the first stands for its equals."""
    rows = []
    for x in logits.double():
        p = (x - x.max()).exp() / (x - x.max()).exp().sum()
        order = sorted(range(len(p)), key=lambda e: (-p[e].item(), e))[:k]
        rows.append((p, p[order] / p[order].sum() if normalize else p[order]))
    probs = [p for p, _ in rows], [w for _, w in rows]
    if not rows:
        return logits.double(), logits.double()[:, :k]
    return torch.stack(probs[0]), torch.stack(probs[1])


def losses(logits: Tensor, targets: Tensor, options: Any) -> Tensor:
    """Cross-entropy of each row; 0 where the target is -100."""
    rows = []
    for x, target in zip(logits.double(), targets.tolist(), strict=True):
        z = x * options.logit_scale
        if options.softcap is not None:
            z = options.softcap * torch.tanh(z / options.softcap)
        if target == -100:
            rows.append(x.sum() * 0)
            continue
        total = z.exp().sum().log()
        wanted = torch.full_like(z, options.label_smoothing / len(z))
        wanted[target] += 1 - options.label_smoothing
        rows.append((wanted * (total - z)).sum() + options.z_loss * total**2)
    return torch.stack(rows) if rows else logits.double().sum(-1)


def reduced(rows: Tensor, reduction: str, denominator: Any = 1.0, **_: Any) -> Tensor:
    return rows if reduction == "none" else rows.sum() / denominator


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(hidden.double(), weight.double(), None if bias is None else bias.double())


def divergences(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Generalized Jensen-Shannon of probabilities, row by row."""

    def kl(p: Tensor, q: Tensor) -> Tensor:
        return (p * (p / q).log()).sum(-1)

    if beta in (0, 1):
        return kl(student, teacher) if beta else kl(teacher, student)
    mixture = beta * teacher + (1 - beta) * student
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def criterion(c: Any, z: Tensor) -> Tensor:
    """The value of a criterion, of a head's logits after scale and softcap."""
    if isinstance(c, KL):
        losses = kl_rows(c, z)
        losses = losses if c.targets is None else losses * (c.targets != -100)
    else:
        valid, index = c.targets != -100, c.targets.clamp(min=0)
        logp = z.log_softmax(-1)
        of_target = logp.gather(1, index[:, None])[:, 0]
        if isinstance(c, LogProbs):
            return of_target * valid
        s = c.label_smoothing
        losses = -(1 - s) * of_target - s * logp.mean(-1) + c.z_loss * z.logsumexp(-1).square()
        losses = losses * valid
        if c.class_weights is not None:
            losses = losses * c.class_weights[index].double()
    losses = losses * c.coefficient * (1.0 if c.weights is None else c.weights.double())
    return losses if c.reduction == "none" else losses.sum() / (c.denominator or 1.0)


def kl_rows(c: KL, z: Tensor) -> Tensor:
    """Of the whole vocabulary, or of stored tokens and all others as one."""
    student = (z / c.temperature).log_softmax(-1)
    if c.teacher_tokens is None:
        weight, bias, options = c.teacher
        teacher = scale_and_cap(linear(c.teacher_hidden, weight, bias), options)
        return kl_ref(student, (teacher / c.temperature).log_softmax(-1), c.beta)
    losses = []
    for row, tokens, logprobs in zip(
        student, c.teacher_tokens, c.teacher_logprobs.double(), strict=True
    ):
        tokens, logprobs = tokens[tokens >= 0], logprobs[tokens >= 0]
        others = torch.ones_like(row, dtype=torch.bool).index_fill(0, tokens, False)
        p = torch.cat((row[tokens], row[others].logsumexp(0)[None]))
        q = torch.cat((logprobs, torch.log1p(-logprobs.exp().sum())[None]))
        losses.append(kl_ref(p, q, c.beta))
    return torch.stack(losses)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Token by token, and each packed sequence as a row of its own."""
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        found = [
            gated_delta_rule(
                *(x[:, start:end] for x in (q, k, v, g, beta)),
                state=None if state is None else state[n : n + 1],
            )
            for n, (start, end) in enumerate(itertools.pairwise(bounds))
        ]
        return torch.cat([o for o, _ in found], 1), torch.cat([final for _, final in found])
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    S = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    S = S if state is None else state.double()
    outputs = [v[:, :0]]
    for t in range(v.shape[1]):
        S = S * g[:, t, :, None, None].exp()
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t])
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * error)
        outputs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t])[:, None])
    return torch.cat(outputs, 1), S
