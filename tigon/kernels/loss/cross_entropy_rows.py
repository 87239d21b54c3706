"""Cross-entropy of the rows of a chunk of logits: losses, statistics, metrics, gradient.

# N rows, V vocab
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels.loss.logits import (
    DEFAULT_OPTIONS,
    IGNORE_INDEX,
    LOG2E,
    LogitGradient,
    Options,
    head_constants,
    scale_and_cap,
    transform,
    uncap,
)
from tigon.kernels.runtime import runs_triton, tl, triton

OTHER_RANK = -1  # a target whose logit another rank has
KERNEL_OUTPUTS = ("entropy", "nll", "target", "total")  # by the kernel, in fp32


def cross_entropy_ref(
    logits: Tensor, targets: Tensor, *, options: Options = DEFAULT_OPTIONS
) -> Tensor:
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
class RowLosses:
    """The results of a pass over logits; all are 0 where the target is ignored.

    The logsumexp is `peak + log_mass`: two numbers keep its precision far from 0.
    """

    loss: Tensor  # [N] fp32
    peak: Tensor  # [N] fp32: the largest logit
    log_mass: Tensor  # [N] fp32: log of the sum of exp(logit - peak)
    metrics: dict[str, Tensor] = field(default_factory=dict)  # predicted_tokens is -100 there


def combine_loss(nll: Tensor, lse: Tensor, mean: Tensor | None, options: Options) -> Tensor:
    """Returns cross-entropy with the regularizers of the options, from the target's, `nll`.

    `lse` is the logsumexp of the logits, `mean` their mean; None without smoothing.
    """
    loss = nll if mean is None else torch.lerp(nll, lse - mean, options.label_smoothing)
    return loss + options.z_loss * lse.square() if options.z_loss else loss


def _reference_rows(
    logits: Tensor,
    targets: Tensor,
    options: Options,
    metrics: Sequence[str],
    grad: LogitGradient | None,
    lse_parts: tuple[Tensor, Tensor] | None,
    holes: bool,
    size: int | None,
) -> RowLosses:
    """Computes loss, gradient and metrics of each row in plain torch: the definition."""
    z = scale_and_cap(logits.to(torch.float32, copy=True), options)
    smoothing, softcap = options.label_smoothing, options.softcap
    chain = 1 - (z / softcap).square() if softcap is not None and grad is not None else None
    if holes:
        z.masked_fill_(logits == -torch.inf, -torch.inf)
    valid = targets != IGNORE_INDEX
    index = targets.clamp(min=0)[:, None]
    total = z.sum(-1) if smoothing else None
    predicted = z.argmax(-1) if "predicted_tokens" in metrics else None
    peak = z.amax(-1)
    if holes or size is not None:  # perhaps nothing but -inf: -inf - -inf is NaN
        peak = peak.clamp(min=-1e38) if lse_parts is None else lse_parts[0]
    on_rank = None if size is None else targets != OTHER_RANK
    target_logits = None if on_rank is None else z.gather(1, index).squeeze(1).where(on_rank, 0)
    z.sub_(peak[:, None])
    target = z.gather(1, index).squeeze(1)
    shifted = z.clone() if "entropy" in metrics else None
    mass = z.exp_().sum(-1)
    if size is not None and lse_parts is not None:
        mass = lse_parts[1].exp()
    log_mass = mass.log()
    nll, lse = log_mass - target, peak + log_mass
    values = {"nll": nll, "z": lse, "max_logit": peak}
    values |= {k: x for k, x in (("target", target_logits), ("total", total)) if x is not None}
    if shifted is not None:
        # Where p is 0, the logit may be -inf
        values["entropy"] = log_mass - shifted.mul_(z).where(z > 0, 0).sum(-1) / mass
    masked = {name: values[name].where(valid, 0) for name in metrics if name != "predicted_tokens"}
    if predicted is not None:
        masked["predicted_tokens"] = torch.where(valid, predicted, IGNORE_INDEX)

    vocab_size = logits.shape[1] if size is None else size
    loss = combine_loss(nll, lse, None if total is None else total / vocab_size, options)
    if grad is not None:
        slope = grad.row_scale * valid * options.logit_scale
        z.mul_((slope * (1 + 2 * options.z_loss * lse) / mass)[:, None])
        if smoothing:
            z.sub_((slope * smoothing / vocab_size)[:, None])
        index_slope = slope if on_rank is None else slope * on_rank
        z.scatter_add_(1, index, (index_slope * (smoothing - 1))[:, None])
        d = (z if chain is None else z.mul_(chain)).masked_fill_((slope == 0)[:, None], 0)
        grad.out.copy_(d if grad.before is None else d.add_(grad.before))
    return RowLosses(loss.where(valid, 0), peak.where(valid, 0), log_mass.where(valid, 0), masked)


@triton.jit
def _value(x, head, HOLES):
    """Returns `transform(x, head)`, with HOLES -inf where x is -inf."""
    z = transform(x, head)
    if HOLES and head[1] is not None:
        z = tl.where(x == -float("inf"), -float("inf"), z)
    return z


@triton.jit
def _probability(z, highest, log_mass, logits):
    """exp(z - highest - log_mass); in one operation where the logits are coarse."""
    if logits.dtype.element_ty == tl.float32:
        p = tl.exp2((z - highest) * LOG2E - log_mass * LOG2E)
    else:
        p = tl.exp2(z * LOG2E - (highest * LOG2E + log_mass * LOG2E))
    return p


@triton.jit
def _rows_kernel(
    logits, targets, loss, peaks, log_masses,
    entropy,  # these five may be None
    nll, predicted, target_logits, totals,
    row_scale,  # these two are None without a gradient
    out,
    before,  # may be None, or out
    V,
    size,  # None for V
    stride, out_stride, before_stride,
    head,  # scale and softcap; None for none
    smoothing,  # None for 0, as z_loss
    z_loss,
    HAS_LSE: tl.constexpr, HOLES: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Processes a row per program: a pass for the logsumexp, one out of L2 for the gradient."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    # Groups of K neighbors share a running maximum: 1 + 1/K exponentials per logit, not 2
    groups = tl.arange(0, BLOCK // K)[:, None]
    columns = groups * K + tl.arange(0, K)[None, :]
    has_target, vocab_size = None, V
    if size is not None:  # another rank may have the target
        has_target, vocab_size = target >= 0, size
    slope = 0.0
    if row_scale is not None:
        out += row * out_stride
        if before is not None:
            before += row * before_stride
        slope = tl.load(row_scale + row).to(tl.float32)
        slope = tl.where(target == -100, 0.0, slope)
        if head[0] is not None:
            slope = slope * head[0]

    highest = tl.full([], 0.0, tl.float32)
    log_mass = tl.full([], 0.0, tl.float32)
    z_target = tl.full([], 0.0, tl.float32)
    if target == -100:
        tl.store(loss + row, 0.0)
        if not HAS_LSE:
            tl.store(peaks + row, 0.0)
            tl.store(log_masses + row, 0.0)
        if entropy is not None:
            tl.store(entropy + row, 0.0)
        if nll is not None:
            tl.store(nll + row, 0.0)
        if predicted is not None:
            tl.store(predicted + row, -100)
    else:
        z_target = _value(tl.load(logits + target, mask=has_target), head, HOLES)
        if size is not None:
            z_target = tl.where(has_target, z_target, 0.0)
        if HAS_LSE:
            highest = tl.load(peaks + row)
            log_mass = tl.load(log_masses + row)
        else:
            peak = tl.full((BLOCK // K,), -1.0e38, tl.float32)  # finite: -inf - -inf is NaN
            mass = tl.zeros((BLOCK // K,), tl.float32)
            moment = tl.zeros((BLOCK // K,), tl.float32)  # sum of p (z - peak), for the entropy
            total = tl.zeros((BLOCK // K,), tl.float32)
            best = tl.zeros((BLOCK // K,), tl.int32)
            for start in range(0, V, BLOCK):
                at = start + columns
                x = tl.load(logits + at, mask=at < V, other=-float("inf"))
                z = _value(x, head, HOLES)
                if head[1] is not None:
                    z = tl.where(at < V, z, -float("inf"))
                top = tl.max(z, axis=1)
                if predicted is not None:
                    first = tl.min(tl.where(z == top[:, None], at, 2147483647), axis=1)
                    best = tl.where(top > peak, first.to(tl.int32), best)
                higher = tl.maximum(peak, top)
                shrink = tl.exp2((peak - higher) * LOG2E)
                if logits.dtype.element_ty == tl.float32:
                    p = tl.exp2((z - higher[:, None]) * LOG2E)  # exact near the maximum
                else:
                    p = tl.exp2(z * LOG2E - (higher * LOG2E)[:, None])  # one operation
                if entropy is not None:
                    moment = (moment + mass * (peak - higher)) * shrink
                    moment += tl.sum(p * tl.where(p > 0, z - higher[:, None], 0.0), axis=1)
                mass = mass * shrink + tl.sum(p, axis=1)
                if smoothing is not None:
                    total += tl.sum(tl.where(at < V, z, 0.0), axis=1)
                peak = higher
            highest = tl.max(peak, axis=0)
            shrink = tl.exp2((peak - highest) * LOG2E)
            if entropy is not None:
                moment += mass * (peak - highest)
            row_mass = tl.sum(mass * shrink, axis=0)
            log_mass = tl.log(row_mass)
            tl.store(peaks + row, highest)
            tl.store(log_masses + row, log_mass)
            row_nll = log_mass + (highest - z_target)
            row_loss = row_nll
            if smoothing is not None:
                row_loss += smoothing * (z_target - tl.sum(total, axis=0) / vocab_size)
            if z_loss is not None:
                row_loss += z_loss * (highest + log_mass) * (highest + log_mass)
            tl.store(loss + row, row_loss)
            if nll is not None:
                tl.store(nll + row, row_nll)
            if target_logits is not None:
                tl.store(target_logits + row, z_target)
            if totals is not None:
                tl.store(totals + row, tl.sum(total, axis=0))
            if entropy is not None:
                tl.store(entropy + row, log_mass - tl.sum(moment * shrink, axis=0) / row_mass)
            if predicted is not None:
                first = tl.min(tl.where(peak == highest, best, 2147483647), axis=0)
                tl.store(predicted + row, first.to(tl.int64))

    if row_scale is not None:
        if slope == 0.0:  # not 0 * NaN
            for start in range(0, V, BLOCK):
                at = start + columns
                d = tl.zeros_like(at).to(out.dtype.element_ty)
                if before is not None:
                    d = tl.load(before + at, mask=at < V, other=0.0)
                tl.store(out + at, d, mask=at < V)
        else:
            steep, flat = slope, 0.0
            if z_loss is not None:
                steep = slope * (1 + 2 * z_loss * (highest + log_mass))
            d_target = _probability(z_target, highest, log_mass, logits) * steep
            if smoothing is not None:
                flat = slope * smoothing / vocab_size
                d_target -= flat + slope * (1 - smoothing)
            else:
                d_target -= slope
            d_target = uncap(d_target, z_target, head)
            if before is not None:
                d_target += tl.load(before + target, mask=has_target).to(tl.float32)
            # Everybody has read what belongs to the target before anybody writes there
            tl.debug_barrier()
            # Backwards: what was read last is still in L2, even if the rows in flight are not
            blocks = tl.cdiv(V, BLOCK)
            for i in range(blocks):
                at = (blocks - 1 - i) * BLOCK + columns
                x = tl.load(logits + at, mask=at < V, other=0.0, eviction_policy="evict_first")
                z = _value(x, head, HOLES)
                d = _probability(z, highest, log_mass, logits) * steep
                if smoothing is not None:
                    d -= flat
                d = uncap(d, z, head)
                if before is not None:
                    d += tl.load(before + at, mask=at < V, other=0.0).to(tl.float32)
                tl.store(
                    out + at, d.to(out.dtype.element_ty), mask=at < V, eviction_policy="evict_first"
                )
            # One column differs: cheaper to store it again than to compare every column
            tl.debug_barrier()
            tl.store(out + target, d_target.to(out.dtype.element_ty), mask=has_target)


def loss_rows(
    logits: Tensor,  # [N, V] raw
    targets: Tensor,  # [N]
    options: Options,
    metrics: Sequence[str] = (),
    grad: LogitGradient | None = None,
    lse_parts: tuple[Tensor, Tensor]
    | None = None,  # peak and log_mass, if an earlier pass found them
    *,
    holes: bool = False,  # raw logits of -inf have probability 0, also with a softcap
    size: int | None = None,
) -> RowLosses:
    """Returns losses and metrics from one pass over the logits, and writes the gradient to `grad`.

    With `size` the logits are a part of a vocabulary of that size: peak, log_mass and metrics are
    those of the part, the loss is undefined, a target may be `OTHER_RANK`, and the gradient needs
    `lse_parts` of the full vocabulary. Metrics may then be "target", the target's logit or 0, and
    with smoothing "total", the sum of the logits.
    """
    if not runs_triton(logits):
        return _reference_rows(logits, targets, options, metrics, grad, lse_parts, holes, size)
    n, vocab = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()

    def rows(dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(n, dtype=dtype, device=logits.device)

    loss = rows()
    peak, log_mass = lse_parts or (rows(), rows())
    outputs = {name: rows() for name in KERNEL_OUTPUTS if name in metrics}
    before = None if grad is None else grad.before
    if "predicted_tokens" in metrics:
        outputs["predicted_tokens"] = rows(torch.int64)
    if n:
        # 64 KiB of a row at a time keep an SM's loads in flight; 32 warps hold them
        block = min(65536 // logits.element_size(), max(128, triton.next_power_of_2(vocab)))
        _rows_kernel[(n,)](
            logits, targets.contiguous(), loss, peak.contiguous(), log_mass.contiguous(),
            *(
                outputs.get(name)
                for name in ("entropy", "nll", "predicted_tokens", "target", "total")
            ),
            # An upstream gradient may be one number, expanded
            None if grad is None else grad.row_scale.contiguous(),
            None if grad is None else grad.out, before, vocab, size, logits.stride(0),
            0 if grad is None else grad.out.stride(0), 0 if before is None else before.stride(0),
            head_constants(options), float(options.label_smoothing) or None,
            float(options.z_loss) or None,
            HAS_LSE=lse_parts is not None, HOLES=holes, BLOCK=block, K=4,
            num_warps=min(32, max(1, block // 1024)),
        )  # fmt: skip
    for name in metrics:
        if name in ("z", "max_logit"):
            outputs[name] = peak + log_mass if name == "z" else peak.clone()
    return RowLosses(loss, peak, log_mass, {name: outputs[name] for name in metrics})
