"""Heads and embeddings with a vocabulary that is sharded over a process group.

# N rows (tokens), V vocab, W rows of a rank's weight with padding, R ranks, C columns

Ranks exchange a few numbers of each row, once or twice, and then compute the same from them.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels.loss.cross_entropy_rows import OTHER_RANK, RowLosses, combine_loss, loss_rows
from tigon.kernels.loss.divergence_rows import (
    divergence_rows,
    logit_masses,
    stored_gradient,
    stored_losses,
)
from tigon.kernels.loss.logits import IGNORE_INDEX, LogitGradient, Options, scale_and_cap
from tigon.kernels.runtime import is_plain, operator, pdl_options, pdl_wait, runs_triton, tl, triton


class VocabularyShard(NamedTuple):
    """This rank's rows of a head's weight and bias; ranks are in the order of their rows.

    Rows of the local weight after these are padding: no result depends on their finite numbers, and
    their gradient is 0.
    """

    group: str  # its name: graphs and copies of a model cannot hold the group itself
    ranks: int
    first: int
    rows: int
    size: int  # V

    @classmethod
    def build(cls, group: str, ranks: int, first: int, rows: int, size: int) -> Self:
        """Creates the shard; raises ValueError for rows outside of the vocabulary."""
        if first < 0 or rows < 0 or first + rows > size:
            raise ValueError(f"rows {first} to {first + rows} are not all in [0, {size})")
        return cls(group, ranks, first, rows, size)

    def check(self, weight: Tensor | None) -> int:
        """Returns the size of the full vocabulary; raises ValueError without a weight, and for one
        of fewer rows than the shard."""
        if weight is None:
            raise ValueError("a vocabulary is for a head's weight: of logits, gather the columns")
        if len(weight) < self.rows:
            raise ValueError(f"the weight has {len(weight)} rows, and its shard {self.rows}")
        return self.size

    def encode(self) -> str:
        """Returns the shard as a string, which the operator takes."""
        return ":".join(str(x) for x in (self.ranks, self.first, self.rows, self.size, self.group))

    @classmethod
    def decode(cls, word: str) -> Self:
        """Reads a shard back from the text that an operator takes."""
        *numbers, group = word.split(":", 4)
        return cls(group, *(int(x) for x in numbers))

    def local(self, targets: Tensor) -> Tensor:
        """Returns targets as columns of this rank's logits, or `OTHER_RANK`."""
        columns = targets - self.first
        on_rank = (columns >= 0) & (columns < self.rows)
        other_targets = torch.where(targets == IGNORE_INDEX, IGNORE_INDEX, OTHER_RANK)
        return columns.where(on_rank, other_targets)

    @property
    def share(self) -> int:
        """The rows of a rank, rounded up: the same number on all."""
        return -(-self.size // self.ranks)

    def without_padding(
        self, logits: Tensor, grad: LogitGradient | None
    ) -> tuple[Tensor, LogitGradient | None]:
        """Returns a chunk's logits and their gradient without padding, and zeroes the latter's."""
        if logits.shape[1] == self.rows:
            return logits, grad
        shown = logits[:, : self.rows]
        if grad is None:
            return shown, None
        grad.out[:, self.rows :] = 0
        out = shown if grad.out is logits else grad.out[:, : self.rows]
        before = None if grad.before is None else grad.before[:, : self.rows]
        return shown, grad._replace(out=out, before=before)

    def gather(self, x: Tensor) -> Tensor:
        """Returns every rank's `x`: [R, ...]."""
        if not x.numel():
            return x.new_zeros(self.ranks, *x.shape)
        ops = torch.ops._c10d_functional
        out = ops.all_gather_into_tensor(x.contiguous(), self.ranks, self.group)
        return ops.wait_tensor(out).view(self.ranks, *x.shape)


def combine_logsumexp(peaks: Tensor, log_masses: Tensor) -> tuple[Tensor, Tensor]:
    """Returns peak and log_mass of all ranks' logits, from those of each [R, N]."""
    peak = peaks.amax(0)
    return peak, (log_masses + (peaks - peak)).logsumexp(0)


class _GatherLogits(torch.autograd.Function):
    """Gathers all columns of the logits; backward takes this rank's."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, shard: VocabularyShard) -> Tensor:
        width = logits.shape[-1]
        ctx.shard, ctx.padding = shard, width - shard.rows
        widths = (max(0, shard.size - i * width) for i in range(shard.ranks))
        parts = zip(shard.gather(logits), widths, strict=True)
        return torch.cat([x[..., :n] for x, n in parts], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        local_columns = grad.narrow(-1, ctx.shard.first, ctx.shard.rows)
        return F.pad(local_columns, (0, ctx.padding)), None


def gather_logits(logits: Tensor, shard: VocabularyShard) -> Tensor:
    """Gathers logits [..., W] of this rank to [..., V].

    Their gradient must be the same on all ranks, which compute the same from them: each takes its
    own columns.
    """
    width, end = logits.shape[-1], shard.first + shard.rows
    if shard.rows and (shard.first % width or (shard.rows < width and end < shard.size)):
        raise ValueError(
            f"rows {shard.first} to {end} of {shard.size} are no whole part of {width} rows: all "
            "ranks need weights of the same number of rows, with padding only after the last"
        )
    return _GatherLogits.apply(logits, shard)


# Losses of a chunk of logits, of which each rank has some columns

NO_PEAK = -1.0e38  # of no logits: finite, as kernels begin


def shard_loss_rows(
    shard: VocabularyShard,
    logits: Tensor,  # [N, rows of the shard] raw
    targets: Tensor,  # [N] of all V
    options: Options,
    metrics: Sequence[str] = (),
    grad: LogitGradient | None = None,
    lse_parts: tuple[Tensor, Tensor] | None = None,
) -> RowLosses:
    """`loss_rows` of all ranks' logits; the gradient is that of this rank's."""
    local = shard.local(targets)
    if lse_parts is None:
        rows = _combine_rows(shard, logits, targets, local, options, metrics)
    else:  # by the pass that found the losses
        rows = RowLosses(torch.zeros_like(lse_parts[0]), *lse_parts)
    if grad is not None and logits.shape[1]:
        lse_parts = rows.peak, rows.log_mass
        loss_rows(logits, local, options, (), grad, lse_parts, size=shard.size)
    return rows


def _combine_rows(
    shard: VocabularyShard,
    logits: Tensor,
    targets: Tensor,
    local: Tensor,
    options: Options,
    metrics: Sequence[str],
) -> RowLosses:
    """Combines each rank's losses and metrics of its columns to those of whole rows."""
    names = ["target"] + ["total"] * bool(options.label_smoothing)
    names += [name for name in ("entropy", "predicted_tokens") if name in metrics]
    if logits.shape[1]:
        part = loss_rows(logits, local, options, names, size=shard.size)
    else:
        nothing = torch.zeros(len(logits), device=logits.device)
        peak, metrics_of_none = nothing + NO_PEAK, dict.fromkeys(names, nothing)
        part = RowLosses(nothing, peak, nothing - torch.inf, metrics_of_none)
    if "predicted_tokens" in names:  # their bits among the fp32 numbers
        tokens = part.metrics["predicted_tokens"] + shard.first
        part.metrics["predicted_tokens"] = tokens.int().view(torch.float32)
    columns = [part.peak, part.log_mass, *(part.metrics[name] for name in names)]
    peaks, log_masses, *gathered = shard.gather(torch.stack(columns, 1)).unbind(2)
    by_name = dict(zip(names, gathered, strict=True))
    peak, log_mass = combine_logsumexp(peaks, log_masses)

    lse, nll = peak + log_mass, log_mass + (peak - by_name["target"].sum(0))
    mean = by_name["total"].sum(0) / shard.size if "total" in by_name else None
    values = {"nll": nll, "z": lse, "max_logit": peak}
    if "entropy" in by_name:
        # A part's entropy is its log_mass less the mean of its logits below its peak
        log_share = log_masses + (peaks - peak) - log_mass
        below = log_masses - by_name["entropy"] + (peaks - peak)
        values["entropy"] = log_mass - (log_share.exp() * below).where(log_share > -1e30, 0).sum(0)
    valid = targets != IGNORE_INDEX
    masked = {name: values[name].where(valid, 0) for name in metrics if name in values}
    if "predicted_tokens" in by_name:
        tokens = by_name["predicted_tokens"].contiguous().view(torch.int32)
        first = peaks.argmax(0, keepdim=True)  # of equal ones
        best = tokens.gather(0, first).squeeze(0)
        masked["predicted_tokens"] = best.long().where(valid, IGNORE_INDEX)
    loss = combine_loss(nll, lse, mean, options).where(valid, 0)
    return RowLosses(loss, peak.where(valid, 0), log_mass.where(valid, 0), masked)


def shard_divergence_rows(
    shard: VocabularyShard,
    student: Tensor,  # [N, rows of the shard] raw
    teacher: Tensor,  # [N, rows of the shard] raw
    options: Options,
    teacher_options: Options,
    beta: float,
    grad: LogitGradient | None = None,
) -> Tensor:
    """`divergence_rows` of all ranks' logits; the gradient is that of this rank's."""
    heads = options, teacher_options
    s_peak, s_mass, t_peak, t_mass = shard.gather(logit_masses(student, teacher, *heads)).unbind(2)
    masses = torch.stack(
        (*combine_logsumexp(s_peak, s_mass), *combine_logsumexp(t_peak, t_mass)), 1
    )
    run = partial(divergence_rows, student, teacher, *heads, beta, masses=masses)
    losses, mean = shard.gather(run(grad if beta == 0 else None)).sum(0).unbind(1)
    if grad is not None and beta != 0:
        run(grad, mean=mean)
    return losses


def shard_topk_rows(
    shard: VocabularyShard,
    logits: Tensor,  # [N, rows of the shard] raw
    tokens: Tensor,  # [N, k] of all V
    logprobs: Tensor,  # [N, k]
    options: Options,
    beta: float,
    grad: LogitGradient | None = None,
) -> Tensor:
    """`topk_rows` of all ranks' logits; the gradient is that of this rank's."""
    absent, local = tokens < 0, shard.local(tokens)
    on_rank = local >= 0
    # A token here stands for those that are not; where there is none, column 0 stays as it is
    first, any_here = on_rank.int().argmax(1, keepdim=True), on_rank.any(1, keepdim=True)
    index = local.where(on_rank, local.gather(1, first)).clamp(min=0)
    target = torch.full_like(tokens[:, 0], OTHER_RANK)
    plain = options.without_regularizers()
    if logits.shape[1]:
        raw = logits.gather(1, index)
        z = scale_and_cap(raw.float(), options).masked_fill(~on_rank, -torch.inf)
        other_targets = logits if grad is not None and grad.out is logits else logits.clone()
        other_targets.scatter_(1, index, raw.masked_fill(any_here, -torch.inf))
        rest = loss_rows(other_targets, target, plain, holes=True, size=shard.size)
        local_columns = torch.cat((rest.peak[:, None], rest.log_mass[:, None], z), 1)
    else:
        other_targets = logits
        shape = len(tokens), tokens.shape[1] + 2
        local_columns = torch.full(shape, -torch.inf, device=logits.device)
        local_columns[:, 0] = NO_PEAK
    gathered = shard.gather(local_columns)
    peak, log_mass = combine_logsumexp(gathered[..., 0], gathered[..., 1])
    z = gathered[..., 2:].amax(0)
    lse = torch.where(log_mass == -torch.inf, -torch.inf, peak + log_mass)
    losses, d = stored_losses(z, lse, logprobs, absent, beta, grad)
    if grad is not None and d is not None and logits.shape[1]:
        exact = stored_gradient(d, z, options)
        exact = exact.where(on_rank, exact.gather(1, first))
        if grad.before is not None:
            exact = exact + grad.before.gather(1, index)
        rest_gradient = grad._replace(row_scale=d[:, -1].contiguous())
        rows = other_targets, target, plain, (), rest_gradient, (peak, log_mass)
        loss_rows(*rows, holes=True, size=shard.size)
        masked = grad.out.gather(1, index)
        grad.out.scatter_(1, index, exact.to(masked.dtype).where(any_here, masked))
    return losses


# Embedding lookup

BLOCK = 1024


def embedding_rows_ref(
    ids: Tensor, weight: Tensor, shard: VocabularyShard, padding_idx: int | None = None
) -> Tensor:
    """`embedding_rows` in plain torch; `padding_idx`, of the full table, gets no gradient."""
    local_columns = ids - shard.first
    on_rank = (local_columns >= 0) & (local_columns < shard.rows)
    padding = None if padding_idx is None else padding_idx - shard.first
    if padding is not None and not 0 <= padding < shard.rows:
        padding = None
    outside = (ids < 0) | (ids >= shard.size)  # an error on every rank, as of a whole weight
    x = F.embedding(local_columns.where(on_rank | outside, 0), weight, padding)
    return x.masked_fill(~on_rank[..., None], 0)


@triton.jit(debug=True)  # or the assertion would not be compiled
def _embedding_rows_kernel(
    ids, weight, y, first, rows, size, C: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Copies the embedding of ids in this rank's rows, and zeros for the others."""
    pdl_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(ids + token).to(tl.int64)
    tl.device_assert((number >= 0) & (number < size), "a token is not in the vocabulary")
    local_columns = number - first + tl.zeros([BLOCK], tl.int64)
    on_rank = (local_columns >= 0) & (local_columns < rows) & (columns < C)
    row = tl.load(weight + local_columns * C + columns, mask=on_rank, other=0.0)
    tl.store(y + token * C + columns, row, mask=columns < C)


def _output(ids: Tensor, weight: Tensor) -> Tensor:
    """Allocates the embeddings [..., C]."""
    return weight.new_empty(*ids.shape, weight.shape[1])


@operator("embedding_rows", lambda ids, weight, first, rows, size: _output(ids, weight))
def _embedding_rows(ids: Tensor, weight: Tensor, first: int, rows: int, size: int) -> Tensor:
    """Returns the embeddings [..., C] of ids by the kernel, 0 outside of [first, first + rows)."""
    y, C = _output(ids, weight), weight.shape[1]
    grid = ids.numel(), triton.cdiv(C, BLOCK)
    options = {"C": C, "BLOCK": BLOCK, "num_warps": 4} | pdl_options(y)
    _embedding_rows_kernel[grid](ids, weight, y, first, rows, size, **options)
    return y


def embedding_rows(
    ids: Tensor, weight: Tensor, shard: VocabularyShard, padding_idx: int | None = None
) -> Tensor:
    """Looks up ids [...] in this rank's rows of the table: [..., C], zeros for other ranks' tokens.

    One outside of the vocabulary is an error on every rank. A kernel replaces ten of torch's in
    decoding, each of which takes longer to start than to run.
    """
    plain = weight.is_contiguous() and is_plain(weight)
    if torch.is_grad_enabled() or not (plain and ids.numel() and runs_triton(weight)):
        return embedding_rows_ref(ids, weight, shard, padding_idx)
    return _embedding_rows(ids.contiguous(), weight, shard.first, shard.rows, shard.size)
