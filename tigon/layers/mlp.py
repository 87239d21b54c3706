"""Gated MLP: down(act(gate(x)) * up(x)) with gate and up as one projection."""

from statistics import NormalDist

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.kernels.linear.fp8_mlp import fp8_mlp
from tigon.kernels.mlp.gated_act import Activation, act_fn
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
        native = isinstance(down, Linear)  # a replacement need not have the attribute fp8
        fp8 = native and down.fp8 and down.training and not torch.compiler.is_compiling()
        if fp8 and self._is_unobserved() and self._has_plain_fp8():
            gathered = up.gather_input(x)
            y = fp8_mlp(gathered, up.weight, up.act, down.weight, down.local_bias)
            return down.reduce_output(y)
        y = up(x, *dropout_args)
        if (recompute := find_recompute(y)) is not None:
            recompute.single_reader = not fp8 and self._is_unobserved()
        return down(y, *dropout_args)

    def _has_plain_fp8(self) -> bool:
        """Whether `fp8_mlp` computes all of both products: no adapter, no bias of gate and up."""
        up, down = self.gate_up_proj, self.down_proj
        plain = all(not p.has_adapter and p.quantized is None for p in (up, down))
        return plain and up.fp8 and up.local_bias is None

    def _is_unobserved(self) -> bool:
        """Whether no hook can see the tensor between the two projections."""
        return is_unpatched(self.gate_up_proj, GatedLinear) and is_unpatched(self.down_proj, Linear)


class TopKMLP(GatedMLP):
    """A gated MLP in which about the share `sparsity` of each token's gates, the smallest, are 0.

    The cutoff is that of a normal distribution with the mean and deviation of the token's gates,
    and is taken from the others. Source: Gemma 3n, as transformers has it.
    """

    def __init__(self, dim: int, intermediate: int, act: Activation, *, sparsity: float):
        super().__init__(dim, intermediate, act)
        self.deviations = NormalDist().inv_cdf(sparsity)

    def forward(self, x: Tensor, *dropout_args: Tensor) -> Tensor:
        layer = self.gate_up_proj
        gate, up = layer.product(layer.gather_input(x), *dropout_args).chunk(2, -1)
        deviation = gate.std(-1, keepdim=True, unbiased=False)
        scale = torch.full((), self.deviations, dtype=gate.dtype, device=gate.device)
        gate = F.relu(gate - (gate.mean(-1, keepdim=True) + deviation * scale))
        return self.down_proj(act_fn(gate, layer.act) * up, *dropout_args)
