"""Gated activation of an MLP: SwiGLU and GeGLU, on the packed output of one projection.

# ... any leading dimensions, I intermediate size
"""

from typing import Literal, get_args

import torch.nn.functional as F
from torch import Tensor

Activation = Literal["silu", "gelu", "gelu_tanh"]


def gated_act_ref(gate_up: Tensor, act: Activation) -> Tensor:
    """`act(gate) * up`; each factor is rounded to the input's dtype, as transformers does."""
    gate, up = gate_up.chunk(2, dim=-1)
    if act == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if act == "gelu_tanh" else "none") * up


def gated_act(
    gate_up: Tensor,  # [..., 2I]: gate first, then up
    act: Activation,
) -> Tensor:
    """`act(gate) * up` [..., I]. Source: Shazeer 2020 (arXiv 2002.05202)."""
    if act not in get_args(Activation):
        raise ValueError(f"act={act!r} is not one of {get_args(Activation)}")
    return gated_act_ref(gate_up, act)
