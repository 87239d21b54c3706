"""Modules whose parameters are in fp32 in a model of any dtype."""

from collections.abc import Callable
from typing import Self

from torch import Tensor, nn


class Float32Module(nn.Module):
    """A module of few parameters that conversions leave, and FSDP gathers, in fp32."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Applies a conversion to the parameters, but to their device alone."""
        return super()._apply(keep_dtype(fn), recurse)


def keep_dtype(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Returns the conversion with its change of device alone."""

    def move(x: Tensor) -> Tensor:
        y = fn(x)
        return y if y.dtype == x.dtype else x.to(y.device)

    return move
