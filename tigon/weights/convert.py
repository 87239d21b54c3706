"""Converts a checkpoint's tensors to another layout and dtype, without a model in memory.

Both layouts map tensors to rows of the same parameters, so each row of a target tensor is read from
the stored tensor that has it.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tigon.weights.checkpoint import Checkpoint
from tigon.weights.entries import RowBlock, TensorEntry, row_count
from tigon.weights.header import TensorInfo
from tigon.weights.layout import Layout, TensorSlice
from tigon.weights.write import all_finite


class StoredRows(NamedTuple):
    """Rows of a tensor that a checkpoint stores: all of them, or those of one rank."""

    row: int  # the first, in the full tensor; counted as RowBlock does
    first: int  # the first, in the stored tensor
    rows: int
    column: int  # the first, in the full tensor
    name: str
    checkpoint: Checkpoint


class _Span(NamedTuple):
    """Rows of a parameter, counted as RowBlock does, and the tensor that has them."""

    first: int  # in the parameter
    length: int
    row: int  # the first, in the tensor
    name: str


def convert_entries(
    layout: Layout,
    dtype: torch.dtype,
    stored: Mapping[str, Sequence[StoredRows]],
    stored_layout: Layout,
    kept: Mapping[str, torch.dtype],
) -> list[TensorEntry]:
    """Make entries that write the tensors of `layout` in `dtype`, or in that which `kept` has for
    their name, read from `stored` rows of `stored_layout`.

    Both layouts are of the same parameters. The writer raises for rows that are not stored.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    blocks: dict[str, list[RowBlock]] = {}
    for parameter, parts in layout.items():
        sources = _spans(stored_layout[parameter])
        starts = [span.first for span in sources]
        for part in parts:
            shapes[part.name] = part.shape
            blocks.setdefault(part.name, [])
        for target in _spans(parts):
            end = target.first + target.length
            at = max(0, bisect_right(starts, target.first) - 1)
            for source in sources[at:]:
                if source.first >= end:
                    break
                first = max(target.first, source.first)
                count = min(end, source.first + source.length) - first
                if count > 0:
                    blocks[target.name] += _row_blocks(
                        target.row + first - target.first,
                        source.row + first - source.first,
                        count,
                        stored.get(source.name, ()),
                        shapes[target.name],
                        kept.get(target.name, dtype),
                    )
    return [
        TensorEntry(name, shape, kept.get(name, dtype), blocks[name])
        for name, shape in shapes.items()
    ]


def _spans(parts: Sequence[TensorSlice]) -> list[_Span]:
    """Lists the parts' spans in the order of the parameter's rows."""
    spans = []
    for part in parts:
        size = math.prod(part.shape[1:-1])
        spans += [
            _Span(size * s.target, size * s.length, size * s.source, part.name) for s in part.rows
        ]
    return sorted(spans)


def _row_blocks(
    row: int,
    source_row: int,
    count: int,
    stored: Sequence[StoredRows],
    shape: Sequence[int],
    dtype: torch.dtype,
) -> list[RowBlock]:
    """Makes blocks that write `count` stored rows from source_row to rows from `row` on."""
    blocks = []
    for block in stored:
        info = block.checkpoint.tensors[block.name]
        first = max(source_row, block.row)
        number = min(source_row + count, block.row + block.rows) - first
        if number > 0:
            start = block.first + first - block.row
            read = partial(_read, block.checkpoint, block.name, dtype, start)
            columns = None if info.shape[1:][-1:] == shape[1:][-1:] else info.shape[-1]
            blocks.append(RowBlock(row + first - source_row, number, read, block.column, columns))
    return blocks


def _read(
    checkpoint: Checkpoint, name: str, dtype: torch.dtype, start: int, first: int, count: int
) -> Tensor:
    """Reads `count` rows of a tensor from row `start` + `first` on, converted to the dtype; raises
    ValueError if a conversion to float16 gives values that are NaN or infinite."""
    info, first = checkpoint.tensors[name], start + first
    shape, unit = info.shape, math.prod(info.shape[1:-1])
    if isinstance(info, TensorInfo) and len(shape) > 2:  # as a matrix, of which any row can be read
        shape, unit = (row_count(shape), shape[-1]), 1
        checkpoint = Checkpoint(checkpoint.name, {name: replace(info, shape=shape)})
    begin, end = first // unit, -(-(first + count) // unit)
    rows = torch.empty((end - begin, *shape[1:]) if shape else (), dtype=dtype, device="cpu")
    checkpoint.read_into(name, rows, row=begin)
    if dtype == torch.float16 != info.dtype and not all_finite([rows], rows.device):
        raise ValueError(
            f"{name} has values that are infinite in float16, or NaN: choose another dtype, such "
            "as bfloat16"
        )
    return rows.reshape(-1, *shape[1:][-1:]).narrow(0, first - begin * unit, count)
