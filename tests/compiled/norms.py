"""Forms of `rms_norm` and `sandwich_norm`. N rows, C model dim."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.compiled.compiling import BF16, FP16, FP32, Forms, backward, zeros
from tigon.kernels import rms_norm, rms_norm_add, sandwich_norm
from tigon.kernels.linear.maxima import request_maxima
from tigon.kernels.norm.rms_norm import recompute_norm, recompute_sandwich


def forms() -> Forms:
    for name, options in RMS.items():
        yield f"rms_norm {name}", partial(_rms_norm, **options)
    yield "rms_norm again", lambda: recompute_norm(*_saved(), None, zeros(2048), 0.0, True)
    yield (
        "rms_norm again, gate",
        lambda: recompute_norm(*_saved(), zeros(8, 2048), None, 1.0, False),
    )
    for weight in (zeros(2048), None):
        yield (
            f"sandwich_norm again, {'norm' if weight is not None else 'sum'}",
            partial(_sandwich_again, weight),
        )
    yield "rms_norm_add bf16", _rms_norm_add
    yield "rms_norm with maxima", _with_maxima
    for name, options in SANDWICH.items():
        yield f"sandwich_norm {name}", partial(_sandwich_norm, **options)


def _saved() -> tuple[Tensor, Tensor]:
    return zeros(8, 2048), zeros(8, dtype=FP32)


def _sandwich_again(weight: Tensor | None) -> None:
    x, rstd = _saved()
    recompute_sandwich(x, x, rstd.repeat(2), zeros(2048), weight, 1.0, False)


def _rms_norm_add() -> None:
    x, residual = (zeros(8, 2048, grad=True) for _ in range(2))
    backward(rms_norm_add(x, residual, zeros(2048, grad=True), 1e-6))


def _with_maxima() -> None:
    x = zeros(8, 2048, grad=True)
    request_maxima(x)
    backward(rms_norm(x, zeros(2048, grad=True), 1e-6))


AFTER: dict[str, Any] = {"cast": "after_weight", "offset": 1.0}
RMS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp32": {"dtype": FP32, "weight": FP32},
    "fp16, fp32 weight": {"dtype": FP16, "weight": FP32},
    "after": AFTER,
    "no weight, residual": {"weight": None, "residual": True},
    "gate": {"gate": BF16},
    "gate, fp32 weight, residual": {"gate": BF16, "weight": FP32, "residual": True},
    "fp32 gate, after": AFTER | {"gate": FP32},
    "gate, no weight": {"gate": BF16, "weight": None},
    "narrow, gate, after": AFTER | {"C": 128, "gate": BF16},
    "narrow, gate of heads": {"C": 128, "gate": BF16, "heads": 4},
    "narrow, odd": {"C": 100, "residual": True},
    "odd": {"C": 1000},
    "wide": {"C": 8192, "residual": True},
    "one row": {"N": 1},
    "strided": {"strided": True},
    "only dx": {"wanted": ("x",)},
    "only the weight's gradient": {"wanted": ("weight",)},
    "gate, all but its gradient": {"gate": BF16, "wanted": ("x", "weight")},
    "inference, residual, gate": {"wanted": (), "residual": True, "gate": BF16},
    "large": {"N": 520, "wanted": ()},
}


def _rms_norm(
    N: int = 8,
    C: int = 2048,
    dtype: torch.dtype = BF16,
    weight: torch.dtype | None = BF16,
    residual: bool = False,
    gate: torch.dtype | None = None,
    strided: bool = False,
    heads: int = 0,  # of a token, whose gates are beside what else a projection has
    wanted: tuple[str, ...] = ("x", "weight", "gate"),
    **options: Any,
) -> None:
    x = zeros(N, C + 64 * strided, dtype=dtype)[:, :C].requires_grad_("x" in wanted)
    gates = None if gate is None else zeros(N, C, dtype=gate, grad="gate" in wanted)
    if heads:
        x = x.unflatten(0, (-1, heads))
        packed = zeros(N // heads, heads * C + 64, dtype=gate, grad=True)
        gates = packed[:, : heads * C].unflatten(-1, (heads, C))
    outputs: Any = rms_norm(
        x,
        None if weight is None else zeros(C, dtype=weight, grad="weight" in wanted),
        1e-6,
        residual=zeros(N, C, dtype=dtype) if residual else None,
        gate=gates,
        **options,
    )
    if wanted:
        backward(*outputs if residual else (outputs,))


SANDWICH: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp32, before": {"dtype": FP32, "weight": FP32, "cast": "before_weight", "offset": 0.0},
    "narrow, before, fp32 weight": {"C": 128, "cast": "before_weight", "weight": FP32},
    "odd, only the norm is used": {"C": 1152, "total": False},
    "one row": {"N": 1},
    "two eps": {"post_eps": 1e-8},
    "only the inputs' gradients": {"wanted": ("inputs",)},
    "only the weights' gradients": {"wanted": ("weights",)},
    "inference": {"wanted": ()},
}


def _sandwich_norm(
    N: int = 8,
    C: int = 2048,
    dtype: torch.dtype = BF16,
    weight: torch.dtype = BF16,
    total: bool = True,
    wanted: tuple[str, ...] = ("inputs", "weights"),
    **options: Any,
) -> None:
    x, residual = (zeros(N, C, dtype=dtype, grad="inputs" in wanted) for _ in range(2))
    weights = (zeros(C, dtype=weight, grad="weights" in wanted) for _ in range(2))
    outputs: Iterator[Tensor] = iter(sandwich_norm(x, residual, *weights, 1e-6, **options))
    if wanted:
        backward(*outputs if total else [next(outputs)])
