"""The output of a forward pass.

# B batch, n kept tokens, V vocab
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from tigon.layers import Cache


@dataclass(eq=False)
class CausalLMOutput:
    """The output of a forward pass; `metrics` holds the requested metrics.

    It can be read as transformers' outputs: `out["loss"]`, `out[0]`, `dict(out)`, and iteration
    over names. These skip fields that are None or empty, so `loss, logits = out[:2]` needs a call
    with `return_logits=True`.
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

    def keys(self) -> list[str]:
        """The names of the fields that are neither None nor empty, in their order."""
        named = ((f.name, getattr(self, f.name)) for f in fields(self))
        return [
            n for n, x in named if x is not None and not (isinstance(x, dict | tuple) and not x)
        ]

    def values(self) -> list[Any]:
        """The values of `keys()`, in the same order."""
        return [getattr(self, name) for name in self.keys()]

    def items(self) -> list[tuple[str, Any]]:
        """The pairs of `keys()` and `values()`."""
        return [(name, getattr(self, name)) for name in self.keys()]

    def to_tuple(self) -> tuple[Any, ...]:
        """`values()` as a tuple."""
        return tuple(self.values())

    def __getitem__(self, key: str | int | slice) -> Any:
        if not isinstance(key, str):
            return self.to_tuple()[key]
        if key not in self:
            raise KeyError(f"{key!r}: this output has {', '.join(self.keys()) or 'nothing'}")
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    def __contains__(self, key: object) -> bool:
        return key in self.keys()


torch.export.register_dataclass(CausalLMOutput, serialized_type_name="tigon.models.CausalLMOutput")
