"""Weights in 4 bits: NF4 with doubly quantised scales, as QLoRA has them.

# n numbers of a matrix, b blocks of 64 of them, g groups of 256 blocks; all of a packed weight have
# the matrices that it is made of one behind the other, each with blocks and groups of its own

A number is the nearest of 16 quantiles of the normal distribution times the largest of its block.
That largest number is 8 bits: the nearest of 256 of dynamic precision times the largest of its
group, from which the matrix's mean of them was taken before. 4.13 bits a number in all. Source:
Dettmers et al. (arXiv 2305.14314) and, for the 8 bits, Dettmers (arXiv 1511.04561); packing, code
books, the order of operations and with them all bits are those of bitsandbytes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.kernels._triton import operator, runs_triton, tl, triton

BLOCK, GROUP = 64, 256  # numbers of a block, blocks of a group
SLAB = 1 << 22  # numbers that are quantised at a time
TILE = 64  # blocks of a program
# The book of bitsandbytes, whose last bits no formula gives
NUMBERS = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    dtype=torch.float32,
    device="cpu",
)


def _dynamic() -> Tensor:
    """256 signed numbers up to 1; each power of ten further down they have a bit less."""
    found = [0.0, 1.0]
    for i in range(7):
        bounds = torch.linspace(0.1, 1, 2**i + 1, dtype=torch.float32, device="cpu")
        means = (bounds[:-1] + bounds[1:]) / 2.0
        found += (10 ** (i - 6) * means).tolist() + (-(10 ** (i - 6)) * means).tolist()
    return torch.tensor(sorted(found), dtype=torch.float32, device="cpu")


DYNAMIC = _dynamic()


class Nf4(NamedTuple):
    """A weight of one or several matrices."""

    codes: Tensor  # uint8 [n / 2]: of two neighbours the first is in the high bits
    scales: Tensor  # uint8 [b], of each block
    steps: Tensor  # fp32 [g], of each group of scales
    offsets: Tensor  # fp32 [g], the mean that was taken from its matrix's scales
    places: Tensor  # int64 [g + 1, 3]: the first number, byte of codes and block of each group
    tables: Tensor  # fp32 [16 + 256], what codes and scales mean


def sizes_of(numbers: int) -> tuple[int, int, int]:
    """Bytes of codes, blocks and groups of a matrix of so many numbers; its last block, byte and
    group may be filled in part, as bitsandbytes pads them."""
    blocks = -(-numbers // BLOCK)
    return -(-numbers // 2), blocks, -(-blocks // GROUP)


def places_of(matrices: Sequence[int]) -> Tensor:
    """`places` for matrices of so many numbers."""
    rows, number, byte, block = [], 0, 0, 0
    for numbers in matrices:
        of_codes, blocks, groups = sizes_of(numbers)
        for i in range(groups):
            at = i * GROUP
            rows.append((number + at * BLOCK, byte + at * BLOCK // 2, block + at))
        number, byte, block = number + numbers, byte + of_codes, block + blocks
    return torch.tensor([*rows, (number, byte, block)], dtype=torch.int64, device="cpu")


def _nearest(x: Tensor, book: Tensor) -> Tensor:
    """The index of the nearest number of the book, uint8; of two that are as near the lower one."""
    return torch.bucketize(x, (book[1:] + book[:-1]) / 2, out_int32=True).to(torch.uint8)


def _quantised(x: Tensor, size: int, book: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [m] of fp32 numbers [m], and the largest of each `size` of them."""
    missing = -len(x) % size
    rows = torch.cat([x, x.new_zeros(missing)]).view(-1, size) if missing else x.view(-1, size)
    most = rows.abs().amax(1)
    shares = rows * (1.0 / most.clamp(min=1e-38)).unsqueeze(1)
    return _nearest(shares.clamp_(-1, 1), book).view(-1)[: len(x)], most


@torch.no_grad()
def nf4_quantise(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`codes`, `scales`, `steps` and `offsets` of one matrix of 16 or 32 bits.

    NaN and infinity have no code: callers check for them. Two or three times SLAB of fp32 numbers
    are held meanwhile.
    """
    flat, book = matrix.reshape(-1), NUMBERS.to(matrix.device)
    codes = torch.empty(len(flat) + len(flat) % 2, dtype=torch.uint8, device=flat.device)
    codes[len(flat) :] = 7  # that of 0, which bitsandbytes pads with
    largest = []
    for first in range(0, len(flat), SLAB):
        x = flat[first : first + SLAB].float()
        codes[first : first + len(x)], most = _quantised(x, BLOCK, book)
        largest.append(most)
    most = torch.cat(largest)
    offset = most.mean()
    scales, steps = _quantised(most - offset, GROUP, DYNAMIC.to(most.device))
    return codes[::2] << 4 | codes[1::2], scales, steps, offset.repeat(len(steps))


def nf4_numbers(
    weight: Nf4, matrices: Sequence[int], which: int, first: int, count: int, dtype: torch.dtype
) -> Tensor:
    """Numbers [first, first + count) of one of the matrices, in plain torch: the definition.

    `matrices`: the numbers that each of them has.
    """
    before = [sizes_of(numbers) for numbers in matrices[:which]]
    byte, block, group = (sum(size[i] for size in before) for i in range(3))
    out = torch.empty(count, dtype=dtype, device=weight.codes.device)
    numbers, dynamic = weight.tables.split([len(NUMBERS), len(DYNAMIC)])
    end = first + count
    for begin in range(first // BLOCK * BLOCK, end, SLAB):
        stop = min(end, begin + SLAB)
        blocks = torch.arange(begin // BLOCK, -(-stop // BLOCK), device=out.device)
        scales = dynamic[weight.scales[block + blocks].int()]
        scales = scales * weight.steps[group + blocks // GROUP]
        scales = scales + weight.offsets[group + blocks // GROUP]
        codes = weight.codes[byte + begin // 2 : byte + (stop + 1) // 2].int()
        values = numbers[torch.stack((codes >> 4, codes & 15), -1).view(-1)]
        missing = len(blocks) * BLOCK - len(values)
        values = torch.cat([values, values.new_zeros(missing)]) if missing else values
        values = values.view(-1, BLOCK).mul_(scales.unsqueeze(1)).view(-1)
        low = max(begin, first)
        out[low - first : stop - first] = values[low - begin : stop - begin]
    return out


def nf4_dequantise_ref(
    weight: Nf4, matrices: Sequence[int], shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """What `nf4_dequantise` returns, in plain torch."""
    parts = [nf4_numbers(weight, matrices, i, 0, n, dtype) for i, n in enumerate(matrices)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(*shape)


@triton.jit
def _nf4_kernel(
    codes, scales, steps, offsets, places, numbers, y,
    PARTS: tl.constexpr,  # programs of a group
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,  # all blocks are full
):  # fmt: skip
    group = tl.program_id(0) // PARTS
    blocks = (tl.program_id(0) % PARTS) * TILE + tl.arange(0, TILE)
    place = places + group * 3
    first, byte, block = tl.load(place), tl.load(place + 1), tl.load(place + 2)
    count = (tl.load(place + 3) - first).to(tl.int32)
    if EVEN:
        first, byte = tl.multiple_of(first, BLOCK), tl.multiple_of(byte, BLOCK // 2)
    there = blocks * BLOCK < count
    scale = tl.load(scales + block + blocks, mask=there, other=0).to(tl.int32)
    scale = tl.load(numbers + 16 + scale) * tl.load(steps + group) + tl.load(offsets + group)
    at = blocks[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    here = there[:, None] if EVEN else at * 2 < count
    code = tl.load(codes + byte + at, mask=here, other=0).to(tl.int32)
    pairs = tl.interleave(tl.load(numbers + (code >> 4)), tl.load(numbers + (code & 15)))
    own = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    here = there[:, None] if EVEN else own < count
    tl.store(y + first + own, (pairs * scale[:, None]).to(y.dtype.element_ty), mask=here)


def _output(
    codes: Tensor, scales: Tensor, steps: Tensor, offsets: Tensor, places: Tensor, tables: Tensor,
    matrices: Sequence[int], shape: Sequence[int], dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return codes.new_empty(shape, dtype=dtype)


@operator("nf4_dequantise", _output)
def _dequantise(
    codes: Tensor, scales: Tensor, steps: Tensor, offsets: Tensor, places: Tensor, tables: Tensor,
    matrices: Sequence[int], shape: Sequence[int], dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    weight = Nf4(codes, scales, steps, offsets, places, tables)
    y = _output(*weight, matrices, shape, dtype)
    parts = GROUP // TILE
    _nf4_kernel[(len(steps) * parts,)](
        *weight, y, PARTS=parts, TILE=TILE, BLOCK=BLOCK,
        EVEN=all(numbers % BLOCK == 0 for numbers in matrices),
        enable_fp_fusion=False,  # scales are rounded between their product and their sum
    )  # fmt: skip
    return y


def nf4_dequantise(
    weight: Nf4, matrices: Sequence[int], shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """The weight [...shape] in `dtype`, in new memory; `matrices`: the numbers of each of its
    matrices. Numbers are fp32 and rounded once."""
    if not runs_triton(weight.steps):
        return nf4_dequantise_ref(weight, matrices, shape, dtype)
    return _dequantise(*weight, matrices, shape, dtype)
