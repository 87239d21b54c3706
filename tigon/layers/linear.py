"""Projections that Hugging Face stores apart and one matrix product computes together."""

from torch import nn


class FusedLinear(nn.Linear):
    """Linear layers over the same input, stacked by rows.

    `parts` are their output sizes in row order; loading and export split by them.
    """

    def __init__(self, in_features: int, parts: tuple[int, ...], *, bias: bool = False):
        super().__init__(in_features, sum(parts), bias=bias)
        self.parts = parts

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, parts={self.parts}"
