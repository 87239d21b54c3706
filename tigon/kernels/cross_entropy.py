"""Cross-entropy of logits that exist; `linear_cross_entropy` is the one that trains.

# N rows, V vocab
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels._triton import (
    check_devices,
    num_sms,
    operator,
    refuse_second_derivative,
    runs_triton,
    tl,
    triton,
)

IGNORE_INDEX = -100
METRICS = ("accuracy", "predicted_tokens", "entropy", "max_logit", "nll", "z")
Reduction = Literal["sum", "none"]


@dataclass(frozen=True)
class Options:
    """What turns raw logits into logits, and logits into a loss.

    `z_loss` adds `z_loss * logsumexp(logits)^2` (PaLM, arXiv 2204.02311).
    """

    softcap: float | None = None
    logit_scale: float = 1.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0


PLAIN = Options()


def scale_and_cap(logits: Tensor, options: Options) -> Tensor:
    """`softcap * tanh(scale * logits / softcap)`, in the dtype of `logits`."""
    if options.logit_scale != 1.0:
        logits = logits * options.logit_scale
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    return logits


def cross_entropy_ref(logits: Tensor, targets: Tensor, *, options: Options = PLAIN) -> Tensor:
    """Per-row cross-entropy of raw logits, fp32 inside; 0 where the target is ignored."""
    z = scale_and_cap(logits.float(), options)
    loss = F.cross_entropy(
        z,
        targets,
        ignore_index=IGNORE_INDEX,
        reduction="none",
        label_smoothing=options.label_smoothing,
    )
    if options.z_loss:
        loss = loss + options.z_loss * z.logsumexp(-1).square() * (targets != IGNORE_INDEX)
    return loss


@dataclass
class Rows:
    """What a pass over logits leaves behind; everything is 0 where the target is ignored."""

    loss: Tensor  # [N] fp32
    lse: Tensor  # [N] fp32: the logsumexp
    metrics: dict[str, Tensor] = field(default_factory=dict)  # predicted_tokens is -100 there


def loss_rows(
    logits: Tensor,  # [N, V] raw
    targets: Tensor,  # [N]
    options: Options,
    metrics: Sequence[str] = (),
    row_scale: Tensor | None = None,  # [N]: the gradient of each row's loss
    out: Tensor | None = None,  # [N, V], may be `logits`: takes their gradient
    lse: Tensor | None = None,  # [N], if an earlier pass found it
) -> Rows:
    """One pass over the logits: losses, metrics and, with `row_scale` and `out`, the gradient."""
    if runs_triton(logits):
        return _launch_rows(logits, targets, options, metrics, row_scale, out, lse)
    return _reference_rows(logits, targets, options, metrics, row_scale, out)


def _reference_rows(
    logits: Tensor,
    targets: Tensor,
    options: Options,
    metrics: Sequence[str],
    row_scale: Tensor | None,
    out: Tensor | None,
) -> Rows:
    z = scale_and_cap(logits.to(torch.float32, copy=True), options)
    valid = targets != IGNORE_INDEX
    index = targets.clamp(min=0)[:, None]
    smoothing, softcap = options.label_smoothing, options.softcap
    mean = z.mean(-1) if smoothing else None
    chain = 1 - (z / softcap).square() if softcap is not None and row_scale is not None else None
    predicted = z.argmax(-1) if "predicted_tokens" in metrics else None
    peak = z.amax(-1)
    z.sub_(peak[:, None])
    target = z.gather(1, index).squeeze(1)
    shifted = z.clone() if "entropy" in metrics else None
    mass = z.exp_().sum(-1)
    log_mass = mass.log()
    nll, lse = log_mass - target, peak + log_mass
    values = {"nll": nll, "z": lse, "max_logit": peak}
    if shifted is not None:
        # Where p is 0, the logit may be -inf
        values["entropy"] = log_mass - shifted.mul_(z).where(z > 0, 0).sum(-1) / mass
    kept = {name: values[name] * valid for name in metrics if name != "predicted_tokens"}
    if predicted is not None:
        kept["predicted_tokens"] = torch.where(valid, predicted, IGNORE_INDEX)

    loss = nll if mean is None else torch.lerp(nll, lse - mean, smoothing)
    if options.z_loss:
        loss = loss + options.z_loss * lse.square()
    if row_scale is not None and out is not None:
        slope = row_scale * valid * options.logit_scale
        z.mul_((slope * (1 + 2 * options.z_loss * lse) / mass)[:, None])
        if smoothing:
            z.sub_((slope * smoothing / logits.shape[1])[:, None])
        z.scatter_add_(1, index, (slope * (smoothing - 1))[:, None])
        out.copy_(z if chain is None else z.mul_(chain))
    return Rows(loss * valid, lse * valid, kept)


LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def transform(x, SCALE: tl.constexpr, CAP: tl.constexpr):
    """Scaled and capped, fp32; tanh(y) = 2 sigmoid(2 y) - 1."""
    z = x.to(tl.float32)
    if SCALE != 1.0:
        z = z * SCALE
    if CAP != 0.0:
        z = CAP * (2 * tl.sigmoid(z * (2 / CAP)) - 1)
    return z


@triton.jit
def _rows_kernel(
    logits,
    out,
    targets,
    row_scale,
    loss,
    lse,
    entropy,
    max_logit,
    nll,
    predicted,
    V,
    stride,
    out_stride,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    SMOOTHING: tl.constexpr,
    Z_LOSS: tl.constexpr,
    GRAD: tl.constexpr,
    LSE_KNOWN: tl.constexpr,
    ENTROPY: tl.constexpr,
    MAX_LOGIT: tl.constexpr,
    NLL: tl.constexpr,
    PREDICTED: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
):
    """One row per program: a pass for the logsumexp, a second, out of L2, for the gradient."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    out += row * out_stride
    target = tl.load(targets + row)
    # Groups of K neighbours share a running maximum: 1 + 1/K exponentials per logit, not 2
    groups = tl.arange(0, BLOCK // K)[:, None]
    columns = groups * K + tl.arange(0, K)[None, :]

    if target == -100:
        tl.store(loss + row, 0.0)
        if not LSE_KNOWN:
            tl.store(lse + row, 0.0)
        if ENTROPY:
            tl.store(entropy + row, 0.0)
        if MAX_LOGIT:
            tl.store(max_logit + row, 0.0)
        if NLL:
            tl.store(nll + row, 0.0)
        if PREDICTED:
            tl.store(predicted + row, -100)
        if GRAD:
            for start in range(0, V, BLOCK):
                at = start + columns
                tl.store(out + at, tl.zeros_like(at).to(out.dtype.element_ty), mask=at < V)
    else:
        z_target = transform(tl.load(logits + target), SCALE, CAP)
        if LSE_KNOWN:
            log_sum = tl.load(lse + row)
            log2_sum = log_sum * LOG2E
        else:
            peak = tl.full((BLOCK // K,), -1.0e38, tl.float32)  # finite: -inf - -inf is NaN
            mass = tl.zeros((BLOCK // K,), tl.float32)
            moment = tl.zeros((BLOCK // K,), tl.float32)  # sum of p (z - peak), for the entropy
            total = tl.zeros((BLOCK // K,), tl.float32)
            best = tl.zeros((BLOCK // K,), tl.int32)
            for start in range(0, V, BLOCK):
                at = start + columns
                x = tl.load(logits + at, mask=at < V, other=-float("inf"))
                z = transform(x, SCALE, CAP)
                if CAP != 0.0:
                    z = tl.where(at < V, z, -float("inf"))
                top = tl.max(z, axis=1)
                if PREDICTED:
                    first = tl.min(tl.where(z == top[:, None], at, 2147483647), axis=1)
                    best = tl.where(top > peak, first.to(tl.int32), best)
                higher = tl.maximum(peak, top)
                shrink = tl.exp2((peak - higher) * LOG2E)
                if logits.dtype.element_ty == tl.float32:
                    p = tl.exp2((z - higher[:, None]) * LOG2E)  # exact near the maximum
                else:
                    p = tl.exp2(z * LOG2E - (higher * LOG2E)[:, None])  # one operation
                if ENTROPY:
                    moment = (moment + mass * (peak - higher)) * shrink
                    moment += tl.sum(p * tl.where(p > 0, z - higher[:, None], 0.0), axis=1)
                mass = mass * shrink + tl.sum(p, axis=1)
                if SMOOTHING != 0.0:
                    total += tl.sum(tl.where(at < V, z, 0.0), axis=1)
                peak = higher
            highest = tl.max(peak, axis=0)
            shrink = tl.exp2((peak - highest) * LOG2E)
            if ENTROPY:
                moment += mass * (peak - highest)
            row_mass = tl.sum(mass * shrink, axis=0)
            log_mass = tl.log(row_mass)
            log_sum = highest + log_mass
            log2_sum = highest * LOG2E + log_mass * LOG2E
            tl.store(lse + row, log_sum)
            row_nll = log_mass + (highest - z_target)
            row_loss = row_nll
            if SMOOTHING != 0.0:
                row_loss += SMOOTHING * (z_target - tl.sum(total, axis=0) / V)
            if Z_LOSS != 0.0:
                row_loss += Z_LOSS * log_sum * log_sum
            tl.store(loss + row, row_loss)
            if NLL:
                tl.store(nll + row, row_nll)
            if MAX_LOGIT:
                tl.store(max_logit + row, highest)
            if ENTROPY:
                tl.store(entropy + row, log_mass - tl.sum(moment * shrink, axis=0) / row_mass)
            if PREDICTED:
                first = tl.min(tl.where(peak == highest, best, 2147483647), axis=0)
                tl.store(predicted + row, first.to(tl.int64))

        if GRAD:
            slope = tl.load(row_scale + row).to(tl.float32) * SCALE
            steep = slope
            if Z_LOSS != 0.0:
                steep = slope * (1 + 2 * Z_LOSS * log_sum)
            flat = slope * SMOOTHING / V
            d_target = tl.exp2(z_target * LOG2E - log2_sum) * steep
            d_target -= flat + slope * (1 - SMOOTHING)
            if CAP != 0.0:
                d_target *= 1 - (z_target / CAP) * (z_target / CAP)
            # Backwards: what was read last is still in L2, even if the rows in flight are not
            blocks = tl.cdiv(V, BLOCK)
            for i in range(blocks):
                at = (blocks - 1 - i) * BLOCK + columns
                x = tl.load(logits + at, mask=at < V, other=0.0, eviction_policy="evict_first")
                z = transform(x, SCALE, CAP)
                d = tl.exp2(z * LOG2E - log2_sum) * steep
                if SMOOTHING != 0.0:
                    d -= flat
                if CAP != 0.0:
                    d *= 1 - (z / CAP) * (z / CAP)
                tl.store(
                    out + at, d.to(out.dtype.element_ty), mask=at < V, eviction_policy="evict_first"
                )
            # One column differs: cheaper to store it again than to compare every column
            tl.debug_barrier()
            tl.store(out + target, d_target.to(out.dtype.element_ty))


def _launch_rows(
    logits: Tensor,
    targets: Tensor,
    options: Options,
    metrics: Sequence[str],
    row_scale: Tensor | None,
    out: Tensor | None,
    lse: Tensor | None,
) -> Rows:
    n, vocab = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    # An upstream gradient may be one number, expanded
    targets = targets.contiguous()
    row_scale = None if row_scale is None else row_scale.contiguous()
    lse = None if lse is None else lse.contiguous()

    def rows(dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(n, dtype=dtype, device=logits.device)

    known, loss = lse, rows()
    lse = rows() if known is None else known
    names = {"z": lse} | {name: rows() for name in ("entropy", "max_logit", "nll")}
    names["predicted_tokens"] = rows(torch.int64) if "predicted_tokens" in metrics else lse
    if n:
        # 64 KiB of a row at a time keep an SM's loads in flight; 32 warps hold them
        block = min(65536 // logits.element_size(), max(128, triton.next_power_of_2(vocab)))
        _rows_kernel[(n,)](
            logits,
            logits if out is None else out,
            targets,
            loss if row_scale is None else row_scale,
            loss,
            lse,
            names["entropy"],
            names["max_logit"],
            names["nll"],
            names["predicted_tokens"],
            vocab,
            logits.stride(0),
            logits.stride(0) if out is None else out.stride(0),
            SCALE=float(options.logit_scale),
            CAP=float(options.softcap or 0.0),
            SMOOTHING=float(options.label_smoothing),
            Z_LOSS=float(options.z_loss),
            GRAD=out is not None,
            LSE_KNOWN=known is not None,
            ENTROPY="entropy" in metrics,
            MAX_LOGIT="max_logit" in metrics,
            NLL="nll" in metrics,
            PREDICTED="predicted_tokens" in metrics,
            BLOCK=block,
            K=4,
            num_warps=min(32, max(1, block // 1024)),
        )
    return Rows(loss, lse, {name: names[name] for name in metrics})


@triton.jit
def _rescale_kernel(x, out, factor, n, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr):
    f = tl.load(factor).to(tl.float32)
    if (not IN_PLACE) or f != 1.0:
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, n, step):
            at = start + tl.arange(0, BLOCK)
            y = tl.load(x + at, mask=at < n).to(tl.float32) * f
            tl.store(out + at, y.to(out.dtype.element_ty), mask=at < n)


def _launch_rescale(x: Tensor, out: Tensor, factor: Tensor) -> None:
    # Few programs that walk: half a million that find nothing to do would take longer than a pass
    programs = min(triton.cdiv(x.numel(), 2048), 16 * num_sms(x))
    if programs:
        _rescale_kernel[(programs,)](
            x, out, factor, x.numel(), IN_PLACE=out is x, BLOCK=2048, num_warps=8
        )


def _rescale_fake(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


@operator("rescale", _rescale_fake)
def _rescale(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x, dtype=dtype)
    _launch_rescale(x, out, factor)
    return out


def rescale(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """`x * factor` rounded once, to `dtype`; a bf16 product would round the factor, too."""
    return _rescale(x, factor, dtype) if runs_triton(x) else (x.float() * factor).to(dtype)


def rescale_(x: Tensor, factor: Tensor) -> Tensor:
    """The same into `x` itself, without touching it where the factor is 1."""
    if torch.compiler.is_compiling() or not x.is_contiguous():
        return rescale(x, factor, x.dtype)
    _launch_rescale(x, x, factor)
    return x


def _loss_rows_fake(
    logits: Tensor,
    targets: Tensor,
    row_scale: Tensor | None,
    lse: Tensor | None,
    softcap: float | None,
    logit_scale: float,
    label_smoothing: float,
    z_loss: float,
    metrics: str,
) -> list[Tensor]:
    rows = logits.new_empty(logits.shape[0], dtype=torch.float32)
    values = [
        torch.empty_like(rows, dtype=torch.int64 if name == "predicted_tokens" else rows.dtype)
        for name in metrics.split()
    ]
    out = logits.new_empty(logits.shape if row_scale is not None else (0,))
    return [rows, torch.empty_like(rows), out, *values]


@operator("loss_rows", _loss_rows_fake)
def _loss_rows(
    logits: Tensor,
    targets: Tensor,
    row_scale: Tensor | None,
    lse: Tensor | None,
    softcap: float | None,
    logit_scale: float,
    label_smoothing: float,
    z_loss: float,
    metrics: str,
) -> list[Tensor]:
    """Losses, logsumexp, gradient (empty without `row_scale`), metrics: all new tensors."""
    options = Options(softcap, logit_scale, label_smoothing, z_loss)
    names = metrics.split()
    out = (
        None
        if row_scale is None
        else torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    )
    rows = loss_rows(logits, targets, options, names, row_scale, out, lse)
    found = rows.lse.clone() if lse is not None else rows.lse
    return [rows.loss, found, logits.new_empty(0) if out is None else out] + [
        # "z" is the logsumexp, which is returned already
        rows.metrics[name].clone() if name == "z" else rows.metrics[name]
        for name in names
    ]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        token_weights: Tensor | None,
        scale: Tensor,
        reduction: Reduction,
        options: Options,
        metrics: tuple[str, ...],
        overwrite: bool,
    ) -> tuple[Tensor, ...]:
        ctx.per_token, ctx.options, ctx.spent = reduction == "none", options, False
        w = None if token_weights is None else token_weights.float()
        # 1 / denominator would push fp16 below its smallest number: it waits for the factor that
        # comes from above
        late = logits.dtype == torch.float16
        row_scale = None
        if ctx.needs_input_grad[0] and not ctx.per_token:
            row_scale = torch.ones_like(targets, dtype=torch.float32) if w is None else w
            row_scale = row_scale if late else row_scale * scale
        if overwrite and row_scale is not None and not torch.compiler.is_compiling():
            found = loss_rows(logits, targets, options, metrics, row_scale, logits)
            torch.autograd.graph.increment_version(logits)
            losses, lse, grad = found.loss, found.lse, logits.detach()
            values = [found.metrics[name] for name in metrics]
        else:
            losses, lse, grad, *values = _loss_rows(
                logits, targets, row_scale, None, *flat(options), " ".join(metrics)
            )
        weighted = losses if w is None else losses * w
        ctx.mark_non_differentiable(*values)
        needs_w = ctx.needs_input_grad[2]
        if ctx.per_token:
            ctx.save_for_backward(logits, targets, token_weights, lse, losses if needs_w else None)
            return weighted, *values
        ctx.save_for_backward(scale if late else None, losses * scale if needs_w else None)
        # The gradient is handed out once, scaled where it lies: saved_tensors would keep it
        ctx.grad = grad if row_scale is not None else None
        return weighted.sum() * scale, *values

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("cross_entropy")
        d_logits = d_weights = None
        if ctx.per_token:
            logits, targets, token_weights, lse, losses = ctx.saved_tensors
            if losses is not None:
                d_weights = (losses * grad).to(token_weights.dtype)
            if ctx.needs_input_grad[0]:
                row_scale = grad if token_weights is None else grad * token_weights.float()
                d_logits = _loss_rows(logits, targets, row_scale, lse, *flat(ctx.options), "")[2]
        else:
            scale, losses = ctx.saved_tensors
            if losses is not None:
                d_weights = losses * grad
            if ctx.needs_input_grad[0]:
                if ctx.spent:
                    raise RuntimeError(
                        "a second backward through cross_entropy: its gradient was handed out; "
                        'reduction="none" computes it each time'
                    )
                ctx.spent = not torch.compiler.is_compiling()
                d_logits = rescale_(ctx.grad, grad if scale is None else grad * scale)
                ctx.grad = None
        return d_logits, None, d_weights, None, None, None, None, None


def flat(options: Options) -> tuple[float | None, float, float, float]:
    return options.softcap, options.logit_scale, options.label_smoothing, options.z_loss


def cross_entropy(
    logits: Tensor,  # [N, V], before scale and softcap
    targets: Tensor,  # [N], -100 is ignored
    *,
    token_weights: Tensor | None = None,  # [N]
    denominator: Tensor | float = 1.0,
    reduction: Reduction = "sum",
    options: Options = PLAIN,
    metrics: Sequence[str] = (),
    overwrite: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """`sum(w_t * ce_t) / denominator` in fp32, or every `w_t * ce_t` [N]; and the metrics.

    As `linear_cross_entropy`, for logits that exist. They are never written to, unless
    `overwrite` says that they belong to the operator: then their gradient takes their place, and
    nothing else of their size is allocated. With reduction "sum" the gradient is made in the
    forward pass and can be had once; "none" allows any number of backward passes.
    """
    if logits.dim() != 2:
        raise ValueError(f"logits {tuple(logits.shape)} are not [N, V]")
    check_rows(logits, targets=targets, token_weights=token_weights)
    check_reduction(reduction)
    rows = rows_behind(metrics)
    check_targets(targets, logits.shape[1])
    if not isinstance(denominator, Tensor):
        # A fill, where as_tensor would copy from the host and wait
        denominator = torch.full((), denominator, dtype=torch.float32, device=logits.device)
    if runs_triton(logits):
        if not torch.is_grad_enabled():  # needs_input_grad would say what requires_grad says
            logits = logits.detach()
        loss, *values = _CrossEntropy.apply(
            logits,
            targets,
            token_weights,
            denominator.float().reciprocal(),
            reduction,
            options,
            rows,
            overwrite,
        )
        found = dict(zip(rows, values, strict=True))
    else:
        loss = cross_entropy_ref(logits, targets, options=options)
        loss = loss if token_weights is None else loss * token_weights
        loss = loss.sum() / denominator if reduction == "sum" else loss
        found = {}
        if rows:
            found = loss_rows(logits.detach(), targets, options, rows).metrics
    return loss, finish_metrics(found, targets, metrics)


def rows_behind(metrics: Sequence[str]) -> tuple[str, ...]:
    """The per-row values that the metrics asked for are made of."""
    unknown = [m for m in metrics if m not in METRICS]
    if unknown:
        raise ValueError(f"unknown metrics {unknown}; there are {', '.join(METRICS)}")
    return tuple(dict.fromkeys("predicted_tokens" if m == "accuracy" else m for m in metrics))


def finish_metrics(
    rows: dict[str, Tensor], targets: Tensor, metrics: Sequence[str]
) -> dict[str, Tensor]:
    """The metrics asked for; "accuracy" is the share of the valid targets predicted right."""
    if "accuracy" in metrics:
        valid = targets != IGNORE_INDEX
        right = (rows["predicted_tokens"] == targets) & valid
        rows = {**rows, "accuracy": right.sum() / valid.sum().clamp(min=1)}
    return {name: rows[name] for name in metrics}


def check_rows(rows: Tensor, **per_row: Tensor | None) -> None:
    """Each of `per_row` has one value for every row, on the same device."""
    for name, value in per_row.items():
        if value is not None and value.shape != rows.shape[:1]:
            raise ValueError(f"{name} {tuple(value.shape)} is not [N] = [{rows.shape[0]}]")
    check_devices(rows=rows, **per_row)


def check_reduction(reduction: str) -> None:
    if reduction not in ("sum", "none"):
        raise ValueError(f"reduction={reduction!r} is not 'sum' or 'none'")


def check_targets(targets: Tensor, vocab_size: int) -> None:
    """Every target is -100 or in [0, V): an error that names it, without a host sync on a GPU."""
    bad = (targets != IGNORE_INDEX) & ((targets < 0) | (targets >= vocab_size))
    if targets.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(
            ~bad.any(), f"a label is neither {IGNORE_INDEX} nor in [0, {vocab_size})"
        )
    elif bad.any():
        where = bad.nonzero()[0].tolist()
        raise ValueError(
            f"label {targets[tuple(where)].item()} at {where} is neither {IGNORE_INDEX} nor in "
            f"[0, {vocab_size}), the vocabulary of the head"
        )
