"""Low-rank adapters of the matrices of all experts.

# E experts, K columns of a matrix, O rows, r rank
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tigon.kernels.lora_grouped_mlp import Low
from tigon.layers.lora import B, LayerAdapter, LoRAPart, Shapes

A = "lora_A_"  # what names of parameters begin with, the matrix's behind it; and B
MATRICES = ("gate_up_proj", "down_proj")


class LowRankExperts(LayerAdapter):
    """One adapter of a mixture: `scale * B_e A_e` is added to a matrix [O, K] of each expert.

    As PEFT stores them: A [E r, K] has the rows of one expert after those of another, B [O, r E]
    the columns of all experts for the first rank, then for the second. A part's `size` is O.
    """

    def __init__(
        self, experts: int, columns: Sequence[int], parts: Sequence[LoRAPart], **how: Any
    ):  # `columns`: K of each part; `how`: dtype and device
        super().__init__()
        self.parts, self.experts = tuple(parts), experts
        for part, width in zip(parts, columns, strict=True):
            a = torch.empty(experts * part.rank, width, **how)
            b = torch.empty(part.size, part.rank * experts, **how)
            self.register_parameter(A + part.name, nn.Parameter(a))
            self.register_parameter(B + part.name, nn.Parameter(b))

    def name_of_a(self, part: LoRAPart) -> str:
        return A + part.name

    def drawn(self, shapes: Shapes, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        found = {}
        for name, _ in self.named_parameters():
            values = torch.zeros(shapes[name], dtype=torch.float32, device="cpu")
            if name.startswith(A):
                nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
            found[name] = values
        return found

    def factors(self, part: LoRAPart) -> tuple[Tensor, Tensor]:
        """A [E, r, K], and B [E, O, r] with its scale."""
        a = self.get_parameter(A + part.name).view(self.experts, part.rank, -1)
        b = self.get_parameter(B + part.name).view(part.size, part.rank, self.experts)
        return a, b.permute(2, 0, 1) * part.scale

    def low(self, gate_up: Tensor, down: Tensor) -> Low:
        """Those of both matrices, of rank 0 where there are none."""
        own = {part.name: part for part in self.parts}
        found: list[Tensor] = []
        for name, matrix in zip(MATRICES, (gate_up, down), strict=True):
            if name in own:
                found += self.factors(own[name])
            else:
                e, o, k = matrix.shape
                found += [matrix.new_empty(e, 0, k), matrix.new_empty(e, o, 0)]
        return Low(*found)

    def extra_repr(self) -> str:
        return ", ".join(f"{p.name}: rank {p.rank}, scale {p.scale:.3g}" for p in self.parts)
