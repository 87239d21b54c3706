"""Frozen weights of linear layers in few bits, which products dequantize where they use them.

# K rows, C columns of a weight; K_p the rows of one of the matrices that it is packed of

Formats are subclasses of `QuantizedWeight`, whose buffers hold the data. They are no parameters:
nothing trains, shards, casts or exports them as such.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from tigon.kernels.linear import quantized
from tigon.kernels.linear.lora import BaseLinear
from tigon.kernels.linear.quantized import (
    BlockFP8Tensor,
    dequantize_block_fp8,
    dequantize_block_fp8_rows,
    quantized_base,
)


class QuantizedWeight(nn.Module, ABC):
    """A weight [K, C] of matrices [K_p, C], each quantized separately; `dtype`: of its values."""

    kind: ClassVar[str]

    def __init__(self, parts: Sequence[int], columns: int, dtype: torch.dtype):
        super().__init__()
        self.parts, self.dtype = tuple(parts), dtype
        self.shape = torch.Size((sum(parts), columns))
        # Its shape and dtype for those who ask a weight for them; in a list, or it would be one of
        # the model's parameters
        empty = torch.empty(self.shape, dtype=dtype, device="meta")
        self._weight_meta = [nn.Parameter(empty, requires_grad=False)]

    @property
    def weight_meta(self) -> nn.Parameter:
        """A frozen parameter on the meta device with its shape and dtype."""
        return self._weight_meta[0]

    @abstractmethod
    def dequantize(self) -> Tensor:
        """Returns the weight in new memory."""

    @abstractmethod
    def rows(self, part: int, first: int, count: int) -> Tensor:
        """Returns rows [first, first + count) of a matrix, in plain torch."""

    @abstractmethod
    def fill(self) -> None:
        """Fills the buffers with random numbers, of the size that weights have."""

    def base(self, inner: BaseLinear) -> BaseLinear:
        """Returns products with it, computed by `inner` on the dequantized weight."""
        return quantized_base(self.dequantize, inner)

    @property
    def nbytes(self) -> int:
        """The bytes of the buffers."""
        return sum(b.nbytes for b in self.buffers())

    def allocate(self, device: torch.device) -> None:
        """Allocates the buffers, unfilled."""
        for name, buffer in self._buffers.items():
            assert buffer is not None
            self._buffers[name] = torch.empty_like(buffer, device=device)

    def check(self, change: Callable[[Tensor], Tensor]) -> None:
        """Raises ValueError if `change`, which `.to()` applies to tensors, converts `dtype`."""
        new_dtype = change(torch.empty(0, dtype=self.dtype, device="cpu")).dtype
        if new_dtype != self.dtype:
            raise ValueError(
                f"the model's weights are quantized ({self.kind}) and are used in {self.dtype}: "
                f"they cannot be converted to {new_dtype}; load the model with dtype={new_dtype}"
            )

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Moves the buffers without a change of dtype; ValueError if `fn` would convert `dtype`."""
        self.check(fn)
        for name, buffer in self._buffers.items():
            assert buffer is not None  # as bytes: floats of it keep their dtype
            self._buffers[name] = fn(buffer.view(torch.uint8)).view(buffer.dtype)
        return self

    def extra_repr(self) -> str:
        return f"{self.kind}, {tuple(self.shape)} in {self.dtype}, parts={self.parts}"


class NF4Weight(QuantizedWeight):
    """A 4-bit weight; see `tigon.kernels.linear.quantized`."""

    kind = "nf4"
    BUFFERS = quantized.NF4Tensor._fields

    def __init__(self, parts: Sequence[int], columns: int, dtype: torch.dtype):
        super().__init__(parts, columns, dtype)
        self.matrices = [rows * columns for rows in parts]
        codes, blocks, groups = (
            sum(sizes) for sizes in zip(*map(quantized.packed_sizes, self.matrices), strict=True)
        )
        on_meta: dict[str, Any] = {"device": "meta"}
        for name, shape, kind in (
            ("codes", (codes,), torch.uint8),
            ("scales", (blocks,), torch.uint8),
            ("steps", (groups,), torch.float32),
            ("offsets", (groups,), torch.float32),
            ("places", (groups + 1, 3), torch.int64),
            ("tables", (len(quantized.NF4_VALUES) + len(quantized.SCALE_VALUES),), torch.float32),
        ):
            self.register_buffer(name, torch.empty(shape, dtype=kind, **on_meta))

    def _stored(self) -> quantized.NF4Tensor:
        """Returns the buffers themselves."""
        tensors: dict[str, Any] = self._buffers
        return quantized.NF4Tensor(*(tensors[name] for name in self.BUFFERS))

    def allocate(self, device: torch.device) -> None:
        super().allocate(device)
        tensors = self._stored()
        tensors.places.copy_(quantized.group_offsets(self.matrices))
        tensors.tables.copy_(torch.cat([quantized.NF4_VALUES, quantized.SCALE_VALUES]))

    def store(self, weight: Tensor) -> None:
        """Quantizes the weight [K, C] into the buffers, each matrix on its own."""
        tensors, sizes = self._stored(), [quantized.packed_sizes(n) for n in self.matrices]
        begins = [0, 0, 0]
        for rows, size in zip(weight.split(list(self.parts)), sizes, strict=True):
            codes, scales, steps, offsets = quantized.quantize_nf4(rows)
            for into, values, axis in (
                (tensors.codes, codes, 0),
                (tensors.scales, scales, 1),
                (tensors.steps, steps, 2),
                (tensors.offsets, offsets, 2),
            ):
                into[begins[axis] : begins[axis] + size[axis]] = values
            begins = [begin + n for begin, n in zip(begins, size, strict=True)]

    def fill(self) -> None:
        """Fills codes and scales with random bytes, steps with 0.02 and offsets with 0.05."""
        tensors = self._stored()
        tensors.codes.random_()
        tensors.scales.random_()
        tensors.steps.fill_(0.02)
        tensors.offsets.fill_(0.05)

    def dequantize(self) -> Tensor:
        return quantized.dequantize_nf4(self._stored(), self.matrices, self.shape, self.dtype)

    def rows(self, part: int, first: int, count: int) -> Tensor:
        columns = self.shape[1]
        at = part, first * columns, count * columns
        numbers = quantized.dequantize_nf4_slice(self._stored(), self.matrices, *at, self.dtype)
        return numbers.view(count, columns)


class FP8Weight(QuantizedWeight):
    """A weight in blocks of fp8, as in a checkpoint; see `tigon.kernels.linear.quantized`.

    `blocks`: rows and columns of the blocks of each matrix, with the same columns in all. `stored`:
    the fp8 format.
    """

    kind = "fp8"

    def __init__(
        self,
        parts: Sequence[int],
        columns: int,
        dtype: torch.dtype,
        *,
        blocks: Sequence[tuple[int, int]],
        stored: torch.dtype,
    ):
        super().__init__(parts, columns, dtype)
        self.blocks, self.stored = tuple(blocks), stored
        self.width = blocks[0][1]
        self.heights = [-(-rows // block) for rows, (block, _) in zip(parts, blocks, strict=True)]
        on_meta: dict[str, Any] = {"device": "meta"}
        scales = sum(self.heights), -(-columns // self.width)
        self.register_buffer("codes", torch.empty(self.shape, dtype=torch.uint8, **on_meta))
        self.register_buffer("scales", torch.empty(scales, dtype=torch.float32, **on_meta))
        self.register_buffer("owners", torch.empty(sum(parts), dtype=torch.int32, **on_meta))

    def _stored(self) -> BlockFP8Tensor:
        """Returns the buffers themselves, and how they are coded."""
        tensors: dict[str, Any] = self._buffers
        parts = tensors["codes"], tensors["scales"], tensors["owners"]
        return BlockFP8Tensor(*parts, self.width, self.stored)

    def allocate(self, device: torch.device) -> None:
        super().allocate(device)
        owner_rows, first = [], 0
        for rows, (block, _), height in zip(self.parts, self.blocks, self.heights, strict=True):
            owner_rows.append(first + torch.arange(rows, dtype=torch.int32, device="cpu") // block)
            first += height
        self._stored().owners.copy_(torch.cat(owner_rows))

    def fill(self) -> None:
        """Fills the codes with random numbers in [0, 1), and all scales with 0.02."""
        tensors = self._stored()
        tensors.codes.random_(0x38)  # below 1
        tensors.scales.fill_(0.02)

    @property
    def memory(self) -> Tensor:
        """The codes [K, C] as a view in their fp8 dtype, to be filled from a file."""
        return self._stored().codes.view(self.stored)

    def store_scales(self, grids: Sequence[Tensor]) -> None:
        """Copies the scales of the blocks of each matrix [rows, columns of blocks] here."""
        self._stored().scales.copy_(torch.cat(list(grids)))

    def dequantize(self) -> Tensor:
        return dequantize_block_fp8(self._stored(), self.dtype)

    def rows(self, part: int, first: int, count: int) -> Tensor:
        first += sum(self.parts[:part])
        return dequantize_block_fp8_rows(self._stored(), first, count, self.dtype)
