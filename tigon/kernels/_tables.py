"""Tables by which one kernel works on many tensors: where each is, and which programs it has.

T tensors, P programs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tigon.kernels._triton import tl, triton

ALIGNED = 16  # bytes of an access; a number of elements that is a multiple fits any dtype


def is_aligned(count: int, addresses: Sequence[int]) -> bool:
    """Whether a kernel may read tensors of `count` elements 16 bytes at a time."""
    bits = count
    for address in addresses:
        bits |= address
    return bits % ALIGNED == 0


class Table:
    """A row of integers for each tensor, and for each program the row of its tensor.

    Both stay on the device, and are made anew only when a number changes: there, without waiting
    for it. Gradients are at new addresses in most steps, unless they are kept.
    """

    def __init__(self, chunk: int) -> None:
        """`chunk`: elements for each program."""
        self.chunk = chunk
        self._known: list[tuple[int, ...]] = []
        self._counts: list[int] = []
        self._firsts: list[int] = []
        self._rows, self._owners = torch.empty(0), torch.empty(0)

    def place(self, rows: Sequence[tuple[int, ...]], device: torch.device) -> tuple[Tensor, Tensor]:
        """Rows begin with the number of elements. Returns int64 [T, 1 + a row's], where each row
        begins with the first of its programs, and int32 [P]."""
        if self._known != rows or self._rows.device != device:
            counts = [row[0] for row in rows]
            if self._counts != counts or self._owners.device != device:
                self._number(counts, device)
            table = [(first, *row) for first, row in zip(self._firsts, rows, strict=True)]
            self._rows = _sent(torch.tensor(table, dtype=torch.int64), device)
            self._known = list(rows)
        return self._rows, self._owners

    def _number(self, counts: list[int], device: torch.device) -> None:
        """Programs in the order of their tensors."""
        programs = torch.tensor([-(-count // self.chunk) for count in counts])
        ends = programs.cumsum(0)
        total = int(ends[-1])
        if total >= 1 << 31:
            raise ValueError(f"{total} programs of {self.chunk} elements are more than a GPU takes")
        owners = torch.arange(len(counts), dtype=torch.int32)
        self._owners = torch.repeat_interleave(
            _sent(owners, device), _sent(programs, device), output_size=total
        )
        self._firsts, self._counts = (ends - programs).tolist(), counts


def _sent(host: Tensor, device: torch.device) -> Tensor:
    """A copy on the device; from pinned memory, as nobody waits for that."""
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


@triton.jit
def own_row(rows, owners, WIDTH: tl.constexpr):
    """The program's row, and the chunk of its tensor that it has."""
    program = tl.program_id(0)
    row = rows + tl.load(owners + program).to(tl.int64) * WIDTH
    return row + 1, program - tl.load(row)


@triton.jit
def pointer(row, COLUMN: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr):
    """The tensor whose address is in a column; WIDE: it begins at a multiple of 16 bytes."""
    p = tl.load(row + COLUMN).to(tl.pointer_type(DTYPE))
    # Nothing is known of an address that is read: elements would be loaded one by one
    return tl.multiple_of(p, 16) if WIDE else p


@triton.jit
def number(row, COLUMN: tl.constexpr, WIDE: tl.constexpr):
    """WIDE: a multiple of 16, by which a mask is known to be the same for all of an access."""
    n = tl.load(row + COLUMN)
    return tl.multiple_of(n, 16) if WIDE else n
