"""The output of a forward pass.

# B batch, n kept tokens, V vocab
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tigon.layers import Cache
from tigon.utils.outputs import Output


@dataclass(eq=False)
class CausalLMOutput(Output):
    """The output of a forward pass; `metrics` holds the requested metrics.

    Read as transformers' outputs, it skips fields that are None or empty, so `loss, logits =
    out[:2]` needs a call with `return_logits=True`.
    """

    loss: Tensor | None = None  # fp32 scalar, or [B, n] with loss_reduction="none"
    logits: Tensor | None = None  # [B, n, V] in the model's dtype
    past_key_values: Cache | None = None
    logprobs: Tensor | None = None  # fp32 [B, n], if LogProbs is among the criteria
    metrics: dict[str, Tensor] = field(default_factory=dict)
    aux_loss: Tensor | None = None  # balance of experts, differentiable; see `forward`
    criteria: tuple[Tensor, ...] = ()  # the value of each criterion of the call
    hidden: Tensor | None = None  # [B, T, C], normed, all positions; with return_hidden
    logits_at: Tensor | None = None  # [n, V] at the positions of logits_at, without a gradient


torch.export.register_dataclass(CausalLMOutput, serialized_type_name="tigon.models.CausalLMOutput")
