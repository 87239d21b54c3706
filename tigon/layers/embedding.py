"""Token embedding, scaled where a family does so."""

import torch
from torch import Tensor, nn


class Embedding(nn.Embedding):
    """ids [B, T] -> [B, T, C], times `scale` rounded to the weight's dtype, as Gemma has it."""

    def __init__(self, vocab: int, dim: int, *, padding_idx: int | None = None, scale: float = 1.0):
        super().__init__(vocab, dim, padding_idx=padding_idx)
        self.scale = scale

    def forward(self, input: Tensor) -> Tensor:
        x = super().forward(input)
        if self.scale == 1.0:
            return x
        # A fill on the device: a Python number would not be rounded, torch.tensor would wait
        return x * torch.full((), self.scale, dtype=x.dtype, device=x.device)
