"""A checkpoint's tensors and how to read them: safetensors files, plain or in few bits.

DeepSeek-V3 introduced block-scaled fp8 (arXiv 2412.19437, section 3.3), in which Qwen3, Ministral 3
and others are published; transformers calls it finegrained_fp8. Beside `X.weight` [N, K] there is
`X.weight_scale_inv` [ceil(N / n), ceil(K / k)] for blocks n x k, or one number [].

# N, K a matrix; E experts stacked in one tensor
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from tigon.hub import Repository
from tigon.utils.json import escape, quote
from tigon.utils.safetensors_header import find_tensors
from tigon.weights.decoded import DecodedTensor, read_rows
from tigon.weights.header import TensorInfo, tensor_infos
from tigon.weights.mxfp4 import decode_mxfp4
from tigon.weights.read import Reader

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# The number of every code: looking it up takes half the time of torch's conversion on a CPU
BYTES = torch.arange(256, dtype=torch.uint8, device="cpu")
NUMBERS = {dtype: BYTES.view(dtype).float() for dtype in FP8}
SCALES = (torch.float32, torch.bfloat16, torch.float16)
SCALE, ACTIVATION = "_scale_inv", "activation_scale"  # endings of names
BLOCK = (128, 128)


@dataclass(frozen=True)
class BlockScales:
    """The block size of config.json: rows and columns, or None for one scale a tensor."""

    block: tuple[int, int] | None = BLOCK


@dataclass(frozen=True)
class Fp8Tensor(DecodedTensor):
    """A block-scaled fp8 matrix: each value is its fp8 number times its block's scale, in fp32."""

    stored: TensorInfo
    scale: TensorInfo
    block: tuple[int, int]

    @property
    def unit(self) -> int:
        """The rows of a block, so that no scale is read twice; 1 where that is all."""
        single_row = len(self.shape) == 3 or self.block[0] >= self.shape[0]  # of scales
        return 1 if single_row else self.block[0]

    def rows(self, reader: Reader, first: int, count: int) -> Tensor:
        """Dequantizes rows [first, first + count) to fp32; of a stack, matrices."""
        codes = self._read(reader, self.stored, first, count).view(torch.uint8)
        numbers = NUMBERS[self.stored.dtype].index_select(0, codes.flatten().int())
        values = numbers.view(codes.shape)
        if len(self.shape) == 3:
            scales = self._scales(reader, first, count)
            for matrix, of_matrix in zip(values, scales, strict=True):
                self._multiply(matrix, of_matrix, 0)
        else:
            top, n = first // self.block[0], self.block[0]
            scales = self._scales(reader, top, -(-(first + count) // n) - top)
            self._multiply(values, scales, first - top * n)
        return values

    def scales(self) -> Tensor:
        """All scales in fp32; ValueError for a negative or non-finite one."""
        with Reader() as reader:
            return self._scales(reader, 0, self.scale.shape[0])

    def _multiply(self, values: Tensor, scales: Tensor, skipped: int) -> None:
        """Multiplies values [n, K] in place by the scales of their blocks; the values begin after
        `skipped` rows of the first block."""
        rows, columns = self.block
        by_row = scales.repeat_interleave(rows, dim=0)[skipped : skipped + len(values)]
        full = values.shape[-1] // columns * columns  # columns of full blocks
        if full:
            blocks = values[:, :full].unflatten(-1, (-1, columns))
            blocks.mul_(by_row[:, : full // columns, None])
        values[:, full:].mul_(by_row[:, full // columns :])

    def _scales(self, reader: Reader, first: int, count: int) -> Tensor:
        """Reads rows of the scales; raises ValueError for one that is negative or not finite."""
        scales = self._read(reader, self.scale, first, count).float()
        bad = (~(scales.isfinite() & (scales >= 0))).nonzero()
        if len(bad):
            at = bad[0].tolist()
            raise ValueError(
                f"{escape(self.scale.path)}: {escape(self.name)}{SCALE} is "
                f"{scales[tuple(at)].item()} for block {[first + at[0], *at[1:]]}, and a "
                "scale is a finite number of at least 0: the file is damaged; download it again"
            )
        return scales

    def _read(self, reader: Reader, info: TensorInfo, first: int, count: int) -> Tensor:
        """Reads `count` rows of a stored tensor from row `first` on, in the dtype of the file."""
        out = torch.empty(count, *info.shape[1:], dtype=info.dtype, device="cpu")
        read_rows(reader, info, out, first)
        return out


def decode_fp8(
    tensors: Mapping[str, TensorInfo], scales: BlockScales | None
) -> dict[str, TensorInfo | DecodedTensor]:
    """Combines each fp8 tensor with its scales to an Fp8Tensor; other tensors stay unchanged.

    `scales` is None if config.json does not mention them. Raises ValueError for scales that are
    missing, or of another shape or dtype.
    """
    combined: dict[str, TensorInfo | DecodedTensor] = dict(tensors)
    for name, info in tensors.items():
        if info.dtype not in FP8 or name.endswith(SCALE):
            continue
        where = f"{escape(info.path)}: tensor {quote(name)} is stored as {info.dtype}"
        if scales is None:
            raise ValueError(
                f"{where}, a quantized checkpoint, and config.json has no quantization_config that "
                "says how to read it: use the model's bf16, fp16 or fp32 checkpoint"
            )
        if len(info.shape) not in (2, 3):
            raise ValueError(f"{where} {list(info.shape)}: only matrices are, or stacks of them")
        scale = tensors.get(name + SCALE)
        if scale is None:
            other = f"{name}_scale"
            hint = f"; it has {quote(other)}, which is not read" if other in tensors else ""
            raise ValueError(f"{where}, but the checkpoint has no {quote(name + SCALE)}{hint}")
        combined[name] = _make_fp8_tensor(name, info, scale, scales)
        del combined[name + SCALE]
        # Scales for rounding inputs to fp8, which is not done here
        combined.pop(name.removesuffix("weight") + ACTIVATION, None)
        combined.pop(f"{name}_{ACTIVATION}", None)
    return combined


def _make_fp8_tensor(
    name: str, info: TensorInfo, scale: TensorInfo, scales: BlockScales
) -> Fp8Tensor:
    """Returns an fp8 tensor with its scales; ValueError for scales that do not fit."""
    where = f"{escape(scale.path)}: tensor {quote(name + SCALE)}"
    if scale.dtype not in SCALES:
        raise ValueError(f"{where} is {scale.dtype}; scales are read in fp32, bf16 or fp16")
    *stack, rows, columns = info.shape
    block = scales.block or (max(1, rows), max(1, columns))
    grid = (*stack, -(-rows // block[0]), -(-columns // block[1]))
    one_each = scales.block is None and scale.shape in (tuple(stack), (*stack, 1))
    if scale.shape != grid and not one_each:
        what = "one for the tensor" if scales.block is None else f"blocks of {list(block)}"
        raise ValueError(
            f"{where} is {list(scale.shape)}; weights {list(info.shape)} with {what} "
            f"(weight_block_size) need {list(grid)}"
        )
    scale = replace(scale, shape=grid)
    return Fp8Tensor(name, info.shape, info.path, info.offset, info, scale, block)


# Checkpoints

SAMPLE_BYTES = 4096  # of each tensor, for the digest


class Checkpoint:
    """The tensors of a checkpoint by name, from the validated headers of its files."""

    def __init__(self, name: str, tensors: Mapping[str, TensorInfo | DecodedTensor]) -> None:
        self.name = name
        self.tensors = tensors
        self._stamps = self._file_stamps()

    def check_unchanged(self) -> None:
        """Raises OSError if a file is another one than when the headers were read: what was read
        since may be a part of each. Call it when all is read."""
        if self._file_stamps() != self._stamps:
            raise OSError(
                f"{escape(self.name)} was replaced while it was read: load it again, or wait until "
                "the program that writes it has ended"
            )

    def _file_stamps(self) -> dict[Path, tuple[int, int]]:
        """Returns the size and the time of each file that is there. Some network file systems
        change a file's inode number."""
        paths = {info.path for info in self.tensors.values()}
        stats = {path: path.stat() for path in paths if path.is_file()}
        return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}

    def sampled_digest(self) -> str:
        """A digest of the names, shapes and dtypes of all tensors, and of a few values of each.

        Training changes values everywhere, so a few of them distinguish models. The same tensors in
        other files have the same digest.
        """
        values: dict[str, bytes] = {}
        of_files: dict[Path, list[str]] = {}
        for name, info in self.tensors.items():
            of_files.setdefault(info.path, []).append(name)
        for path, names in of_files.items():
            with path.open("rb") as file:
                values |= {name: _sample(self.tensors[name], file) for name in names}
        total = hashlib.sha256()
        for name, info in sorted(self.tensors.items()):
            total.update(repr((name, tuple(info.shape), str(info.dtype))).encode())
            total.update(values[name])
        return total.hexdigest()

    @classmethod
    def open(cls, repository: Repository, scales: BlockScales | None = None) -> "Checkpoint":
        """Reads the headers of the repository's model.safetensors, or of all shards of its index,
        which are downloaded if they are not there.

        `scales`: the blocks of fp8 tensors in config.json, needed to read them; names tell MXFP4.
        """
        infos = decode_fp8(tensor_infos(find_tensors(repository)), scales)
        return cls(repository.name, decode_mxfp4(infos))

    def read_into(self, name: str, out: Tensor, *, row: int = 0) -> None:
        """Fills `out` with rows [row, row + len(out)) of the tensor, converted to its dtype."""
        with Reader() as reader:
            read_rows(reader, self.tensors[name], out.detach(), row)


def _sample(info: TensorInfo | DecodedTensor, file: IO[bytes]) -> bytes:
    """A digest of bytes in the middle of a tensor, or at the beginning of an encoded one."""
    plain = isinstance(info, TensorInfo)
    size = min(SAMPLE_BYTES, info.nbytes) if plain else SAMPLE_BYTES  # of others: those that follow
    file.seek(info.offset + ((info.nbytes - size) // 2 if plain else 0))
    return hashlib.sha256(file.read(size)).digest()
