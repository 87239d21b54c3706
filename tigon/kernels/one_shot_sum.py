"""The sum over ranks whose GPUs write to each other's memory, for tensors so small that latency is
all of their time.

Each rank writes its elements into the memory of every other one and adds up what arrives in its
own: one kernel, and one way over NVLink. No flag follows the data: memory that nothing has arrived
at yet holds -0.0, and 0.0 is sent in place of -0.0.

There are three buffers, used in turn. In a turn a rank empties the buffer of the turn before,
which it has read. The others write there again two turns later, and each of them gets so far only
with what this rank sends after that. Every program has its own part of the buffers and its own
count of turns, so that programs never wait for each other.
Source: TensorRT-LLM's one-shot all-reduce with Lamport-style buffers.

# R ranks, n elements, S of a program, P programs at most
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tigon.kernels._triton import pdl_options, pdl_wait, tl, triton

TURNS, S, P = 3, 1024, 256
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


class Buffers(NamedTuple):
    """What a rank has for the sums of a group in one dtype; the others write to `own`."""

    own: Tensor  # bits [TURNS, R, P S], all `empty` at first
    addresses: Tensor  # int64 [R], of every rank's `own`
    turns: Tensor  # int32 [P], zeros at first
    rank: int
    dtype: torch.dtype
    handle: object = None  # of the shared memory, which lives as long


def empty(dtype: torch.dtype) -> int:
    """The bits of -0.0."""
    return torch.iinfo(BITS[dtype]).min


@triton.jit
def _kernel(
    x,  # bits [n]
    y,  # [n]
    own,
    addresses,
    turns,
    n,
    RANK: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    P: tl.constexpr,
    TURNS: tl.constexpr,
    EMPTY: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    program = tl.program_id(0)
    at = program * S + tl.arange(0, S)
    inside = at < n
    turn = tl.load(turns + program)
    bits = tl.load(x + at, mask=inside, other=0)
    sent = tl.where(bits == EMPTY, 0, bits).to(bits.dtype)
    for rank in tl.static_range(R):
        if rank != RANK:
            there = tl.multiple_of(tl.load(addresses + rank).to(own.dtype), 16)
            # Written through, as the reader is another GPU
            to = there + (turn * R + RANK) * (P * S) + at
            tl.store(to, sent, mask=inside, cache_modifier=".wt")
    total = tl.zeros([S], tl.float32)
    for rank in tl.static_range(R):  # in the same order on all, so that they get the same sum
        part = bits
        if rank != RANK:
            here = own + (turn * R + rank) * (P * S) + at
            part = tl.load(here, mask=inside, other=0, volatile=True)
            while tl.max((part == EMPTY).to(tl.int32), 0) > 0:
                part = tl.load(here, mask=inside, other=0, volatile=True)
        total += part.to(y.dtype.element_ty, bitcast=True).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=inside)
    before = (turn + TURNS - 1) % TURNS
    for rank in tl.static_range(R):
        if rank != RANK:
            nothing = tl.full([S], EMPTY, bits.dtype)
            tl.store(own + (before * R + rank) * (P * S) + at, nothing)
    tl.store(turns + program, (turn + 1) % TURNS)


def one_shot_sum(x: Tensor, buffers: Buffers) -> Tensor:
    """The sum of every rank's `x` [...], added up in float32: the same bits on all of them.

    All ranks call it in the same order with as many elements, at most P S, each on one stream. It
    waits on the device until all have; a CUDA graph can hold it.
    """
    own, addresses, turns, rank, dtype, _ = buffers
    x = x.contiguous()
    if x.dtype != dtype or x.numel() > own.shape[-1]:
        raise ValueError(f"{x.numel()} elements of {x.dtype}: buffers for {own.shape[-1]}, {dtype}")
    y = torch.empty_like(x)
    _kernel[(triton.cdiv(x.numel(), S),)](
        x.view(own.dtype),
        y,
        own,
        addresses,
        turns,
        x.numel(),
        rank,
        own.shape[1],
        S,
        own.shape[2] // S,
        TURNS,
        empty(dtype),
        num_warps=4,
        **pdl_options(x),
    )
    return y
