"""Gated activation of an MLP: SwiGLU and GeGLU, on the packed output of one projection.

# ... any leading dimensions, I intermediate size; of experts N tokens, k slots of each, S of all
"""

from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels.mlp.clamped_swiglu import (
    ClampedSwiGLU,
    clamped_and_slope,
    clamped_swiglu_backward_ref,
    load_pairs,
)
from tigon.kernels.recompute import GatedInputs, note_recompute
from tigon.kernels.runtime import (
    as_rows,
    is_watched,
    operator,
    owns_storage,
    pdl_options,
    pdl_wait,
    refuse_second_derivative,
    retains_graph,
    runs_triton,
    tl,
    triton,
)

Activation = Literal["silu", "gelu", "gelu_tanh"]
ACTIVATIONS = get_args(Activation)

# Columns and warps of one program: at most 8 elements of each factor per thread, 16 bytes of bf16
FORWARD = (1024, 4)
BACKWARD = (1024, 8)
SLOT = (1024, 4)  # of one slot of a mixture of experts: the best of some tried on an H200


def act_fn(x: Tensor, act: Activation) -> Tensor:
    """`act(x)`, in plain torch."""
    if act == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if act == "gelu_tanh" else "none")


def gated_act_ref(gate_up: Tensor, act: Activation) -> Tensor:
    """`act(gate) * up`; each factor is rounded to the input's dtype, as transformers does."""
    gate, up = gate_up.chunk(2, dim=-1)
    return act_fn(gate, act) * up


@triton.jit
def act_and_slope(x, ACT: tl.constexpr):
    """Returns the activation of fp32 numbers, and its derivative."""
    if ACT == "silu":
        s = tl.sigmoid(x)
        y = x * s
        slope = s + y * (1 - s)
    elif ACT == "gelu":
        s = 0.5 * (1 + tl.erf(0.7071067811865476 * x))
        y = x * s
        slope = s + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    else:  # (1 + tanh(z)) / 2 is sigmoid(2z)
        s = tl.sigmoid(1.5957691216057308 * x * (1 + 0.044715 * x * x))
        y = x * s
        slope = s + y * (1 - s) * 1.5957691216057308 * (1 + 0.134145 * x * x)
    return y, slope


@triton.jit
def gated_gradients(d, gate, up, dtype: tl.constexpr, ACT: tl.constexpr):
    """Returns gradients of gate and up, and act(gate) * up, in fp32; only act is rounded."""
    a, slope = act_and_slope(gate, ACT)
    a = a.to(dtype).to(tl.float32)
    return d * up * slope, d * a, a * up


@triton.jit
def program_columns(size, BLOCK: tl.constexpr):
    """Returns row and columns of a program; neighboring programs walk along a row."""
    blocks = tl.cdiv(size, BLOCK)
    row = tl.program_id(0) // blocks
    columns = (tl.program_id(0) - row * blocks) * BLOCK + tl.arange(0, BLOCK)
    return row.to(tl.int64), columns


@triton.jit
def _gated_act_kernel(x, y, x_row, size, ACT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Writes act(gate) * up of some columns of a row to y."""
    pdl_wait(PDL)
    row, cols = program_columns(size, BLOCK)
    keep = cols < size
    gate = tl.load(x + row * x_row + cols, mask=keep, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_row + size + cols, mask=keep, other=0.0).to(tl.float32)
    a, _ = act_and_slope(gate, ACT)
    a = a.to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + row * size + cols, a * up, mask=keep)


@triton.jit
def _gated_act_backward_kernel(
    dy, x, dx, y, dy_row, x_row, dx_row, size, ACT: tl.constexpr, BLOCK: tl.constexpr
):
    """Writes the gradients of gate and up to dx and, unless y is None, act(gate) * up to y."""
    # dx may be x, and y dy: every element is read and written by one thread, as both have the
    # same layout
    row, cols = program_columns(size, BLOCK)
    keep = cols < size
    d = tl.load(dy + row * dy_row + cols, mask=keep, other=0.0).to(tl.float32)
    gate = tl.load(x + row * x_row + cols, mask=keep, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_row + size + cols, mask=keep, other=0.0).to(tl.float32)
    d_gate, d_up, product = gated_gradients(d, gate, up, dx.dtype.element_ty, ACT)
    tl.store(dx + row * dx_row + cols, d_gate, mask=keep)
    tl.store(dx + row * dx_row + size + cols, d_up, mask=keep)
    if y is not None:
        tl.store(y + row * size + cols, product, mask=keep)


def launch_columns(size: int, choice: tuple[int, int]) -> dict[str, int]:
    """Returns block and warps for `size` columns: narrow rows take a smaller program."""
    block, warps = choice
    fit = min(block, triton.next_power_of_2(size))
    return {"BLOCK": fit, "num_warps": max(1, warps * fit // block)}


def _output(gate_up: Tensor, *_: Any) -> Tensor:
    """Allocates the product [..., I]."""
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


@operator("gated_act", _output)
def _forward(gate_up: Tensor, act: str) -> Tensor:
    """Returns act(gate) * up [..., I], by the kernel."""
    y = _output(gate_up)
    if y.numel():
        x, size = as_rows(gate_up), y.shape[-1]
        launch = launch_columns(size, FORWARD)
        grid = (x.shape[0] * triton.cdiv(size, launch["BLOCK"]),)
        _gated_act_kernel[grid](x, y, x.stride(0), size, ACT=act, **launch, **pdl_options(x))
    return y


def _gradient(dy: Tensor, gate_up: Tensor, *_: Any) -> Tensor:
    """Allocates the gradient of gate_up."""
    return gate_up.new_empty(gate_up.shape)


@operator("gated_act_backward", _gradient)
def _backward(dy: Tensor, gate_up: Tensor, act: str) -> Tensor:
    """Returns the gradient of gate_up [..., 2 I] in new memory, by the kernel."""
    out = _gradient(dy, gate_up)
    _backward_into(out, None, dy, gate_up, act)
    return out


def _backward_into(
    out: Tensor, product: Tensor | None, dy: Tensor, gate_up: Tensor, act: str
) -> None:
    """Writes the gradient of `gate_up` to `out`, and the forward result to `product` unless None.

    `out` is contiguous and may be `gate_up`; `product` may be a contiguous `dy`. On meta it does
    nothing.
    """
    if dy.numel() and not dy.is_meta:
        d, x, size = as_rows(dy), as_rows(gate_up), dy.shape[-1]
        launch = launch_columns(size, BACKWARD)
        grid = (x.shape[0] * triton.cdiv(size, launch["BLOCK"]),)
        strides = d.stride(0), x.stride(0), 2 * size
        _gated_act_backward_kernel[grid](d, x, out, product, *strides, size, ACT=act, **launch)


@triton.jit
def _act_backward_kernel(
    gate_up, dh, order, weights, dgate_up, weighted, dweights,
    alpha, limit,  # of a clamped SwiGLU; else None
    I,  # noqa: E741
    ACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Differentiates one slot's weight and activation.

    dh is the gradient of h = act(gate) * up for a weight of 1: the weight's gradient is their
    product, so that the output of `down` need not be saved.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(order + row)
    weight = tl.load(weights + slot).to(tl.float32)
    product = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, I, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        keep = cols < I
        if ACT == "clamped":
            gate, up = load_pairs(gate_up, row, start, I, BLOCK)
        else:
            gate = tl.load(gate_up + row * 2 * I + cols, mask=keep, other=0.0).to(tl.float32)
            up = tl.load(gate_up + row * 2 * I + I + cols, mask=keep, other=0.0).to(tl.float32)
        d = tl.load(dh + row * I + cols, mask=keep, other=0.0).to(tl.float32)
        if ACT == "clamped":
            a, slope, factor = clamped_and_slope(gate, up, alpha, limit)
        else:
            a, slope = act_and_slope(gate, ACT)
            a, factor = a.to(dh.dtype.element_ty).to(tl.float32), up
        h = (a * factor).to(dh.dtype.element_ty).to(tl.float32)
        product += d * h
        d *= weight
        tl.store(weighted + row * I + cols, h * weight, mask=keep)
        if ACT == "clamped":
            dgate = tl.where(gate <= limit, d * factor * slope, 0.0)
            dup = tl.where(tl.abs(up) <= limit, d * a, 0.0)
            both = 2 * start + tl.arange(0, 2 * BLOCK)
            tl.store(dgate_up + row * 2 * I + both, tl.interleave(dgate, dup), mask=both < 2 * I)
        else:
            tl.store(dgate_up + row * 2 * I + cols, d * factor * slope, mask=keep)
            tl.store(dgate_up + row * 2 * I + I + cols, d * a, mask=keep)
    tl.store(dweights + slot, tl.sum(product))


def weighted_act_backward(
    hidden: Tensor,  # [S, 2I]
    dh: Tensor,  # [S, I]: of the activation of weight 1
    order: Tensor,  # [S], of each row its slot in `weights`
    weights: Tensor,  # [N, k]
    act: Activation | ClampedSwiGLU,
    outputs: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Fills `outputs`: gradients of `hidden`, the activation times its weight, those of `weights`.

    A step of `grouped_mlp`. All are contiguous.
    """
    dhidden, weighted, dweights = outputs
    if not runs_triton(hidden):
        scale = weights.flatten()[order][:, None]
        d = (dh * scale).to(dh.dtype)
        if isinstance(act, ClampedSwiGLU):
            h, dgate_up = clamped_swiglu_backward_ref(hidden, d, act)
        else:
            gate, up = hidden.chunk(2, dim=-1)
            a = act_fn(gate, act)
            if act == "silu":
                dgate = torch.ops.aten.silu_backward(d * up, gate)
            else:
                form = "tanh" if act == "gelu_tanh" else "none"
                dgate = torch.ops.aten.gelu_backward(d * up, gate, approximate=form)
            h, dgate_up = a * up, torch.cat((dgate, d * a), -1)
        wide = torch.promote_types(dh.dtype, torch.float32)
        dweights.view(-1)[order] = (dh.to(wide) * h).sum(-1).to(weights.dtype)
        weighted.copy_(h * scale)
        dhidden.copy_(dgate_up)
    elif dh.numel():
        block, warps = SLOT
        block = min(block, triton.next_power_of_2(dh.shape[1]))
        clamp, name = (act, "clamped") if isinstance(act, ClampedSwiGLU) else ((None, None), act)
        args = hidden, dh, order, weights, dhidden, weighted, dweights, *clamp, dh.shape[1]
        _act_backward_kernel[(len(dh),)](*args, ACT=name, BLOCK=block, num_warps=warps)


def _can_overwrite(gate_up: Tensor, overwrite: bool) -> bool:
    """Whether this backward pass may write over `gate_up`, if the caller allows `overwrite`."""
    # Another backward pass of a graph that is retained may need gate_up
    return overwrite and not retains_graph() and gate_up.is_contiguous()


def gradient_memory(gate_up: Tensor, overwrite: bool) -> Tensor:
    """Returns memory for the gradient of `gate_up`: its own, if possible."""
    if not _can_overwrite(gate_up, overwrite):
        return _gradient(gate_up, gate_up)
    torch.autograd.graph.increment_version(gate_up)
    return gate_up.detach()


def gradient_and_product(
    dy: Tensor, gate_up: Tensor, act: Activation, overwrite: bool
) -> tuple[Tensor, Tensor]:
    """Returns the gradient of `gate_up` and, written over `dy`, the forward result, in one pass.

    `dy` is contiguous and belongs to the caller.
    """
    if is_watched(dy):  # modes see ops, and ops alias no input
        return _backward(dy, gate_up, act), _forward(gate_up, act)
    gradient = gradient_memory(gate_up, overwrite)
    with torch.cuda.device_of(gradient):
        _backward_into(gradient, dy, dy, gate_up, act)
    return gradient, dy


class _GatedAct(torch.autograd.Function):
    """`gated_act`, whose backward writes over gate_up if `overwrite` and the graph allow it."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, act: Activation, overwrite: bool) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.act, ctx.overwrite = act, overwrite
        return _forward(gate_up, act)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        refuse_second_derivative("gated_act")
        (gate_up,) = ctx.saved_tensors
        # Modes see ops, which alias no input. Dynamo overwrites nothing, so it is asked first
        if not _can_overwrite(gate_up, ctx.overwrite) or is_watched(dy):
            return _backward(dy, gate_up, ctx.act), None, None
        gradient = gradient_memory(gate_up, ctx.overwrite)
        with torch.cuda.device_of(gradient):
            _backward_into(gradient, None, dy, gradient, ctx.act)
        return gradient, None, None


def check_act(act: str) -> None:
    if act not in ACTIVATIONS:
        raise ValueError(f"act={act!r} is not one of {ACTIVATIONS}")


def gated_act(
    gate_up: Tensor,  # [..., 2I]: gate first, then up
    act: Activation,
    *,
    overwrite: bool = False,
) -> Tensor:
    """Returns `act(gate) * up` [..., I]. Source: Shazeer 2020 (arXiv 2002.05202).

    With `overwrite` the caller promises that nothing else reads `gate_up`: a backward pass that
    does not retain the graph may write the gradient over it.
    """
    check_act(act)
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up {tuple(gate_up.shape)} has no two halves: make its end even")
    if not runs_triton(gate_up):
        return gated_act_ref(gate_up, act)
    compiling = torch.compiler.is_compiling()
    overwrite = overwrite and not compiling and owns_storage(gate_up)
    y = _GatedAct.apply(gate_up, act, overwrite)
    if not compiling and y.requires_grad:
        note_recompute(y, _forward, (gate_up,), act, gated=GatedInputs(gate_up, act, y.grad_fn))
    return y
