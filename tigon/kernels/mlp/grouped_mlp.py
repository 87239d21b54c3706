"""The MLPs of a mixture of experts: each token through the few that its router chose for it.

# N tokens, k experts per token, S rows (slots) sorted by expert: N k, less those that are absent,
# E experts, C model dim, I intermediate size; K the dimension summed over, O outputs of a product;
# r rank of what is added to gate_up, q of what is added to down

Transposed matrices are [E, C, 2I] and [E, I, C], as in gpt-oss. Experts may have biases, of which
that of down is multiplied by the weight, too.

With low-rank additions (LoRA) W_e becomes W_e + B_e A_e, which is never made: the rows that went to
an expert are multiplied with its A_e, and that with its B_e. Source: Hu et al. (arXiv 2106.09685),
for stacked matrices as PEFT has them (`target_parameters`). Backward saves the S rows of both
products with A, too; the sorted rows and the activation are computed again. Below fp32 A, B and
each of the products are in the dtype of x, sums are in fp32; what is added is rounded before.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels.mlp import grouped_product as products
from tigon.kernels.mlp.clamped_swiglu import (
    ClampedSwiGLU,
    clamped_swiglu,
    clamped_swiglu_backward,
    clamped_swiglu_ref,
)
from tigon.kernels.mlp.gated_act import (
    Activation,
    act_and_slope,
    check_act,
    gated_act,
    gated_act_ref,
)
from tigon.kernels.mlp.grouped_product import (
    experts_of_rows,
    grouped_bias_gradient,
    grouped_product,
    grouped_weight_gradient,
    product_by_row,
)
from tigon.kernels.mlp.permute import combine_rows, spread_rows
from tigon.kernels.mlp.slot_order import sort_slots
from tigon.kernels.recompute import find_recompute, run_recompute
from tigon.kernels.runtime import (
    autocast_dtype,
    check_devices,
    has_values,
    operator,
    refuse_second_derivative,
    runs_triton,
    tl,
    triton,
)

UNKNOWN_SLOTS = -1  # slots of which some may be absent, the host does not know how many
ACT = (1024, 4)  # columns and warps of one program: the best of some tried on an H200


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


ExpertActivation = Activation | ClampedSwiGLU


def _activate(hidden: Tensor, act: ExpertActivation) -> Tensor:
    """Returns [..., I] for [..., 2I], in plain torch."""
    if isinstance(act, ClampedSwiGLU):
        return clamped_swiglu_ref(hidden, act)
    return gated_act_ref(hidden, act)


def grouped_mlp_ref(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    experts: Tensor,
    weights: Tensor,
    act: ExpertActivation,
    slots: int | None = None,
    low: LoRAFactors | None = None,
    *,
    biases: ExpertBiases | None = None,
    transposed: bool = False,
) -> Tensor:
    """Returns `sum_j weights[n, j] * down[e] @ gated_act(gate_up[e] @ x[n])` with e = experts[n,
    j].

    Each product is in the input's dtype, the sum over j in fp32 and rounded once. With `slots`,
    that many of the experts are in [0, E), or UNKNOWN_SLOTS, and the rest are E: absent. With
    `low`, the matrices are sums; with `biases`, they are added to both products.
    """
    if low is not None:
        pairs = [(low.b_up, low.a_up), (low.b_down, low.a_down)]
        if transposed:
            pairs = [(a.mT, b.mT) for b, a in pairs]
        gate_up, down = (torch.baddbmm(w, *p) for w, p in zip((gate_up, down), pairs, strict=True))
    if not transposed:
        gate_up, down = gate_up.mT, down.mT  # [E, C, 2I] and [E, I, C]
    n, k = experts.shape
    flat = experts.flatten()
    if slots == UNKNOWN_SLOTS:
        slots = int((flat < len(gate_up)).sum())
    if slots is None and products.must_not_sync(x, n * k) and not torch.is_grad_enabled():
        # A step of decoding
        hidden = product_by_row(x.repeat_interleave(k, 0), gate_up, flat)
        hidden = hidden if biases is None else hidden + biases.gate_up[flat]
        y = product_by_row(_activate(hidden, act), down, flat)
        y = y if biases is None else y + biases.down[flat]
    else:
        order = flat.argsort(stable=True)[:slots]
        each = flat.bincount(minlength=len(gate_up))[: len(gate_up)]
        rows = x.index_select(0, order // k).split(each.tolist())
        # unbind: the gradient of all experts is stacked once; indexing would add one for each
        both = gate_up.unbind(), down.unbind()
        added = [(None,) * len(gate_up)] * 2 if biases is None else [b.unbind() for b in biases]
        parts = [
            _product_ref(_activate(_product_ref(r, g, b), act), d, c)
            for r, g, d, b, c in zip(rows, *both, *added, strict=True)
            if len(r) or not len(order)
        ]
        y = torch.cat(parts)
        y = y.new_zeros(n * k, x.shape[1]).index_copy(0, order, y)
    scale = _at_least_fp32(weights)[..., None]
    return (y.view(n, k, x.shape[1]) * scale).sum(1).to(y.dtype)


def _product_ref(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """Returns x [S, K] times [K, O], with the bias [O] added if there is one."""
    return x @ matrix if bias is None else torch.addmm(bias, x, matrix)


def _at_least_fp32(x: Tensor) -> Tensor:
    """Returns x in fp32, or in fp64 if it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@triton.jit
def _act_backward_kernel(
    gate_up, dh, order, weights, dgate_up, weighted, dweights,
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
        gate = tl.load(gate_up + row * 2 * I + cols, mask=keep, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * 2 * I + I + cols, mask=keep, other=0.0).to(tl.float32)
        d = tl.load(dh + row * I + cols, mask=keep, other=0.0).to(tl.float32)
        a, slope = act_and_slope(gate, ACT)
        a = a.to(dh.dtype.element_ty).to(tl.float32)
        h = (a * up).to(dh.dtype.element_ty).to(tl.float32)
        product += d * h
        d *= weight
        tl.store(weighted + row * I + cols, h * weight, mask=keep)
        tl.store(dgate_up + row * 2 * I + cols, d * up * slope, mask=keep)
        tl.store(dgate_up + row * 2 * I + I + cols, d * a, mask=keep)
    tl.store(dweights + slot, tl.sum(product))


def _act_backward(
    hidden: Tensor, dh: Tensor, order: Tensor, weights: Tensor, act: str, clamp: Sequence[float]
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns gradients of hidden [S, 2I] and of weights, and h times its weight [S, I]."""
    dhidden, weighted = torch.empty_like(hidden), torch.empty_like(dh)
    absent = len(order) < weights.numel()
    dweights = torch.zeros_like(weights) if absent else torch.empty_like(weights)
    if clamp:
        outputs = dhidden, weighted, dweights
        clamped_swiglu_backward(hidden, dh, order, weights, ClampedSwiGLU(*clamp), outputs)
    elif not runs_triton(hidden):
        gate, up = hidden.chunk(2, dim=-1)
        h, scale = gated_act_ref(hidden, cast(Activation, act)), weights.flatten()[order][:, None]
        dweights.view(-1)[order] = (_at_least_fp32(dh) * h).sum(-1).to(weights.dtype)
        weighted.copy_(h * scale)
        d = (dh * scale).to(dh.dtype)
        if act == "silu":
            a, dgate = F.silu(gate), torch.ops.aten.silu_backward(d * up, gate)
        else:
            options = "tanh" if act == "gelu_tanh" else "none"
            a = F.gelu(gate, approximate=options)
            dgate = torch.ops.aten.gelu_backward(d * up, gate, approximate=options)
        dhidden.copy_(torch.cat((dgate, d * a), -1))
    elif dh.numel():
        block, warps = ACT
        block = min(block, triton.next_power_of_2(dh.shape[1]))
        slots = (hidden, dh, order, weights, dhidden, weighted, dweights)
        _act_backward_kernel[(len(dh),)](*slots, dh.shape[1], ACT=act, BLOCK=block, num_warps=warps)
    return dhidden, weighted, dweights


def sorted_slots(
    experts: Tensor, number: int, slots: int | None, *, fused: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the order of the slots by expert [S], its inverse [N k], and where each expert ends.

    Experts equal to `number` are absent, all but `slots`; their inverse is S or more. With
    UNKNOWN_SLOTS S is N k, and the end of the order, after all ends, is absent.
    """
    order, inverse, ends = sort_slots(experts, number, slots is not None, fused=fused)
    if slots == UNKNOWN_SLOTS:
        return order, inverse.masked_fill_(experts.flatten() == number, len(order)), ends
    return (order if slots is None else order[:slots].clone()), inverse, ends


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


def _outputs(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    low: Sequence[Tensor],
    experts: Tensor,
    weights: Tensor,
    act: str,
    slots: int | None,
    biases: Sequence[Tensor],
    clamp: Sequence[float],
    transposed: bool,
) -> list[Tensor]:
    """Allocates the output and what backward needs: gate_up of the slots, and their order."""
    size = count_slots(experts, slots)
    widths = (2 * _widths(down, transposed)[1], *(a.shape[1] for a in low[::2]))
    numbers = [experts.new_empty(size), experts.new_empty(experts.numel())]
    ends = experts.new_empty(len(gate_up), dtype=torch.int32)
    return [torch.empty_like(x), *(x.new_empty(size, n) for n in widths), *numbers, ends]


def _widths(down: Tensor, transposed: bool) -> tuple[int, int]:
    """Returns C and I."""
    _, rows, columns = down.shape
    return (columns, rows) if transposed else (rows, columns)


def count_slots(experts: Tensor, slots: int | None) -> int:
    """Returns S: `slots`, or all N k if it is None or UNKNOWN_SLOTS."""
    return experts.numel() if slots in (None, UNKNOWN_SLOTS) else slots


@operator("grouped_mlp", _outputs)
def _forward(
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
    order, inverse, ends = sorted_slots(experts, len(gate_up), slots, fused=runs_triton(x))
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
    hidden: Tensor,
    low_rows: Sequence[Tensor],
    order: Tensor,
    inverse: Tensor,
    ends: Tensor,
    dy: Tensor,
    act: str,
    biases: Sequence[Tensor],
    *_: Any,
) -> list[Tensor]:
    """Allocates the needed gradients; the others are empty."""
    likes = zip((x, gate_up, down, weights, *low, *biases), needs_grad, strict=True)
    return [torch.empty_like(t) if want else t.new_empty(0) for t, want in likes]


@operator("grouped_mlp_backward", _gradients)
def _backward(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    low: list[Tensor],
    weights: Tensor,
    needs_grad: list[bool],  # of x, gate_up, down, weights, those of low and of biases
    hidden: Tensor,
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
    rows = spread_rows(dy, inverse, k, size)
    dh, dv = _product_backward(rows, down, low[2:], ends, transposed)
    dhidden, weighted, dweights = _act_backward(hidden, dh, order, weights, act, clamp)
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


def _weight_gradient(dy: Tensor, x: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    """Returns the gradient of the matrices of a product with sorted rows x [S, K], as stored."""
    pair = (x, dy) if transposed else (dy, x)
    return grouped_weight_gradient(*pair, ends)


def forward_workspace(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    low: Sequence[Tensor],
    experts: Tensor,
    weights: Tensor,
    act: str,
    slots: int | None = None,
    biases: Sequence[Tensor] = (),
    clamp: Sequence[float] = (),
    transposed: bool = False,
) -> int:
    """Returns the most bytes that `_forward` uses besides its outputs.

    These are h and its product per slot; with low-rank additions the sorted rows and the addition
    to gate_up, or h, its product and the addition to that.
    """
    c, inner = _widths(down, transposed)
    columns = max(c + 2 * inner, 2 * c + inner) if low else c + inner
    return count_slots(experts, slots) * columns * x.element_size()


def backward_workspace(x: Tensor, gate_up: Tensor, down: Tensor, *rest: Any) -> int:
    """Returns the most bytes that `_backward` uses besides its outputs, made one by one."""
    low, _, needs_grad, hidden, *_, transposed = rest
    c, inner = _widths(down, transposed)
    slots, size = len(hidden), x.element_size()
    if low:
        return slots * max(c + 4 * inner, 2 * c + 2 * inner) * size
    tensors = zip((x, gate_up, down), needs_grad, strict=False)
    outputs = sum(t.numel() * size for t, want in tensors if want)
    first = slots * (c + 4 * inner) * size - outputs  # in _act_backward
    return max(first, slots * (c + 2 * inner) * size)


class _GroupedMLP(torch.autograd.Function):
    """The experts' MLPs: saves gate_up per slot, and computes the rest again in backward."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        x, gate_up, down, experts, weights, act, slots, clamp, transposed, factors, *rest = args
        low, biases = rest[:factors], rest[factors:]
        form = biases, clamp, transposed
        y, *saved = _forward(x, gate_up, down, low, experts, weights, act, slots, *form)
        if (recompute := find_recompute(x)) is not None:
            recompute.keep_gate_up()
        ctx.form, ctx.counts = (act, clamp, transposed), (factors, len(biases))
        ctx.recompute_fn = None if recompute is None else recompute.fn
        saved_x = (x,) if recompute is None else recompute.saved
        ctx.save_for_backward(gate_up, down, weights, *low, *biases, *saved, *saved_x)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        needs, (factors, others) = ctx.needs_input_grad, ctx.counts
        needs_rest, products = needs[10:], factors // 2
        refuse_second_derivative("lora_grouped_mlp" if factors else "grouped_mlp")
        needs_grad = [*needs[:3], needs[4], *needs_rest]
        # Read once: with activation checkpointing they are there only once
        gate_up, down, weights, *rest = ctx.saved_tensors
        low, biases, rest = (
            rest[:factors],
            rest[factors : factors + others],
            rest[factors + others :],
        )
        hidden, *rest = rest
        low_rows, (order, inverse, ends, *saved_x) = rest[:products], rest[products:]
        dy = dy.contiguous()
        if ctx.recompute_fn is None:
            x = saved_x[0]
        elif needs_grad[1] or any(needs_rest[: min(factors, 1)]):
            x = run_recompute(ctx.recompute_fn, saved_x).view_as(dy)
        else:  # without the gradients of gate_up and A its shape and dtype alone are asked
            x = dy
        saved, (act, clamp, transposed) = (hidden, low_rows, order, inverse, ends), ctx.form
        given = gate_up, down, low, weights, needs_grad, *saved, dy, act, biases, clamp, transposed
        dx, dgate_up, ddown, dweights, *drest = (
            g if want else None for g, want in zip(_backward(x, *given), needs_grad, strict=True)
        )
        return dx, dgate_up, ddown, None, dweights, *[None] * 5, *drest


def grouped_mlp(
    x: Tensor,  # [N, C]
    gate_up: Tensor,  # [E, 2I, C]: of each expert gate first, then up
    down: Tensor,  # [E, C, I]
    experts: Tensor,  # [N, k] int64, in [0, E)
    weights: Tensor,  # [N, k], of any floating dtype
    act: ExpertActivation,
    *,
    biases: ExpertBiases | None = None,
    transposed: bool = False,
) -> Tensor:
    """Returns the weighted sum [N, C] of k gated MLPs for each token. No token is dropped.

    An expert that no token chose has gradients of 0. The down bias is weighted, too. If
    `transposed`, the matrices are [E, C, 2I] and [E, I, C]. Raises ValueError on shapes, dtypes and
    expert numbers that do not match. Source: the dropless mixture of experts of MegaBlocks (arXiv
    2211.15841), defined by `grouped_mlp_ref`.
    """
    _check(x, gate_up, down, experts, weights, act, biases, transposed)
    return unchecked_grouped_mlp(
        x, gate_up, down, experts, weights, act, biases=biases, transposed=transposed
    )


def unchecked_grouped_mlp(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    experts: Tensor,
    weights: Tensor,
    act: ExpertActivation,
    slots: int | None = None,
    low: LoRAFactors | None = None,
    *,
    biases: ExpertBiases | None = None,
    transposed: bool = False,
) -> Tensor:
    """`grouped_mlp` of valid expert numbers, as those of topk are: their check is six launches.

    With `slots`, that many are in [0, E), and the rest are E: absent. With UNKNOWN_SLOTS nothing
    waits to learn how many, and there is no backward pass. `low` is added to the matrices.
    """
    dtype = autocast_dtype(x.device) or (None if low is None else x.dtype)
    if dtype is not None:
        x, gate_up, down = x.to(dtype), gate_up.to(dtype), down.to(dtype)
    if not x.dtype == gate_up.dtype == down.dtype:
        raise ValueError(
            f"x is {x.dtype}, gate_up {gate_up.dtype} and down {down.dtype}: cast them to one"
        )
    low = None if low is None else LoRAFactors(*(t.to(x.dtype) for t in low))
    biases = None if biases is None else ExpertBiases(*(t.to(x.dtype) for t in biases))
    # Plain torch has to know how many rows each expert has
    if runs_triton(x) or not has_values(x):
        tensors = (t.contiguous() for t in (x, gate_up, down, experts, weights))
        factors = () if low is None else (*pad_rank(low[:2]), *pad_rank(low[2:]))
        name, clamp = ("", [*act]) if isinstance(act, ClampedSwiGLU) else (act, [])
        rest = [t.contiguous() for t in (*factors, *(biases or ()))]
        form = name, slots, clamp, transposed, len(factors)
        return _GroupedMLP.apply(*tensors, *form, *rest)
    options: dict[str, Any] = {"biases": biases, "transposed": transposed}
    return grouped_mlp_ref(x, gate_up, down, experts, weights, act, slots, low, **options)


def pad_rank(factors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Pads A [E, r, K] and B [E, O, r] with zeros to a rank whose rows are whole 16 bytes."""
    a, b = factors
    padding = -a.shape[1] % (16 // a.element_size())
    return (F.pad(a, (0, 0, 0, padding)), F.pad(b, (0, padding))) if padding else (a, b)


def _check(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    experts: Tensor,
    weights: Tensor,
    act: ExpertActivation,
    biases: ExpertBiases | None,
    transposed: bool,
) -> None:
    """Raises ValueError unless tokens, experts' matrices, indices and weights fit each other."""
    if not isinstance(act, ClampedSwiGLU):
        check_act(act)
    dims = (x.dim(), gate_up.dim(), down.dim(), experts.dim(), weights.dim())
    fits = dims == (2, 3, 3, 2, 2) and experts.shape == weights.shape and experts.shape[1] > 0
    if fits:
        (n, c), e, (width, inner) = x.shape, len(down), _widths(down, transposed)
        shape = (e, c, 2 * inner) if transposed else (e, 2 * inner, c)
        fits = experts.shape[0] == n and gate_up.shape == shape and width == c
    if not fits:
        shapes = {"x": x, "gate_up": gate_up, "down": down, "experts": experts, "weights": weights}
        raise ValueError(
            ", ".join(f"{name} {tuple(t.shape)}" for name, t in shapes.items())
            + (
                " are not [N, C], [E, C, 2I], [E, I, C], [N, k] and [N, k]"
                if transposed
                else " are not [N, C], [E, 2I, C], [E, C, I], [N, k] and [N, k]"
            )
        )
    found = None if biases is None else [tuple(b.shape) for b in biases]
    if found not in (None, [(e, 2 * inner), (e, c)]):
        raise ValueError(f"biases {found} are not [{(e, 2 * inner)}, {(e, c)}]")
    check_devices(x=x, gate_up=gate_up, down=down, experts=experts, weights=weights)
    if experts.dtype != torch.int64 or not weights.is_floating_point():
        raise ValueError(
            f"experts is {experts.dtype}, weights {weights.dtype}: they must be int64 and floating"
        )
    bad = (experts < 0) | (experts >= len(gate_up))
    if x.device.type != "cpu" or not has_values(experts):
        torch._assert_async(~bad.any(), f"an expert is not in [0, {len(gate_up)})")
    elif bad.any():
        token, j = bad.nonzero()[0].tolist()
        raise ValueError(
            f"expert {experts[token, j].item()} at {[token, j]} is not in [0, {len(gate_up)})"
        )
