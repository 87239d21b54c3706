"""The clamped SwiGLU of gpt-oss's experts, whose gates and ups alternate: gate 0, up 0, gate 1 ...

# S rows, I intermediate size
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tigon.kernels.runtime import runs_triton, tl, triton

FORWARD = (512, 4)  # columns and warps of one program


class ClampedSwiGLU(NamedTuple):
    """`g sigmoid(alpha g) (u + 1)` with g = min(gate, limit) and u in [-limit, limit].

    A gate and its up are neighbors.
    """

    alpha: float
    limit: float


def clamped_swiglu_ref(gate_up: Tensor, clamp: ClampedSwiGLU) -> Tensor:
    """Returns [..., I] for [..., 2I], each factor rounded to the input's dtype."""
    gate = gate_up[..., ::2].clamp(max=clamp.limit)
    up = gate_up[..., 1::2].clamp(-clamp.limit, clamp.limit)
    return (up + 1) * (gate * torch.sigmoid(gate * clamp.alpha))


def clamped_swiglu_backward_ref(
    gate_up: Tensor, d: Tensor, clamp: ClampedSwiGLU
) -> tuple[Tensor, Tensor]:
    """Returns the activation again, and the gradient of gate_up from that of the activation."""
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    g, u = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    s = torch.sigmoid(g * clamp.alpha)
    a = g * s
    dgate = torch.where(gate <= clamp.limit, d * (u + 1) * (s + clamp.alpha * a * (1 - s)), 0)
    dup = torch.where(up.abs() <= clamp.limit, d * a, 0)
    return (u + 1) * a, torch.stack((dgate, dup), -1).flatten(-2)


@triton.jit
def load_pairs(x, row, start, I, BLOCK: tl.constexpr):  # noqa: E741
    """Loads gates and ups [BLOCK] of a row of [S, 2I], from unit `start` on, in fp32."""
    cols = 2 * start + tl.arange(0, 2 * BLOCK)
    both = tl.load(x + row * 2 * I + cols, mask=cols < 2 * I, other=0.0).to(tl.float32)
    return tl.split(both.reshape(BLOCK, 2))


@triton.jit
def clamped_and_slope(gate, up, alpha, limit):
    """Returns the activation of clamped gates, its derivative, and what it is multiplied by."""
    gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
    s = tl.sigmoid(alpha * gate)
    a = gate * s
    return a, s + alpha * a * (1 - s), up + 1


@triton.jit
def _clamped_kernel(
    x, y, alpha, limit,
    I,  # noqa: E741
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the activation of some units of a row."""
    blocks = tl.cdiv(I, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    start = tl.program_id(0) % blocks * BLOCK
    gate, up = load_pairs(x, row, start, I, BLOCK)
    a, _, factor = clamped_and_slope(gate, up, alpha, limit)
    cols = start + tl.arange(0, BLOCK)
    tl.store(y + row * I + cols, a * factor, mask=cols < I)


def clamped_swiglu(gate_up: Tensor, clamp: ClampedSwiGLU) -> Tensor:
    """Returns [S, I] for a contiguous [S, 2I]: a step of `grouped_mlp`, without a gradient."""
    if not runs_triton(gate_up):
        return clamped_swiglu_ref(gate_up, clamp)
    y = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    if y.numel():
        block, warps = FORWARD
        block = min(block, triton.next_power_of_2(y.shape[1]))
        grid = (len(y) * triton.cdiv(y.shape[1], block),)
        sizes = *clamp, y.shape[1]
        _clamped_kernel[grid](gate_up, y, *sizes, BLOCK=block, num_warps=warps)
    return y
