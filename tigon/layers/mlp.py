"""Gated MLP: down(act(gate(x)) * up(x)) with gate and up as one projection."""

from torch import Tensor, nn

from tigon.kernels.gated_act import Activation
from tigon.layers.linear import GatedLinear, Linear


class GatedMLP(nn.Module):
    """[..., C] -> [..., C]."""

    def __init__(self, dim: int, intermediate: int, act: Activation, *, bias: bool = False):
        super().__init__()
        self.gate_up_proj = GatedLinear(dim, intermediate, act, bias=bias)
        self.down_proj = Linear(intermediate, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gate_up_proj(x))
