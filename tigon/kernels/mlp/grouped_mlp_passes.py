"""The forward and the backward pass of a mixture of experts, over rows sorted by expert.

# N tokens, k experts per token, S rows (slots) sorted by expert: N k, less those that are absent,
# E experts, C model dim, I intermediate size; K the dimension summed over, O outputs of a product;
# r rank of what is added to gate_up, q of what is added to down

Backward has gate_up per slot, or computes it again, and, of low-rank additions, the S rows of both
products with A; the sorted rows and the activation are computed again.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from tigon.kernels.mlp.clamped_swiglu import ClampedSwiGLU, clamped_swiglu
from tigon.kernels.mlp.gated_act import SLOT, Activation, gated_act, weighted_act_backward
from tigon.kernels.mlp.grouped_product import (
    experts_of_rows,
    grouped_bias_gradient,
    grouped_product,
    grouped_weight_gradient,
)
from tigon.kernels.mlp.permute import combine_rows, spread_rows
from tigon.kernels.mlp.slot_order import sort_slots
from tigon.kernels.runtime import operator, runs_triton

UNKNOWN_SLOTS = -1  # slots of which some may be absent, the host does not know how many


class LoRAFactors(NamedTuple):
    """The low-rank factors of the experts' matrices; ranks may be 0."""

    a_up: Tensor  # [E, r, C]
    b_up: Tensor  # [E, 2I, r], with its scale
    a_down: Tensor  # [E, q, I]
    b_down: Tensor  # [E, C, q], with its scale


class ExpertBiases(NamedTuple):
    """The biases of the experts' matrices."""

    gate_up: Tensor  # [E, 2I]
    down: Tensor  # [E, C]


def _product(
    x: Tensor,
    w: Tensor,
    factors: Sequence[Tensor],
    ends: Tensor,
    transposed: bool,
    bias: Tensor | None,
) -> tuple[Tensor, list[Tensor]]:
    """Returns x (W_e + B_e A_e)^T plus a bias of sorted rows, and x A_e^T if there are factors."""
    y = grouped_product(x, w, ends, transposed=transposed, bias=bias)
    if not factors:
        return y, []
    a, b = factors
    if not a.shape[1]:
        return y, [x.new_empty(len(x), 0)]
    u = grouped_product(x, a, ends)
    return y.add_(grouped_product(u, b, ends)), [u]


def _product_backward(
    dy: Tensor, w: Tensor, factors: Sequence[Tensor], ends: Tensor, transposed: bool
) -> tuple[Tensor, Tensor]:
    """Returns dy (W_e + B_e A_e) of sorted rows, and dy B_e, which is empty without factors."""
    dx = grouped_product(dy, w, ends, transposed=not transposed)
    if not factors or not factors[0].shape[1]:
        return dx, dy.new_empty(0)
    a, b = factors
    du = grouped_product(dy, b, ends, transposed=True)
    return dx.add_(grouped_product(du, a, ends, transposed=True)), du


def _weight_gradient(dy: Tensor, x: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    """Returns the gradient of the matrices of a product with sorted rows x [S, K], as stored."""
    pair = (x, dy) if transposed else (dy, x)
    return grouped_weight_gradient(*pair, ends)


def _act_backward(
    hidden: Tensor, dh: Tensor, order: Tensor, weights: Tensor, act: str, clamp: Sequence[float],
    *, overwrite: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns gradients of hidden [S, 2I], over itself if `overwrite` and they may be, and of
    weights, and h times its weight [S, I]."""
    # With more threads than numbers in a row, one may read what another has written
    overwrite &= dh.shape[1] >= 32 * SLOT[1]
    dhidden, weighted = hidden if overwrite else torch.empty_like(hidden), torch.empty_like(dh)
    absent = len(order) < weights.numel()
    dweights = torch.zeros_like(weights) if absent else torch.empty_like(weights)
    outputs = dhidden, weighted, dweights
    form = ClampedSwiGLU(*clamp) if clamp else cast(Activation, act)
    weighted_act_backward(hidden, dh, order, weights, form, outputs)
    return outputs


def _outputs(
    x: Tensor, gate_up: Tensor, down: Tensor, low: Sequence[Tensor], experts: Tensor, *rest: Any
) -> list[Tensor]:
    """Allocates the output and what backward needs: gate_up of the slots, and their order."""
    _, _, slots, *_, transposed = rest
    size = count_slots(experts, slots)
    widths = (2 * expert_widths(down, transposed)[1], *(a.shape[1] for a in low[::2]))
    numbers = [experts.new_empty(size), experts.new_empty(experts.numel())]
    ends = experts.new_empty(len(gate_up), dtype=torch.int32)
    return [torch.empty_like(x), *(x.new_empty(size, n) for n in widths), *numbers, ends]


def expert_widths(down: Tensor, transposed: bool) -> tuple[int, int]:
    """Returns C and I."""
    _, rows, columns = down.shape
    return (columns, rows) if transposed else (rows, columns)


def count_slots(experts: Tensor, slots: int | None) -> int:
    """Returns S: `slots`, or all N k if it is None or UNKNOWN_SLOTS."""
    return experts.numel() if slots in (None, UNKNOWN_SLOTS) else slots


@operator("grouped_mlp", _outputs)
def grouped_mlp_forward(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    low: list[Tensor],  # the fields of `LoRAFactors`, or empty
    experts: Tensor,
    weights: Tensor,
    act: str,  # of no meaning with `clamp`
    slots: int | None,
    biases: list[Tensor],  # the fields of `ExpertBiases`, or empty
    clamp: list[float],  # the fields of `ClampedSwiGLU`, or empty
    transposed: bool,
) -> list[Tensor]:
    """Returns the output and, for backward, per slot gate_up and products with A, and the order."""
    k, (up_bias, down_bias) = experts.shape[1], biases or (None, None)
    number, absent, fused = len(gate_up), slots is not None, runs_triton(x)
    order, inverse, ends = sort_slots(experts, number, absent, fused=fused)
    if slots == UNKNOWN_SLOTS:  # S is N k, and the end of the order is absent
        inverse.masked_fill_(experts.flatten() == number, len(order))
    elif slots is not None:  # absent slots come last: their inverse is S or more
        order = order[:slots].clone()
    rows = spread_rows(x, inverse, k, len(order))
    hidden, u = _product(rows, gate_up, low[:2], ends, transposed, up_bias)
    del rows
    if clamp:
        h = clamped_swiglu(hidden, ClampedSwiGLU(*clamp))
    else:
        h = gated_act(hidden, cast(Activation, act))
    y, v = _product(h, down, low[2:], ends, transposed, down_bias)
    return [combine_rows(y, inverse, weights, k), hidden, *u, *v, order, inverse, ends]


def _gradients(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    low: Sequence[Tensor],
    weights: Tensor,
    needs_grad: list[bool],
    *rest: Any,
) -> list[Tensor]:
    """Allocates the needed gradients; the others are empty."""
    biases = rest[-3]
    likes = zip((x, gate_up, down, weights, *low, *biases), needs_grad, strict=True)
    return [torch.empty_like(t) if want else t.new_empty(0) for t, want in likes]


@operator("grouped_mlp_backward", _gradients)
def grouped_mlp_backward(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    low: list[Tensor],
    weights: Tensor,
    needs_grad: list[bool],  # of x, gate_up, down, weights, those of low and of biases
    hidden: Tensor | None,  # gate_up per slot; None: computed again
    low_rows: list[Tensor],  # both products with A
    order: Tensor,
    inverse: Tensor,
    ends: Tensor,
    dy: Tensor,  # [N, C]
    act: str,
    biases: list[Tensor],
    clamp: list[float],
    transposed: bool,
) -> list[Tensor]:
    """Returns the gradients that are needed; the rest are empty."""
    inputs = {"x": x, "gate_up": gate_up, "down": down, "weights": weights}
    inputs |= zip(LoRAFactors._fields, low, strict=False)
    inputs |= zip(("up_bias", "down_bias"), biases, strict=False)
    needs = dict(zip(inputs, needs_grad, strict=True))
    needed = {name for name, t in inputs.items() if needs[name] and t.numel()}
    k, size = weights.shape[1], len(order)
    if owned := hidden is None:
        form = low[:2], ends, transposed, biases[0] if biases else None
        hidden, _ = _product(spread_rows(x, inverse, k, size), gate_up, *form)
    rows = spread_rows(dy, inverse, k, size)
    dh, dv = _product_backward(rows, down, low[2:], ends, transposed)
    dhidden, weighted, dweights = _act_backward(
        hidden, dh, order, weights, act, clamp, overwrite=owned
    )
    gradients = {"weights": dweights}
    del dh
    if biases and "weights" in needed:
        shares = (dy @ biases[1].mT)[order // k, experts_of_rows(ends, size)]
        dweights.view(-1)[order] += shares.to(dweights.dtype)
    if "up_bias" in needed:
        gradients["up_bias"] = grouped_bias_gradient(dhidden, None, ends)
    if "down_bias" in needed:
        gradients["down_bias"] = grouped_bias_gradient(rows, weights.flatten()[order], ends)
    if "down" in needed:
        gradients["down"] = _weight_gradient(rows, weighted, ends, transposed)
    if "a_down" in needed:
        gradients["a_down"] = grouped_weight_gradient(dv, weighted, ends)
    if "b_down" in needed:
        v = (low_rows[1] * weights.flatten()[order, None]).to(dv.dtype)
        gradients["b_down"] = grouped_weight_gradient(rows, v, ends)
    del rows, weighted
    if "x" in needed or low:
        dx, du = _product_backward(dhidden, gate_up, low[:2], ends, transposed)
        if "x" in needed:
            gradients["x"] = combine_rows(dx, inverse, None, k)
        del dx
    if "b_up" in needed:
        gradients["b_up"] = grouped_weight_gradient(dhidden, low_rows[0], ends)
    if needed & {"gate_up", "a_up"}:
        rows = spread_rows(x, inverse, k, size)
        if "gate_up" in needed:
            gradients["gate_up"] = _weight_gradient(dhidden, rows, ends, transposed)
        if "a_up" in needed:
            gradients["a_up"] = grouped_weight_gradient(du, rows, ends)
    return [
        gradients[name] if name in needed else t.new_zeros(t.shape if needs[name] else 0)
        for name, t in inputs.items()
    ]


def forward_workspace(
    x: Tensor, gate_up: Tensor, down: Tensor, low: Sequence[Tensor], experts: Tensor, *rest: Any
) -> int:
    """Returns the most bytes that `grouped_mlp_forward` uses besides its outputs.

    These are h and its product per slot; with low-rank additions the sorted rows and the addition
    to gate_up, or h, its product and the addition to that.
    """
    _, _, slots, *_, transposed = rest
    c, inner = expert_widths(down, transposed)
    columns = max(c + 2 * inner, 2 * c + inner) if low else c + inner
    return count_slots(experts, slots) * columns * x.element_size()


def backward_workspace(x: Tensor, gate_up: Tensor, down: Tensor, *rest: Any) -> int:
    """Returns the most bytes that `grouped_mlp_backward` uses besides its outputs: no more if it
    computes gate_up again, which the gradient overwrites."""
    low, _, needs_grad, _, _, order, *_, transposed = rest
    c, inner = expert_widths(down, transposed)
    slots, size = len(order), x.element_size()
    if low:
        return slots * max(c + 4 * inner, 2 * c + 2 * inner) * size
    tensors = zip((x, gate_up, down), needs_grad, strict=False)
    outputs = sum(t.numel() * size for t, want in tensors if want)
    first = slots * (c + 4 * inner) * size - outputs  # in _act_backward
    return max(first, slots * (c + 2 * inner) * size)
