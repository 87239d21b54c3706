"""The clamped SwiGLU of gpt-oss's experts, whose gates and ups alternate: gate 0, up 0, gate 1 ...

# S rows, N k slots of weights, I intermediate size
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tigon.kernels.runtime import runs_triton, tl, triton

# Columns and warps of one program
FORWARD = (512, 4)
BACKWARD = (1024, 4)


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


@triton.jit
def _load_pairs(x, row, start, I, BLOCK: tl.constexpr):  # noqa: E741
    """Loads gates and ups [BLOCK] of a row of [S, 2I], from unit `start` on, in fp32."""
    cols = 2 * start + tl.arange(0, 2 * BLOCK)
    both = tl.load(x + row * 2 * I + cols, mask=cols < 2 * I, other=0.0).to(tl.float32)
    return tl.split(both.reshape(BLOCK, 2))


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
    gate, up = _load_pairs(x, row, start, I, BLOCK)
    gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
    cols = start + tl.arange(0, BLOCK)
    tl.store(y + row * I + cols, gate * tl.sigmoid(alpha * gate) * (up + 1), mask=cols < I)


@triton.jit
def _clamped_backward_kernel(
    gate_up, dh, order, weights, dgate_up, weighted, dweights, alpha, limit,
    I,  # noqa: E741
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Differentiates one slot's weight and activation, as `_act_backward_kernel` does."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(order + row)
    weight = tl.load(weights + slot).to(tl.float32)
    product = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, I, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        keep = cols < I
        gate, up = _load_pairs(gate_up, row, start, I, BLOCK)
        g, u = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
        d = tl.load(dh + row * I + cols, mask=keep, other=0.0).to(tl.float32)
        s = tl.sigmoid(alpha * g)
        a = g * s
        h = (a * (u + 1)).to(dh.dtype.element_ty).to(tl.float32)
        product += d * h
        d *= weight
        tl.store(weighted + row * I + cols, h * weight, mask=keep)
        dgate = tl.where(gate <= limit, d * (u + 1) * (s + alpha * a * (1 - s)), 0.0)
        dup = tl.where(tl.abs(up) <= limit, d * a, 0.0)
        both = 2 * start + tl.arange(0, 2 * BLOCK)
        tl.store(dgate_up + row * 2 * I + both, tl.interleave(dgate, dup), mask=both < 2 * I)
    tl.store(dweights + slot, tl.sum(product))


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


def clamped_swiglu_backward(
    hidden: Tensor,  # [S, 2I]
    dh: Tensor,  # [S, I]: of the activation of weight 1
    order: Tensor,  # [S], of each row its slot in `weights`
    weights: Tensor,  # [N, k]
    clamp: ClampedSwiGLU,
    outputs: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Fills `outputs`: gradients of `hidden`, the activation times its weight, those of `weights`.

    All are contiguous.
    """
    dhidden, weighted, dweights = outputs
    if not runs_triton(hidden):
        gate, up = hidden[..., ::2], hidden[..., 1::2]
        g, u = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
        s = torch.sigmoid(g * clamp.alpha)
        a, scale = g * s, weights.flatten()[order][:, None]
        h, d = (u + 1) * a, (dh * scale).to(dh.dtype)
        dgate = torch.where(gate <= clamp.limit, d * (u + 1) * (s + clamp.alpha * a * (1 - s)), 0)
        dup = torch.where(up.abs() <= clamp.limit, d * a, 0)
        dhidden.copy_(torch.stack((dgate, dup), -1).flatten(-2))
        dweights.view(-1)[order] = (dh.float() * h).sum(-1).to(weights.dtype)
        weighted.copy_(h * scale)
    elif dh.numel():
        block, warps = BACKWARD
        block = min(block, triton.next_power_of_2(dh.shape[1]))
        args = hidden, dh, order, weights, dhidden, weighted, dweights, *clamp, dh.shape[1]
        _clamped_backward_kernel[(len(dh),)](*args, BLOCK=block, num_warps=warps)
