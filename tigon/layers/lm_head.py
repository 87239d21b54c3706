"""The head: hidden states to logits, or to loss terms without logits.

# B batch, T kept tokens, C model dim, V vocab, r rank of an adapter
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.distributed.all_reduce import all_gather_small
from tigon.distributed.collectives import Ranks, scale_replicated_grad
from tigon.kernels.linear.linear import linear, reduction_chunks
from tigon.kernels.linear.lora import lora_linear
from tigon.kernels.loss.fused_linear import HeadValue, run_loss_terms
from tigon.kernels.loss.logits import Options, scale_and_cap
from tigon.kernels.loss.terms import LossTerm, ValidRows
from tigon.kernels.loss.vocab_parallel import VocabularyShard, gather_logits
from tigon.layers.lora import Adapters, LowRank


class HeadOutput(NamedTuple):  # a tuple, so that FSDP finds the tensors in it
    """The output of a pass of the head: the terms' values, and logits where they are wanted."""

    values: list[HeadValue]  # of each loss term, per-row ones [B, T]
    logits: Tensor | None = None  # [B, T, V]
    logits_at: Tensor | None = None  # [n, V]


class LMHead(nn.Module):
    """The head: hidden states [B, T, C] to logits [B, T, V], or to loss terms without logits.

    Logits are x W^T + bias, times `logit_scale` and then capped by `softcap`, if there is one. All
    that touches the vocabulary happens inside its forward, so FSDP's hooks see it, and the weight
    may be tied, sharded, frozen or parametrized (LoRA).
    """

    def __init__(
        self,
        dim: int,
        vocab: int,
        *,
        bias: bool = False,
        softcap: float | None = None,
        logit_scale: float = 1.0,
    ):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, dim))
        self.bias = nn.Parameter(torch.empty(vocab)) if bias else None
        self.options = Options(softcap=softcap, logit_scale=logit_scale)
        self.logits_bytes: int | None = None  # maximum of a chunk of logits; None: by shape
        self.vocabulary: VocabularyShard | None = None  # this rank's rows of weight and bias
        self.scorers: Ranks | None = None  # ranks that replicate a head of few scores
        self.copies: Adapters | None = None  # weights of adapters that replace `weight`
        self.lora: Adapters | None = None  # low-rank adapters

    def forward(
        self,
        hidden: Tensor | None,  # [B, T, C]
        criteria: Sequence[LossTerm] = (),
        *,
        active: ValidRows | None = None,
        return_logits: bool = False,
        at: Tensor | None = None,  # [n, C]
        logits_bytes: int | None = None,
        lend: Callable[[Tensor, Tensor | None], Any] | None = None,
    ) -> Any:
        """Returns a HeadOutput: logits without `criteria` or if requested; else only loss terms.

        With `return_logits` the loss terms use those logits, which are not overwritten, unless
        ranks share the vocabulary. The hidden states `at` also get logits, without a gradient.
        `logits_bytes` replaces the head's own. As a teacher's head it is called by the student's
        pass: `lend` then gets weight and bias while they are gathered, and its result is returned.
        """
        weight, low = self._active_weight()
        if lend is not None:
            return lend(weight.detach() if low is None else _merge_adapter(weight, low), self.bias)
        if hidden is None:
            raise ValueError("the head has no hidden states")
        logits_bytes = self.logits_bytes if logits_bytes is None else logits_bytes
        if logits_bytes is not None and logits_bytes < 1:
            raise ValueError(f"logits_bytes={logits_bytes} must be at least 1")
        logits_at = None
        if at is not None:
            with torch.no_grad():
                logits_at = scale_and_cap(self._logits(at, weight, low), self.options)
        keeps_logits = return_logits and self.vocabulary is None
        values: list[HeadValue] = []
        if criteria and not keeps_logits:
            added = None  # [..., r] and [V, r], whose product the adapter adds to the logits
            if low is not None:
                (term,) = low.additions()
                added = linear(hidden, low.lora_A.to(hidden.dtype)) * term.scale, term.b
            values = run_loss_terms(
                hidden,
                weight,
                self.bias,
                criteria,
                added=added,
                options=self.options,
                active=active,
                logits_bytes=logits_bytes,
                vocabulary=self.vocabulary,
            )
            if not return_logits:
                return HeadOutput(values, None, logits_at)
        raw = self._logits(hidden, weight, low)
        if keeps_logits:
            values = run_loss_terms(
                raw, None, None, criteria, options=self.options, logits_bytes=logits_bytes
            )
        return HeadOutput(values, scale_and_cap(raw, self.options), logits_at)

    @property
    def takes_criteria(self) -> bool:
        """Whether a call takes criteria, and not states alone."""
        return True

    def raw_logits(self, x: Tensor) -> Tensor:
        """Returns logits [..., V] of states [..., C], neither scaled nor capped."""
        return self._logits(x, *self._active_weight())

    def _active_weight(self) -> tuple[Tensor, LowRank | None]:
        """Returns the weight in use, and the adapter that is added to its product or None."""
        copy = None if self.copies is None else self.copies.active()
        # Once: a parametrized weight is computed at each access
        weight = self.weight if copy is None else copy.to(self.weight.dtype)
        low: LowRank | None = None if self.lora is None else self.lora.active()
        if low is not None and low.dora:  # lengths of rows: a gradient of them needs the weight's
            return _merge_adapter(weight, low), None
        return weight, low

    def _logits(self, x: Tensor, weight: Tensor, low: LowRank | None) -> Tensor:
        """Returns logits [..., V] of all ranks, neither scaled nor capped, of states [..., C]."""
        if low is None:
            raw = linear(x, weight, self.bias)
        else:
            raw = lora_linear(x, weight, self.bias, low.lora_A, low.additions())
        if self.scorers is not None:
            return scale_replicated_grad(raw, self.scorers)
        if self.vocabulary is None:
            return raw
        return self._gather_logits(raw, self.vocabulary)

    def _gather_logits(self, raw: Tensor, shard: VocabularyShard) -> Tensor:
        """Gathers this rank's logits [..., W] to [..., V]."""
        if not torch.is_grad_enabled():
            local_logits = raw[..., : shard.rows]
            full = all_gather_small(local_logits, shard.first, shard.size, Ranks.sharing(shard))
            if full is not None:
                return full
        missing = shard.share - raw.shape[-1]  # of the last rank
        return gather_logits(F.pad(raw, (0, missing)) if missing > 0 else raw, shard)


def run_head(
    head: nn.Module,
    options: Options,
    hidden: Tensor,  # [B, T, C]
    criteria: Any,  # as of LMHead
    *,
    active: ValidRows | None,
    return_logits: bool,
    at: Tensor | None,  # [n, C]
    logits_bytes: int | None,
) -> HeadOutput:
    """Returns the output of an LMHead, or of a module or `forward` that another library has put in
    its place, which maps states [..., C] to logits [..., V].

    `options` and `criteria` are then applied to the logits, which are all in memory at once.
    """
    if isinstance(head, LMHead) and head.takes_criteria:
        return head(
            hidden,
            criteria,
            active=active,
            return_logits=return_logits,
            at=at,
            logits_bytes=logits_bytes,
        )
    logits_at = None
    if at is not None:
        with torch.no_grad():
            logits_at = scale_and_cap(head(at), options)
    raw = head(hidden)
    values = run_loss_terms(raw, None, None, criteria, options=options, logits_bytes=logits_bytes)
    logits = scale_and_cap(raw, options) if return_logits or not criteria else None
    return HeadOutput(values, logits, logits_at)


def _merge_adapter(weight: Tensor, low: LowRank) -> Tensor:
    """Returns a new weight [V, C] with the adapter added, and its rows' learned norms for DoRA."""
    (addition,) = low.additions()
    b, a = (t.to(weight.dtype) for t in (addition.b, low.lora_A))
    chunks = [  # of rows, over which the gradient of A sums
        torch.addmm(weight[rows], b[rows], a, alpha=addition.scale)
        for rows in reduction_chunks(b.t(), weight)
    ]
    merged = chunks[0] if len(chunks) == 1 else torch.cat(chunks)
    if not low.dora:
        return merged
    scale = (low.dora_scale(weight) - 1).to(weight.dtype)[:, None]  # as linear layers have it
    return torch.addcmul(merged, merged, scale)
