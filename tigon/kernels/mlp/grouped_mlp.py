"""The MLPs of a mixture of experts: each token through the few that its router chose for it.

# N tokens, k experts per token, S rows (slots) sorted by expert: N k, less those that are absent,
# E experts, C model dim, I intermediate size; K the dimension summed over, O outputs of a product;
# r rank of what is added to gate_up, q of what is added to down

Transposed matrices are [E, C, 2I] and [E, I, C], as in gpt-oss. Experts may have biases, of which
that of down is multiplied by the weight, too.

With low-rank additions (LoRA) W_e becomes W_e + B_e A_e, which is never made: the rows that went to
an expert are multiplied with its A_e, and that with its B_e. Source: Hu et al. (arXiv 2106.09685),
for stacked matrices as PEFT has them (`target_parameters`). Below fp32 A, B and each of the
products are in the dtype of x, sums are in fp32; what is added is rounded before.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels.mlp import grouped_product as products
from tigon.kernels.mlp.clamped_swiglu import ClampedSwiGLU, clamped_swiglu_ref
from tigon.kernels.mlp.gated_act import Activation, check_act, gated_act_ref
from tigon.kernels.mlp.grouped_mlp_passes import (
    UNKNOWN_SLOTS,
    ExpertBiases,
    LoRAFactors,
    expert_widths,
    grouped_mlp_backward,
    grouped_mlp_forward,
)
from tigon.kernels.mlp.grouped_product import product_by_row
from tigon.kernels.recompute import find_recompute, run_recompute, save_input
from tigon.kernels.runtime import (
    autocast_dtype,
    check_devices,
    has_values,
    refuse_second_derivative,
    runs_triton,
)

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
    scale = weights.to(torch.promote_types(weights.dtype, torch.float32))[..., None]
    return (y.view(n, k, x.shape[1]) * scale).sum(1).to(y.dtype)


def _product_ref(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """Returns x [S, K] times [K, O], with the bias [O] added if there is one."""
    return x @ matrix if bias is None else torch.addmm(bias, x, matrix)


class _GroupedMLP(torch.autograd.Function):
    """The experts' MLPs: saves gate_up per slot unless told otherwise, and computes the rest again
    in backward."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        x, gate_up, down, experts, weights, act, slots, clamp, transposed, *rest = args
        recompute_gate_up, factors, *rest = rest
        low, biases = rest[:factors], rest[factors:]
        form = biases, clamp, transposed
        y, *saved = grouped_mlp_forward(x, gate_up, down, low, experts, weights, act, slots, *form)
        if recompute_gate_up:
            saved[0] = None
        ctx.form, ctx.counts = (act, clamp, transposed), (factors, len(biases))
        ctx.recompute_fn, saved_x = save_input(x, find_recompute(x))
        ctx.save_for_backward(gate_up, down, weights, *low, *biases, *saved, *saved_x)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        needs, (factors, others) = ctx.needs_input_grad, ctx.counts
        needs_rest, products = needs[11:], factors // 2
        refuse_second_derivative("lora_grouped_mlp" if factors else "grouped_mlp")
        needs_grad = [*needs[:3], needs[4], *needs_rest]
        # Read once: with activation checkpointing they are there only once
        gate_up, down, weights, *rest = ctx.saved_tensors
        low, biases = rest[:factors], rest[factors : factors + others]
        hidden, *rest = rest[factors + others :]
        low_rows, (order, inverse, ends, *saved_x) = rest[:products], rest[products:]
        dy = dy.contiguous()
        # Without the gradients of gate_up and A the shape and dtype of x alone are asked
        needs_numbers = hidden is None or needs_grad[1] or any(needs_rest[: min(factors, 1)])
        x = run_recompute(ctx.recompute_fn, saved_x).view_as(dy) if needs_numbers else dy
        saved, (act, clamp, transposed) = (hidden, low_rows, order, inverse, ends), ctx.form
        given = gate_up, down, low, weights, needs_grad, *saved, dy, act, biases, clamp, transposed
        computed = zip(grouped_mlp_backward(x, *given), needs_grad, strict=True)
        dx, dgate_up, ddown, dweights, *drest = (g if want else None for g, want in computed)
        return dx, dgate_up, ddown, None, dweights, *[None] * 6, *drest


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
    recompute_gate_up: bool = False,
) -> Tensor:
    """`grouped_mlp` of valid expert numbers, as those of topk are: their check is six launches.

    With `slots`, that many are in [0, E), and the rest are E: absent. With UNKNOWN_SLOTS nothing
    waits to learn how many, and there is no backward pass. `low` is added to the matrices. With
    `recompute_gate_up`, backward computes gate_up per slot again, the same bits in less memory;
    plain torch keeps it.
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
        form = name, slots, clamp, transposed, recompute_gate_up, len(factors)
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
        (n, c), e, (width, inner) = x.shape, len(down), expert_widths(down, transposed)
        shape = (e, c, 2 * inner) if transposed else (e, 2 * inner, c)
        fits = experts.shape[0] == n and gate_up.shape == shape and width == c
    if not fits:
        shapes = {"x": x, "gate_up": gate_up, "down": down, "experts": experts, "weights": weights}
        found = ", ".join(f"{name} {tuple(t.shape)}" for name, t in shapes.items())
        matrices = "[E, C, 2I], [E, I, C]" if transposed else "[E, 2I, C], [E, C, I]"
        raise ValueError(f"{found} are not [N, C], {matrices}, [N, k] and [N, k]")
    given = None if biases is None else [tuple(b.shape) for b in biases]
    if given not in (None, [(e, 2 * inner), (e, c)]):
        raise ValueError(f"biases {given} are not [{(e, 2 * inner)}, {(e, c)}]")
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
