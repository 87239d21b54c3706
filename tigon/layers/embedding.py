"""Token embedding, scaled where a family does so."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.layers.lora import Copies


class Embedding(nn.Embedding):
    """ids [B, T] -> [B, T, C], times `scale` rounded to the weight's dtype, as Gemma has it.

    `copies`: weights of adapters, one of which may replace its own.
    """

    def __init__(self, vocab: int, dim: int, *, padding_idx: int | None = None, scale: float = 1.0):
        super().__init__(vocab, dim, padding_idx=padding_idx)
        self.scale = scale
        self.copies: Copies | None = None

    def forward(self, input: Tensor) -> Tensor:
        weight = None if self.copies is None else self.copies.active()
        if weight is None:
            x = super().forward(input)
        else:
            x = F.embedding(input, weight, self.padding_idx).to(self.weight.dtype)
        if self.scale == 1.0:
            return x
        # A fill on the device: a Python number would not be rounded, torch.tensor would wait
        return x * torch.full((), self.scale, dtype=x.dtype, device=x.device)
