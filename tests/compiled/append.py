"""Forms of `append_attention`.

# B rows, T new tokens of each, R cache slots, H query heads, K kv heads, D head dim
"""

from functools import partial
from typing import Any

import torch

from tests.compiled.compiling import BF16, FP16, FP32, Forms, zeros
from tigon.kernels.attention.decode import _forward, holds_tile


def forms() -> Forms:
    for name, options in FORMS.items():
        yield f"append_attention {name}", partial(_append, **options)


PACKED: dict[str, Any] = {"kept": torch.int8}
FORMS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp16, wide, window": {"dtype": FP16, "D": 256, "window": 300},
    "several tokens, chunks": {"T": 4, "window": 300, "chunked": True},
    "several tokens, window, softcap": {"T": 4, "window": 300, "softcap": 50.0},
    "fp32, several tokens, softcap": {"dtype": FP32, "T": 4, "softcap": 50.0},
    "packed, fp16, softcap": PACKED | {"dtype": FP16, "softcap": 50.0},
    "packed, fp32, several tokens": PACKED | {"dtype": FP32, "T": 4},
    "packed, several tokens, window, softcap": PACKED | {"T": 4, "window": 300, "softcap": 50.0},
    "whole, odd": {"B": 16, "D": 80},
    "rotated": {"turned": 128},
    "rotated, more tokens": {"turned": 128, "T": 8},
    "rotated in part, fp32, several tokens": {"turned": 24, "dtype": FP32, "T": 4},
    "packed, whole, odd": PACKED | {"B": 16, "D": 80},
    "with room for the next kernels": {"H": 4, "K": 1, "window": 32},
    "sinks": {"sinks": True, "D": 64},
    "packed, several tokens, window, sinks": PACKED | {"T": 4, "window": 300, "sinks": True},
    "latents of 320 numbers": {"H": 32, "K": 1, "D": 320},
    "latents of 576 numbers": {"H": 128, "K": 1, "D": 576, "T": 4},
    "latents, fp32": {"H": 128, "K": 1, "D": 576, "dtype": FP32},
    "heads of 512 numbers": {"D": 512},
    "heads of 512 numbers, several tokens": {"D": 512, "K": 1, "T": 16},
    "heads of 512 numbers, fp32, window": {"D": 512, "dtype": FP32, "window": 300},
    "packed, heads of 512 numbers": PACKED | {"D": 512, "T": 4},
    "packed, latents": PACKED | {"H": 128, "K": 1, "D": 576},
    "large, one kv head": {"B": 16384, "H": 1, "K": 1, "D": 64},
}


def _append(
    B: int = 1,
    T: int = 1,
    H: int = 8,
    K: int = 2,
    D: int = 128,
    dtype: torch.dtype = BF16,
    kept: torch.dtype | None = None,
    window: int | None = None,
    chunked: bool = False,
    softcap: float | None = None,
    turned: int | None = None,  # dims that are yet to be rotated
    sinks: bool = False,
) -> None:
    q = zeros(B, T, H, D, dtype=dtype)
    k, v = (zeros(B, T, K, D, dtype=dtype) for _ in range(2))
    # What is not looked at need not be allocated for every row
    keys, values = (zeros(1, K, 1024, D, dtype=kept or dtype).expand(B, -1, -1, -1) for _ in "kv")
    scales = [None if kept is None else zeros(B, K, 1024, dtype=FP32) for _ in "kv"]
    if not holds_tile(q, keys):
        return
    lengths = zeros(B, dtype=torch.int32)
    angles = [None if turned is None else zeros(1, T, turned // 2, dtype=FP32) for _ in range(2)]
    options = window, chunked, softcap, D**-0.5, *angles, zeros(H, dtype=dtype) if sinks else None
    _forward(q, k, v, keys, values, *scales, lengths, *options)
