"""A linear layer for one row, as in decoding one sequence, with the gated activation after it.

# C columns of the row and of the weight, N rows of the weight

The time is that of reading the weight: 2 N C bytes in bf16, for as many operations. Each
multiprocessor runs a few programs, which walk over the weight and prefetch the next tile. With
programmatic dependent launch (`pdl_wait`) a program starts as soon as the previous kernel leaves
room, and loads its first tile before it waits for that kernel's results. So the kernel before must
not write weights: FSDP2, which gathers them, turns this off (`disable_pdl`). `linear` chooses
between this kernel and torch, and splits few rows on a CPU.
"""

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels.linear.linear import training_linear
from tigon.kernels.mlp.gated_act import Activation, act_and_slope, check_act, gated_act_ref
from tigon.kernels.runtime import (
    next_power_of_2,
    num_sms,
    operator,
    pdl_options,
    pdl_wait,
    runs_triton,
    tl,
    triton,
)

BLOCK, TILE = 4096, 16384  # columns, and elements of a tile
PART = 2**18  # on a CPU: elements of a weight that each thread reads at a time


class GemvLaunch(NamedTuple):
    """The rows and columns of a tile, and the programs on each multiprocessor; tuned on an H200."""

    rows: int
    block: int
    warps: int
    per_sm: int


@functools.cache
def select_launch(C: int, factors: int) -> GemvLaunch:
    """Chooses the launch. `factors`: weights of one size that are read together, 2 for gate and
    up."""
    block = next_power_of_2(C)
    if block <= BLOCK:
        return GemvLaunch(max(8192 // block // factors, 1), block, warps=4, per_sm=4)
    # A whole row with idle lanes behind it is faster than several steps that have none
    if block * factors > TILE:
        block = BLOCK
    return GemvLaunch(TILE // block // factors, block, warps=8, per_sm=2)


def gemv_ref(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, act: Activation | None = None
) -> Tensor:
    y = F.linear(x, weight, bias)
    return y if act is None else gated_act_ref(y, act)


@triton.jit
def _load_tile(weight, tile, columns, N, C: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr):
    rows = tile * ROWS + tl.arange(0, ROWS)
    mask = (rows < N)[:, None]
    if not EVEN:
        mask = mask & (columns < C)[None, :]
    at = weight + rows.to(tl.int64)[:, None] * C + columns[None, :]
    return tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _round_sums(sums, bias, y, rows, N):
    """Adds the bias and rounds once, as the linear layer does."""
    if bias is not None:
        sums += tl.load(bias + rows, mask=rows < N, other=0.0).to(tl.float32)
    return sums.to(y.dtype.element_ty)


@triton.jit
def _gemv_kernel(
    x,
    weight,
    up_weight,  # the second half of the weight's rows, with an activation
    bias,
    up_bias,
    y,
    N,  # of y
    C: tl.constexpr,
    ACT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    STEPS: tl.constexpr = (C + BLOCK - 1) // BLOCK
    EVEN: tl.constexpr = C % BLOCK == 0
    columns = tl.arange(0, BLOCK)
    first, step = tl.program_id(0), tl.num_programs(0)
    w = _load_tile(weight, first, columns, N, C, ROWS, EVEN)
    if ACT is not None:
        u = _load_tile(up_weight, first, columns, N, C, ROWS, EVEN)
    pdl_wait(PDL)
    if STEPS == 1:
        row = tl.load(x + columns, mask=columns < C, other=0.0).to(tl.float32)[None, :]
    for tile in tl.range(first, tl.cdiv(N, ROWS), step):
        sums = tl.zeros([ROWS], tl.float32)
        up_sums = tl.zeros([ROWS], tl.float32)
        for i in tl.static_range(STEPS):
            # The tile of the next step is under way while this one is used
            later = tile + step if i == STEPS - 1 else tile
            ahead = columns if i == STEPS - 1 else columns + (i + 1) * BLOCK
            w_next = _load_tile(weight, later, ahead, N, C, ROWS, EVEN)
            if ACT is not None:
                u_next = _load_tile(up_weight, later, ahead, N, C, ROWS, EVEN)
            if STEPS > 1:
                at = i * BLOCK + columns
                row = tl.load(x + at, mask=at < C, other=0.0).to(tl.float32)[None, :]
            sums += tl.sum(w.to(tl.float32) * row, 1)
            w = w_next
            if ACT is not None:
                up_sums += tl.sum(u.to(tl.float32) * row, 1)
                u = u_next
        rows = tile * ROWS + tl.arange(0, ROWS)
        out = _round_sums(sums, bias, y, rows, N)
        if ACT is not None:
            up = _round_sums(up_sums, up_bias, y, rows, N)
            a, _ = act_and_slope(out.to(tl.float32), ACT)
            out = (a.to(out.dtype).to(tl.float32) * up.to(tl.float32)).to(out.dtype)
        tl.store(y + rows, out, mask=rows < N)


def _output(x: Tensor, weight: Tensor, bias: Tensor | None, act: str | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0] // (1 if act is None else 2))


@operator("gemv", _output)
def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, act: str | None) -> Tensor:
    y = _output(x, weight, bias, act)
    N, C = y.shape[-1], x.shape[-1]
    launch = select_launch(C, 1 if act is None else 2)
    programs = min(triton.cdiv(N, launch.rows), launch.per_sm * num_sms(x))
    _gemv_kernel[(programs,)](
        x,
        weight,
        None if act is None else weight[N:],
        bias,
        None if act is None or bias is None else bias[N:],
        y,
        N,
        C=C,
        ACT=act,
        ROWS=launch.rows,
        BLOCK=launch.block,
        num_warps=launch.warps,
        **pdl_options(x),
    )
    return y


def _is_plain_product(x: Tensor, weight: Tensor) -> bool:
    """Whether the call is a plain product without gradients."""
    return (
        not torch.is_grad_enabled()
        and not x.is_meta  # which autocast does not know
        and not torch.is_autocast_enabled(x.device.type)
        and x.dtype == weight.dtype
        and type(weight) is torch.nn.Parameter  # subclasses, such as quantized ones, have their own
        and weight.is_contiguous()
    )


def uses_gemv(x: Tensor, weight: Tensor) -> bool:
    """Whether `gemv` serves this call: one row on a GPU, without gradients."""
    return x.numel() == x.shape[-1] and runs_triton(x) and _is_plain_product(x, weight)


def gemv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, act: Activation | None = None
) -> Tensor:
    """`F.linear(x, weight, bias)` of one row x [..., C], without gradients.

    With an activation, the weight [2 N, C] has the rows of gate and up, as in `gated_act`, and the
    result is [..., N]. Sums are fp32, and every step is rounded as by separate operators. Check
    `uses_gemv` first.
    """
    if x.numel() != x.shape[-1]:
        raise ValueError(f"x {tuple(x.shape)} is not one row")
    if weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x has {x.shape[-1]} columns, the weight {tuple(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)} does not fit the weight {tuple(weight.shape)}")
    if act is not None:
        check_act(act)
        if weight.shape[0] % 2:
            raise ValueError(f"weight {tuple(weight.shape)} has no two halves: give an even N")
    # The kernel reads rows one after another; a copy of the weight would cost more than it saves
    plain = weight.is_contiguous() and (bias is None or bias.is_contiguous())
    if not (plain and runs_triton(x)):
        return gemv_ref(x, weight, bias, act)
    return _forward(x.contiguous(), weight, bias, act)


def _num_parts(x: Tensor, weight: Tensor) -> int:
    """Returns in how many parts to read the weight for a few fp32 rows on a CPU.

    MKL first copies the weight into another layout; the copy of a part stays in the caches.
    """
    few = (
        not torch.compiler.is_compiling()
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and 4 <= x.numel() // x.shape[-1] <= 8
        and torch.backends.mkl.is_available()
        and _is_plain_product(x, weight)
    )
    parts = weight.numel() // (PART * torch.get_num_threads()) if few else 1
    return parts if parts >= 4 else 1


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, faster for the few rows of decoding: one on a GPU, 4 to 8 in fp32 on a CPU.

    In training an `x` that backward can recompute is not saved: see `training_linear`.
    """
    if torch.is_grad_enabled():
        return training_linear(x, weight, bias)
    if uses_gemv(x, weight):
        return gemv(x, weight, bias)
    if (parts := _num_parts(x, weight)) > 1:
        biases = [None] * parts if bias is None else bias.chunk(parts)
        weights = weight.chunk(parts)
        return torch.cat([F.linear(x, w, b) for w, b in zip(weights, biases, strict=False)], -1)
    return F.linear(x, weight, bias)
