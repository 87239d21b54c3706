"""Forms of the gated delta rule.

# B batch, T tokens, S packed sequences, K key heads, H value heads, D head dim
"""

from functools import partial
from typing import Any

import torch

from tests.compiled.compiling import BF16, FP16, FP32, INT32, Forms, backward, zeros
from tigon.kernels import delta_gates, gated_delta_rule, gated_delta_step


def forms() -> Forms:
    for name, options in FORMS.items():
        yield f"gated_delta_rule {name}", partial(_rule, **options)
    for H, dtype in (32, BF16), (5, FP16), (32, FP32):
        for learns in (True, False):
            yield f"delta_gates {H} {dtype} {learns}", partial(_delta_gates, H, dtype, learns)
    for name, options in STEPS.items():
        yield f"gated_delta_step {name}", partial(_step, **options)


FORMS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp16, packed, states": {"dtype": FP16, "S": 2, "states": True},
    "fp32, narrow": {"dtype": FP32, "D": 24},
    "fp32": {"dtype": FP32},
    "few heads": {"K": 1, "H": 1, "D": 64},
    "few heads, fp16": {"K": 1, "H": 1, "D": 96, "dtype": FP16},
    "rows that are no boxes": {"D": 20},
}
STEPS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp32, several tokens": {"dtype": FP32, "T": 4},
    "large": {"B": 128},
}


def _gates(B: int, T: int, H: int, dtype: torch.dtype, grad: bool) -> dict[str, Any]:
    return {
        "g": zeros(B, T, H, dtype=FP32, grad=grad),
        "beta": zeros(B, T, H, dtype=dtype, grad=grad),
    }


def _delta_gates(H: int, dtype: torch.dtype, learns: bool) -> None:
    """Of columns of a projection."""
    a, b = zeros(1, 192, 8 * H, dtype=dtype, grad=True)[..., : 2 * H].chunk(2, -1)
    parameters = (zeros(H, dtype=FP32, grad=learns) for _ in "Ad")
    backward(*delta_gates(a, b, *parameters))


def _rule(
    B: int = 1,
    T: int = 192,
    S: int = 0,
    K: int = 2,
    H: int = 4,
    D: int = 128,
    dtype: torch.dtype = BF16,
    states: bool = False,
) -> None:
    q, k = (zeros(B, T, K, D, dtype=dtype, grad=True) for _ in "qk")
    v = zeros(B, T, H, D, dtype=dtype, grad=True)
    bounds = torch.linspace(0, T, S + 1).to(INT32) if S else None
    state = zeros(S or B, H, D, D, dtype=FP32) if states else None
    o, final = gated_delta_rule(
        q, k, v, **_gates(B, T, H, dtype, True), cu_seqlens=bounds, state=state
    )
    backward(*(o, final) if states else (o,))


def _step(
    B: int = 2, T: int = 1, K: int = 16, H: int = 32, D: int = 128, dtype: torch.dtype = BF16
) -> None:
    q, k = (zeros(B, T, K, D, dtype=dtype) for _ in "qk")
    v, state = zeros(B, T, H, D, dtype=dtype), zeros(B, H, D, D, dtype=FP32)
    gated_delta_step(q, k, v, **_gates(B, T, H, dtype, False), state=state)
