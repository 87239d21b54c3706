"""The head of a language model and its loss in one operator; no [N, V] tensor outlives a chunk.

# N rows (tokens), n rows of a chunk, C model dim, V vocab
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels._triton import check_devices, operator, refuse_second_derivative, runs_triton
from tigon.kernels.cross_entropy import (
    IGNORE_INDEX,
    PLAIN,
    Options,
    Reduction,
    check_reduction,
    check_rows,
    check_targets,
    cross_entropy_ref,
    finish_metrics,
    flat,
    loss_rows,
    rescale,
    rows_behind,
)

# Upper bound of the logits, and on the CPU their fp32 copies, that exist at one time
LOGITS_BYTES = 2**30


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


class ActiveRows:
    """Which rows of a loss count, and how many: a number on its way from the device to the host.

    Made before the model's blocks are launched, the number has arrived when the head wants it,
    and the host never waits for the device.
    """

    def __init__(self, keep: Tensor, *, by_weight: bool):
        self.by_weight = by_weight  # whether rows are out because their weight is 0
        self._keep = keep.flatten()
        self._count, self._arrived = self._keep.sum(), None
        if keep.is_cuda:
            counted = self._count
            self._count = torch.empty((), dtype=counted.dtype, device="cpu", pin_memory=True)
            self._count.copy_(counted, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def index(self) -> Tensor | None:
        """The rows that count, in order; None if all do."""
        if self._arrived is not None:
            self._arrived.synchronize()
        count = int(self._count)
        if count == len(self._keep):
            return None
        return torch.argsort(self._keep, descending=True, stable=True)[:count]


def active_rows(targets: Tensor, token_weights: Tensor | None = None) -> ActiveRows | None:
    """The rows with a target that is not ignored and, given weights, a weight that is not 0.

    Weights that learn leave no row out. None where the host cannot learn a number from the
    device: in graphs, traced or captured.
    """
    if torch.compiler.is_compiling():
        return None
    if targets.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    keep = targets != IGNORE_INDEX
    by_weight = token_weights is not None and not token_weights.requires_grad
    if token_weights is not None and by_weight:
        keep = keep & (token_weights != 0)
    return ActiveRows(keep, by_weight=by_weight)


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
    active: ActiveRows | None = None,
    logits_bytes: int = LOGITS_BYTES,
) -> tuple[Tensor, dict[str, Tensor]]:
    """`sum(w_t * ce_t) / denominator` in fp32, or every `w_t * ce_t` [N]; and the metrics.

    With reduction "sum" the gradients are made while a chunk's logits exist: three matrix
    products, nothing recomputed. With "none" the upstream gradient is unknown, so the logits are
    computed again in the backward pass: four. At most `logits_bytes` of logits exist at a time.

    Rows whose target is ignored or whose weight is 0 cost nothing. On a GPU the host must know
    how many remain: `active` made ahead of time saves waiting for the device. Under torch.compile
    and in CUDA graphs no row is left out.

    Metrics are per row [N] without gradient: nll, z (logsumexp), max_logit, entropy (nats),
    predicted_tokens; 0 (predicted_tokens -100) where the target is ignored, and with metrics only
    such rows are left out; "accuracy" is the share of targets predicted right. Sources: the
    chunked gradient-in-forward form of Liger-Kernel (arXiv 2410.10989), defined by
    `linear_cross_entropy_ref`.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} "
            "are not [N, C] and [V, C]"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)} is not [V] = [{weight.shape[0]}]")
    check_rows(hidden, targets=targets, token_weights=token_weights)
    check_devices(hidden=hidden, weight=weight, bias=bias)
    check_reduction(reduction)
    rows = rows_behind(metrics)
    check_targets(targets, weight.shape[0])

    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype}, weight {weight.dtype}: cast one of them")
    if not torch.is_grad_enabled():  # needs_input_grad would still say what requires_grad says
        hidden, weight = hidden.detach(), weight.detach()
        bias = None if bias is None else bias.detach()
    if not isinstance(denominator, Tensor):
        # A fill, where as_tensor would copy from the host and wait
        denominator = torch.full((), denominator, dtype=torch.float32, device=hidden.device)
    if active is None or (rows and active.by_weight):
        active = active_rows(targets, None if rows else token_weights)
    index = None if active is None else active.index()
    loss, *values = _LinearCrossEntropy.apply(
        hidden,
        weight,
        bias,
        targets,
        token_weights,
        denominator.float().reciprocal(),
        reduction,
        options,
        rows,
        index,
        logits_bytes,
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
        index: Tensor | None,
        logits_bytes: int,
    ) -> tuple[Tensor, ...]:
        ctx.per_token = reduction == "none"
        ctx.options, ctx.logits_bytes = options, logits_bytes
        w = None if token_weights is None else token_weights.float()
        # 1 / denominator would push fp16 below its smallest number, sums without it above the
        # largest: such gradients wait in fp32
        late = hidden.dtype == torch.float16
        needs = [n and not ctx.per_token for n in ctx.needs_input_grad[:3]]
        row_scale = torch.ones_like(targets, dtype=torch.float32) if w is None else w
        losses, lse, *rest = _pass(hidden)(
            hidden,
            weight,
            bias,
            targets,
            row_scale if late else row_scale * scale,
            None,
            *flat(options),
            " ".join(metrics),
            needs,
            index,
            logits_bytes,
        )
        grads, values = rest[:3], rest[3:]
        if ctx.per_token:
            ctx.save_for_backward(hidden, weight, bias, targets, token_weights, losses, lse, index)
        else:
            ctx.save_for_backward(
                *(g if n else None for g, n in zip(grads, needs, strict=True)),
                scale if late else None,
                losses * scale if ctx.needs_input_grad[4] else None,
            )
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(*values)
        weighted = losses if w is None else losses * w
        return weighted if ctx.per_token else weighted.sum() * scale, *values

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(
            "linear_cross_entropy",
            "the loss with return_logits=True has one, on a GPU inside "
            '`with tigon.kernels.use("reference")`',
        )
        d_token_weights = None
        if ctx.per_token:
            hidden, weight, bias, targets, token_weights, losses, lse, index = ctx.saved_tensors
            if ctx.needs_input_grad[4]:
                d_token_weights = (losses * grad).to(token_weights.dtype)
            needs = list(ctx.needs_input_grad[:3])
            kept = _pass(hidden)(
                hidden,
                weight,
                bias,
                targets,
                (grad if token_weights is None else grad * token_weights).float(),
                lse,
                *flat(ctx.options),
                "",
                needs,
                index,
                ctx.logits_bytes,
            )[2:]
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
        return *grads, None, d_token_weights, *(None,) * 6


def _pass(hidden: Tensor) -> Any:
    """The chunked pass: on the CPU visible to torch.compile, else one opaque op."""
    plain = hidden.device.type == "cpu" and not runs_triton(hidden)
    return _chunked_pass.__wrapped__ if plain else _chunked_pass


def _chunked_pass_fake(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    row_scale: Tensor,
    lse: Tensor | None,
    softcap: float | None,
    logit_scale: float,
    label_smoothing: float,
    z_loss: float,
    metrics: str,
    needs: list[bool],
    index: Tensor | None,
    logits_bytes: int,
) -> list[Tensor]:
    n = hidden.shape[0]
    late = hidden.dtype == torch.float16
    one_chunk = n <= chunk_rows(weight.shape[0], hidden, logits_bytes)
    dtypes = (
        torch.float32 if late else hidden.dtype,
        weight.dtype if one_chunk and not late else torch.float32,
        torch.float32,
    )
    like = (hidden, weight, weight[:, 0])
    grads = [
        torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
        if need
        else x.new_empty(0)
        for x, dtype, need in zip(like, dtypes, needs, strict=True)
    ]
    rows = [
        hidden.new_empty(n, dtype=torch.int64 if name == "predicted_tokens" else torch.float32)
        for name in ("loss", "lse", *metrics.split())
    ]
    return [*rows[:2], *grads, *rows[2:]]


@operator("linear_cross_entropy", _chunked_pass_fake)
def _chunked_pass(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    row_scale: Tensor,  # [N]: the gradient of row t's loss
    lse: Tensor | None,  # [N], if an earlier pass found it
    softcap: float | None,
    logit_scale: float,
    label_smoothing: float,
    z_loss: float,
    metrics: str,
    needs: list[bool],  # gradients of hidden, weight and bias
    index: Tensor | None,  # the rows to compute; None: all
    logits_bytes: int,
) -> list[Tensor]:
    """Unweighted losses, logsumexps, three gradients (empty unless needed), then the metrics.

    The weight's gradient is fp32 if chunks add up to it, the bias's always; in fp16 all are, and
    still without what overflows or underflows there (see the caller).
    """
    options = Options(softcap, logit_scale, label_smoothing, z_loss)
    names, n = metrics.split(), hidden.shape[0]
    late = hidden.dtype == torch.float16
    need_hidden, need_weight, need_bias = needs
    if index is not None:
        hidden, targets, row_scale = hidden[index], targets[index], row_scale[index]
        lse = None if lse is None else lse[index]

    rows = chunk_rows(weight.shape[0], hidden, logits_bytes)
    m = hidden.shape[0]
    chunks = range(0, max(1, m), rows)  # one at least, so that all results exist
    per_row: dict[str, list[Tensor]] = {name: [] for name in ("loss", "lse", *names)}
    d_hidden = hidden.new_empty(hidden.shape if need_hidden else (0,))
    d_weight = d_bias = None
    for start in chunks:
        part = slice(start, start + rows)
        h = hidden[part]
        logits = head_logits(h, weight, bias)
        found = loss_rows(
            logits,
            targets[part],
            options,
            names,
            row_scale[part] if any(needs) else None,
            logits if any(needs) else None,
            None if lse is None else lse[part],
        )
        for name, value in {"loss": found.loss, "lse": found.lse, **found.metrics}.items():
            per_row[name].append(value)
        if need_hidden:
            if h.is_cuda:
                torch.mm(logits, weight, out=d_hidden[part])
            else:
                d_hidden[part] = logits @ weight
        if need_weight:
            d_weight = add_product(d_weight, logits.T, h, only=len(chunks) == 1)
        if need_bias:
            total = logits.sum(0, dtype=torch.float32)
            d_bias = total if d_bias is None else d_bias + total
        del logits

    def spread(rows: Tensor, fill: int = 0) -> Tensor:
        """The computed rows at their places among all N."""
        if index is None:
            return rows
        return rows.new_full((n, *rows.shape[1:]), fill).index_copy_(0, index, rows)

    values = {
        name: spread(torch.cat(parts), IGNORE_INDEX if name == "predicted_tokens" else 0)
        for name, parts in per_row.items()
    }
    if need_hidden:
        d_hidden = spread(d_hidden)
    return [
        values["loss"],
        values["lse"],
        d_hidden.float() if late else d_hidden,
        hidden.new_empty(0) if d_weight is None else d_weight,
        hidden.new_empty(0) if d_bias is None else d_bias,
        *(values[name] for name in names),
    ]


def chunk_rows(vocab: int, hidden: Tensor, logits_bytes: int) -> int:
    """Rows whose logits fit the budget; in place on a GPU, with fp32 copies elsewhere.

    A multiple of 1024, or else of 128: matrix products of other sizes are slower, as are smaller.
    """
    if not runs_triton(hidden):
        return max(1, logits_bytes // (16 * vocab))
    rows = max(1, logits_bytes // (hidden.element_size() * _padded(vocab)))
    step = next(step for step in (1024, 128, 1) if rows >= step)
    return rows // step * step


def _padded(vocab: int) -> int:
    return -(-vocab // 64) * 64


def head_logits(h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Logits of a chunk, ours to overwrite; rows start at multiples of 128 bytes for the GPU."""
    if not h.is_cuda:
        return F.linear(h, weight, bias)
    logits = h.new_empty(h.shape[0], _padded(weight.shape[0]))[:, : weight.shape[0]]
    if bias is None:
        return torch.mm(h, weight.T, out=logits)
    return torch.addmm(bias, h, weight.T, out=logits)


def add_product(total: Tensor | None, a: Tensor, b: Tensor, *, only: bool) -> Tensor:
    """`total + a @ b` in fp32, however narrow the factors; an only product needs no fp32 copy."""
    if only and a.dtype != torch.float16:
        return a @ b
    if total is None:
        total = a.new_zeros(a.shape[0], b.shape[1], dtype=torch.float32)
    if a.device.type == "cuda" and a.dtype != torch.float32:
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    return total.addmm_(a.float(), b.float())  # in place, so autocast does not narrow it
