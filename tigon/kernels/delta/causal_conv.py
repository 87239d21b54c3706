"""Causal depthwise convolution over time, plain or with what Gated DeltaNet does to its result.

# B batch, T tokens, C channels, W taps, K key heads, D dim of a key, H value heads
"""

from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels.delta.causal_conv_kernels import conv_backward_kernel, conv_forward_kernel
from tigon.kernels.norm.rms_norm_kernels import sum_partials
from tigon.kernels.runtime import (
    DTYPES,
    as_strided_rows,
    check_devices,
    next_power_of_2,
    num_sms,
    operator,
    pdl_options,
    refuse_second_derivative,
    runs_triton,
)
from tigon.kernels.saved_sources import note_parts

Activation = Literal["silu"]
L2_EPS = 1e-6  # of the norm of queries and keys
MAX_TAPS, MAX_DIM = 4, 1024  # of the kernels; more of them take the reference
# Tokens that a program walks over, at most: the longest that leaves work for all multiprocessors
CHUNKS = (64, 32, 16)
STEP = 4  # tokens whose loads are in flight together
PER_SM = 4  # programs, at least
# Of a program, and numbers of its tile that each has; with CHUNKS the best of some 100 on an H200
FORWARD_THREADS, BACKWARD_THREADS, ELEMENTS = 256, 128, 4
SHORT = 16  # tokens, in rows of which one program updates the state


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
    inputs, taps = torch.cat((before, x), 1), weight.float().unbind(1)
    y = x.float() * taps[-1]
    cut = x.new_zeros(B, T, dtype=torch.bool)  # whether another sequence's
    for back in range(1, W):
        tap = inputs.narrow(1, W - 1 - back, T).float()
        if starts is not None:
            cut = cut | F.pad(starts, (back - 1, 0)).narrow(1, 0, T)
            tap = tap.masked_fill(cut.unsqueeze(2), 0.0)
        y = y + tap * taps[W - 1 - back]
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
    """Splits silu of the convolution; norms heads of q and k in fp32; divides q by sqrt(D)."""
    y = causal_conv_ref(x, weight, activation="silu", starts=starts, state=state)
    size = key_heads * key_dim
    q, k, v = y.split((size, size, y.shape[-1] - 2 * size), -1)
    q, k = (u.unflatten(-1, (key_heads, key_dim)).float() for u in (q, k))
    q, k = (u * torch.rsqrt(u.square().sum(-1, keepdim=True) + L2_EPS) for u in (q, k))
    return (q * key_dim**-0.5).to(x.dtype), k.to(x.dtype), v


class ConvLaunch(NamedTuple):
    """Launch parameters."""

    groups: int  # of `width` channels: one head each
    width: int
    block: int  # columns, a power of two
    rows: int  # chunks of tokens of a program
    chunk: int  # tokens
    chunks: int  # of all rows
    step: int
    warps: int

    @property
    def blocks(self) -> int:
        """Returns how many programs have the same channels."""
        return -(-self.chunks // self.rows)


def _launch(x: Tensor, key_dim: int, threads: int, whole: bool = False) -> ConvLaunch:
    """Chooses the launch for programs of so many threads; `whole`: rows in one chunk."""
    B, T, C = x.shape
    width = key_dim or min(128, next_power_of_2(C))
    block, groups = next_power_of_2(width), -(-C // width)
    rows = max(threads * ELEMENTS // block, 1)
    for chunk in (T,) if whole else CHUNKS:
        chunks = B * -(-T // chunk)
        if groups * (chunks // rows) >= PER_SM * num_sms(x):
            break
    fitting = rows if chunks >= rows else 1  # two sizes, so that few rows compile no other kernels
    warps = max(1, fitting * block // (32 * ELEMENTS))
    step = 1 if whole else STEP
    return ConvLaunch(groups, width, block, fitting, chunk, chunks, step, min(warps, 8))


def _parts_of(parts: list[Tensor]) -> list[tuple[Tensor, int]]:
    """Returns q, k and v as the kernels take them; y alone stands for each."""
    rows = [as_strided_rows(t.flatten(2)) for t in parts]
    return rows if len(rows) == 3 else 3 * rows


def _outputs(
    x: Tensor, weight: Any, starts: Any, state: Any, key_heads: int, key_dim: int, *_: Any
) -> list[Tensor]:
    """Allocates y, or q, k and v."""
    B, T, C = x.shape
    if not key_heads:
        return [x.new_empty(B, T, C)]
    q, k = (x.new_empty(B, T, key_heads, key_dim) for _ in range(2))
    return [q, k, x.new_empty(B, T, C - 2 * key_heads * key_dim)]


def _run_forward(
    x: Tensor,
    weight: Tensor,
    starts: Tensor | None,
    state: Tensor | None,
    key_heads: int,
    key_dim: int,
    silu: bool,
    update: bool,
) -> list[Tensor]:
    """Launches the forward kernel."""
    outputs = _outputs(x, weight, starts, state, key_heads, key_dim)
    if x.numel() == 0:
        return outputs
    launch = _launch(x, key_dim, FORWARD_THREADS, update)
    conv_forward_kernel[(launch.groups * launch.blocks,)](
        *(as_strided_rows(x), *_parts_of(outputs), weight.contiguous(), starts, state),
        *(launch.chunks, x.shape[1], launch.chunk, key_dim**-0.5 if key_heads else 1.0),
        *(*weight.shape, key_heads, launch.width, silu, update),
        *(launch.block, launch.rows, launch.step),
        num_warps=launch.warps,
        **pdl_options(x),
    )
    return outputs


@operator("causal_conv", _outputs)
def _forward(
    x: Tensor,  # [B, T, C]
    weight: Tensor,  # [C, W]
    starts: Tensor | None,  # [B, T]
    state: Tensor | None,  # [B, W - 1, C]
    key_heads: int,  # 0: no queries and keys
    key_dim: int,
    silu: bool,
) -> list[Tensor]:
    """Returns what `_outputs` allocates, by the kernel."""
    state = None if state is None else state.contiguous()
    starts = None if starts is None else starts.contiguous()
    return _run_forward(x, weight, starts, state, key_heads, key_dim, silu, False)


@operator("causal_conv_step", _outputs, mutates=("state",))
def _forward_and_update(
    x: Tensor, weight: Tensor, starts: Tensor | None, state: Tensor, key_heads: int, key_dim: int,
    silu: bool,
) -> list[Tensor]:  # fmt: skip
    """Does what `_forward` does, and updates the contiguous state in the same pass."""
    return _run_forward(x, weight, starts, state, key_heads, key_dim, silu, True)


def _gradients(
    x: Tensor, weight: Tensor, state: Tensor | None, needs: list[bool], *_: Any
) -> list[Tensor]:
    """Allocates the needed gradients of the first three arguments."""
    expected = zip((x, weight, state), needs, strict=True)
    return [t.new_empty(t.shape) for t, needed in expected if needed and t is not None]


@operator("causal_conv_backward", _gradients)
def _backward(
    x: Tensor,
    weight: Tensor,
    state: Tensor | None,
    needs: list[bool],  # the gradients of these three, returned in this order
    starts: Tensor | None,
    ups: list[Tensor],  # of y, or of q, k and v
    key_heads: int,
    key_dim: int,
    silu: bool,
) -> list[Tensor]:
    """Returns the gradients that `_gradients` allocates."""
    gradients = _gradients(x, weight, state, needs)
    if x.numel() == 0:
        return [g.zero_() for g in gradients]
    made = iter(gradients)
    dx, dweight, dstate = (next(made) if needed else None for needed in needs)
    if dx is None and dstate is not None:
        dx = x.new_empty(x.shape)
    launch, (C, W) = _launch(x, key_dim, BACKWARD_THREADS), weight.shape
    partials = None
    if dweight is not None:
        partials = torch.empty(launch.blocks * C * W, dtype=torch.float32, device=x.device)
    conv_backward_kernel[(launch.groups * launch.blocks,)](
        *(as_strided_rows(x), *_parts_of(ups), weight.contiguous()),
        *(None if t is None else t.contiguous() for t in (starts, state)),
        *(dx, dstate, partials),
        *(launch.chunks, x.shape[1], launch.chunk, key_dim**-0.5 if key_heads else 1.0),
        *(C, W, key_heads, launch.width, silu, launch.block, launch.rows, launch.step),
        num_warps=launch.warps,
    )
    if partials is not None and dweight is not None:
        sum_partials(partials, launch.blocks, C * W, dweight)
    return gradients


class _CausalConv(torch.autograd.Function):
    """The convolution, plain or of queries, keys and values, and its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, starts: Any, state: Any, *how: Any) -> Any:
        ctx.how = how
        ctx.save_for_backward(x, weight, starts, state)
        outputs = tuple(_forward(x, weight, starts, state, *how))
        if not torch.compiler.is_compiling():
            note_parts(outputs, _forward, (x, weight, starts, state), *how)
        return outputs

    @staticmethod
    def backward(ctx: Any, *ups: Tensor) -> Any:
        refuse_second_derivative("causal_conv")
        x, weight, starts, state = ctx.saved_tensors
        needs_x, needs_weight, _, needs_state = ctx.needs_input_grad[:4]
        needs = [needs_x, needs_weight, needs_state]
        made = iter(_backward(x, weight, state, needs, starts, list(ups), *ctx.how))
        dx, dweight, dstate = (next(made) if needed else None for needed in needs)
        return dx, dweight, None, dstate, None, None, None


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


def _run(
    x: Tensor,
    weight: Tensor,
    starts: Tensor | None,
    state: Tensor | None,
    update: bool,
    key_heads: int,
    key_dim: int,
    silu: bool,
) -> tuple[Tensor, ...]:
    """Returns y, or q, k and v, by the kernels where they serve; updates the state if asked to."""
    how, learned = (key_heads, key_dim, silu), (x, weight) if state is None else (x, weight, state)
    fits = weight.shape[1] <= MAX_TAPS and key_dim <= MAX_DIM and weight.dtype in DTYPES
    outputs: tuple[Tensor, ...]
    if not (runs_triton(x) and fits and (state is None or state.dtype == x.dtype)):
        given: dict[str, Any] = {"starts": starts, "state": state}
        if key_heads:
            given |= {"key_heads": key_heads, "key_dim": key_dim}
            outputs = causal_conv_qkv_ref(x, weight, **given)
        else:
            activation: Activation | None = "silu" if silu else None
            outputs = (causal_conv_ref(x, weight, activation=activation, **given),)
    elif torch.is_grad_enabled() and any(t.requires_grad for t in learned):
        before = state.clone() if update and state is not None else state
        outputs = _CausalConv.apply(x, weight, starts, before, *how)
    elif update and state is not None and state.is_contiguous() and x.shape[1] <= SHORT:
        return tuple(_forward_and_update(x, weight, None, state, *how))
    else:
        outputs = tuple(_forward(x, weight, starts, state, *how))
    if update and state is not None:
        state.copy_(torch.cat((state, x.detach().to(state.dtype)), 1)[:, x.shape[1] :])
    return outputs


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
    (y,) = _run(x, weight, starts, state, update_state, 0, 0, activation == "silu")
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
    q, k, v = _run(x, weight, starts, state, update_state, key_heads, key_dim, True)
    return q, k, v
