"""Causal depthwise convolution over time, plain or with what Gated DeltaNet does to its result.

# B batch, T tokens, C channels, W taps, K key heads, D dim of a key, H value heads
"""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels.runtime import check_devices

Activation = Literal["silu"]
L2_EPS = 1e-6  # of the norm of queries and keys


def causal_conv_ref(
    x: Tensor,
    weight: Tensor,
    *,
    activation: Activation | None = None,
    starts: Tensor | None = None,
    state: Tensor | None = None,
) -> Tensor:
    """`y[t] = sum over j of weight[:, j] * x[t - (W - 1) + j]`, then silu; fp32 inside.

    It is rounded to the dtype of x before silu, too.
    """
    (B, T, C), W = x.shape, weight.shape[1]
    before = x.new_zeros(B, W - 1, C) if state is None else state.to(x.dtype)
    inputs = torch.cat((before, x), 1)
    y = x.float() * weight[:, -1].float()
    cut = torch.zeros(B, T, 1, dtype=torch.bool, device=x.device)  # whether another sequence's
    for back in range(1, W):
        tap = inputs[:, W - 1 - back : W - 1 - back + T].float()
        if starts is not None:
            cut = cut | F.pad(starts, (back - 1, 0))[:, :T, None]
            tap = tap.masked_fill(cut, 0.0)
        y = y + tap * weight[:, W - 1 - back].float()
    y = y.to(x.dtype)
    return F.silu(y) if activation == "silu" else y


def causal_conv_qkv_ref(
    x: Tensor,
    weight: Tensor,
    *,
    key_heads: int,
    key_dim: int,
    starts: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits silu of the convolution, divides each head of q and k by its length, in fp32, and q
    by sqrt(D), too."""
    y = causal_conv_ref(x, weight, activation="silu", starts=starts, state=state)
    size = key_heads * key_dim
    q, k, v = y.split((size, size, y.shape[-1] - 2 * size), -1)
    q, k = (_unit(u.unflatten(-1, (key_heads, key_dim)).float()) for u in (q, k))
    return (q * key_dim**-0.5).to(x.dtype), k.to(x.dtype), v


def _unit(x: Tensor) -> Tensor:
    """Divides the last dimension by its length."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def _update(state: Tensor, x: Tensor) -> None:
    """Writes the W - 1 inputs before the next token to the state."""
    state.copy_(torch.cat((state, x.detach().to(state.dtype)), 1)[:, x.shape[1] :])


def _check(
    x: Tensor, weight: Tensor, starts: Tensor | None, state: Tensor | None, update_state: bool
) -> None:
    """Raises ValueError for shapes and dtypes that do not fit."""
    if x.dim() != 3:
        raise ValueError(f"x {tuple(x.shape)} is not [B, T, C]")
    B, T, C = x.shape
    if weight.dim() != 2 or weight.shape[0] != C or not weight.shape[1]:
        raise ValueError(f"weight {tuple(weight.shape)} is not [C, W], with the {C} channels of x")
    W = weight.shape[1]
    if starts is not None and (starts.shape != (B, T) or starts.dtype != torch.bool):
        found = f"{tuple(starts.shape)} {starts.dtype}"
        raise ValueError(f"starts {found} is not {(B, T)} torch.bool, a mark for each token")
    if state is not None and state.shape != (B, W - 1, C):
        raise ValueError(f"state {tuple(state.shape)} is not [B, W - 1, C] = {(B, W - 1, C)}")
    if update_state and (state is None or starts is not None):
        raise ValueError("update_state=True changes a given state, of rows without starts")
    check_devices(x=x, weight=weight, starts=starts, state=state)


def causal_conv(
    x: Tensor,  # [B, T, C]
    weight: Tensor,  # [C, W]; the last tap is the present token's
    *,
    activation: Activation | None = None,
    starts: Tensor | None = None,  # [B, T] bool: where a packed sequence begins
    state: Tensor | None = None,  # [B, W - 1, C]: the inputs before the first token; None: zeros
    update_state: bool = False,
) -> Tensor:
    """Returns `y[t] = sum over j of weight[:, j] * x[t - (W - 1) + j]` [B, T, C], within sequences.

    With `update_state` the state holds the inputs before the next token when this returns.
    """
    if activation is not None and activation not in get_args(Activation):
        raise ValueError(f"activation={activation!r} is neither 'silu' nor None")
    _check(x, weight, starts, state, update_state)
    y = causal_conv_ref(x, weight, activation=activation, starts=starts, state=state)
    if update_state and state is not None:
        _update(state, x)
    return y


def causal_conv_qkv(
    x: Tensor,  # [B, T, 2 K D + C]: q, k, v
    weight: Tensor,  # [2 K D + C, W]
    *,
    key_heads: int,
    key_dim: int,
    starts: Tensor | None = None,  # [B, T] bool: where a packed sequence begins
    state: Tensor | None = None,  # [B, W - 1, 2 K D + C]: the inputs before the first token
    update_state: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q and k [B, T, K, D], and v [B, T, C], as the gated delta rule takes them: after the
    convolution and silu, q and k of length 1, and q divided by sqrt(D).

    `starts`, `state` and `update_state` are those of `causal_conv`. Source: Yang et al. 2024
    (arXiv 2412.06464); eps lies inside the root, as in transformers.
    """
    _check(x, weight, starts, state, update_state)
    if key_heads < 1 or key_dim < 1 or 2 * key_heads * key_dim > x.shape[-1]:
        raise ValueError(
            f"x has {x.shape[-1]} channels: queries and keys of {key_heads} heads of {key_dim} "
            f"would take {2 * key_heads * key_dim}"
        )
    sizes = {"key_heads": key_heads, "key_dim": key_dim}
    found = causal_conv_qkv_ref(x, weight, **sizes, starts=starts, state=state)
    if update_state and state is not None:
        _update(state, x)
    return found
