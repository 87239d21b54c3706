"""Root mean square normalisation, with the residual addition that precedes it.

# ... any leading dimensions, C model dim
"""

from typing import Literal, overload

import torch.nn.functional as F
from torch import Tensor

Cast = Literal["before_weight", "after_weight"]


def rms_norm_ref(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    cast: Cast = "before_weight",
) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * (offset + weight)` over the last dimension, fp32 inside."""
    h = F.rms_norm(x.float(), weight.shape, eps=eps)
    if cast == "before_weight":  # Llama rounds to the input's dtype first; Gemma and OLMo last
        return ((offset + weight if offset else weight) * h.to(x.dtype)).to(x.dtype)
    return (h * (offset + weight.float())).to(x.dtype)


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    offset: float = ...,
    cast: Cast = ...,
    residual: None = None,
) -> Tensor: ...
@overload
def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    offset: float = ...,
    cast: Cast = ...,
    residual: Tensor,
) -> tuple[Tensor, Tensor]: ...
def rms_norm(
    x: Tensor,  # [..., C]
    weight: Tensor,  # [C]
    eps: float,
    *,
    offset: float = 0.0,
    cast: Cast = "before_weight",
    residual: Tensor | None = None,  # [..., C]
) -> Tensor | tuple[Tensor, Tensor]:
    """RMSNorm of `x`; with a residual, of `x + residual`, and then `(normed, sum)` is returned.

    `offset` 1 and `cast="after_weight"` is Gemma's variant. Source: Zhang & Sennrich 2019
    (arXiv 1910.07467); the two cast orders are those of transformers' modelling files.
    """
    if x.shape[-1:] != weight.shape:
        raise ValueError(f"weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}")
    if residual is None:
        return rms_norm_ref(x, weight, eps, offset=offset, cast=cast)
    total = x + residual
    return rms_norm_ref(total, weight, eps, offset=offset, cast=cast), total
