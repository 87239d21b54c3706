"""An operator beside its definition, with what makes its inputs: what a row of `CASES` is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Inputs = dict[str, Any]
Call = Callable[..., Any]
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class OpCase:
    operator: Call
    definition: Call  # in float64, of the same arguments
    inputs: Callable[..., Inputs]  # of a size, in float32, by their names
    eager: Call | None = None  # plain torch, beside which half precision is judged
    options: Inputs = field(default_factory=dict)
    sizes: Sequence[Any] = ()  # the first is small
    real: Sequence[Any] = ()  # more of them, on a GPU in half precision
    empty: Sequence[Any] = ()
    constant: Sequence[str] = ()  # floats without gradients
    parameters: Sequence[str] = ()  # which are such, as those of a layer
    whole: Sequence[str] = ()  # floats that stay float32 beside half precision
    dtype: torch.dtype = torch.float32  # another one's numbers are compared elsewhere
    halves: Sequence[torch.dtype] = HALF
    result: torch.dtype | None = None  # whatever the inputs' dtype
    autocast: Sequence[str] = ()  # what is cast
    second: str = ""  # what an error about second derivatives names
    rtol: float = 1e-4  # of gradients
    factor: float = 2.0  # of plain torch's error, which real sizes may have

    def make(self, size: Any = None, dtype: torch.dtype | None = None) -> Inputs:
        """Leaves, those that learn with gradients."""
        made, dtype = self.inputs(*(self.sizes[0] if size is None else size)), dtype or self.dtype
        for name, x in made.items():
            if isinstance(x, Tensor) and x.is_floating_point():
                x = x.to(torch.float32 if name in self.whole else dtype)
                made[name] = nn.Parameter(x) if name in self.parameters else x
                made[name].requires_grad_(name not in self.constant)
        return made

    def run(self, inputs: Inputs, function: Call | None = None) -> list[Tensor]:
        found = (function or self.operator)(**inputs, **self.options)
        if hasattr(found, "metrics"):  # a value and its metrics
            return [found.value]
        return [found] if isinstance(found, Tensor) else list(found)


def learned(inputs: Inputs) -> list[Tensor]:
    return [x for x in inputs.values() if isinstance(x, Tensor) and x.requires_grad]
