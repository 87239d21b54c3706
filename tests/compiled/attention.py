"""Forms of `wide_attention`.

# N queries and keys of all sequences, H query heads, K kv heads, D head dim
"""

from functools import partial
from typing import Any

import torch

from tests.compiled.compiling import BF16, FP16, Forms, backward, zeros
from tigon.kernels.attention.wide import wide_attention


def forms() -> Forms:
    for name, options in FORMS.items():
        yield f"wide_attention {name}", partial(_attention, **options)


FORMS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp16, packed": {"dtype": FP16, "packed": True},
    "320 dims, one head": {"H": 1, "K": 1, "D": 320},
    "264 dims": {"D": 264},
    "64 dims": {"D": 64},
}


def _attention(
    N: int = 256,
    H: int = 8,
    K: int = 2,
    D: int = 512,
    dtype: torch.dtype = BF16,
    packed: bool = False,
) -> None:
    q, k, v = (zeros(N, heads, D, dtype=dtype, grad=True) for heads in (H, K, K))
    cu = torch.tensor([0, 100, N]).int() if packed else None
    backward(wide_attention(q, k, v, (cu, cu), (N, N), scale=None, reach=(None, 0)))
