"""Gated MLP: down(act(gate(x)) * up(x)) with gate and up as one projection."""

import torch
from torch import Tensor, nn

from tigon.kernels.linear.fp8 import fp8_gated_linear
from tigon.kernels.mlp.gated_act import Activation
from tigon.kernels.recompute import find_recompute
from tigon.layers.linear import GatedLinear, Linear, is_unpatched


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)): [..., C] -> [..., C].

    `dropout_args`: keys [...] of an adapter's dropout, if there is one.
    """

    def __init__(self, dim: int, intermediate: int, act: Activation, *, bias: bool = False):
        super().__init__()
        self.gate_up_proj = GatedLinear(dim, intermediate, act, bias=bias)
        self.down_proj = Linear(intermediate, dim, bias=bias)

    def forward(self, x: Tensor, *dropout_args: Tensor) -> Tensor:
        up, down = self.gate_up_proj, self.down_proj
        fp8 = down.fp8 and down.training and not torch.compiler.is_compiling()
        if fp8 and not down.has_adapter and down.quantized is None and self._is_unobserved():
            gate_up = up.product(up.gather_input(x), *dropout_args)
            return down.reduce_output(
                fp8_gated_linear(gate_up, up.act, down.weight, down.local_bias)
            )
        y = up(x, *dropout_args)
        if (recompute := find_recompute(y)) is not None:
            recompute.single_reader = not fp8 and self._is_unobserved()
        return down(y, *dropout_args)

    def _is_unobserved(self) -> bool:
        """Whether no hook can see the tensor between the two projections."""
        return is_unpatched(self.gate_up_proj, GatedLinear) and is_unpatched(self.down_proj, Linear)
