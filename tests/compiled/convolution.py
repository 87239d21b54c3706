"""Forms of `causal_conv` and `causal_conv_qkv`. B batch, T tokens, C channels, W taps."""

from functools import partial
from typing import Any

import torch

from tests.compiled.compiling import BF16, FP16, FP32, Forms, backward, zeros
from tigon.kernels import causal_conv, causal_conv_qkv


def forms() -> Forms:
    for name, options in FORMS.items():
        yield f"causal_conv {name}", partial(_causal_conv, **options)


PACKED: dict[str, Any] = {"starts": True, "state": True}
QKV: dict[str, Any] = {"key_heads": 2, "key_dim": 128}
FORMS: dict[str, dict[str, Any]] = {
    "bf16": {"W": 3},
    "fp32, silu": {"dtype": FP32, "weight": FP32, "activation": "silu"},
    "fp16, fp32 weight, packed": PACKED | {"dtype": FP16, "weight": FP32},
    "odd": {"C": 1000, "T": 7},
    "narrow": {"C": 24, "T": 70},
    "only dx": {"wanted": ("x",)},
    "only the weight's gradient, packed": PACKED | {"wanted": ("weight",)},
    "state learns": PACKED | {"wanted": ("x", "state")},
    "qkv, bf16": QKV | {"B": 4, "T": 512},
    "qkv, packed": QKV | PACKED | {"wanted": ("x", "weight", "state")},
    "qkv, heads of 96": QKV | {"key_dim": 96, "dtype": FP32},
    "qkv, strided": QKV | {"strided": True},
    "qkv, inference": QKV | {"wanted": (), "T": 512},
    "qkv, step": QKV | {"wanted": (), "state": True, "T": 1, "update_state": True},
    "step": {"wanted": (), "state": True, "T": 5, "W": 3, "update_state": True},
    "large": {"wanted": (), "T": 4096},
}


def _causal_conv(
    B: int = 2,
    T: int = 64,
    C: int = 1024,
    W: int = 4,
    dtype: torch.dtype = BF16,
    weight: torch.dtype = BF16,
    starts: bool = False,
    state: bool = False,
    strided: bool = False,
    wanted: tuple[str, ...] = ("x", "weight"),
    **options: Any,
) -> None:
    x = zeros(B, T, C + 64 * strided, dtype=dtype)[..., :C].requires_grad_("x" in wanted)
    function: Any = causal_conv_qkv if "key_heads" in options else causal_conv
    outputs = function(
        x,
        zeros(C, W, dtype=weight, grad="weight" in wanted),
        starts=zeros(B, T, dtype=torch.bool) if starts else None,
        state=zeros(B, W - 1, C, dtype=dtype, grad="state" in wanted) if state else None,
        **options,
    )
    if wanted:
        backward(*outputs if isinstance(outputs, tuple) else (outputs,))
