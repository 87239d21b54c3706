"""Weights in 4 bits: NF4 with doubly quantized scales, as QLoRA has them.

# n numbers of a matrix, b blocks of 64 of them, g groups of 256 blocks; all of a packed weight have
# the matrices that it is made of one behind the other, each with blocks and groups of its own

A number is the nearest of 16 quantiles of the normal distribution times the largest of its block.
That largest number is 8 bits: the nearest of 256 of dynamic precision times the largest of its
group, from which the matrix's mean of them was taken before. 4.13 bits a number in all. Source:
Dettmers et al. (arXiv 2305.14314) and, for the 8 bits, Dettmers (arXiv 1511.04561); packing, code
books, the order of operations and with them all bits are those of bitsandbytes.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels.linear.lora import BaseLinear
from tigon.kernels.runtime import operator, refuse_second_derivative, runs_triton, tl, triton

BLOCK, GROUP = 64, 256  # numbers of a block, blocks of a group
SLAB = 1 << 22  # elements that are (de)quantized at a time
TILE = 64  # blocks of a program
# The book of bitsandbytes, whose last bits no formula gives
NF4_VALUES = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    dtype=torch.float32,
    device="cpu",
)


def _scale_values() -> Tensor:
    """Returns 256 signed numbers up to 1 with a bit less precision for each power of ten below."""
    numbers_list = [0.0, 1.0]
    for i in range(7):
        bounds = torch.linspace(0.1, 1, 2**i + 1, dtype=torch.float32, device="cpu")
        means = (bounds[:-1] + bounds[1:]) / 2.0
        numbers_list += (10 ** (i - 6) * means).tolist() + (-(10 ** (i - 6)) * means).tolist()
    return torch.tensor(sorted(numbers_list), dtype=torch.float32, device="cpu")


SCALE_VALUES = _scale_values()


class NF4Tensor(NamedTuple):
    """The tensors of an NF4 weight, of one matrix or several."""

    codes: Tensor  # uint8 [n / 2]: of two neighbors the first is in the high bits
    scales: Tensor  # uint8 [b], of each block
    steps: Tensor  # fp32 [g], of each group of scales
    offsets: Tensor  # fp32 [g], the mean that was taken from its matrix's scales
    places: Tensor  # int64 [g + 1, 3]: the first number, byte of codes and block of each group
    tables: Tensor  # fp32 [16 + 256], what codes and scales mean


def packed_sizes(numbers: int) -> tuple[int, int, int]:
    """Returns the bytes of codes, the blocks and the groups of a matrix of `numbers` elements.

    The last block, byte and group may be partly filled, as bitsandbytes pads them.
    """
    blocks = -(-numbers // BLOCK)
    return -(-numbers // 2), blocks, -(-blocks // GROUP)


def group_offsets(matrices: Sequence[int]) -> Tensor:
    """Returns `NF4Tensor.places` for matrices of these numbers of elements."""
    rows, number, byte, block = [], 0, 0, 0
    for numbers in matrices:
        code_bytes, blocks, groups = packed_sizes(numbers)
        for i in range(groups):
            at = i * GROUP
            rows.append((number + at * BLOCK, byte + at * BLOCK // 2, block + at))
        number, byte, block = number + numbers, byte + code_bytes, block + blocks
    return torch.tensor([*rows, (number, byte, block)], dtype=torch.int64, device="cpu")


def _quantize_blocks(x: Tensor, size: int, book: Tensor) -> tuple[Tensor, Tensor]:
    """Returns codes [m] of fp32 numbers [m], and the absolute maximum of each `size` of them."""
    padding = -len(x) % size
    rows = torch.cat([x, x.new_zeros(padding)]).view(-1, size) if padding else x.view(-1, size)
    largest_abs = rows.abs().amax(1)
    shares = rows * (1.0 / largest_abs.clamp(min=1e-38)).unsqueeze(1)
    # The nearest number of the book, of equally near ones the lower
    between = (book[1:] + book[:-1]) / 2
    codes = torch.bucketize(shares.clamp_(-1, 1), between, out_int32=True).to(torch.uint8)
    return codes.view(-1)[: len(x)], largest_abs


@torch.no_grad()
def quantize_nf4(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns `codes`, `scales`, `steps` and `offsets` of one 16- or 32-bit matrix.

    NaN and infinity have no code: check for them before. Needs memory for two or three times SLAB
    fp32 numbers.
    """
    flat, book = matrix.reshape(-1), NF4_VALUES.to(matrix.device)
    codes = torch.empty(len(flat) + len(flat) % 2, dtype=torch.uint8, device=flat.device)
    codes[len(flat) :] = 7  # that of 0, which bitsandbytes pads with
    largest = []
    for first in range(0, len(flat), SLAB):
        x = flat[first : first + SLAB].float()
        codes[first : first + len(x)], largest_abs = _quantize_blocks(x, BLOCK, book)
        largest.append(largest_abs)
    largest_abs = torch.cat(largest)
    offset = largest_abs.mean()
    scales, steps = _quantize_blocks(
        largest_abs - offset, GROUP, SCALE_VALUES.to(largest_abs.device)
    )
    return codes[::2] << 4 | codes[1::2], scales, steps, offset.repeat(len(steps))


def dequantize_nf4_slice(
    weight: NF4Tensor,
    matrices: Sequence[int],
    which: int,
    first: int,
    count: int,
    dtype: torch.dtype,
) -> Tensor:
    """Returns elements [first, first + count) of one matrix, in plain torch: the definition.

    `matrices`: the number of elements of each matrix.
    """
    before = [packed_sizes(numbers) for numbers in matrices[:which]]
    byte, block, group = (sum(size[i] for size in before) for i in range(3))
    out = torch.empty(count, dtype=dtype, device=weight.codes.device)
    numbers, dynamic = weight.tables.split([len(NF4_VALUES), len(SCALE_VALUES)])
    end = first + count
    for begin in range(first // BLOCK * BLOCK, end, SLAB):
        stop = min(end, begin + SLAB)
        blocks = torch.arange(begin // BLOCK, -(-stop // BLOCK), device=out.device)
        scales = dynamic[weight.scales[block + blocks].int()]
        scales = scales * weight.steps[group + blocks // GROUP]
        scales = scales + weight.offsets[group + blocks // GROUP]
        codes = weight.codes[byte + begin // 2 : byte + (stop + 1) // 2].int()
        values = numbers[torch.stack((codes >> 4, codes & 15), -1).view(-1)]
        padding = len(blocks) * BLOCK - len(values)
        values = torch.cat([values, values.new_zeros(padding)]) if padding else values
        values = values.view(-1, BLOCK).mul_(scales.unsqueeze(1)).view(-1)
        low = max(begin, first)
        out[low - first : stop - first] = values[low - begin : stop - begin]
    return out


def dequantize_nf4_ref(
    weight: NF4Tensor, matrices: Sequence[int], shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """`dequantize_nf4` in plain torch."""
    parts = [dequantize_nf4_slice(weight, matrices, i, 0, n, dtype) for i, n in enumerate(matrices)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(*shape)


@triton.jit
def _nf4_kernel(
    codes, scales, steps, offsets, groups, numbers, y,
    PARTS: tl.constexpr,  # programs of a group
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,  # all blocks are full
):  # fmt: skip
    """Dequantizes nf4 codes: looks each up and multiplies by the scale of its block."""
    group = tl.program_id(0) // PARTS
    blocks = (tl.program_id(0) % PARTS) * TILE + tl.arange(0, TILE)
    start = groups + group * 3
    first, byte, block = tl.load(start), tl.load(start + 1), tl.load(start + 2)
    count = (tl.load(start + 3) - first).to(tl.int32)
    if EVEN:
        first, byte = tl.multiple_of(first, BLOCK), tl.multiple_of(byte, BLOCK // 2)
    block_mask = blocks * BLOCK < count
    scale = tl.load(scales + block + blocks, mask=block_mask, other=0).to(tl.int32)
    scale = tl.load(numbers + 16 + scale) * tl.load(steps + group) + tl.load(offsets + group)
    at = blocks[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    element_mask = block_mask[:, None] if EVEN else at * 2 < count
    code = tl.load(codes + byte + at, mask=element_mask, other=0).to(tl.int32)
    pairs = tl.interleave(tl.load(numbers + (code >> 4)), tl.load(numbers + (code & 15)))
    element = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    element_mask = block_mask[:, None] if EVEN else element < count
    tl.store(
        y + first + element, (pairs * scale[:, None]).to(y.dtype.element_ty), mask=element_mask
    )


@operator("nf4_dequantize", lambda codes, *rest: codes.new_empty(rest[-2], dtype=rest[-1]))
def _dequantize_nf4(
    codes: Tensor, scales: Tensor, steps: Tensor, offsets: Tensor, groups: Tensor, tables: Tensor,
    matrices: Sequence[int], shape: Sequence[int], dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Returns the dequantized weight of this shape in `dtype`, by the kernel."""
    y, parts = codes.new_empty(shape, dtype=dtype), GROUP // TILE
    _nf4_kernel[(len(steps) * parts,)](
        codes, scales, steps, offsets, groups, tables, y, PARTS=parts, TILE=TILE, BLOCK=BLOCK,
        EVEN=all(numbers % BLOCK == 0 for numbers in matrices),
        enable_fp_fusion=False,  # scales are rounded between their product and their sum
    )  # fmt: skip
    return y


def dequantize_nf4(
    weight: NF4Tensor, matrices: Sequence[int], shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Returns the weight [...shape] in `dtype`, in new memory; computed in fp32 and rounded once.

    `matrices`: the number of elements of each of its matrices.
    """
    if not runs_triton(weight.steps):
        return dequantize_nf4_ref(weight, matrices, shape, dtype)
    return _dequantize_nf4(*weight, matrices, shape, dtype)


# Weights in fp8 with a scale for every block, as checkpoints store them.
#
# N, K of a weight; R rows of scales, S of them in a row
#
# A value is its fp8 number times the scale of its block, in fp32, rounded once. Source: DeepSeek-V3
# (arXiv 2412.19437, section 3.3). A packed weight stacks matrices of several tensors, whose blocks
# begin anew with each, so `owners` maps every row to its row of scales.

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROWS, COLUMNS = 16, 256  # of a program's tile


class BlockFP8Tensor(NamedTuple):
    """The tensors of a weight in blocks of fp8, of one matrix or several."""

    codes: Tensor  # uint8 [N, K]
    scales: Tensor  # fp32 [R, S]
    owners: Tensor  # int32 [N], the row of scales of each row
    width: int  # columns of a block
    stored: torch.dtype  # the fp8 format of the codes


def dequantize_block_fp8_rows(
    weight: BlockFP8Tensor, first: int, count: int, dtype: torch.dtype
) -> Tensor:
    """Returns rows [first, first + count) [count, K] in `dtype`, dequantized in plain torch."""
    columns = weight.codes.shape[1]
    out = torch.empty(count, columns, dtype=dtype, device=weight.codes.device)
    column_block = torch.arange(columns, device=out.device) // weight.width
    step = max(1, SLAB // max(1, columns))
    for begin in range(0, count, step):
        rows = slice(first + begin, first + min(begin + step, count))
        values = weight.codes[rows].view(weight.stored).float()
        out[begin : begin + step] = values.mul_(weight.scales[weight.owners[rows]][:, column_block])
    return out


@triton.jit
def decode_fp8(code, E4M3: tl.constexpr):
    """Converts int32 fp8 codes to fp32. GPUs before sm_89 have no instruction for it.

    Both formats are fp16 with fewer bits: e5m2 lacks the last eight of the mantissa, e4m3 has a
    bias of 7 instead of 15.
    """
    if E4M3:
        bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
        x = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where((code & 0x7F) == 0x7F, float("nan"), x)
    return (code << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _block_fp8_kernel(
    codes, scales, owners, y, N, K, S, width,
    E4M3: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Dequantizes fp8 codes that have one scale for each block of the weight."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    block_mask = (rows < N)[:, None] & (columns < K)[None, :]
    owner = tl.load(owners + rows, mask=rows < N, other=0)
    scale_index = owner[:, None] * S + (columns // width)[None, :]
    scale = tl.load(scales + scale_index, mask=block_mask, other=0.0)
    at = rows.to(tl.int64)[:, None] * K + columns[None, :]
    code = tl.load(codes + at, mask=block_mask, other=0).to(tl.int32)
    tl.store(y + at, (decode_fp8(code, E4M3) * scale).to(y.dtype.element_ty), mask=block_mask)


@operator("block_fp8_dequantize", lambda codes, *rest: codes.new_empty(codes.shape, dtype=rest[-1]))
def _dequantize_block_fp8(
    codes: Tensor, scales: Tensor, owners: Tensor, width: int, e4m3: bool, dtype: torch.dtype
) -> Tensor:
    """Returns the dequantized weight [N, K] in `dtype`, by the kernel."""
    y = codes.new_empty(codes.shape, dtype=dtype)
    N, K = y.shape
    grid = triton.cdiv(N, ROWS), triton.cdiv(K, COLUMNS)
    _block_fp8_kernel[grid](
        codes, scales, owners, y, N, K, scales.shape[1], width,
        E4M3=e4m3, ROWS=ROWS, COLUMNS=COLUMNS,
    )  # fmt: skip
    return y


def dequantize_block_fp8(weight: BlockFP8Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the weight [N, K] in `dtype`, in new memory."""
    if not runs_triton(weight.scales):
        return dequantize_block_fp8_rows(weight, 0, len(weight.codes), dtype)
    *tensors, width, stored = weight
    return _dequantize_block_fp8(*tensors, width, stored == E4M3, dtype)


# The linear layer. y = x W^T + bias and dX = dY W each dequantize W into memory that is free again
# after the product: neither W in 16 bits nor x is saved for backward.

Dequantize = Callable[[], Tensor]  # the weight [K, C]


class _QuantizedLinear(torch.autograd.Function):
    """A linear product with a frozen quantized weight, which backward dequantizes again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, *args: Any) -> Tensor:
        ctx.dequantize, ctx.inner = args
        return ctx.inner.product(x, ctx.dequantize(), bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("a product with a quantized weight")
        needs_x, needs_bias, *_ = ctx.needs_input_grad
        rows = dy.reshape(-1, dy.shape[-1])
        dx = None
        if needs_x:
            weight = ctx.dequantize().to(dy.dtype)  # another one under autocast
            dx = ctx.inner.gradient(rows, weight).view(*dy.shape[:-1], -1)
        return dx, rows.sum(0) if needs_bias else None, None, None


def quantized_linear(
    x: Tensor, bias: Tensor | None, dequantize: Dequantize, inner: BaseLinear
) -> Tensor:
    """`F.linear(x, dequantize(), bias)` of x [..., C], whose weight has no gradient.

    `inner` computes the products. Under torch.compile autograd may save the dequantized weight.
    """
    learns = x.requires_grad or (bias is not None and bias.requires_grad)
    if torch.compiler.is_compiling() or not x.numel():
        return F.linear(x, dequantize(), bias)
    if not (learns and torch.is_grad_enabled()):
        return inner.linear(x, dequantize(), bias)
    return _QuantizedLinear.apply(x, bias, dequantize, inner)


def quantized_base(dequantize: Dequantize, inner: BaseLinear) -> BaseLinear:
    """Returns `quantized_linear` as a base of `lora_linear`, which ignores the weight."""
    return BaseLinear(
        lambda x, _, bias: inner.product(x, dequantize(), bias),
        lambda dy, _: inner.gradient(dy, dequantize()),
        lambda x, _, bias: quantized_linear(x, bias, dequantize, inner),
    )
