"""How the kernels of the gated delta rule find their chunks, and load and store tiles of them.

# B batch, T tokens, N = B T tokens, S sequences, M chunks, C tokens of a chunk, D head dim

A tile is loaded by the copy engine of Hopper and newer GPUs wherever rows are multiples of 16
bytes: with BOXES a kernel is given tensor descriptors in place of pointers. What a box holds beyond
the tensor is 0, but the rows after a sequence are those of the next one.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.kernels.runtime import is_hopper, next_power_of_2, num_stages, shared_memory, tl, triton

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # no Triton
    TensorDescriptor = None

CHUNK = 64
SEQUENCES = 256  # whose chunks are counted at once
MAX_DIM = 128  # of heads: a state of [a part of Dv, Dk] stays in registers


class DeltaLaunch(NamedTuple):
    """Launch parameters; tuned on an H200."""

    block: int  # columns of what a program computes
    warps: int
    stages: int  # chunks or heads in flight


def block_of(dim: int) -> int:
    """Returns the width of a tile that holds `dim` columns, at least what tl.dot takes."""
    return max(16, next_power_of_2(dim))


def precision_of(x: Tensor) -> str:
    """Returns the precision of products of fp32 where x is what it is: three products of tf32 are
    as exact as one of fp32."""
    return "tf32" if x.dtype == torch.bfloat16 else "tf32x3"


def fit_stages(x: Tensor, most: int, block: int) -> int:
    """Returns how many chunks of a scan to have in flight, up to `most`, for keys x [..., Dk] and
    programs of `block` columns of values."""
    columns = 2 * block_of(x.shape[-1]) + block + 2 * CHUNK  # q, k; v; solve, mix
    step = CHUNK * columns * x.element_size()
    return num_stages(step, most, shared_memory(x) - (12 << 10))  # the rest is for products


def fits(x: Tensor) -> bool:
    """Whether two chunks of x [..., Dk] fit into shared memory: wide fp32 does not everywhere."""
    return fit_stages(x, 2, 64) == 2


def is_wide(x: Tensor) -> bool:
    """Whether x is on a GPU with 227 KiB of shared memory that multiplies 64 rows at once."""
    if x.device.type != "cuda":
        return True
    return is_hopper(x.device.index) and shared_memory(x) > 200 << 10


def takes_boxes(*tensors: Tensor) -> bool:
    """Whether the copy engine reads these contiguous tensors [..., D]: numbers of 16 bits, since
    boxes of wider ones would not fit into shared memory."""
    if tensors[0].element_size() != 2 or not is_wide(tensors[0]):
        return False
    return all(x.shape[-1] % 8 == 0 and x.data_ptr() % 16 == 0 for x in tensors)


def row_boxes(x: Tensor, columns: int) -> Any:
    """Describes x [..., heads, D] as [heads, N, D], of which a box has a chunk's rows."""
    heads, D = x.shape[-2:]
    shape, strides = [heads, x.numel() // (heads * D), D], [D, heads * D, 1]
    return TensorDescriptor(x, shape, strides, [1, CHUNK, columns])


def matrix_boxes(x: Tensor, rows: int, columns: int) -> Any:
    """Describes x [..., R, D] as [L, R, D]."""
    return TensorDescriptor.from_tensor(x.view(-1, *x.shape[-2:]), [1, rows, columns])


class Chunks(NamedTuple):
    """Where the chunks of sequences are: int32 on the device, so that nothing waits for it."""

    table: Tensor  # [2, M]: first token and number of tokens; 0 beyond the last chunk
    offsets: Tensor  # [S + 1]: the first chunk of each sequence
    bounds: Tensor  # [S + 1]: the first token of each sequence

    @property
    def slots(self) -> int:
        """How many chunks there are at most."""
        return self.table.shape[1]


@triton.jit(do_not_specialize=["S", "M"])
def _chunks_kernel(bounds, table, offsets, S, M, C: tl.constexpr, BLOCK: tl.constexpr):
    """Lists the chunks of a sequence; the last program empties those that nobody needs."""
    n = tl.program_id(0)
    chunks = tl.zeros([BLOCK], tl.int32)
    for before in range(0, n, BLOCK):
        at = before + tl.arange(0, BLOCK)
        ends = tl.load(bounds + at + 1, mask=at < n, other=0)
        lengths = ends - tl.load(bounds + at, mask=at < n, other=0)
        chunks += (lengths + C - 1) // C
    first = tl.sum(chunks, 0)
    start = tl.load(bounds + n)
    end = tl.load(bounds + tl.minimum(n + 1, S))
    count = tl.where(n < S, (end - start + C - 1) // C, M - first)
    tl.store(offsets + n, first)
    for at_chunk in range(0, count, 64):
        chunk = at_chunk + tl.arange(0, 64)
        token = tl.where(n < S, start + chunk * C, 0)
        left = tl.where(n < S, end - token, 0)
        tl.store(table + first + chunk, token, mask=chunk < count)
        tl.store(table + M + first + chunk, tl.minimum(left, C), mask=chunk < count)


def make_chunks(q: Tensor, cu_seqlens: Tensor | None) -> Chunks:
    """Cuts the rows of q [B, T, ...], or the packed sequences of its single row, into chunks."""
    B, T = q.shape[:2]
    if cu_seqlens is None:
        bounds = torch.arange(B + 1, dtype=torch.int32, device=q.device) * T
    else:
        bounds = cu_seqlens.int().contiguous()
    S = len(bounds) - 1
    M = B * T // CHUNK + S
    made = Chunks(bounds.new_empty(2, M), bounds.new_empty(S + 1), bounds)
    _chunks_kernel[(S + 1,)](bounds, made.table, made.offsets, S, M, CHUNK, SEQUENCES)
    return made


@triton.jit
def _row_tile(
    x, token, left, head,
    heads: tl.constexpr, D: tl.constexpr, first, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Returns pointers to columns of one head of x [N, heads, D], for the C tokens from `token` on
    of which `left` exist; and which exist."""
    rows, columns = tl.arange(0, C)[:, None], first + tl.arange(0, BLOCK)[None, :]
    x += (token.to(tl.int64) * heads + head) * D
    return x + rows * (heads * D) + columns, (rows < left) & (columns < D)


@triton.jit
def load_rows(
    x, token, left, head,
    heads: tl.constexpr, D: tl.constexpr, first, C: tl.constexpr, BLOCK: tl.constexpr,
    BOXES: tl.constexpr, CLEAR: tl.constexpr,
):  # fmt: skip
    """Loads a tile [C, BLOCK]; rows that do not exist are 0, or with boxes only if CLEAR."""
    if BOXES:
        tile = x.load([head, token, first]).reshape(C, BLOCK)
        if CLEAR:
            tile = tl.where(tl.arange(0, C)[:, None] < left, tile, 0.0)
        return tile
    else:
        at, exists = _row_tile(x, token, left, head, heads, D, first, C, BLOCK)
        return tl.load(at, mask=exists, other=0.0)


@triton.jit
def store_rows(
    x, value, token, left, head,
    heads: tl.constexpr, D: tl.constexpr, first, C: tl.constexpr, BLOCK: tl.constexpr,
    BOXES: tl.constexpr,
):  # fmt: skip
    """Stores a tile [C, BLOCK] where rows exist, or with boxes all of it."""
    if BOXES:
        x.store([head, token, first], value.reshape(1, C, BLOCK))
    else:
        at, exists = _row_tile(x, token, left, head, heads, D, first, C, BLOCK)
        tl.store(at, value.to(x.dtype.element_ty), mask=exists)


@triton.jit
def matrix_tile(
    x, at, R: tl.constexpr, D: tl.constexpr, row, column, BR: tl.constexpr, BD: tl.constexpr
):
    """Returns pointers to a tile of the matrix `at` of x [..., R, D], and which exist."""
    rows, columns = row + tl.arange(0, BR)[:, None], column + tl.arange(0, BD)[None, :]
    return x + at.to(tl.int64) * R * D + rows * D + columns, (rows < R) & (columns < D)


@triton.jit
def load_matrix(
    x, at, R: tl.constexpr, D: tl.constexpr, row, column, BR: tl.constexpr, BD: tl.constexpr,
    BOXES: tl.constexpr,
):  # fmt: skip
    """Loads a tile of the matrix `at` of x [..., R, D], 0 where nothing exists."""
    if BOXES:
        return x.load([at, row, column]).reshape(BR, BD)
    else:
        pointers, exists = matrix_tile(x, at, R, D, row, column, BR, BD)
        return tl.load(pointers, mask=exists, other=0.0)


@triton.jit
def store_matrix(
    x, value, at, R: tl.constexpr, D: tl.constexpr, row, column,
    BR: tl.constexpr, BD: tl.constexpr, BOXES: tl.constexpr,
):  # fmt: skip
    """Stores what `load_matrix` loads."""
    if BOXES:
        x.store([at, row, column], value.to(x.dtype).reshape(1, BR, BD))
    else:
        pointers, exists = matrix_tile(x, at, R, D, row, column, BR, BD)
        tl.store(pointers, value.to(x.dtype.element_ty), mask=exists)


@triton.jit
def load_gate(gates, at, which: tl.constexpr, C: tl.constexpr, BOXES: tl.constexpr):
    """Loads one of the four rows of the gates `at` of [..., 4, C]."""
    if BOXES:
        return gates.load([at, which, 0]).reshape(C)
    else:
        return tl.load(gates + (at.to(tl.int64) * 4 + which) * C + tl.arange(0, C))
