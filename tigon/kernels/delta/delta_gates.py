"""The gates of the gated delta rule: what each head forgets, and how much it corrects.

In torch's operations they are 7 launches forward and 17 backward, of a few microseconds each.

# ... any leading dimensions, N tokens, H heads
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels.norm.rms_norm_kernels import sum_partials
from tigon.kernels.runtime import (
    DTYPES,
    as_strided_rows,
    check_devices,
    next_power_of_2,
    operator,
    pdl_options,
    pdl_wait,
    refuse_second_derivative,
    runs_triton,
    tl,
    triton,
)

# Tokens times heads of a program; backward, larger ones leave fewer partial sums
FORWARD, BACKWARD = 1024, 2048


def delta_gates_ref(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """`-exp(A_log) softplus(a + dt_bias)` in fp32, and `sigmoid(b)`: the definition."""
    return -A_log.float().exp() * F.softplus(a.float() + dt_bias.float()), b.sigmoid()


@triton.jit
def _softplus(x):
    """Returns log(1 + exp(x)), to a few roundings for any x."""
    e = tl.exp(-tl.abs(x))
    # log(1 + e) is 2 atanh(s); tl.log would lose the digits of a small e
    s = e / (2 + e)
    series = tl.zeros_like(x)
    for n in tl.static_range(7):
        series = series * s * s + 1.0 / (13 - 2 * n)
    return tl.maximum(x, 0.0) + 2 * s * series


@triton.jit
def _tile(N, H: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the tokens and heads of a program, and which of them exist."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    head = tl.arange(0, BLOCK)[None, :]
    return row, head, (row < N) & (head < H)


@triton.jit
def _load_decay(a, A_log, dt_bias, row, head, keep, H: tl.constexpr):
    """Loads a + dt_bias of a tile, and exp(A_log) [1, BLOCK], in fp32."""
    x = tl.load(a[0] + row * a[1] + head, mask=keep, other=0.0).to(tl.float32)
    x += tl.load(dt_bias + head, mask=head < H, other=0.0).to(tl.float32)
    return x, tl.exp(tl.load(A_log + head, mask=head < H, other=0.0).to(tl.float32))


@triton.jit(do_not_specialize=["N"])
def _forward_kernel(
    a,  # these two: pointer and step of rows
    b, A_log, dt_bias, g, beta, N,
    H: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Writes both gates of ROWS tokens."""
    pdl_wait(PDL)
    row, head, keep = _tile(N, H, ROWS, BLOCK)
    x, rate = _load_decay(a, A_log, dt_bias, row, head, keep, H)
    z = tl.load(b[0] + row * b[1] + head, mask=keep, other=0.0).to(tl.float32)
    tl.store(g + row * H + head, -rate * _softplus(x), mask=keep)
    tl.store(beta + row * H + head, tl.sigmoid(z), mask=keep)


@triton.jit(do_not_specialize=["N"])
def _backward_kernel(
    dg, dbeta,
    a,  # these two: pointer and step of rows
    b, A_log, dt_bias, da, db,
    partials,  # None, or [2, programs, H]: sums of the gradients of A_log and dt_bias
    N, H: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the gradients of a and b of ROWS tokens, and sums of those of the parameters."""
    row, head, keep = _tile(N, H, ROWS, BLOCK)
    at = row * H + head
    x, rate = _load_decay(a, A_log, dt_bias, row, head, keep, H)
    z = tl.load(b[0] + row * b[1] + head, mask=keep, other=0.0).to(tl.float32)
    d = -rate * tl.load(dg + at, mask=keep, other=0.0)
    dx = d * tl.sigmoid(x)
    s = tl.sigmoid(z)
    dz = tl.load(dbeta + at, mask=keep, other=0.0).to(tl.float32) * s * (1 - s)
    tl.store(da + at, dx, mask=keep)
    tl.store(db + at, dz, mask=keep)
    if partials is not None:
        partials += tl.program_id(0).to(tl.int64) * H + head
        tl.store(partials, tl.sum(d * _softplus(x), 0, keep_dims=True), mask=head < H)
        partials += tl.num_programs(0).to(tl.int64) * H
        tl.store(partials, tl.sum(dx, 0, keep_dims=True), mask=head < H)


def _tiles(H: int, elements: int) -> dict[str, int]:
    """Returns the tokens and heads of a program."""
    block = next_power_of_2(H)
    return {"ROWS": max(1, elements // block), "BLOCK": block}


def _gates(a: Tensor, b: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Allocates g and beta."""
    return a.new_empty(a.shape, dtype=torch.float32), b.new_empty(b.shape)


@operator("delta_gates", _gates)
def _forward(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Returns g and beta, by the kernel."""
    gates = _gates(a, b)
    if a.numel():
        H = a.shape[-1]
        N, tiles = a.numel() // H, _tiles(H, FORWARD)
        _forward_kernel[(triton.cdiv(N, tiles["ROWS"]),)](
            *(as_strided_rows(a), as_strided_rows(b), A_log, dt_bias, *gates, N),
            H=H, **tiles, **pdl_options(a),
        )  # fmt: skip
    return gates


def _gradients(
    dg: Tensor, dbeta: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, learns: bool
) -> list[Tensor]:
    """Allocates the gradients of a and b and, if these learn, of A_log and dt_bias."""
    inputs = (a, b, A_log, dt_bias) if learns else (a, b)
    return [x.new_empty(x.shape) for x in inputs]


@operator("delta_gates_backward", _gradients)
def _backward(
    dg: Tensor, dbeta: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, learns: bool
) -> list[Tensor]:
    """Returns what `_gradients` allocates, by the kernels, from contiguous dg and dbeta."""
    gradients = _gradients(dg, dbeta, a, b, A_log, dt_bias, learns)
    if not a.numel():
        return [x.zero_() for x in gradients]
    H = a.shape[-1]
    N, tiles = a.numel() // H, _tiles(H, BACKWARD)
    programs = triton.cdiv(N, tiles["ROWS"])
    partials = dg.new_empty(2, programs, H) if learns else None
    _backward_kernel[(programs,)](
        *(dg, dbeta, as_strided_rows(a), as_strided_rows(b), A_log, dt_bias),
        *(*gradients[:2], partials, N), H=H, **tiles,
    )  # fmt: skip
    if partials is not None:
        sum_partials(partials, programs, H, gradients[2], gradients[3])
    return gradients


class _DeltaGates(torch.autograd.Function):
    """`delta_gates` by kernels: saves its inputs alone."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*inputs)
        return _forward(*inputs)

    @staticmethod
    def backward(ctx: Any, dg: Tensor, dbeta: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("delta_gates")
        learns = any(ctx.needs_input_grad[2:])
        gradients = _backward(dg.contiguous(), dbeta.contiguous(), *ctx.saved_tensors, learns)
        return (*gradients,) if learns else (*gradients, None, None)


def delta_gates(
    a: Tensor,  # [..., H]
    b: Tensor,  # [..., H]
    A_log: Tensor,  # [H]
    dt_bias: Tensor,  # [H]
) -> tuple[Tensor, Tensor]:
    """Returns g and beta [..., H] of `gated_delta_rule`: `-exp(A_log) softplus(a + dt_bias)`, the
    logarithm of each head's decay in fp32, and `sigmoid(b)`.

    a and b may be columns of a projection. Source: Yang et al. 2024 (arXiv 2412.06464). Raises
    ValueError for other shapes.
    """
    check_devices(a=a, b=b, A_log=A_log, dt_bias=dt_bias)
    if b.shape != a.shape:
        raise ValueError(f"b {tuple(b.shape)} does not fit a {tuple(a.shape)}")
    for name, x in ("A_log", A_log), ("dt_bias", dt_bias):
        if x.shape != a.shape[-1:]:
            raise ValueError(f"{name} {tuple(x.shape)} is not [H] = {tuple(a.shape[-1:])}")
    if not (runs_triton(a) and all(x.dtype in DTYPES for x in (b, A_log, dt_bias))):
        return delta_gates_ref(a, b, A_log, dt_bias)
    g, beta = _DeltaGates.apply(a, b, A_log.contiguous(), dt_bias.contiguous())
    return g, beta
