"""The head of a language model and its loss in one operator; no [N, V] tensor outlives a chunk.

# N rows (tokens), n rows of a chunk, C model dim, V vocab
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels.cross_entropy import (
    IGNORE_INDEX,
    PLAIN,
    Options,
    check_targets,
    cross_entropy_ref,
    finish_metrics,
    rows_behind,
    scale_and_cap,
    softmax_rows_,
)

# Upper bound of the logits and their fp32 copies that exist at one time.
LOGITS_BYTES = 2**30
Reduction = Literal["sum", "none"]


def linear_cross_entropy_ref(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    token_weights: Tensor | None = None,
    denominator: Tensor | float = 1.0,
    reduction: Reduction = "sum",
    options: Options = PLAIN,
) -> Tensor:
    """The definition, fp32 throughout, with all logits at once and plain autograd."""
    logits = F.linear(hidden.float(), weight.float(), None if bias is None else bias.float())
    losses = cross_entropy_ref(logits, targets, options=options)
    if token_weights is not None:
        losses = losses * token_weights
    return losses if reduction == "none" else losses.sum() / denominator


def linear_cross_entropy(
    hidden: Tensor,  # [N, C]
    weight: Tensor,  # [V, C]
    targets: Tensor,  # [N], -100 is ignored
    *,
    bias: Tensor | None = None,  # [V]
    token_weights: Tensor | None = None,  # [N]
    denominator: Tensor | float = 1.0,
    reduction: Reduction = "sum",
    options: Options = PLAIN,
    metrics: Sequence[str] = (),
) -> tuple[Tensor, dict[str, Tensor]]:
    """`sum(w_t * ce_t) / denominator` in fp32, or every `w_t * ce_t` [N]; and the metrics.

    With reduction "sum" the gradients are made while a chunk's logits exist: three matrix
    products, nothing recomputed. With "none" the upstream gradient is unknown, so the logits are
    computed again in the backward pass: four. Rows whose target is ignored cost nothing on the
    CPU. Metrics are per row [N] without gradient: nll, z (logsumexp), max_logit, entropy (nats),
    predicted_tokens; 0 (predicted_tokens -100) where the target is ignored; "accuracy" is the
    share of targets predicted right. Sources: the chunked gradient-in-forward form of Liger-Kernel
    (arXiv 2410.10989), defined by `linear_cross_entropy_ref`.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} "
            "are not [N, C] and [V, C]"
        )
    for name, value in (("targets", targets), ("token_weights", token_weights)):
        if value is not None and value.shape != hidden.shape[:1]:
            raise ValueError(f"{name} {tuple(value.shape)} is not [N] = [{hidden.shape[0]}]")
    if reduction not in ("sum", "none"):
        raise ValueError(f"reduction={reduction!r} is not 'sum' or 'none'")
    rows = rows_behind(metrics)
    check_targets(targets, weight.shape[0])

    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if not torch.is_grad_enabled():  # needs_input_grad would still say what requires_grad says
        hidden, weight = hidden.detach(), weight.detach()
        bias = None if bias is None else bias.detach()
    if not isinstance(denominator, Tensor):
        # A fill, where as_tensor would copy from the host and wait
        denominator = torch.full((), denominator, dtype=torch.float32, device=hidden.device)
    scale = denominator.float().reciprocal()
    loss, *values = _LinearCrossEntropy.apply(
        hidden, weight, bias, targets, token_weights, scale, reduction, options, rows
    )
    return loss, finish_metrics(dict(zip(rows, values, strict=True)), targets, metrics)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        token_weights: Tensor | None,
        scale: Tensor,
        reduction: Reduction,
        options: Options,
        metrics: tuple[str, ...],
    ) -> tuple[Tensor, ...]:
        per_token = reduction == "none"
        w = None if token_weights is None else token_weights.float()
        # 1 / denominator would push fp16 below its smallest number, sums without it above the
        # largest: such gradients wait in fp32
        late = hidden.dtype == torch.float16
        row_scale = torch.ones_like(targets, dtype=torch.float32) if w is None else w
        result = _chunked_pass(
            hidden,
            weight,
            bias,
            targets,
            row_scale if late else row_scale * scale,
            options,
            metrics,
            needs=(False, False, False) if per_token else tuple(ctx.needs_input_grad[:3]),
        )
        losses = result.losses if w is None else result.losses * w
        ctx.per_token, ctx.options = per_token, options
        if per_token:
            ctx.save_for_backward(hidden, weight, bias, targets, token_weights, result.losses)
        else:
            kept = torch.float32 if late else hidden.dtype
            ctx.save_for_backward(
                *(None if g is None else g.to(kept) for g in result.grads),
                scale if late else None,
                result.losses * scale if ctx.needs_input_grad[4] else None,
            )
        values = tuple(result.metrics[name] for name in metrics)
        ctx.mark_non_differentiable(*values)
        return losses if per_token else losses.sum() * scale, *values

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        # once_differentiable would not notice: that the gradients depend on the weight is hidden
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "create_graph=True: linear_cross_entropy has no second derivative; "
                "the loss with return_logits=True has one"
            )
        d_token_weights = None
        if ctx.per_token:
            hidden, weight, bias, targets, token_weights, losses = ctx.saved_tensors
            if ctx.needs_input_grad[4]:
                d_token_weights = (losses * grad).to(token_weights.dtype)
            result = _chunked_pass(
                hidden,
                weight,
                bias,
                targets,
                grad if token_weights is None else grad * token_weights.float(),
                ctx.options,
                (),
                needs=tuple(ctx.needs_input_grad[:3]),
            )
            grads = result.grads
        else:
            *kept, scale, d_token_weights = ctx.saved_tensors
            factor = grad if scale is None else grad * scale
            # A bf16 product would round the factor too: 0.2 % on every gradient
            grads = tuple(None if g is None else g.float() * factor for g in kept)
            if d_token_weights is not None:
                d_token_weights = d_token_weights * grad
        return *grads, None, d_token_weights, None, None, None, None


@dataclass
class _Pass:
    losses: Tensor  # [N], unweighted
    metrics: dict[str, Tensor]
    grads: tuple[Tensor | None, ...]  # of hidden, weight and bias; the latter two may be fp32


def _chunked_pass(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    row_scale: Tensor,  # [N]: the gradient of row t's loss
    options: Options,
    metrics: tuple[str, ...],
    needs: tuple[bool, ...],
) -> _Pass:
    """Losses, metrics and the gradients that `needs` asks for, a chunk of rows at a time."""
    need_hidden, need_weight, need_bias = needs
    n, vocab = hidden.shape[0], weight.shape[0]
    active = None
    if hidden.device.type == "cpu" and not torch.compiler.is_compiling():
        keep = targets != IGNORE_INDEX
        if not keep.all():
            active = keep.nonzero().squeeze(1)
            hidden, targets, row_scale = hidden[active], targets[active], row_scale[active]

    rows = max(1, LOGITS_BYTES // (16 * vocab))
    chunks = range(0, max(1, hidden.shape[0]), rows)  # one at least, so that all results exist
    values: dict[str, list[Tensor]] = {name: [] for name in metrics}
    losses: list[Tensor] = []
    d_hidden: list[Tensor] = []
    d_weight = d_bias = None
    for start in chunks:
        h, t = hidden[start : start + rows], targets[start : start + rows]
        logits = F.linear(h, weight, bias)
        loss, stats, d_logits = _chunk(
            logits, t, row_scale[start : start + rows], options, metrics, any(needs)
        )
        losses.append(loss)
        for name in metrics:
            values[name].append(stats[name])
        if d_logits is None:
            continue
        if need_hidden:
            d_hidden.append(d_logits @ weight)
        if need_weight:
            d_weight = _add_product(d_weight, d_logits.T, h, only=len(chunks) == 1)
        if need_bias:
            total = d_logits.sum(0, dtype=torch.float32)
            d_bias = total if d_bias is None else d_bias + total

    def spread(parts: list[Tensor], fill: int = 0) -> Tensor:
        """The chunks' rows at their places among all N."""
        joined = torch.cat(parts)
        if active is None:
            return joined
        full = joined.new_full((n, *joined.shape[1:]), fill)
        return full.index_copy_(0, active, joined)

    return _Pass(
        losses=spread(losses),
        metrics={
            name: spread(parts, IGNORE_INDEX if name == "predicted_tokens" else 0)
            for name, parts in values.items()
        },
        grads=(spread(d_hidden) if need_hidden else None, d_weight, d_bias),
    )


def _chunk(
    logits: Tensor,  # [n, V], ours to overwrite
    targets: Tensor,  # [n]
    row_scale: Tensor,  # [n]
    options: Options,
    metrics: tuple[str, ...],
    needs_grad: bool,
) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
    """Per-row losses and metrics, and the gradient of the logits in their dtype."""
    dtype, vocab = logits.dtype, logits.shape[1]
    z = scale_and_cap(logits.float(), options)
    valid = targets != IGNORE_INDEX
    smoothing, softcap = options.label_smoothing, options.softcap
    mean = z.mean(-1) if smoothing else None
    chain = 1 - (z / softcap).square() if softcap is not None and needs_grad else None
    rows = softmax_rows_(z, targets, metrics)
    loss = rows.nll
    if mean is not None:
        loss = torch.lerp(loss, rows.lse - mean, smoothing)
    if options.z_loss:
        loss = loss + options.z_loss * rows.lse.square()
    loss = loss * valid
    if not needs_grad:
        return loss, rows.metrics, None

    slope = row_scale * valid * options.logit_scale
    d = z.mul_((slope * (1 + 2 * options.z_loss * rows.lse) / rows.mass)[:, None])
    if smoothing:
        d.sub_((slope * smoothing / vocab)[:, None])
    d.scatter_add_(1, targets.clamp(min=0)[:, None], (slope * (smoothing - 1))[:, None])
    if chain is not None:
        d.mul_(chain)
    return loss, rows.metrics, d.to(dtype)


def _add_product(total: Tensor | None, a: Tensor, b: Tensor, *, only: bool) -> Tensor:
    """`total + a @ b` in fp32, however narrow the factors; an only product needs no fp32 copy."""
    if only and a.dtype != torch.float16:
        return a @ b
    if total is None:
        total = a.new_zeros(a.shape[0], b.shape[1], dtype=torch.float32)
    if a.device.type == "cuda" and a.dtype != torch.float32:
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    return total.addmm_(a.float(), b.float())  # in place, so autocast does not narrow it
