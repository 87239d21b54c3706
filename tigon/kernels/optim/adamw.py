"""AdamW over many parameters at once, in place: each number is read once and written once.

# T tensors, P programs, K blocks of B elements with one scale

A table tells one kernel where each of many tensors is and which programs work on it. Weights are
float32 or bfloat16, gradients alike, states float32, bfloat16 or 8 bits; everything is float32
between being read and being written. The definition, which runs elsewhere, is in
tigon/train/optim/adamw.py. Source: Loshchilov and Hutter, 2019 (arXiv 1711.05101), in the order of
operations of torch's fused kernel.
"""

import math
from collections.abc import Sequence
from ctypes import c_float
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.kernels.optim.low_bits import (
    CodeTables,
    dequantize,
    draw_bits,
    draw_bits_strided,
    extract_16_bits,
    quantize,
    round_stochastically,
    round_to_nearest,
)
from tigon.kernels.runtime import has_values, tl, triton

ALIGNED = 16  # bytes of an access; a number of elements that is a multiple fits any dtype


def is_aligned(count: int, addresses: Sequence[int]) -> bool:
    """Whether a kernel may read tensors of `count` elements 16 bytes at a time."""
    bits = count
    for address in addresses:
        bits |= address
    return bits % ALIGNED == 0


class TensorTable:
    """A row of integers for each tensor, and for each program the row of its tensor.

    Both stay on the device, and are only computed again if a number changes, without waiting for
    the device. Gradients are at new addresses in most steps, unless they are kept.
    """

    def __init__(self, chunk: int) -> None:
        """`chunk`: elements for each program."""
        self.chunk = chunk
        self._values: list[tuple[int, ...]] = []
        self._counts: list[int] = []
        self._firsts: list[int] = []
        self._rows, self._owners = torch.empty(0, device="cpu"), torch.empty(0, device="cpu")

    def update(
        self, rows: Sequence[tuple[int, ...]], device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Returns int64 [T, 1 + a row's], each row after the first of its programs, and int32 [P].

        `rows` begin with the number of elements.
        """
        if self._values != rows or self._rows.device != device:
            counts = [row[0] for row in rows]
            if self._counts != counts or self._owners.device != device:
                self._number(counts, device)
            table = [(first, *row) for first, row in zip(self._firsts, rows, strict=True)]
            self._rows = _to_device(torch.tensor(table, dtype=torch.int64, device="cpu"), device)
            self._values = list(rows)
        return self._rows, self._owners

    def _number(self, counts: list[int], device: torch.device) -> None:
        """Sets each tensor's first program and each program's tensor; they are in the same order.

        Raises ValueError for more programs than a GPU takes.
        """
        programs = [-(-count // self.chunk) for count in counts]
        ends = list(accumulate(programs))
        total = ends[-1]
        if total >= 1 << 31:
            raise ValueError(f"{total} programs of {self.chunk} elements are more than a GPU takes")
        owners = torch.arange(len(counts), dtype=torch.int32, device="cpu")
        repeats = torch.tensor(programs, device="cpu")
        self._owners = torch.repeat_interleave(
            _to_device(owners, device), _to_device(repeats, device), output_size=total
        )
        self._firsts, self._counts = [0, *ends[:-1]], counts


def _to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copies to the device through pinned memory, so that the host does not wait."""
    if device.type != "cuda" or not has_values(host):
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


@triton.jit
def load_row(rows, owners, WIDTH: tl.constexpr):
    """Returns a pointer to the program's row, after its first column, and its chunk's index."""
    program = tl.program_id(0)
    row = rows + tl.load(owners + program).to(tl.int64) * WIDTH
    return row + 1, program - tl.load(row)


@triton.jit
def load_pointer(row, COLUMN: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr):
    """Loads the address in a column; WIDE: it is a multiple of 16 bytes."""
    p = tl.load(row + COLUMN).to(tl.pointer_type(DTYPE))
    # Nothing is known of an address that is read: elements would be loaded one by one
    return tl.multiple_of(p, 16) if WIDE else p


@triton.jit
def load_number(row, COLUMN: tl.constexpr, WIDE: tl.constexpr):
    """Loads a number; WIDE: it is a multiple of 16, so that masks are uniform within an access."""
    n = tl.load(row + COLUMN)
    return tl.multiple_of(n, 16) if WIDE else n


# Elements and warps of one program: 8 elements a thread are 16 bytes of bfloat16
BLOCK, WARPS = 1024, 4
# Elements from which on a tensor has a launch of its own; with None all go by the table. Known
# addresses take 4 % off the time on the device, and a launch takes the host 40 us, in which the
# device updates 1e7 elements. On an H200 with a tensor each, 8B: 0.93 of copy's rate, and 0.89 by
# the table; 1B, whose tensors are smaller: 0.86 and 0.89
OWN_LAUNCH: int | None = 48 * 2**20
# Weights whose update has division and square root rounded as in torch's kernel. Of an update that
# bfloat16 keeps 8 bits of nothing is seen, and it takes more instructions than memory leaves time
PRECISE = (torch.float32,)
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.uint8: tl.uint8}
PARTS = tl.constexpr(WARPS)  # in which a program sums squares, so that no warp waits for another
WIDTH = tl.constexpr(9)  # of a row: first program, elements, position, 6 addresses; and 2 of lines


class AdamWSlot(NamedTuple):
    """The tensors of one parameter, contiguous and not empty, on one device."""

    weight: Tensor
    gradient: Tensor
    exp_avg: Tensor  # or its codes, uint8, and the same below
    exp_avg_sq: Tensor
    exp_avg_scale: Tensor | None = None
    exp_avg_sq_scale: Tensor | None = None
    position: int = 0  # of its first element, by which random bits are drawn
    # Width (less than 2**30) and pitch of lines with gaps between their positions: element i has
    # position + i // width * pitch + i % width
    lines: tuple[int, int] | None = None


class AdamWSettings(NamedTuple):
    """The numbers of one update: rates, betas, eps and the step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int  # from 1
    stream: int  # of random bits, int64


@triton.jit
def _read(values, scale, table, at, inside, blocks, B: tl.constexpr):
    """Loads a state as float32; `blocks`: the number of blocks."""
    if B == 0:
        return tl.load(values + at, mask=inside, other=0.0).to(tl.float32)
    else:
        codes = tl.load(values + at, mask=inside, other=0)
        each = tl.arange(0, at.shape[0])[:, None]
        return dequantize(codes, tl.load(scale + each, mask=each < blocks, other=0.0), table)


@triton.jit
def _write(x, values, scale, bounds, cells, bits, at, inside, blocks, SIGNED: tl.constexpr, B):
    """Stores a state in its dtype, quantized by blocks if it has a scale."""
    if B > 0:
        codes, largest = quantize(x, bounds, cells, SIGNED)
        tl.store(values + at, codes, mask=inside)
        each = tl.arange(0, at.shape[0])[:, None]
        tl.store(scale + each, largest, mask=each < blocks)
    elif values.dtype.element_ty == tl.bfloat16:
        tl.store(values + at, round_stochastically(x, bits), mask=inside)
    else:
        tl.store(values + at, x, mask=inside)


@triton.jit
def _update(
    tensors, chunk, count, position, lines, factor, numbers, stream, codes, squares,
    STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr, B: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Updates weight and states of BLOCK elements of one parameter, its chunk number `chunk`.

    Unless `squares` is None, the sums of the squares of its gradient are written there.
    """
    weight, gradient, exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale = tensors
    decay, beta1, beta2, eps, step_size, correction = numbers
    shares, bounds, cells, positive_shares, positive_bounds, positive_cells = codes
    first = chunk.to(tl.int64) * BLOCK
    weight, gradient, exp_avg, exp_avg_sq = (
        weight + first, gradient + first, exp_avg + first, exp_avg_sq + first
    )  # fmt: skip
    remaining, blocks = count - first, 0
    if B > 0:
        at = tl.arange(0, BLOCK // B)[:, None] * B + tl.arange(0, B)[None, :]
        blocks = remaining // B
        exp_avg_scale, exp_avg_sq_scale = exp_avg_scale + first // B, exp_avg_sq_scale + first // B
    else:
        at = tl.arange(0, BLOCK)
    inside = at < remaining
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    m = _read(exp_avg, exp_avg_scale, shares, at, inside, blocks, B)
    v = _read(exp_avg_sq, exp_avg_sq_scale, positive_shares, at, inside, blocks, B)
    if squares is not None:
        sums = tl.sum(tl.reshape(g * g, (PARTS, BLOCK // PARTS)), 1)
        tl.store(squares + tl.program_id(0) * PARTS + tl.arange(0, PARTS), sums)
    if factor is not None:
        g *= factor
    w = tl.fma(w, -decay, w)
    m = tl.fma(m, beta1, tl.fma(g, -beta1, g))
    v = tl.fma(v, beta2, tl.fma(g * g, -beta2, g * g))
    if PRECISE:
        root = tl.div_rn(tl.sqrt_rn(v), correction)
        w -= tl.div_rn(m * step_size, root + eps)
    else:
        w -= m * step_size / tl.fma(tl.sqrt(v), 1 / correction, eps)
    ROUNDS: tl.constexpr = STOCHASTIC and weight.dtype.element_ty == tl.bfloat16
    w_bits, m_bits, v_bits = 0, 0, 0
    if ROUNDS or exp_avg.dtype.element_ty == tl.bfloat16:
        if lines is None:
            bits = draw_bits(position + first, at, stream)
        else:
            bits = draw_bits_strided(position, first, at, lines[0], lines[1], stream)
        w_bits, m_bits = extract_16_bits(bits, 0), extract_16_bits(bits, 1)
        v_bits = extract_16_bits(bits, 2)
    if ROUNDS:
        tl.store(weight + at, round_stochastically(w, w_bits), mask=inside)
    elif weight.dtype.element_ty == tl.bfloat16:
        tl.store(weight + at, round_to_nearest(w), mask=inside)
    else:
        tl.store(weight + at, w, mask=inside)
    _write(m, exp_avg, exp_avg_scale, bounds, cells, m_bits, at, inside, blocks, True, B)
    bounds, cells = positive_bounds, positive_cells
    _write(v, exp_avg_sq, exp_avg_sq_scale, bounds, cells, v_bits, at, inside, blocks, False, B)


@triton.jit(do_not_specialize=["stream"])
def _adamw_table_kernel(
    rows, owners, scale, numbers, stream, codes, squares,
    W: tl.constexpr, G: tl.constexpr, S: tl.constexpr, WIDE: tl.constexpr, LINES: tl.constexpr,
    STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr, B: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Updates BLOCK elements of any parameter; nothing if the scale is NaN.

    W, G, S: dtypes of weights, gradients and states.
    """
    factor = None
    if scale is not None:
        factor = tl.load(scale)
        if factor != factor:
            return
    row, chunk = load_row(rows, owners, WIDTH + 2 if LINES else WIDTH)
    tensors = (
        load_pointer(row, 2, W, WIDE),
        load_pointer(row, 3, G, WIDE),
        load_pointer(row, 4, S, WIDE),
        load_pointer(row, 5, S, WIDE),
        load_pointer(row, 6, tl.float32, False),
        load_pointer(row, 7, tl.float32, False),
    )
    count, position, lines = load_number(row, 0, WIDE), tl.load(row + 1), None
    if LINES:
        lines = tl.load(row + 8), tl.load(row + 9)
    _update(
        tensors, chunk, count, position, lines, factor, numbers, stream, codes, squares,
        STOCHASTIC, BLOCK, B, PRECISE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["position", "width", "pitch", "stream"])
def _adamw_tensor_kernel(
    tensors, count, position, width, pitch, scale, numbers, stream, codes, squares,
    STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr, B: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Updates BLOCK elements of one parameter; nothing if the scale is NaN."""
    factor = None
    if scale is not None:
        factor = tl.load(scale)
        if factor != factor:
            return
    lines = None
    if width is not None:
        lines = width, pitch
    _update(
        tensors, tl.program_id(0), count, position, lines, factor, numbers, stream, codes, squares,
        STOCHASTIC, BLOCK, B, PRECISE,
    )  # fmt: skip


class SlotKind(NamedTuple):
    """The properties that all slots of one launch share."""

    weight: torch.dtype
    gradient: torch.dtype
    states: torch.dtype
    block: int  # of states of 8 bits; 0: others
    wide: bool  # aligned for accesses of 16 bytes
    lines: bool


class FusedAdamW:
    """Updates sets of parameters and keeps the tables of each for the next update."""

    def __init__(self, stochastic: bool, codes: CodeTables | None = None) -> None:
        """`stochastic` rounds bfloat16 weights stochastically, as bfloat16 states always are.

        `codes` are for 8-bit states.
        """
        self.stochastic, self.codes = stochastic, codes
        self.tables: dict[tuple[object, SlotKind], TensorTable] = {}

    def __call__(
        self,
        name: object,
        slots: Sequence[AdamWSlot],
        settings: AdamWSettings,
        scale: Tensor | None = None,
        squares: list[Tensor] | None = None,
    ) -> None:
        """Updates every slot's weight and states in place, without waiting for the device.

        `name` identifies the set. `scale`: one float32 on the device that multiplies the gradients;
        if it is NaN, nothing changes. Appends to `squares`, if it is given, sums of the gradients'
        squares before that, float64 on the device, which are NaN if the scale is.
        """
        torch.autograd.graph.increment_version([slot.weight for slot in slots])
        kinds: dict[SlotKind, list[tuple[AdamWSlot, tuple[int, ...]]]] = {}
        for slot in slots:
            addresses = tuple([t.data_ptr() for t in _tensors(slot)])
            kinds.setdefault(_kind(slot, addresses), []).append((slot, addresses))
        for kind, members in kinds.items():
            by_table = []
            launch = partial(self._launch, kind, settings, scale, squares)
            with torch.cuda.device_of(members[0][0].weight):
                for slot, addresses in members:
                    count = slot.weight.numel()
                    if OWN_LAUNCH is None or count < OWN_LAUNCH:
                        row = count, slot.position, *addresses, *(slot.lines or ())
                        by_table.append(row)
                    else:
                        lines = slot.lines or (None, None)
                        given = _tensors(slot), count, slot.position, *lines
                        launch(_adamw_tensor_kernel, triton.cdiv(count, BLOCK), given, slot.weight)
                if by_table:
                    table = self.tables.setdefault((name, kind), TensorTable(BLOCK))
                    rows, owners = table.update(by_table, members[0][0].weight.device)
                    launch(
                        _adamw_table_kernel, len(owners), (rows, owners), rows,
                        W=TYPES[kind.weight], G=TYPES[kind.gradient], S=TYPES[kind.states],
                        WIDE=kind.wide, LINES=kind.lines,
                    )  # fmt: skip

    def _launch(
        self,
        kind: SlotKind,
        settings: AdamWSettings,
        scale: Tensor | None,
        squares: list[Tensor] | None,
        kernel: Any,
        programs: int,
        given: tuple[Any, ...],  # the kernel's first arguments
        like: Tensor,  # on the device; stands for tables that are not read
        **options: Any,
    ) -> None:
        """Launches the update of one parameter or of a table of them, and appends to `squares`."""
        parts = None
        if squares is not None:
            parts = like.new_empty(programs * WARPS, dtype=torch.float32)
        kernel[(programs,)](
            *given, scale, _numbers(settings), settings.stream, self._codes(kind, like), parts,
            STOCHASTIC=self.stochastic, BLOCK=BLOCK, B=kind.block, PRECISE=kind.weight in PRECISE,
            num_warps=WARPS, **options,
        )  # fmt: skip
        if squares is not None and parts is not None:
            total = parts.sum(dtype=torch.float64)
            squares.append(total if scale is None else total + 0 * scale)

    def _codes(self, kind: SlotKind, unused: Tensor) -> tuple[Tensor, ...]:
        """Returns the tables of 8-bit states, or tensors that are not read."""
        if not kind.block:
            return (unused,) * 6
        if self.codes is None:
            raise ValueError("states of 8 bits need the values of their codes: pass `codes`")
        return tuple(self.codes)


def _tensors(slot: AdamWSlot) -> tuple[Tensor, ...]:
    """Returns the tensors in the kernels' order; states stand in for missing scales, unread."""
    m, v = slot.exp_avg, slot.exp_avg_sq
    m_scale = m if slot.exp_avg_scale is None else slot.exp_avg_scale
    v_scale = v if slot.exp_avg_sq_scale is None else slot.exp_avg_sq_scale
    return slot.weight, slot.gradient, m, v, m_scale, v_scale


def _kind(slot: AdamWSlot, addresses: Sequence[int]) -> SlotKind:
    """Returns the properties by which slots share a launch."""
    scale = slot.exp_avg_scale
    block = 0 if scale is None else slot.exp_avg.numel() // scale.numel()
    wide = is_aligned(slot.weight.numel(), addresses)
    dtypes = slot.weight.dtype, slot.gradient.dtype, slot.exp_avg.dtype
    return SlotKind(*dtypes, block, wide, slot.lines is not None)


def _numbers(settings: AdamWSettings) -> tuple[float, ...]:
    """Returns lr * weight decay, both betas, eps, the step size with its bias correction, and the
    root's correction, rounded to float32 where torch's fused kernel rounds."""
    lr, beta1, beta2 = (_float32(x) for x in (settings.lr, settings.beta1, settings.beta2))
    decay = _float32(lr * _float32(settings.weight_decay))
    step_size = _float32(lr / _float32(1 - _float32(beta1**settings.step)))
    correction = _float32(math.sqrt(_float32(1 - _float32(beta2**settings.step))))
    return decay, beta1, beta2, _float32(settings.eps), step_size, correction


def _float32(x: float) -> float:
    """Returns x rounded to float32."""
    return c_float(x).value
