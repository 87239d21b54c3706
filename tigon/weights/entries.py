"""Parameters as the tensors of a checkpoint: what `loading` reads, the other way round."""

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tigon.weights.layout import Layout, Part, fills
from tigon.weights.pieces import Entry, Piece, cut
from tigon.weights.plan import Lines, Local, local_part, own_columns
from tigon.weights.writers import Writers


def entries(
    parameters: Mapping[str, Tensor],
    layout: Layout,
    dtype: torch.dtype,
    *,
    values: Mapping[str, Tensor] | None = None,
    ranks: Writers | None = None,
) -> list[Entry]:
    """Every tensor of the layout in `dtype`, with what this rank writes of it: its own rows and
    columns; of what other ranks have too, its share.

    `values`: by name, in place of a parameter's memory on this rank, and as large. Raises
    ValueError where a parameter is not made of the tensors that the layout names.
    """
    ranks, values = ranks or Writers(), values or {}
    shapes: dict[str, tuple[int, ...]] = {}
    pieces: dict[str, list[Piece]] = {}
    for name, p in parameters.items():
        if not fills(layout[name], p):
            raise ValueError(f"{name} is {list(p.shape)}, not filled by {layout[name]}")
        if p.is_meta:
            raise ValueError(f"{name} is on the meta device: allocate it first (to_empty)")
        local = local_part(name, p)
        if name in values:
            value = values[name].detach()
            value = value.to_local() if isinstance(value, DTensor) else value
            if value.shape != local.memory.shape:
                raise ValueError(
                    f"{name} is {list(local.memory.shape)}, its value {list(value.shape)}"
                )
            local = local._replace(memory=value)
        for part in layout[name]:
            shapes[part.name] = part.shape
            blocks = _blocks(part, local)
            replica, replicas = _replica(p, part, ranks)
            if replicas > 1:  # shares begin at another one for each tensor: most are one group
                groups = [block for whole in blocks for block in _cut(whole, dtype)]
                blocks = groups[(replica - len(shapes)) % replicas :: replicas]
            pieces.setdefault(part.name, []).extend(blocks)
    return [Entry(name, shape, dtype, pieces[name]) for name, shape in shapes.items()]


def _replica(parameter: Tensor, part: Part, ranks: Writers) -> tuple[int, int]:
    """Which of how many ranks that have the same rows this one is."""
    if not isinstance(parameter, DTensor):
        return (ranks.rank, ranks.size) if part.copy is None else part.copy
    mesh, (number, count) = parameter.device_mesh, part.copy or (0, 1)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return 0, 0
    for dim, placement in enumerate(parameter.placements):
        if placement.is_replicate():
            number, count = number * mesh.size(dim) + coordinate[dim], count * mesh.size(dim)
    return number, count


def _blocks(part: Part, local: Local) -> list[Piece]:
    """What this rank has of a part."""
    single = len(part.shape) < 2
    lines, found = Lines(local, single=single), []
    for source, target, length in part.lines(local.shape):
        for line, block in lines.within(target, target + length):
            rows = block.view(-1) if single else own_columns(part, block)
            columns = None if rows.shape[1:] == part.shape[1:][-1:] else rows.shape[1]
            column, read = part.column + lines.column, partial(rows.narrow, 0)
            found.append(Piece(source + line - target, len(rows), read, column, columns))
    return found


def _cut(piece: Piece, dtype: torch.dtype) -> Iterator[Piece]:
    row_bytes = piece.read(0, 1).numel() * dtype.itemsize
    for first, count in cut(piece.rows, row_bytes):
        read = partial(piece.read(first, count).narrow, 0)
        yield piece._replace(row=piece.row + first, rows=count, read=read)
