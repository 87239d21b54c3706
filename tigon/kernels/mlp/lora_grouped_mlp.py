"""The MLPs of a mixture of experts with low-rank additions (LoRA), one for each expert's matrix.

# N tokens, k experts per token, S slots sorted by expert: N k, less those that are absent,
# E experts, C model dim, I intermediate size, r rank of what is added to gate_up, q of what is
# added to down

W_e becomes W_e + B_e A_e, which is never made: the rows that went to an expert are multiplied with
its A_e, and that with its B_e. Source: Hu et al. (arXiv 2106.09685), for stacked matrices as PEFT
has them (`target_parameters`). Backward keeps what `grouped_mlp` does and the S rows of both
products with A; where a gradient needs the sorted rows or the activation, they are computed again.

Rounding, below fp32: A, B, and each of the products are in the dtype of x, sums are in fp32; what
is added is rounded before it is added.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels.mlp.gated_act import Activation, gated_act
from tigon.kernels.mlp.grouped_mlp import (
    _act_backward,
    count_slots,
    grouped_mlp_ref,
    grouped_product,
    grouped_weight_gradient,
    sorted_slots,
)
from tigon.kernels.mlp.permute import combine_rows, spread_rows
from tigon.kernels.recompute import find_recompute, run_recompute
from tigon.kernels.runtime import (
    autocast_dtype,
    has_values,
    operator,
    refuse_second_derivative,
    runs_triton,
)


class LoRAFactors(NamedTuple):
    """The low-rank factors of the experts' matrices; ranks may be 0."""

    a_up: Tensor  # [E, r, C]
    b_up: Tensor  # [E, 2I, r], with its scale
    a_down: Tensor  # [E, q, I]
    b_down: Tensor  # [E, C, q], with its scale


def lora_grouped_mlp_ref(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    low: LoRAFactors,
    experts: Tensor,
    weights: Tensor,
    act: Activation,
    slots: int | None = None,
) -> Tensor:
    """The definition: `grouped_mlp_ref` of the sums of matrices."""
    gate_up = torch.baddbmm(gate_up, low.b_up, low.a_up)
    down = torch.baddbmm(down, low.b_down, low.a_down)
    return grouped_mlp_ref(x, gate_up, down, experts, weights, act, slots)


def _product(x: Tensor, w: Tensor, a: Tensor, b: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Returns x (W_e + B_e A_e)^T of sorted rows, and x A_e^T."""
    y = grouped_product(x, w, ends)
    if not a.shape[1]:
        return y, x.new_empty(len(x), 0)
    u = grouped_product(x, a, ends)
    return y.add_(grouped_product(u, b, ends)), u


def _product_backward(
    dy: Tensor, w: Tensor, a: Tensor, b: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Returns dy (W_e + B_e A_e) of sorted rows, and dy B_e."""
    dx = grouped_product(dy, w, ends, transposed=True)
    if not a.shape[1]:
        return dx, None
    du = grouped_product(dy, b, ends, transposed=True)
    return dx.add_(grouped_product(du, a, ends, transposed=True)), du


def _outputs(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    low: list[Tensor],
    experts: Tensor,
    weights: Tensor,
    act: str,
    slots: int | None,
) -> list[Tensor]:
    size = count_slots(experts, slots)
    wide = [x.new_empty(size, n) for n in (gate_up.shape[1], low[0].shape[1], low[2].shape[1])]
    numbers = [experts.new_empty(size), experts.new_empty(experts.numel())]
    return [torch.empty_like(x), *wide, *numbers, experts.new_empty(len(down), dtype=torch.int32)]


@operator("lora_grouped_mlp", _outputs)
def _forward(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    low: list[Tensor],
    experts: Tensor,
    weights: Tensor,
    act: str,
    slots: int | None,
) -> list[Tensor]:
    """Returns the output and, for backward, per slot gate_up and both products with A, and the
    order.
    """
    k, (a_up, b_up, a_down, b_down) = experts.shape[1], low
    order, inverse, ends = sorted_slots(experts, len(gate_up), slots)
    hidden, u = _product(spread_rows(x, inverse, k, len(order)), gate_up, a_up, b_up, ends)
    y, v = _product(gated_act(hidden, cast(Activation, act)), down, a_down, b_down, ends)
    return [combine_rows(y, inverse, weights, k), hidden, u, v, order, inverse, ends]


def _gradients(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    low: list[Tensor],
    weights: Tensor,
    needs_grad: list[bool],
    *_: Any,
) -> list[Tensor]:
    likes = (x, gate_up, down, weights, *low)
    return [
        torch.empty_like(t) if want else t.new_empty(0)
        for t, want in zip(likes, needs_grad, strict=True)
    ]


@operator("lora_grouped_mlp_backward", _gradients)
def _backward(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    low: list[Tensor],
    weights: Tensor,
    needs_grad: list[bool],  # of x, gate_up, down, weights and the four of low
    hidden: Tensor,
    u: Tensor,
    v: Tensor,
    order: Tensor,
    inverse: Tensor,
    ends: Tensor,
    dy: Tensor,  # [N, C]
    act: str,
) -> list[Tensor]:
    """Returns the gradients that are needed; the rest are empty."""
    k, (a_up, b_up, a_down, b_down) = weights.shape[1], low
    gradients: list[Tensor | None] = [None] * len(needs_grad)
    rows = spread_rows(dy, inverse, k, len(order))
    dh, dv = _product_backward(rows, down, a_down, b_down, ends)
    dhidden, weighted, dweights = _act_backward(hidden, dh, order, weights, act)
    del dh
    if needs_grad[2]:
        gradients[2] = grouped_weight_gradient(rows, weighted, ends)
    if dv is not None:
        if needs_grad[6]:
            gradients[6] = grouped_weight_gradient(dv, weighted, ends)
        if needs_grad[7]:
            v = (v * weights.flatten()[order, None]).to(v.dtype)
            gradients[7] = grouped_weight_gradient(rows, v, ends)
    del rows, weighted
    dx, du = _product_backward(dhidden, gate_up, a_up, b_up, ends)
    if needs_grad[0]:
        gradients[0] = combine_rows(dx, inverse, None, k)
    del dx
    if du is not None and needs_grad[5]:
        gradients[5] = grouped_weight_gradient(dhidden, u, ends)
    if needs_grad[1] or (du is not None and needs_grad[4]):
        rows = spread_rows(x, inverse, k, len(order))
        gradients[1] = grouped_weight_gradient(dhidden, rows, ends) if needs_grad[1] else None
        gradients[4] = grouped_weight_gradient(du, rows, ends) if du is not None else None
    gradients[3] = dweights if needs_grad[3] else None
    likes = (x, gate_up, down, weights, *low)
    return [
        t.new_zeros(t.shape if want else 0) if d is None else d
        for t, d, want in zip(likes, gradients, needs_grad, strict=True)
    ]


def forward_workspace(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    low: list[Tensor],
    experts: Tensor,
    weights: Tensor,
    act: str,
    slots: int | None = None,
) -> int:
    """Returns the most bytes that `_forward` uses besides its outputs.

    These are the sorted rows and the addition to gate_up, or the activation, its product and the
    addition to that.
    """
    c, inner = down.shape[1:]
    return count_slots(experts, slots) * max(c + 2 * inner, 2 * c + inner) * x.element_size()


def backward_workspace(x: Tensor, gate_up: Tensor, down: Tensor, *rest: Any) -> int:
    """Returns the most bytes that `_backward` uses besides its outputs."""
    _, _, _, hidden, *_ = rest
    c, inner = down.shape[1:]
    return len(hidden) * max(c + 4 * inner, 2 * c + 2 * inner) * x.element_size()


class _LoRAGroupedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, act: str, slots: int | None, *args: Tensor) -> Tensor:
        x, gate_up, down, experts, weights, *low = args
        y, *saved = _forward(x, gate_up, down, low, experts, weights, act, slots)
        if (recompute := find_recompute(x)) is not None:
            recompute.keep_gate_up()
        ctx.act, ctx.recompute_fn = act, None if recompute is None else recompute.fn
        saved_x = (x,) if recompute is None else recompute.saved
        ctx.save_for_backward(gate_up, down, weights, *low, *saved, *saved_x)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("lora_grouped_mlp")
        _, _, *needs = ctx.needs_input_grad
        needs_grad = [*needs[:3], *needs[4:]]
        # Read once: with activation checkpointing they are there only once
        gate_up, down, weights, *rest = ctx.saved_tensors
        low, saved, saved_x = rest[:4], rest[4:10], rest[10:]
        dy = dy.contiguous()
        if ctx.recompute_fn is None:
            x = saved_x[0]
        else:  # without the gradients of gate_up and A its shape and dtype alone are asked
            x = (
                run_recompute(ctx.recompute_fn, saved_x).view_as(dy)
                if needs_grad[1] or needs_grad[4]
                else dy
            )
        grads = _backward(x, gate_up, down, low, weights, needs_grad, *saved, dy, ctx.act)
        gradients = [g if want else None for g, want in zip(grads, needs_grad, strict=True)]
        return None, None, *gradients[:3], None, *gradients[3:]


def lora_grouped_mlp(
    x: Tensor,  # [N, C]
    gate_up: Tensor,  # [E, 2I, C]: of each expert gate first, then up
    down: Tensor,  # [E, C, I]
    low: LoRAFactors,
    experts: Tensor,  # [N, k] int64, in [0, E), not checked
    weights: Tensor,  # [N, k], of any floating dtype
    act: Activation,
    slots: int | None = None,
) -> Tensor:
    """`grouped_mlp` with low-rank matrices added to those of the experts: [N, C].

    With `slots`, that many experts are in [0, E), and the rest are E: absent. Defined by
    `lora_grouped_mlp_ref`, which also runs where plain torch does.
    """
    dtype = autocast_dtype(x.device) or x.dtype
    x, gate_up, down = x.to(dtype), gate_up.to(dtype), down.to(dtype)
    low = LoRAFactors(*(t.to(dtype) for t in low))
    if not (runs_triton(x) or not has_values(x)):
        return lora_grouped_mlp_ref(x, gate_up, down, low, experts, weights, act, slots)
    low = LoRAFactors(*pad_rank(low[:2]), *pad_rank(low[2:]))
    tensors = (x, gate_up, down, experts, weights, *low)
    y: Tensor = _LoRAGroupedMLP.apply(act, slots, *(t.contiguous() for t in tensors))
    return y


def pad_rank(factors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Pads A [E, r, K] and B [E, O, r] with zeros to a rank whose rows are whole 16 bytes."""
    a, b = factors
    padding = -a.shape[1] % (16 // a.element_size())
    return (F.pad(a, (0, 0, 0, padding)), F.pad(b, (0, padding))) if padding else (a, b)
