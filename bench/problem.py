"""What one case of the kernel benchmark is made of: tensors, providers, and the truth."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bench.timing import Run

Tensors = dict[str, Tensor]


@dataclass
class Provider:
    """One implementation. What a run of it overwrites is restored, untimed, before the next."""

    name: str
    make: Callable[[], Run]  # imports and compiles; the Run is the forward pass
    leaves: Tensors | None = None  # the problem's, if it has no layout of its own
    upstream: tuple[Tensor, ...] | None = None
    overwrites: tuple[Tensor, ...] = ()
    split: Callable[[Tensors], Tensors] = dict  # its results under the truth's names


@dataclass
class Problem:
    leaves: Tensors
    outputs: tuple[str, ...]
    upstream: tuple[Tensor, ...]  # gradients of the outputs; empty for a loss
    truth: Callable[[], Tensors]
    providers: list[Provider]
    gemms: dict[str, Run] = field(default_factory=dict)
    notes: dict[str, float] = field(default_factory=dict)


def truth(
    define: Callable[..., Any],  # (tensors by name, the rows they are) -> output or outputs
    rows: Tensors,
    shared: Tensors,
    outputs: tuple[str, ...],
    upstream: tuple[Tensor, ...],
    *,
    step: int,
    dtype: torch.dtype = torch.float64,
) -> Tensors:
    """Outputs and gradients of `define` by autograd, computed in `dtype`, `step` rows at a time."""
    results: Tensors = {}
    wide = {name: t.detach().to(dtype).requires_grad_() for name, t in shared.items()}
    count = next(iter(rows.values())).shape[0]

    def keep(name: str, part: Tensor, at: slice, *, total: bool) -> None:
        if total:
            results[name] = results.get(name, 0) + part
            return
        if name not in results:
            results[name] = part.new_empty(count, *part.shape[1:], dtype=torch.float32)
        results[name][at] = part

    for start in range(0, count, step):
        at = slice(start, start + step)
        leaves = {name: t.detach()[at].to(dtype).requires_grad_() for name, t in rows.items()}
        leaves |= wide
        out = as_tuple(define(leaves, at))
        grads = torch.autograd.grad(
            out, list(leaves.values()), [u[at].to(dtype) for u in upstream] or None
        )
        for name, value in zip(outputs, out, strict=True):
            keep(name, value.detach(), at, total=value.dim() == 0)
        for name, grad in zip(leaves, grads, strict=True):
            keep("d" + name, grad, at, total=name in shared)
    return {name: value.float() for name, value in results.items()}


def as_tuple(value: Any) -> tuple[Tensor, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def randn(*shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16).mul_(scale).add_(shift)


def leaf(*shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    return randn(*shape, scale=scale, shift=shift).requires_grad_()
