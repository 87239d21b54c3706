"""Rotary position embedding.

# B batch, T tokens, H query heads, K kv heads, D head dim, R rotated dims (R <= D)
"""

import torch
from torch import Tensor


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    r = 2 * cos.shape[-1]
    whole = r == x.shape[-1]
    rotated = (x if whole else x[..., :r]).float()
    if interleaved:
        x1, x2 = rotated[..., 0::2], rotated[..., 1::2]
    else:
        x1, x2 = rotated.chunk(2, dim=-1)
    y1, y2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    y = torch.stack((y1, y2), -1).flatten(-2) if interleaved else torch.cat((y1, y2), -1)
    y = y.to(x.dtype)
    return y if whole else torch.cat((y, x[..., r:]), -1)


def rope_ref(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate the first R dims of every head by the angles of its position, fp32 inside."""
    cos, sin = cos.float().unsqueeze(-2), sin.float().unsqueeze(-2)  # [B, T, 1, R/2]
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)


def rope(
    q: Tensor,  # [B, T, H, D]
    k: Tensor,  # [B, T, K, D]
    cos: Tensor,  # [B or 1, T, R/2]
    sin: Tensor,  # [B or 1, T, R/2]
    *,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotated copies of `q` and `k`.

    Pairs are dims (i, i + R/2), or (2i, 2i + 1) when interleaved; dims from R on pass through.
    Source: Su et al. 2021 (arXiv 2104.09864), in the half-rotation layout of transformers.
    """
    if 2 * cos.shape[-1] > q.shape[-1]:
        raise ValueError(f"cos rotates {2 * cos.shape[-1]} dims, but heads have {q.shape[-1]}")
    return rope_ref(q, k, cos, sin, interleaved=interleaved)
