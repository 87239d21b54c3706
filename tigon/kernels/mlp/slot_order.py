"""Sorts the slots of a mixture of experts, one for each expert of a token, by their expert.

The numbers are few, so each slot's place is counted, where a sort by bits takes several passes and
launches. Nothing is added by atomics: equal experts stay in the order of their slots.

# S slots, E experts; expert E is absent and comes last
"""

import torch
from torch import Tensor

from tigon.kernels.runtime import next_power_of_2, tl, triton

# Flags of a program, one for each of its slots and experts, and warps
FLAGS, WARPS = 1 << 13, 4
FEW_SLOTS, MOST_SLOTS = 16, 128  # of a program
SUM = (128, 8)  # programs' counts that are summed at a time, and experts of a program


def sort_slots_ref(experts: Tensor, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the order of the slots by expert, its inverse, and where each expert ends, by a
    stable sort: the definition."""
    small = torch.uint8 if number < 256 else torch.int16 if number < 2**15 else torch.int64
    ordered, order = experts.flatten().to(small).sort(stable=True)  # fewer bits, fewer passes
    numbers = torch.arange(number, device=experts.device, dtype=small)
    ends = torch.searchsorted(ordered, numbers, right=True, out_int32=True)
    places = torch.arange(len(order), device=order.device, dtype=order.dtype)
    return order, torch.empty_like(order).scatter_(0, order, places), ends


@triton.jit
def _flags(experts, ids, S, BLOCK: tl.constexpr):
    """Returns the slots of this program, and [BLOCK, EXPERTS] flags of their experts."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(experts + slot, mask=slot < S, other=-1)
    return slot, (expert[:, None] == ids[None, :]).to(tl.int32)


@triton.jit(do_not_specialize=["S"])
def _count_kernel(experts, counts, S, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Counts the slots of each expert among those of a program."""
    ids = tl.arange(0, EXPERTS)
    _, flags = _flags(experts, ids, S, BLOCK)
    tl.store(counts + tl.program_id(0) * EXPERTS + ids, tl.sum(flags, 0))


@triton.jit(do_not_specialize=["BLOCKS"])
def _sum_kernel(
    counts, totals, BLOCKS, EXPERTS: tl.constexpr, SOME: tl.constexpr, COLUMNS: tl.constexpr
):
    """Replaces each program's counts by the sum of those before it; writes the sum of all."""
    ids = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.int32)
    for start in range(0, BLOCKS, SOME):
        block = start + tl.arange(0, SOME)[:, None]
        at = counts + block * EXPERTS + ids[None, :]
        count = tl.load(at, mask=block < BLOCKS, other=0)
        tl.store(at, tl.cumsum(count, 0) - count + total[None, :], mask=block < BLOCKS)
        total += tl.sum(count, 0)
    tl.store(totals + ids, total)


@triton.jit(do_not_specialize=["S"])
def _place_kernel(
    experts, counts, totals, order, inverse, ends, S, E,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Places a slot behind those of smaller experts and the earlier ones of its own.

    counts and totals are None where one program has all slots.
    """
    ids = tl.arange(0, EXPERTS)
    slot, flags = _flags(experts, ids, S, BLOCK)
    if counts is None:
        total = tl.sum(flags, 0)
        end = tl.cumsum(total)
        first = end - total
    else:
        total = tl.load(totals + ids)
        end = tl.cumsum(total)
        first = end - total + tl.load(counts + tl.program_id(0) * EXPERTS + ids)
    place = tl.sum(flags * (tl.cumsum(flags, 0) - 1 + first[None, :]), 1)
    tl.store(inverse + slot, place.to(tl.int64), mask=slot < S)
    tl.store(order + place, slot.to(tl.int64), mask=slot < S)
    tl.store(ends + ids, end, mask=ids < tl.where(tl.program_id(0) == 0, E, 0))


def sort_slots(
    experts: Tensor, number: int, absent: bool, *, fused: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the order of the slots by expert [S], its inverse [S], and where each expert ends.

    `experts`, contiguous and int64, are in [0, number), or `number` if some are `absent`. Order and
    inverse are int64, the ends [number] int32. `fused`: by kernels.
    """
    slots = experts.numel()
    if not slots or not fused:
        return sort_slots_ref(experts, number)
    order, inverse = experts.new_empty(slots), experts.new_empty(slots)
    ends = experts.new_empty(number, dtype=torch.int32)
    ids = max(SUM[1], next_power_of_2(number + absent))
    # Two sizes, so that few other numbers of slots compile a kernel
    block = FEW_SLOTS if slots <= FEW_SLOTS else min(MOST_SLOTS, max(FEW_SLOTS, FLAGS // ids))
    blocks, counts, totals = triton.cdiv(slots, block), None, None
    sizes = {"EXPERTS": ids, "BLOCK": block, "num_warps": WARPS}
    if blocks > 1:
        counts, totals = ends.new_empty(blocks, ids), ends.new_empty(ids)
        _count_kernel[(blocks,)](experts, counts, slots, **sizes)
        some, columns = SUM
        _sum_kernel[(ids // columns,)](counts, totals, blocks, ids, some, columns)
    outputs = order, inverse, ends
    _place_kernel[(blocks,)](experts, counts, totals, *outputs, slots, number, **sizes)
    return outputs
