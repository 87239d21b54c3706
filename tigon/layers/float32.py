"""Modules whose parameters are in fp32 in a model of any dtype."""

from collections.abc import Callable
from typing import Self

from torch import Tensor, nn


class Float32Module(nn.Module):
    """A module of few parameters that conversions of the model leave in fp32.

    FSDP gathers them apart from the others, in fp32, too.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Applies a conversion to the parameters, but to their device alone."""
        values = {n: p.detach() for n, p in self.named_parameters(recurse=False)}
        values = {n: x if x.is_meta else x.clone() for n, x in values.items()}
        super()._apply(fn, recurse)
        for name, x in values.items():
            p = self.get_parameter(name)
            if p.dtype != x.dtype:
                p.data = x.to(p.device)
        return self
