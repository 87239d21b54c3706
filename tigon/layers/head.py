"""The head: hidden states to logits, or to a loss without logits.

# B batch, T kept tokens, C model dim, V vocab
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.kernels.cross_entropy import (
    Options,
    cross_entropy,
    finish_metrics,
    rows_behind,
    scale_and_cap,
    softmax_rows_,
)
from tigon.kernels.linear_cross_entropy import Reduction, linear_cross_entropy


class HeadOutput(NamedTuple):  # a tuple, so that FSDP finds the tensors in it
    loss: Tensor | None
    logits: Tensor | None
    metrics: dict[str, Tensor]


class LMHead(nn.Module):
    """Everything that touches the vocabulary happens inside this forward.

    So FSDP's hooks see it, and the weight may be tied, sharded, frozen or parametrised (LoRA).
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

    def forward(
        self,
        hidden: Tensor,  # [B, T, C]
        targets: Tensor | None = None,  # [B, T], already shifted
        *,
        token_weights: Tensor | None = None,  # [B, T]
        denominator: Tensor | float = 1.0,
        reduction: Reduction = "sum",
        return_logits: bool = False,
        metrics: Sequence[str] = (),
    ) -> HeadOutput:
        weight = self.weight  # once: a parametrised weight is computed at each access
        raw = F.linear(hidden, weight, self.bias) if return_logits or targets is None else None
        logits = None if raw is None else scale_and_cap(raw, self.options)
        if targets is None:
            return HeadOutput(None, logits, {})

        shape = targets.shape
        targets = targets.flatten()
        token_weights = None if token_weights is None else token_weights.flatten()
        if raw is None:
            loss, values = linear_cross_entropy(
                hidden.flatten(0, 1),
                weight,
                targets,
                bias=self.bias,
                token_weights=token_weights,
                denominator=denominator,
                reduction=reduction,
                options=self.options,
                metrics=metrics,
            )
        else:
            raw = raw.flatten(0, 1)
            loss = cross_entropy(raw, targets, options=self.options)
            loss = loss if token_weights is None else loss * token_weights
            if reduction == "sum":
                loss = loss.sum() / denominator
            with torch.no_grad():
                z = scale_and_cap(raw.to(torch.float32, copy=True), self.options)
                rows = softmax_rows_(z, targets, rows_behind(metrics)).metrics
            values = finish_metrics(rows, targets, metrics)
        return HeadOutput(
            loss=loss.view(shape) if reduction == "none" else loss,
            logits=logits,
            metrics={name: v.view(shape) if v.dim() else v for name, v in values.items()},
        )
