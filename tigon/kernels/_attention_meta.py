"""Fused attention without numbers: it allocates what FlashAttention-2 does on a GPU.

# B batch, T query tokens, S key tokens, H query heads, K kv heads, D head dim
"""

from typing import Any

import torch
from torch import Tensor


class _FusedShapes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, t, heads, _ = q.shape
        out = q.new_empty(q.shape)
        ctx.save_for_backward(q, k, v, out, q.new_empty(b, heads, t, dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, _, lse = ctx.saved_tensors
        gradients = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
        # The sum of dq, and the row sums of dout * out, in fp32
        temporary = [q.new_empty(q.shape, dtype=torch.float32), torch.empty_like(lse)]
        if k.shape[2] != q.shape[2]:  # gradients of each query head's keys and values
            b, s, _, d = k.shape
            temporary += [q.new_empty(b, s, q.shape[2], d) for _ in "kv"]
        return gradients


def fused_shapes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [B, T, H, D], k and v [B, S, K, D], all on meta -> [B, T, H, D]."""
    return _FusedShapes.apply(q, k, v)
