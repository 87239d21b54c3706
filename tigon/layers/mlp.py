"""Gated MLP: down(act(gate(x)) * up(x)) with gate and up as one projection."""

from torch import Tensor, nn
from torch.nn.modules import module as hooks

from tigon.kernels.gated_act import Activation, gated_act
from tigon.kernels.row_linear import row_linear, takes_row
from tigon.layers.linear import FusedLinear, Linear


class GatedMLP(nn.Module):
    """[..., C] -> [..., C]."""

    def __init__(self, dim: int, intermediate: int, act: Activation, *, bias: bool = False):
        super().__init__()
        self.gate_up_proj = FusedLinear(dim, (intermediate, intermediate), bias=bias)
        self.down_proj = Linear(intermediate, dim, bias=bias)
        self.act: Activation = act

    def forward(self, x: Tensor) -> Tensor:
        # gate_up is local to this function, so its gradient may take its memory. The one other
        # reader would be a forward hook, which may keep the output, or a layer put in place of
        # the projection, whose last operation may save it. Hooks on gradients and a recomputed
        # block (activation checkpointing) see nothing but the finished gradient and a new gate_up.
        proj = self.gate_up_proj
        private = type(proj) is FusedLinear and not proj._forward_hooks
        private = private and not hooks._global_forward_hooks
        if private and takes_row(x, proj.weight):
            return self.down_proj(row_linear(x, proj.weight, proj.bias, self.act))
        return self.down_proj(gated_act(proj(x), self.act, overwrite=private))
