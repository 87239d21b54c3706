"""Parameters of adapters, inside the layers that they belong to.

# C columns of a layer's input, K_p of a part's output, r rank of a part, R ranks of all parts,
# E experts, K columns and O rows of an expert's matrix

The paths of the base's parameters do not change: an adapter's are `PATH.lora.NAME`.
"""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tigon.distributed.collectives import Ranks
from tigon.kernels.linear.lora import LoRATerm
from tigon.kernels.mlp.grouped_mlp_passes import LoRAFactors

# Of a block's path, what is before the names inside it
BLOCK = re.compile(r".*?\.\d+\.")
# What names of parameters begin with, the part's behind it
LORA_A, LORA_B, MAGNITUDE = "lora_A_", "lora_B_", "lora_magnitude_vector_"


def dropout_seed(path: str) -> int:
    """Returns a dropout seed, an int64, from the layer's path inside its block.

    It differs within a block and is equal across blocks, so that torch.compile compiles one block.
    """
    inside = BLOCK.sub("", path, count=1).encode()
    digest = hashlib.blake2b(inside, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class LoRAPart(NamedTuple):
    """One projection of a layer, perhaps packed with others, and its adapter's rank and scale."""

    name: str  # such as q_proj
    first: int  # of its columns in the layer's output
    size: int  # K_p
    rank: int
    scale: float


Shapes = Mapping[str, Sequence[int]]  # by the name of a parameter


class LayerAdapter(nn.Module):
    """One adapter of one layer."""

    parts: tuple[LoRAPart, ...]
    dora = False

    def init_values(
        self, shapes: Shapes, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """Returns PEFT's initial values in fp32 on the CPU, which add nothing yet: A from Kaiming's
        uniform distribution, B of zeros, and no magnitudes of DoRA.

        `shapes`: the full shape of each parameter, of which ranks may have parts.
        """
        initial = {}
        for name, _ in self.named_parameters():
            if name.startswith(MAGNITUDE.removesuffix("_")):
                continue
            initial[name] = torch.zeros(shapes[name], dtype=torch.float32, device="cpu")
            if name.startswith(LORA_A.removesuffix("_")):
                nn.init.kaiming_uniform_(initial[name], a=math.sqrt(5), generator=generator)
        return initial

    def extra_repr(self) -> str:
        return ", ".join(f"{p.name}: rank {p.rank}, scale {p.scale:.3g}" for p in self.parts)


class LowRank(LayerAdapter):
    """One adapter of a linear layer: `scale * B (A x)` is added to each of some parts.

    A of all parts are one parameter [R, C]; B of each is one parameter [K_p, r]. With `dora` (arXiv
    2402.09353) the rows of W + scale B A get learned norms, a vector [K_p] for each part; as in its
    section 4.3, the norms that they had are constants in backward. `dropout`: the share of x that A
    does not read in training; `seed`: the layer's `dropout_seed`. `column_ranks`: the ranks that
    divide the columns of W and A.
    """

    column_ranks: Ranks | None = None

    def __init__(
        self,
        in_features: int,
        parts: Sequence[LoRAPart],
        *,
        dora: bool = False,
        dropout: float = 0.0,
        seed: int = 0,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        super().__init__()
        self.parts, self.dora = tuple(parts), dora
        self.dropout, self.seed = dropout, seed
        options: dict[str, Any] = {"dtype": dtype, "device": device}
        total = sum(part.rank for part in parts)
        self.lora_A = nn.Parameter(torch.empty(total, in_features, **options))
        for part in parts:
            self.register_parameter(
                LORA_B + part.name, nn.Parameter(torch.empty(part.size, part.rank, **options))
            )
        for part in parts if dora else ():
            empty = torch.empty(part.size, **options)
            self.register_parameter(MAGNITUDE + part.name, nn.Parameter(empty))

    def additions(self) -> list[LoRATerm]:
        """Returns the first column, B and scale of each part, to be multiplied by A x."""
        local: dict[str, Any] = self._parameters  # none is None
        return [LoRATerm(p.first, local[LORA_B + p.name], p.scale) for p in self.parts]

    def dora_scale(self, weight: Tensor) -> Tensor:
        """Returns [K] in fp32, each row's learned norm over that of W + scale B A; 1 elsewhere.

        From ||W||^2 + 2 scale W A^T B^T + scale^2 B A A^T B^T, without a matrix of W's size.
        """
        local: dict[str, Any] = self._parameters
        gains, end, rank = [], 0, 0
        for part in self.parts:
            with torch.no_grad():
                rows = weight[part.first : part.first + part.size]
                a = self.lora_A[rank : rank + part.rank]
                b = local[LORA_B + part.name].float() * part.scale
                square = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32).square()
                square += 2 * (nn.functional.linear(rows, a.to(rows.dtype)).float() * b).sum(1)
                square += (b @ (a.float() @ a.float().t()) * b).sum(1)
                if self.column_ranks is not None:
                    square = self.column_ranks.sum(square)
            gains.append(square.new_ones(part.first - end))
            gains.append(local[MAGNITUDE + part.name].float() / square.sqrt())
            end, rank = part.first + part.size, rank + part.rank
        gains.append(gains[0].new_ones(weight.shape[0] - end))
        return torch.cat(gains)

    def row_norms(self, rows: Tensor) -> Tensor:
        """Returns the fp32 norms [n] of rows [n, C]; all ranks that divide C call this."""
        local = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)
        return local if self.column_ranks is None else self.column_ranks.sum(local.square()).sqrt()

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", dropout {self.dropout}" if self.dropout else "")


class Adapters(nn.Module):
    """What adapters have in one layer, by name, of which at most one is active: modules that are
    added to it, or parameters that replace its weight (PEFT's modules_to_save)."""

    chosen: str | None = None

    def active(self) -> Any:
        """The module or parameter of the chosen adapter; None if it has none here."""
        if self.chosen is None:
            return None
        return self._modules.get(self.chosen, self._parameters.get(self.chosen))


MATRICES = ("gate_up_proj", "down_proj")


class LowRankExperts(LayerAdapter):
    """One adapter of a mixture: `scale * B_e A_e` is added to a matrix [O, K] of each expert.

    As PEFT stores them: A [E r, K] has the rows of one expert after those of another, B [O, r E]
    the columns of all experts for the first rank, then for the second. A part's `size` is O.
    """

    def __init__(
        self, experts: int, columns: Sequence[int], parts: Sequence[LoRAPart], **options: Any
    ):  # `columns`: K of each part; `options`: dtype and device
        super().__init__()
        self.parts, self.experts = tuple(parts), experts
        for part, width in zip(parts, columns, strict=True):
            a = torch.empty(experts * part.rank, width, **options)
            b = torch.empty(part.size, part.rank * experts, **options)
            self.register_parameter(LORA_A + part.name, nn.Parameter(a))
            self.register_parameter(LORA_B + part.name, nn.Parameter(b))

    def factors(self, part: LoRAPart) -> tuple[Tensor, Tensor]:
        """Returns views of A [E, r, K] and B [E, O, r]."""
        a = self.get_parameter(LORA_A + part.name).view(self.experts, part.rank, -1)
        b = self.get_parameter(LORA_B + part.name).view(part.size, part.rank, self.experts)
        return a, b.permute(2, 0, 1)

    def lora_factors(
        self, gate_up: Tensor, down: Tensor, *, transposed: bool = False
    ) -> LoRAFactors:
        """Returns A [E, r, K] and scaled B [E, O, r] of gate_up and down, rank 0 without."""
        parts = {part.name: part for part in self.parts}
        factors: list[Tensor] = []
        for name, matrix in zip(MATRICES, (gate_up, down), strict=True):
            if name in parts:
                a, b = self.factors(parts[name])
                factors += [a, b * parts[name].scale]
            else:
                e, o, k = (matrix.mT if transposed else matrix).shape
                factors += [matrix.new_empty(e, 0, k), matrix.new_empty(e, o, 0)]
        return LoRAFactors(*factors)
