"""The choice of a mixture's router: probabilities of all experts, and the best of them.

In torch's operations it is ten launches forward and as many backward, of a few microseconds each.

# N tokens, E experts, k of them per token
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.kernels.runtime import (
    next_power_of_2,
    operator,
    refuse_second_derivative,
    runs_triton,
    tl,
    triton,
)

SCORES, MOST_ROWS, MOST_WARPS = 512, 32, 8  # numbers of a warp; rows and warps of a program


class TopExperts(NamedTuple):
    """What a router chooses for each token."""

    probs: Tensor  # [N, E] fp32, sum to 1
    experts: Tensor  # [N, k] int64, the largest first
    weights: Tensor  # [N, k], their probabilities, or shares of the sum of these


def softmax_topk_ref(
    logits: Tensor, k: int, *, normalize: bool, dtype: torch.dtype | None = None
) -> TopExperts:
    """Returns the softmax of logits [N, E] in fp32, and its k largest: the definition."""
    probs = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    weights, experts = probs.topk(k)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return TopExperts(probs, experts, weights if dtype is None else weights.to(dtype))


@triton.jit
def _forward_kernel(
    logits, probs, experts, weights, N, E,
    K: tl.constexpr, SLOTS: tl.constexpr, NORMALIZE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Takes a token's largest probability k times."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    keep = (row < N)[:, None] & (column < E)
    at = row[:, None] * E + column
    x = tl.load(logits + at, mask=keep, other=0.0).to(tl.float32)
    x = tl.where(column < E, x, float("-inf"))
    exponential = tl.exp(x - tl.max(x, 1)[:, None])
    p = exponential / tl.sum(exponential, 1)[:, None]
    tl.store(probs + at, p, mask=keep)
    # As in torch's topk, NaN is larger than any number, so that all choices are experts
    left = tl.where(column < E, tl.where(p == p, p, 2.0), -2.0)
    slot = tl.arange(0, SLOTS)[None, :]
    values = tl.zeros((ROWS, SLOTS), tl.float32)
    numbers = tl.zeros((ROWS, SLOTS), tl.int32)
    for j in tl.static_range(K):
        value = tl.max(left, 1)
        best = tl.min(tl.where(left == value[:, None], column, BLOCK), 1)  # of equal ones the first
        left = tl.where(column == best[:, None], -1.0, left)
        value = tl.where(value > 1.0, float("nan"), value)
        values = tl.where(slot == j, value[:, None], values)
        numbers = tl.where(slot == j, best[:, None], numbers)
    if NORMALIZE:
        values /= tl.sum(values, 1)[:, None]
    at, keep = row[:, None] * K + slot, (row < N)[:, None] & (slot < K)
    tl.store(experts + at, numbers.to(tl.int64), mask=keep)
    tl.store(weights + at, values, mask=keep)


@triton.jit
def _backward_kernel(
    dprobs, dweights, probs, experts, dlogits, N, E,
    K: tl.constexpr, NORMALIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds the gradients of the chosen probabilities to those of all, and goes through softmax.

    dprobs is None where no loss reads them.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    keep = (row < N)[:, None] & (column < E)
    at = row[:, None] * E + column
    p = tl.load(probs + at, mask=keep, other=0.0)
    total = tl.zeros((ROWS,), tl.float32)
    product = tl.zeros((ROWS,), tl.float32)
    if NORMALIZE:
        for j in tl.static_range(K):
            expert = tl.load(experts + row * K + j, mask=row < N, other=0)
            value = tl.load(probs + row * E + expert, mask=row < N, other=1.0)
            dweight = tl.load(dweights + row * K + j, mask=row < N, other=0.0).to(tl.float32)
            total += value
            product += value * dweight
        product /= total
    d = tl.zeros((ROWS, BLOCK), tl.float32)
    if dprobs is not None:
        d += tl.load(dprobs + at, mask=keep, other=0.0)
    for j in tl.static_range(K):
        expert = tl.load(experts + row * K + j, mask=row < N, other=-1)
        dweight = tl.load(dweights + row * K + j, mask=row < N, other=0.0).to(tl.float32)
        if NORMALIZE:
            dweight = (dweight - product) / total
        d += tl.where(column == expert[:, None], dweight[:, None], 0.0)
    d = p * (d - tl.sum(p * d, 1)[:, None])
    tl.store(dlogits + at, d, mask=keep)


def _tile(experts: int) -> dict[str, int]:
    """Returns the rows and columns of a program: one warp, unless a row is too long for it."""
    columns = next_power_of_2(experts)
    rows = max(1, min(MOST_ROWS, SCORES // columns))
    warps = max(1, min(MOST_WARPS, rows * columns // SCORES))
    return {"ROWS": rows, "BLOCK": columns, "num_warps": warps}


def _choice(
    logits: Tensor, k: int, normalize: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocates probabilities, experts and weights."""
    probs = logits.new_empty(logits.shape, dtype=torch.float32)
    experts = logits.new_empty(logits.shape[0], k, dtype=torch.int64)
    return probs, experts, logits.new_empty(experts.shape, dtype=dtype)


@operator("softmax_topk", _choice)
def _forward(
    logits: Tensor, k: int, normalize: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns probabilities, experts and weights of contiguous logits, by the kernel."""
    outputs, (n, e) = _choice(logits, k, normalize, dtype), logits.shape
    if n:
        tile = _tile(e) | {"SLOTS": next_power_of_2(k)}
        grid = (triton.cdiv(n, tile["ROWS"]),)
        _forward_kernel[grid](logits, *outputs, n, e, K=k, NORMALIZE=normalize, **tile)
    return outputs


def _gradient(dweights: Tensor, dprobs: Tensor | None, probs: Tensor, *rest: Any) -> Tensor:
    """Allocates the gradient of the logits."""
    return probs.new_empty(probs.shape, dtype=rest[-1])


@operator("softmax_topk_backward", _gradient)
def _backward(
    dweights: Tensor,
    dprobs: Tensor | None,
    probs: Tensor,
    experts: Tensor,
    normalize: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Returns the gradient of the logits, in their dtype, by the kernel."""
    dlogits, (n, e) = probs.new_empty(probs.shape, dtype=dtype), probs.shape
    if n:
        tile, k = _tile(e), experts.shape[1]
        given = dprobs, dweights, probs, experts, dlogits, n, e
        grid = (triton.cdiv(n, tile["ROWS"]),)
        _backward_kernel[grid](*given, K=k, NORMALIZE=normalize, **tile)
    return dlogits


class _SoftmaxTopK(torch.autograd.Function):
    """`softmax_topk` by kernels: saves the probabilities and the choice."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, k: int, normalize: bool, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        probs, experts, weights = _forward(logits, k, normalize, dtype)
        ctx.save_for_backward(probs, experts)
        ctx.form = normalize, logits.dtype
        ctx.mark_non_differentiable(experts)
        return probs, experts, weights

    @staticmethod
    def backward(
        ctx: Any, dprobs: Tensor | None, _: None, dweights: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        refuse_second_derivative("softmax_topk")
        probs, experts = ctx.saved_tensors
        if dweights is None:
            if dprobs is None:
                return None, None, None, None
            dweights = probs.new_zeros(experts.shape)
        dprobs = None if dprobs is None else dprobs.contiguous()
        return _backward(dweights.contiguous(), dprobs, probs, experts, *ctx.form), None, None, None


def softmax_topk(
    logits: Tensor,  # [N, E]
    k: int,
    *,
    normalize: bool,
    dtype: torch.dtype | None = None,
) -> TopExperts:
    """Returns the probabilities of all experts in fp32, and the k largest of each token.

    The weights are these, made to sum to 1 with `normalize`, in fp32 or rounded to `dtype`. Of
    equal probabilities the kernel takes the first, torch any. Raises ValueError unless logits are
    [N, E] and k is in [1, E].
    """
    if logits.dim() != 2 or not 1 <= k <= logits.shape[1]:
        raise ValueError(f"logits {tuple(logits.shape)}, k={k}: not [N, E] and k in [1, E]")
    if not runs_triton(logits):
        return softmax_topk_ref(logits, k, normalize=normalize, dtype=dtype)
    dtype = torch.float32 if dtype is None else dtype
    return TopExperts(*_SoftmaxTopK.apply(logits.contiguous(), k, normalize, dtype))
