"""Products of sorted rows with one matrix for each expert, and the gradients of these matrices.

# S rows sorted by expert, N tokens, k experts per token, E experts, K the dimension summed over,
# O outputs of a product
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.kernels.linear.linear import matmul_into
from tigon.kernels.runtime import INTERPRETED, is_hopper, num_sms, shared_memory, tl, triton

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # no Triton
    TensorDescriptor = None

# Rows, outputs and summed elements of a step, warps, and steps in flight: the best of some tried
# on an H200. The interpreter, which takes as long for a step of any size, tests with more tiles
TILE = (32, 32, 16, 4, 1) if INTERPRETED else (128, 256, 64, 8, 3)
FEW_ROWS = 64  # rows, as in a step of decoding, which should not wait for the device


@triton.jit
def _grouped_product_kernel(
    x,  # descriptor of [S, K]
    weight,  # descriptor of [E, O, K], TRANSPOSED [E, K, O]
    ends, y,
    bias,  # [E, O], or None
    O,  # noqa: E741
    K,
    E: tl.constexpr, EXPERTS: tl.constexpr, TRANSPOSED: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Walks over tiles, which are ordered by expert and then down its rows.

    So programs that run at the same time read the same rows and few columns of few matrices.
    """
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
        offset = tile - (tl.sum(tl.where(i < e, tiles, 0))) * across
        last = tl.load(ends + e)
        row = tl.load(ends + e - 1, mask=e > 0, other=0) + (offset % down) * ROWS
        column = offset // down * OUTPUTS
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
        if bias is not None:
            total += tl.load(bias + e * O + columns, mask=columns < O, other=0.0).to(tl.float32)
        at = y + rows.to(tl.int64) * O + columns
        # Rows past the last one are another expert's
        tl.store(at, total.to(y.dtype.element_ty), mask=(rows < last) & (columns < O))


def _aligned(*tensors: Tensor) -> bool:
    """Whether each row of contiguous tensors begins at a multiple of 16 bytes."""
    return all(t.shape[-1] * t.element_size() % 16 == 0 and t.data_ptr() % 16 == 0 for t in tensors)


def _triton_supports(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel can run: 16-bit numbers, and rows that the copy engine can address."""
    if x.device.type == "cuda":
        fits = x.dtype in (torch.bfloat16, torch.float16) and is_hopper(x.device.index)
    else:  # the interpreter has no bf16 products
        fits = INTERPRETED and x.dtype in (torch.float16, torch.float32)
    return fits and _aligned(x, weight)


def _torch_supports(x: Tensor, weight: Tensor) -> bool:
    """Whether torch's grouped_mm can run: bf16 (fp32 on the CPU), rows aligned to 16 bytes."""
    on_cpu = x.device.type == "cpu" and x.dtype == torch.float32
    return (x.dtype == torch.bfloat16 or on_cpu) and _aligned(x, weight)


def must_not_sync(x: Tensor, rows: int) -> bool:
    """Whether the host may not wait for the device to learn how many rows each expert has.

    So it is on a GPU with few rows, and while a CUDA graph is captured.
    """
    return x.device.type == "cuda" and (
        rows <= FEW_ROWS or torch.cuda.is_current_stream_capturing()
    )


def training_syncs(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether training with expert matrices [E, O, K] may wait for the device to learn their rows.

    A capture then fails, or computes every row with every expert.
    """
    fits = device.type == "cuda" and dtype == torch.bfloat16 and is_hopper(device.index)
    return not fits or any(size * dtype.itemsize % 16 for size in shape[1:])


def product_by_row(x: Tensor, matrices: Tensor, experts: Tensor) -> Tensor:
    """Multiplies each row of x [S, K] by its expert's [K, O] -> [S, O], without waiting."""
    # A row's own copy of a matrix moves it three times; in a product with all, each moves once
    if 3 * len(x) < len(matrices):
        return torch.bmm(x[:, None], matrices[experts])[:, 0]
    return torch.matmul(x, matrices)[experts, torch.arange(len(x), device=x.device)]


def experts_of_rows(ends: Tensor, rows: int) -> Tensor:
    """Returns the expert [S] of each sorted row; of rows after the last end the last one."""
    row = torch.arange(rows, device=ends.device, dtype=ends.dtype)
    return torch.searchsorted(ends, row, right=True).clamp_(max=len(ends) - 1)


def grouped_product(
    x: Tensor, weight: Tensor, ends: Tensor, *, transposed: bool = False, bias: Tensor | None = None
) -> Tensor:
    """Multiplies rows x [S, K], those of expert e up to ends[e], by weight [E, O, K] -> [S, O].

    If `transposed`, the weight is [E, K, O]. `bias` [E, O] is added. All are contiguous. Sums are
    fp32. With few rows, and where the kernel runs (16 bits, from sm_90 on, K and O of whole 16
    bytes), nothing waits for the device; otherwise the host may ask it where the experts end. Rows
    after the last end belong to no expert, and their results are undefined.
    """
    experts, width = len(weight), weight.shape[2 if transposed else 1]
    if not len(x):
        return x.new_empty(0, width)
    if _triton_supports(x, weight):
        y = x.new_empty(len(x), width)
        rows, outputs, step, warps, stages = TILE
        # All of them are in shared memory on Hopper, and 2 KiB of other things
        in_flight = (shared_memory(x) - 2048) // ((rows + outputs) * step * x.element_size())
        box = [1, step, outputs] if transposed else [1, outputs, step]
        _grouped_product_kernel[(num_sms(x),)](
            TensorDescriptor.from_tensor(x, [rows, step]),
            TensorDescriptor.from_tensor(weight, box), ends, y, bias, width, x.shape[1],
            E=experts, EXPERTS=triton.next_power_of_2(experts), TRANSPOSED=transposed, ROWS=rows,
            OUTPUTS=outputs, STEP=step, num_warps=warps, num_stages=min(stages, in_flight),
        )  # fmt: skip
        return y
    matrices = weight if transposed else weight.transpose(1, 2)
    if must_not_sync(x, len(x)):
        y = product_by_row(x, matrices, experts_of_rows(ends, len(x)))
    elif _torch_supports(x, weight):
        y = F.grouped_mm(x, matrices, offs=ends).contiguous()  # it pads rows to 16 bytes
    else:
        y, start = x.new_empty(len(x), width), 0
        for w, end in zip(matrices, ends.tolist(), strict=True):
            torch.mm(x[start:end], w, out=y[start:end])
            start = end
    return y if bias is None else y.add_(bias[experts_of_rows(ends, len(x))])


def grouped_weight_gradient(dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Returns the gradient [E, O, K] from dy [S, O] and x [S, K], 0 where an expert has no rows.

    It is torch's product: with few rows to sum over it was faster than any of ours. In fp16, which
    it lacks, and in fp32 on GPUs the host asks where each expert ends, and multiplies one by one.
    """
    if len(x) and _torch_supports(dy, x):
        return F.grouped_mm(dy.t(), x, offs=ends)
    dw, start = x.new_zeros(len(ends), dy.shape[1], x.shape[1]), 0
    for w, end in zip(dw, ends.tolist(), strict=True):
        if end > start:
            matmul_into(dy[start:end].t(), x[start:end], w)
        start = end
    return dw


def grouped_bias_gradient(dy: Tensor, weights: Tensor | None, ends: Tensor) -> Tensor:
    """Returns [E, O], each expert's sum of rows of dy [S, O], times weights [S] if given."""
    ones = dy.new_ones(len(dy), 16 // dy.element_size())
    columns = ones if weights is None else ones * weights[:, None].to(dy.dtype)
    return grouped_weight_gradient(dy, columns, ends)[..., 0].contiguous()
