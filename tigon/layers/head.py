"""The head: hidden states to logits, or to a loss without logits.

# B batch, T kept tokens, C model dim, V vocab
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tigon.kernels.cross_entropy import Options, Reduction, cross_entropy, scale_and_cap
from tigon.kernels.linear_cross_entropy import LOGITS_BYTES, ActiveRows, linear_cross_entropy
from tigon.kernels.row_linear import linear


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
        self.logits_bytes = LOGITS_BYTES  # that a loss may hold of logits at a time

    def forward(
        self,
        hidden: Tensor,  # [B, T, C]
        targets: Tensor | None = None,  # [B, T], already shifted
        *,
        token_weights: Tensor | None = None,  # [B, T]
        denominator: Tensor | float = 1.0,
        reduction: Reduction = "sum",
        active: ActiveRows | None = None,
        return_logits: bool = False,
        metrics: Sequence[str] = (),
    ) -> HeadOutput:
        weight = self.weight  # once: a parametrised weight is computed at each access
        raw = None
        if return_logits or targets is None:
            raw = linear(hidden, weight, self.bias)
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
                active=active,
                logits_bytes=self.logits_bytes,
            )
        else:
            loss, values = cross_entropy(
                raw.flatten(0, 1),
                targets,
                token_weights=token_weights,
                denominator=denominator,
                reduction=reduction,
                options=self.options,
                metrics=metrics,
            )
        return HeadOutput(
            loss=loss.view(shape) if reduction == "none" else loss,
            logits=logits,
            metrics={name: v.view(shape) if v.dim() else v for name, v in values.items()},
        )
