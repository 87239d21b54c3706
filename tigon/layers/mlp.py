"""Gated MLP: down(act(gate(x)) * up(x)) with gate and up as one projection."""

from torch import Tensor, nn

from tigon.kernels.gated_act import Activation, gated_act
from tigon.layers.linear import FusedLinear


class GatedMLP(nn.Module):
    """[..., C] -> [..., C]."""

    def __init__(self, dim: int, intermediate: int, act: Activation, *, bias: bool = False):
        super().__init__()
        self.gate_up_proj = FusedLinear(dim, (intermediate, intermediate), bias=bias)
        self.down_proj = nn.Linear(intermediate, dim, bias=bias)
        self.act: Activation = act

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(gated_act(self.gate_up_proj(x), self.act))
