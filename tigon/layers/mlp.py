"""Gated MLP: down(act(gate(x)) * up(x)) with gate and up as one projection."""

from torch import Tensor, nn

from tigon.kernels._rebuilt import recipe_of
from tigon.kernels.gated_act import Activation
from tigon.layers.linear import GatedLinear, Linear, calls_only


class GatedMLP(nn.Module):
    """[..., C] -> [..., C]."""

    def __init__(self, dim: int, intermediate: int, act: Activation, *, bias: bool = False):
        super().__init__()
        self.gate_up_proj = GatedLinear(dim, intermediate, act, bias=bias)
        self.down_proj = Linear(intermediate, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.gate_up_proj(x)
        if (recipe := recipe_of(y)) is not None:
            both = calls_only(self.gate_up_proj, GatedLinear) and calls_only(self.down_proj, Linear)
            recipe.alone = both
        return self.down_proj(y)
