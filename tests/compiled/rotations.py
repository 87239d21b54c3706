"""Forms of `rope` and `qk_norm_rope`. B batch, T tokens, H query heads, K kv heads, D head dim."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.compiled.compiling import BF16, FP32, Forms, backward, zeros
from tigon.kernels import qk_norm_rope, rope


def forms() -> Forms:
    for name, options in LAYOUTS.items():
        yield f"rope {name}", partial(_rope, **options)
        yield f"qk_norm_rope in place, {name}", partial(_qk_norm_rope, overwrite=True, **options)
        if name in ("bf16", "interleaved, partial", "one token"):  # rope has the others
            yield f"qk_norm_rope {name}", partial(_qk_norm_rope, **options)
    for name, options in NORMS.items():
        yield f"qk_norm_rope normed, {name}", partial(_qk_norm_rope, **SMALL | options)


LAYOUTS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp32": {"dtype": FP32},
    "interleaved": {"interleaved": True},
    "partial": {"rotated": 64},
    "interleaved, partial": {"interleaved": True, "rotated": 64},
    "narrow": {"H": 2, "K": 1, "D": 32},  # fewer numbers than threads
    "one token": {"B": 1, "T": 1},
}
WEIGHTED: dict[str, Any] = {"weight": BF16}
AFTER: dict[str, Any] = {"cast": "after_weight", "offset": 1.0}
SMALL: dict[str, Any] = {"H": 4, "K": 2, "D": 64}  # takes a third of the time to compile
NORMS: dict[str, dict[str, Any]] = {
    "bf16": WEIGHTED | {"H": 16, "K": 8, "D": 128},
    "fp32, after": AFTER | {"weight": FP32, "dtype": FP32},
    "interleaved, fp32 weight": {"weight": FP32, "interleaved": True},
    "partial": WEIGHTED | {"rotated": 32},
    "after, interleaved, partial": AFTER | WEIGHTED | {"interleaved": True, "rotated": 32},
    "frozen weights, partial": WEIGHTED | {"frozen": True, "rotated": 32},
    "one token, one head": WEIGHTED | {"B": 1, "T": 1, "H": 1, "K": 1},
}


def _angles(T: int, rotated: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return zeros(1, T, rotated // 2, dtype=dtype), zeros(1, T, rotated // 2, dtype=dtype)


def _rope(
    B: int = 2,
    T: int = 8,
    H: int = 16,
    K: int = 8,
    D: int = 128,
    rotated: int | None = None,
    dtype: torch.dtype = BF16,
    interleaved: bool = False,
) -> None:
    q, k = (zeros(B, T, heads, D, dtype=dtype, grad=True) for heads in (H, K))
    backward(*rope(q, k, *_angles(T, rotated or D, dtype), interleaved=interleaved))


def _qk_norm_rope(
    B: int = 2,
    T: int = 8,
    H: int = 16,
    K: int = 8,
    D: int = 128,
    rotated: int | None = None,
    dtype: torch.dtype = BF16,
    weight: torch.dtype | None = None,
    frozen: bool = False,
    **options: Any,
) -> None:
    qkv = zeros(B, T, (H + 2 * K) * D, dtype=dtype, grad=True)
    if weight is not None:
        for name in ("q_weight", "k_weight"):
            options[name] = zeros(D, dtype=weight, grad=not frozen)
    outputs = qk_norm_rope(
        qkv * 1, *_angles(T, rotated or D, dtype), heads=H, kv_heads=K, **options
    )
    if not options.get("overwrite"):  # whose backward pass is the same
        backward(*outputs)
