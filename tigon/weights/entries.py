"""Parameters as the tensors of a checkpoint: what `loading` reads, the other way round."""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tigon.weights.layout import Layout, Rows, tiles
from tigon.weights.writer import Entry


class _Piece(NamedTuple):
    rows: Rows
    parameter: str


def entries(parameters: Mapping[str, Tensor], layout: Layout, dtype: torch.dtype) -> list[Entry]:
    """Every tensor of the layout, in `dtype`; a sharded one is gathered when its turn comes.

    Raises where the parameters do not have all rows of a tensor, each once.
    """

    @lru_cache(maxsize=4)  # the parts of a fused weight and bias are written close to each other
    def whole(name: str) -> Tensor:
        p = parameters[name].detach()
        return p.full_tensor() if isinstance(p, DTensor) else p

    def getter(shape: tuple[int, ...], pieces: list[_Piece]) -> Callable[[], Tensor]:
        def get() -> Tensor:
            found = [
                whole(piece.parameter)
                .reshape(-1, *shape[1:])
                .narrow(0, piece.rows.target, piece.rows.length)
                for piece in sorted(pieces)
            ]
            tensor = found[0] if len(found) == 1 else torch.cat(found)
            return tensor.reshape(shape).to(dtype)

        return get

    shapes: dict[str, tuple[int, ...]] = {}
    pieces: dict[str, list[_Piece]] = {}
    for parameter, parts in layout.items():
        for part in parts:
            shapes[part.name] = part.shape
            pieces.setdefault(part.name, []).extend(_Piece(s, parameter) for s in part.slices)
    for name, shape in shapes.items():
        spans = [(piece.rows.source, piece.rows.length) for piece in pieces[name]]
        if not tiles(spans, shape[0] if shape else 1):
            owners = ", ".join(sorted({piece.parameter for piece in pieces[name]}))
            raise ValueError(
                f"{name} {list(shape)} cannot be written: {owners} have rows {spans} of it "
                "(first, number), not each row once"
            )
    return [(name, shape, dtype, getter(shape, pieces[name])) for name, shape in shapes.items()]
