"""Linear layers, and those that Hugging Face stores apart and one product computes together."""

from torch import Tensor, nn

from tigon.kernels.row_linear import linear


class Linear(nn.Linear):
    """nn.Linear, faster for a single row without gradients: the next token of one sequence."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class FusedLinear(Linear):
    """Linear layers over the same input, stacked by rows.

    `parts` are their output sizes in row order; loading and export split by them.
    """

    def __init__(self, in_features: int, parts: tuple[int, ...], *, bias: bool = False):
        super().__init__(in_features, sum(parts), bias=bias)
        self.parts = parts

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, parts={self.parts}"
