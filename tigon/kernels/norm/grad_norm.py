"""The sum of squares of many tensors for a gradient's norm: each number is read once.

# P programs
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tigon.kernels.optim.adamw import TensorTable, is_aligned, load_number, load_pointer, load_row
from tigon.kernels.runtime import tl, triton

# Elements of one program, elements at a time, and warps
CHUNK, BLOCK, WARPS = 16384, 2048, 8
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}
WIDTH = tl.constexpr(3)  # of a row: first program, elements, address


@triton.jit
def _squares_kernel(
    rows, owners, partials, G: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the sum of the squares of one chunk of a tensor to `partials`."""
    row, chunk = load_row(rows, owners, WIDTH)
    count, x = load_number(row, 0, WIDE), load_pointer(row, 1, G, WIDE)
    first = chunk.to(tl.int64) * CHUNK
    x += first
    remaining = count - first
    total = tl.zeros([BLOCK], tl.float32)
    for begin in tl.static_range(0, CHUNK, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        values = tl.load(x + at, mask=at < remaining, other=0.0).to(tl.float32)
        total += values * values
    tl.store(partials + tl.program_id(0), tl.sum(total, 0))


class SquaredNorm:
    """Computes sums of squares of float32 and bfloat16 tensors, and keeps their tables."""

    def __init__(self) -> None:
        self.tables: dict[tuple[torch.dtype, bool], TensorTable] = {}

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """Returns the float64 sum on the device, in an order that depends on shapes alone.

        CHUNK squares are summed in float32, their sums in float64. `tensors` are contiguous and not
        empty; at least one.
        """
        kinds: dict[tuple[torch.dtype, bool], list[tuple[int, ...]]] = {}
        for t in tensors:
            address = t.data_ptr()
            key = t.dtype, is_aligned(t.numel(), (address,))
            kinds.setdefault(key, []).append((t.numel(), address))
        device = tensors[0].device
        sums = []
        with torch.cuda.device_of(tensors[0]):
            for (dtype, wide), rows in kinds.items():
                table = self.tables.setdefault((dtype, wide), TensorTable(CHUNK))
                table_rows, owners = table.update(rows, device)
                partials = torch.empty(len(owners), dtype=torch.float32, device=device)
                _squares_kernel[(len(owners),)](
                    table_rows, owners, partials, G=TYPES[dtype], WIDE=wide, CHUNK=CHUNK,
                    BLOCK=BLOCK, num_warps=WARPS,
                )  # fmt: skip
                sums.append(partials.sum(dtype=torch.float64))
        return torch.stack(sums).sum()
