"""MXFP4 weights of experts, the form in which gpt-oss is published (OCP Microscaling formats, 1.0).

Beside `X_blocks` [E, O, K / 32, 16], two codes of 4 bits a byte and the low one first, there is
`X_scales` [E, O, K / 32], the exponents of two of blocks of 32 codes, plus 127.

# E experts, O outputs of a matrix, K inputs
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tigon.utils.json import escape, quote
from tigon.weights.decoded import DecodedTensor
from tigon.weights.header import TensorInfo
from tigon.weights.read import Reader

BLOCKS, SCALES = "_blocks", "_scales"  # endings of names
GROUP = 32  # codes of a block
CHUNK = 512  # outputs that are decoded at a time
POSITIVE = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device="cpu")
NUMBERS = torch.cat((POSITIVE, -POSITIVE)).bfloat16()  # of each code
BYTES = torch.arange(256, device="cpu")
POWERS = (2.0 ** (BYTES[:255] - 127)).bfloat16()  # of each scale
PAIRS = NUMBERS[torch.stack((BYTES % 16, BYTES // 16), 1)]  # of each byte


@dataclass(frozen=True)
class Mxfp4Tensor(DecodedTensor):
    """The matrices of all experts, transposed to [E, K, O], in bf16 as transformers has them."""

    dtype = torch.bfloat16

    stored: TensorInfo
    scale: TensorInfo

    def rows(self, reader: Reader, first: int, count: int) -> Tensor:
        """Reads the matrices [count, K, O] of experts from `first` on, in bf16; raises ValueError
        for a scale that is not a number."""
        _, outputs, groups, _ = self.stored.shape
        values = torch.empty(count, *self.shape[1:], dtype=self.dtype, device="cpu")
        for matrix, expert in zip(values, range(first, first + count), strict=True):
            for output in range(0, outputs, CHUNK):
                rows = min(CHUNK, outputs - output)
                start = (expert * outputs + output) * groups
                codes = torch.empty(rows, groups * GROUP // 2, dtype=torch.uint8, device="cpu")
                at = self.stored.offset + start * GROUP // 2
                reader.read(self.stored.path, at, torch.uint8, codes)
                exponents = torch.empty(rows, groups, dtype=torch.uint8, device="cpu")
                reader.read(self.scale.path, self.scale.offset + start, torch.uint8, exponents)
                if (exponents == 255).any():
                    raise ValueError(
                        f"{escape(self.scale.path)}: {escape(self.name)}{SCALES} of expert "
                        f"{expert} has 255, which is no number: the file is damaged; download it "
                        "again"
                    )
                numbers = PAIRS.index_select(0, codes.flatten().int()).view(rows, groups, GROUP)
                powers = POWERS.index_select(0, exponents.flatten().int())
                numbers.mul_(powers.view(rows, groups, 1))
                matrix[:, output : output + rows] = numbers.flatten(1).t()
        return values


def decode_mxfp4(
    tensors: Mapping[str, TensorInfo | DecodedTensor],
) -> dict[str, TensorInfo | DecodedTensor]:
    """Combines blocks and scales to Mxfp4Tensors; ValueError if they do not fit."""
    combined = dict(tensors)
    for name, info in tensors.items():
        if not name.endswith(BLOCKS):
            continue
        base = name.removesuffix(BLOCKS)
        scale = tensors.get(base + SCALES)
        where = f"{escape(info.path)}: tensor {quote(name)}"
        if base in tensors:
            raise ValueError(f"{where} beside {quote(base)}: these experts are there twice")
        if scale is None:
            raise ValueError(f"{where}, but the checkpoint has no {quote(base + SCALES)}")
        shapes = list(info.shape), list(scale.shape)
        fits = len(info.shape) == 4 and info.shape[3] == GROUP // 2
        if not fits or scale.shape != info.shape[:3]:
            raise ValueError(
                f"{where} {shapes[0]} with scales {shapes[1]} is not [E, O, K / 32, 16] with "
                "[E, O, K / 32]"
            )
        for part in (info, scale):
            if not isinstance(part, TensorInfo) or part.dtype != torch.uint8:
                raise ValueError(f"{where} or its scales are {part.dtype}, not {torch.uint8}")
        assert isinstance(info, TensorInfo) and isinstance(scale, TensorInfo)
        shape = (info.shape[0], info.shape[2] * GROUP, info.shape[1])
        combined[base] = Mxfp4Tensor(base, shape, info.path, info.offset, info, scale)
        del combined[name], combined[base + SCALES]
    return combined
