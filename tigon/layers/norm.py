"""RMSNorm as modules."""

import torch
from torch import Tensor, nn

from tigon.kernels.rms_norm import Cast, rms_norm


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension."""

    def __init__(self, dim: int, eps: float, *, offset: float = 0.0, cast: Cast = "before_weight"):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps, self.offset, self.cast = eps, offset, cast

    def init_weights(self) -> None:
        nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, offset=self.offset, cast=self.cast)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class AddRMSNorm(RMSNorm):
    """The seam between two branches: `(norm(x + residual), x + residual)` in one pass.

    Without a residual, at the start of the stream, `(norm(x), x)`.
    """

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        if residual is None:
            return super().forward(x), x
        return rms_norm(
            x, self.weight, self.eps, offset=self.offset, cast=self.cast, residual=residual
        )
