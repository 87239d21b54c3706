"""One-shot all-reduce of tensors so small that latency is all of their time.

# R ranks, n elements, S of a part, P parts, N rows, C elements of a row

Each rank writes its elements into the memory of every other one and sums what arrives in its own:
one kernel, and one way over NVLink. No flag follows the data: memory that nothing has arrived at
yet holds -0.0, and 0.0 is sent in place of -0.0.

There are three buffers, used in turn. In a turn a rank empties the buffer of the turn before, which
it has read. Other ranks write there again two turns later, which they only reach with what this
rank sends after that. Every program has its own part of the buffers and its own count of turns, so
that programs never wait for each other. `one_shot_all_reduce_norm` has a program for each row,
which adds the sum to the residual stream and norms it. Source: TensorRT-LLM's one-shot all-reduce
with Lamport-style buffers, and its fusion with RMSNorm.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tigon.kernels.runtime import next_power_of_2, pdl_options, pdl_wait, tl, triton

TURNS, S, P = 3, 1024, 256
MAX_COLUMNS = 16384  # elements of a row that a program norms
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


class SymmetricBuffers(NamedTuple):
    """A rank's buffers for the sums of a group in one dtype; other ranks write to `local`."""

    local: Tensor  # bits [TURNS, R, P S], all `empty` at first
    addresses: Tensor  # int64 [R], of every rank's `local`
    turns: Tensor  # int32 [P], zeros at first
    rank: int
    dtype: torch.dtype
    handle: object = None  # of the shared memory, which lives as long


def empty_bits(dtype: torch.dtype) -> int:
    return torch.iinfo(BITS[dtype]).min


@triton.jit
def _exchange_and_add(
    bits,  # this rank's elements
    at,  # where they are in a part of the buffers
    inside,  # those that exist
    full_mask,  # those of parts that have some
    local, addresses, turn,
    dtype: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr, SIZE: tl.constexpr,
    TURNS: tl.constexpr, EMPTY: tl.constexpr,
):  # fmt: skip
    """Sends the elements to the other ranks and sums what they send, in fp32."""
    sent_bits = tl.where(bits == EMPTY, 0, bits).to(bits.dtype)
    for rank in tl.static_range(R):
        if rank != RANK:
            target = tl.multiple_of(tl.load(addresses + rank).to(local.dtype), 16)
            # Written through, as the reader is another GPU
            to = target + (turn * R + RANK) * SIZE + at
            tl.store(to, sent_bits, mask=inside, cache_modifier=".wt")
    # While the others' elements are on their way
    before = (turn + TURNS - 1) % TURNS
    for rank in tl.static_range(R):
        if rank != RANK:
            nothing = tl.full(bits.shape, EMPTY, bits.dtype)
            tl.store(local + (before * R + rank) * SIZE + at, nothing, mask=full_mask)
    total = tl.zeros(bits.shape, tl.float32)
    for rank in tl.static_range(R):  # in the same order on all, so that they get the same sum
        part = bits
        if rank != RANK:
            source = local + (turn * R + rank) * SIZE + at
            part = tl.load(source, mask=inside, other=0, volatile=True)
            while tl.max((part == EMPTY).to(tl.int32)) > 0:
                part = tl.load(source, mask=inside, other=0, volatile=True)
        total += part.to(dtype, bitcast=True).to(tl.float32)
    return total.to(dtype)


@triton.jit
def _one_shot_kernel(
    x,  # bits [n], or [rows, WIDTH]
    y,  # [n]
    local, addresses, turns, n, first,
    RANK: tl.constexpr, R: tl.constexpr, S: tl.constexpr, P: tl.constexpr, TURNS: tl.constexpr,
    EMPTY: tl.constexpr, WIDTH: tl.constexpr,
    SIZE: tl.constexpr,  # of a row of y, of which x has WIDTH columns; None: x has all n elements
    PDL: tl.constexpr,
):  # fmt: skip
    """Sums x over the ranks: sends this rank's elements, then adds up what arrives."""
    pdl_wait(PDL)
    part = tl.program_id(0)
    at = part * S + tl.arange(0, S)
    inside = at < n
    turn = tl.load(turns + part)
    if SIZE is None:
        bits = tl.load(x + at, mask=inside, other=0)
    else:
        column = at % SIZE - first
        has = inside & (column >= 0) & (column < WIDTH)
        bits = tl.load(x + at // SIZE * WIDTH + column, mask=has, other=0)
    dtype: tl.constexpr = y.dtype.element_ty
    full_mask = at >= 0
    total = _exchange_and_add(
        bits, at, inside, full_mask, local, addresses, turn, dtype, RANK, R, P * S, TURNS, EMPTY
    )  # fmt: skip
    tl.store(y + at, total, mask=inside)
    tl.store(turns + part, (turn + 1) % TURNS)


@triton.jit
def _one_shot_norm_kernel(
    x,  # bits [N, C]
    residual,  # [N, C]
    weight,  # [C]
    y,  # [N, C]
    total,  # [N, C], of the ranks
    stream,  # [N, C], residual + total
    local, addresses, turns, eps,
    C: tl.constexpr, OFFSET: tl.constexpr, BEFORE: tl.constexpr, RANK: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, P: tl.constexpr,
    PARTS: tl.constexpr,  # of a row, and more up to a power of two
    TURNS: tl.constexpr, EMPTY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes `_one_shot_kernel` and then the kernel of `rms_norm`, with the same roundings."""
    part = tl.arange(0, PARTS)[:, None]
    column = part * S + tl.arange(0, S)[None, :]
    inside, exists = column < C, part * S < C
    full_mask = exists & (column >= 0)
    w = tl.load(weight + column, mask=inside, other=0.0)  # which no kernel just before has written
    pdl_wait(PDL)
    dtype: tl.constexpr = y.dtype.element_ty
    at = tl.program_id(0) * C + column
    count = turns + tl.program_id(0) * (C // S) + part
    turn = tl.load(count, mask=exists, other=0)
    bits = tl.load(x + at, mask=inside, other=0)
    h = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    added = _exchange_and_add(
        bits, at, inside, full_mask, local, addresses, turn, dtype, RANK, R, P * S, TURNS, EMPTY
    )  # fmt: skip
    tl.store(total + at, added, mask=inside)
    h += added.to(tl.float32)
    tl.store(count, (turn + 1) % TURNS, mask=exists)
    h = h.to(dtype)
    tl.store(stream + at, h, mask=inside)
    h = h.to(tl.float32)
    scale = w.to(tl.float32) + OFFSET
    if BEFORE:  # the definition adds the offset in the weight's dtype
        scale = scale.to(w.dtype).to(tl.float32)
    h *= tl.math.rsqrt(tl.sum(h * h) * (1.0 / C) + eps)
    if BEFORE:
        h = h.to(dtype).to(tl.float32)
    tl.store(y + at, (h * scale).to(dtype), mask=inside)


def one_shot_all_reduce(x: Tensor, buffers: SymmetricBuffers) -> Tensor:
    """Returns the sum of every rank's `x` [...], added in float32: the same bits on all of them.

    All ranks call it in the same order with the same number of elements, at most P S, each on one
    stream. It waits on the device until all have; a CUDA graph can capture it.
    """
    x = x.contiguous()
    return _launch(x, torch.empty_like(x), 0, None, buffers)


def one_shot_all_gather(x: Tensor, first: int, size: int, buffers: SymmetricBuffers) -> Tensor:
    """Gathers each rank's columns `first` to `first + W`, `x` [..., W], to all [..., size].

    It is an all-reduce with zeros in other columns; see `one_shot_all_reduce` for how to call it.
    """
    x = x.contiguous()
    return _launch(x, x.new_empty(*x.shape[:-1], size), first, size, buffers)


def _check(x: Tensor, n: int, buffers: SymmetricBuffers) -> None:
    """Raises ValueError unless x fits into the buffers."""
    limit = buffers.local.shape[-1]
    if x.dtype != buffers.dtype or n > limit:
        raise ValueError(f"{n} elements of {x.dtype}: buffers for {limit}, {buffers.dtype}")


def _launch(
    x: Tensor, y: Tensor, first: int, size: int | None, buffers: SymmetricBuffers
) -> Tensor:
    """Writes the sum over ranks to y; `first` and `size` as in all-gather."""
    local, addresses, turns, rank, dtype, _ = buffers
    _check(x, y.numel(), buffers)
    _one_shot_kernel[(triton.cdiv(y.numel(), S),)](
        x.view(local.dtype), y, local, addresses, turns, y.numel(), first, rank, local.shape[1], S,
        local.shape[2] // S, TURNS, empty_bits(dtype), None if size is None else x.shape[-1], size,
        num_warps=4, **pdl_options(y),
    )  # fmt: skip
    return y


def supports_norm(x: Tensor, residual: Tensor, weight: Tensor) -> bool:
    """Whether `one_shot_all_reduce_norm` can run for x [..., C]: its rows must be whole parts."""
    C = x.shape[-1]
    matches = residual.dtype == x.dtype and residual.shape == x.shape and weight.shape == (C,)
    # A copy of the weight would be written just before the kernel, which reads it before it waits
    matches = matches and weight.is_contiguous()
    return matches and C <= MAX_COLUMNS and (C % S == 0 or x.numel() == C)


def one_shot_all_reduce_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    buffers: SymmetricBuffers,
    *,
    offset: float = 0.0,
    before: bool = True,  # round before the weight
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns total = one_shot_all_reduce(x), rms_norm(residual + total), and residual + total."""
    local, addresses, turns, rank, dtype, _ = buffers
    _check(x, x.numel(), buffers)
    if not supports_norm(x, residual, weight):
        raise ValueError(
            f"x {tuple(x.shape)} and residual {tuple(residual.shape)}: see supports_norm"
        )
    x, C = x.contiguous(), x.shape[-1]
    with torch.inference_mode(False):  # else `total` would not count its versions
        total, y, stream = (torch.empty_like(x) for _ in range(3))
    parts = next_power_of_2(triton.cdiv(C, S))
    _one_shot_norm_kernel[(x.numel() // C,)](
        x.view(local.dtype), residual.contiguous(), weight, y, total, stream, local, addresses,
        turns, eps, C, offset, before, rank, local.shape[1], S, local.shape[2] // S, parts, TURNS,
        empty_bits(dtype),
        num_warps=min(2 * parts, 16), **pdl_options(y),
    )  # fmt: skip
    return total, y, stream
