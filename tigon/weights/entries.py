"""Parameters as the tensors of a checkpoint: what `loading` reads, the other way round."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tigon.weights.layout import Layout, fills
from tigon.weights.plan import own_rows, own_slices
from tigon.weights.ranks import Ranks
from tigon.weights.writer import Entry, Piece, cut


def entries(
    parameters: Mapping[str, Tensor],
    layout: Layout,
    dtype: torch.dtype,
    *,
    values: Mapping[str, Tensor] | None = None,
    ranks: Ranks | None = None,
) -> list[Entry]:
    """Every tensor of the layout in `dtype`, with what this rank writes of it: its own rows; of
    those that other ranks have too, its share.

    `values`: by name, in place of a parameter's memory on this rank, and as large. Raises
    ValueError where a parameter is not made of the tensors that the layout names.
    """
    ranks, values = ranks or Ranks(), values or {}
    shapes: dict[str, tuple[int, ...]] = {}
    pieces: dict[str, list[Piece]] = {}
    for name, p in parameters.items():
        if not fills(layout[name], p):
            raise ValueError(f"{name} is {list(p.shape)}, not filled by {layout[name]}")
        local, first = own_rows(name, p)
        if name in values:
            value = values[name].detach()
            value = value.to_local() if isinstance(value, DTensor) else value
            if value.shape != local.shape:
                raise ValueError(f"{name} is {list(local.shape)}, its value {list(value.shape)}")
            local = value
        replica, replicas = _replica(p, ranks)
        for part in layout[name]:
            shapes[part.name] = part.shape
            found = pieces.setdefault(part.name, [])
            for row, block in own_slices(part, p.shape, local, first):
                rows = block.reshape(-1, *part.shape[1:][-1:])  # as pieces count them
                row *= len(rows) // len(block)
                row_bytes = rows[0].numel() * dtype.itemsize
                groups = list(cut(len(rows), row_bytes)) if replicas > 1 else [(0, len(rows))]
                # Shares begin at another replica for each tensor: most tensors are one group
                for i, (start, count) in enumerate(groups, len(shapes)):
                    if i % replicas == replica:
                        read = partial(_rows, rows[start : start + count])
                        found.append(Piece(row + start, count, read))
    return [Entry(name, shape, dtype, pieces[name]) for name, shape in shapes.items()]


def _replica(parameter: Tensor, ranks: Ranks) -> tuple[int, int]:
    """Which of how many ranks that have the same rows this one is."""
    if not isinstance(parameter, DTensor):
        return ranks.rank, ranks.size
    mesh, number, count = parameter.device_mesh, 0, 1
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return 0, 0
    for dim, placement in enumerate(parameter.placements):
        if placement.is_replicate():
            number, count = number * mesh.size(dim) + coordinate[dim], count * mesh.size(dim)
    return number, count


def _rows(rows: Tensor, first: int, count: int) -> Tensor:
    return rows.narrow(0, first, count)
