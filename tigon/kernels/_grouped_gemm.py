"""Matrix products of rows sorted by expert, each with its own expert's matrix.

# S rows (slots), E experts, K the dimension summed over, O outputs
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels._triton import INTERPRETED, multiprocessors, tl, triton

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # no Triton
    TensorDescriptor = None

# Rows, outputs and summed elements of a step, warps, and steps in flight: the best of some tried
# on an H200. The interpreter, which takes as long for a step of any size, tests with more tiles
TILE = (32, 32, 16, 4, 1) if INTERPRETED else (128, 256, 64, 8, 3)


@triton.jit
def _grouped_product_kernel(
    x,  # descriptor of [S, K]
    weight,  # descriptor of [E, O, K], TRANSPOSED [E, K, O]
    ends,
    y,
    O,  # noqa: E741
    K,
    E: tl.constexpr,
    EXPERTS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Each program walks over tiles; those of an expert follow each other, down its rows first,
    so that programs at work together read the same rows and few columns of few matrices."""
    i = tl.arange(0, EXPERTS)
    end = tl.load(ends + i, mask=i < E, other=0)
    start = tl.load(ends + i - 1, mask=(i > 0) & (i < E), other=0)
    tiles = tl.where(i < E, (end - start + ROWS - 1) // ROWS, 0)  # of rows, per expert
    upto = tl.cumsum(tiles)
    across = (O + OUTPUTS - 1) // OUTPUTS
    # Flattened, the first steps of a tile are loaded while the last tile is stored
    for tile in tl.range(
        tl.program_id(0), tl.sum(tiles) * across, tl.num_programs(0), flatten=True
    ):
        e = tl.sum((upto * across <= tile).to(tl.int32))
        down = tl.sum(tl.where(i == e, tiles, 0))
        place = tile - (tl.sum(tl.where(i < e, tiles, 0))) * across
        last = tl.load(ends + e)
        row = tl.load(ends + e - 1, mask=e > 0, other=0) + (place % down) * ROWS
        column = place // down * OUTPUTS
        total = tl.zeros((ROWS, OUTPUTS), tl.float32)
        for k in range(0, K, STEP):
            a = x.load([row, k])
            if TRANSPOSED:
                b = weight.load([e, k, column]).reshape(STEP, OUTPUTS)
            else:
                b = weight.load([e, column, k]).reshape(OUTPUTS, STEP).T
            total = tl.dot(a, b, total)
        rows = row + tl.arange(0, ROWS)[:, None]
        columns = column + tl.arange(0, OUTPUTS)[None, :]
        at = y + rows.to(tl.int64) * O + columns
        # Rows past the last one are another expert's
        tl.store(at, total.to(y.dtype.element_ty), mask=(rows < last) & (columns < O))


@functools.cache
def _has_tma(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def _triton_serves(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel does: 16-bit numbers, and rows that the copy engine can address."""
    if x.device.type == "cuda":
        fits = x.dtype in (torch.bfloat16, torch.float16) and _has_tma(x.device.index)
    else:  # the interpreter has no bf16 products
        fits = INTERPRETED and x.dtype != torch.bfloat16
    steps = all(t.shape[-1] * t.element_size() % 16 == 0 for t in (x, weight))
    return fits and steps and x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0


def _torch_serves(x: Tensor, weight: Tensor) -> bool:
    """Whether torch's grouped_mm does: bf16 (fp32 on the CPU), in steps of 16 bytes."""
    steps = all(t.shape[-1] * t.element_size() % 16 == 0 for t in (x, weight))
    return steps and (
        x.dtype == torch.bfloat16 or (x.device.type == "cpu" and x.dtype == torch.float32)
    )


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor, *, transposed: bool = False) -> Tensor:
    """Rows x [S, K], those of expert e up to ends[e], times weight [E, O, K] -> [S, O].

    Transposed, the weight is [E, K, O]. Both are contiguous. Sums in fp32. On GPUs from sm_90 on
    in 16 bits and elsewhere in bf16 nothing waits for the device.
    """
    experts, width = len(weight), weight.shape[2 if transposed else 1]
    if not len(x):
        return x.new_empty(0, width)
    if _triton_serves(x, weight):
        y = x.new_empty(len(x), width)
        rows, outputs, step, warps, stages = TILE
        box = [1, step, outputs] if transposed else [1, outputs, step]
        _grouped_product_kernel[(multiprocessors(x),)](
            TensorDescriptor.from_tensor(x, [rows, step]),
            TensorDescriptor.from_tensor(weight, box),
            ends,
            y,
            width,
            x.shape[1],
            E=experts,
            EXPERTS=triton.next_power_of_2(experts),
            TRANSPOSED=transposed,
            ROWS=rows,
            OUTPUTS=outputs,
            STEP=step,
            num_warps=warps,
            num_stages=stages,
        )
        return y
    matrices = weight if transposed else weight.transpose(1, 2)
    if _torch_serves(x, weight):
        return F.grouped_mm(x, matrices, offs=ends)
    y, start = x.new_empty(len(x), width), 0
    for w, end in zip(matrices, ends.tolist(), strict=True):
        torch.mm(x[start:end], w, out=y[start:end])
        start = end
    return y


def grouped_weight_gradient(dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """dy [S, O] and x [S, K] -> [E, O, K], 0 where an expert has no rows.

    torch's own product: with few rows to sum over it was faster than any of ours.
    """
    if len(x) and _torch_serves(dy, x):
        return F.grouped_mm(dy.t(), x, offs=ends)
    dw, start = x.new_zeros(len(ends), dy.shape[1], x.shape[1]), 0
    for w, end in zip(dw, ends.tolist(), strict=True):
        if end > start:
            torch.mm(dy[start:end].t(), x[start:end], out=w)
        start = end
    return dw
