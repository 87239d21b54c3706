"""Casts of a model's weights: what quantized ones refuse, and where float16 overflows."""

import warnings
from typing import Any, Self

import torch
from torch import nn

from tigon.layers import QuantizedWeight
from tigon.models.config import ModelConfig
from tigon.models.decoder import Decoder


class CheckedCasts(nn.Module):
    """A module with a decoder `model`, whose device and dtype it has; conversions raise for another
    dtype of quantized weights, and warn where float16 overflows."""

    config: ModelConfig
    model: Decoder

    @property
    def device(self) -> torch.device:
        """The device of the embedding's weight."""
        return self.model.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the embedding's weight."""
        return self.model.embed_tokens.weight.dtype

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Applies a conversion to all tensors, as `to` and `half` do; raises ValueError, before
        any, if it changes the dtype of quantized weights."""
        if (weight := self._quantized_weight) is not None:  # before anything is converted
            weight.check(fn)
        old_dtype = self.dtype
        super()._apply(fn, recurse)
        if self.dtype != old_dtype:
            self.warn_of_overflow()
        return self

    def warn_of_overflow(self) -> None:
        """Warns if the model is in float16 and its family's activations exceed it."""
        if self.dtype == torch.float16 and self.config.overflows_float16:
            warnings.warn(
                f"activations of {self.config.architecture} exceed the range of float16, so that "
                "logits become nan: use bfloat16 or float32",
                stacklevel=2,
            )

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """As nn.Module's, but raises ValueError for True if any weight is quantized."""
        if requires_grad and (weight := self._quantized_weight) is not None:
            raise ValueError(
                f"the model's weights are quantized ({weight.kind}) and cannot be trained: "
                "add_adapter adds weights that can"
            )
        return super().requires_grad_(requires_grad)

    @property
    def _quantized_weight(self) -> QuantizedWeight | None:
        """The first quantized weight among the submodules, or None."""
        return next((m for m in self.modules() if isinstance(m, QuantizedWeight)), None)
