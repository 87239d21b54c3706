"""The gate between attention and its output projection, as in Qwen3-Next and Qwen3.5.

# ... any leading dimensions, C columns
"""

from typing import Any

import torch
from torch import Tensor

from tigon.kernels.mlp.gated_act import BACKWARD, FORWARD, launch_columns, program_columns
from tigon.kernels.recompute import note_recompute
from tigon.kernels.runtime import (
    as_rows,
    check_devices,
    operator,
    pdl_options,
    pdl_wait,
    refuse_second_derivative,
    runs_triton,
    tl,
    triton,
)


def sigmoid_gate_ref(x: Tensor, gate: Tensor) -> Tensor:
    """`x * sigmoid(gate)`; the sigmoid is rounded to its dtype, as transformers does."""
    return x * gate.sigmoid()


@triton.jit
def _forward_kernel(
    x, gate, y, x_row, gate_row, size, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Writes x * sigmoid(gate) of some columns of a row."""
    pdl_wait(PDL)
    row, cols = program_columns(size, BLOCK)
    keep = cols < size
    value = tl.load(x + row * x_row + cols, mask=keep, other=0.0).to(tl.float32)
    z = tl.load(gate + row * gate_row + cols, mask=keep, other=0.0).to(tl.float32)
    s = tl.sigmoid(z).to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + row * size + cols, value * s, mask=keep)


@triton.jit
def _backward_kernel(
    dy, x, gate, dx, dgate, dy_row, x_row, gate_row, size, BLOCK: tl.constexpr
):  # fmt: skip
    """Writes both gradients of some columns of a row."""
    row, cols = program_columns(size, BLOCK)
    keep = cols < size
    d = tl.load(dy + row * dy_row + cols, mask=keep, other=0.0).to(tl.float32)
    value = tl.load(x + row * x_row + cols, mask=keep, other=0.0).to(tl.float32)
    z = tl.load(gate + row * gate_row + cols, mask=keep, other=0.0).to(tl.float32)
    s = tl.sigmoid(z)
    rounded = s.to(dx.dtype.element_ty).to(tl.float32)
    tl.store(dx + row * size + cols, d * rounded, mask=keep)
    tl.store(dgate + row * size + cols, d * value * s * (1 - s), mask=keep)


def _output(x: Tensor, *_: Any) -> Tensor:
    """Allocates the product [..., C]."""
    return x.new_empty(x.shape)


@operator("sigmoid_gate", _output)
def _forward(x: Tensor, gate: Tensor) -> Tensor:
    """Returns x * sigmoid(gate), by the kernel."""
    y = _output(x)
    if y.numel():
        rows, gates, size = as_rows(x), as_rows(gate), x.shape[-1]
        launch = launch_columns(size, FORWARD)
        grid = (len(rows) * triton.cdiv(size, launch["BLOCK"]),)
        strides = rows.stride(0), gates.stride(0)
        _forward_kernel[grid](rows, gates, y, *strides, size, **launch, **pdl_options(x))
    return y


def _gradients(dy: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Allocates the gradients of x and gate."""
    return dy.new_empty(dy.shape), dy.new_empty(dy.shape)


@operator("sigmoid_gate_backward", _gradients)
def _backward(dy: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x and gate, by the kernel."""
    gradients = _gradients(dy)
    if dy.numel():
        inputs, size = [as_rows(t) for t in (dy, x, gate)], dy.shape[-1]
        launch = launch_columns(size, BACKWARD)
        grid = (len(inputs[0]) * triton.cdiv(size, launch["BLOCK"]),)
        strides = (t.stride(0) for t in inputs)
        _backward_kernel[grid](*inputs, *gradients, *strides, size, **launch)
    return gradients


class _SigmoidGate(torch.autograd.Function):
    """`sigmoid_gate` by kernels: saves what attention and the gate's projection keep anyway."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(x, gate)
        return _forward(x, gate)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        refuse_second_derivative("sigmoid_gate")
        dx, dgate = _backward(dy, *ctx.saved_tensors)
        return dx, dgate


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Returns `x * sigmoid(gate)` for x and gate [..., C], the gated output of attention.

    A product of it recomputes it in backward. Source: Qiu et al. 2025 (arXiv 2505.06708). Raises
    ValueError for other shapes.
    """
    check_devices(x=x, gate=gate)
    if x.shape != gate.shape:
        raise ValueError(f"gate {tuple(gate.shape)} does not fit x {tuple(x.shape)}")
    if not (runs_triton(x) and gate.dtype == x.dtype):
        return sigmoid_gate_ref(x, gate)
    y: Tensor = _SigmoidGate.apply(x, gate)
    if y.requires_grad and not torch.compiler.is_compiling():
        note_recompute(y, _forward, (x, gate))
    return y
