"""Converts a checkpoint's tensors to another layout and dtype, without a model in memory.

Both layouts map tensors to rows of the same parameters, so that a few rows of a target tensor are
read as these rows of the parameter would be loaded.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from tigon.weights.checkpoint import Checkpoint
from tigon.weights.entries import RowBlock, TensorEntry
from tigon.weights.layout import Layout, ShardLines, TensorSlice, plan_reads
from tigon.weights.read import Reader, ReadSpan, merge_reads
from tigon.weights.write import all_finite


def convert_entries(
    parameters: Mapping[str, Tensor],
    layout: Layout,
    dtype: torch.dtype,
    checkpoint: Checkpoint,
    stored_layout: Layout,
    kept: Mapping[str, torch.dtype],
) -> list[TensorEntry]:
    """Makes entries that write the tensors of `layout` in `dtype`, or in that which `kept` has for
    their name, read from the checkpoint, whose tensors are in `stored_layout`.

    `parameters` may be on the meta device.
    """
    entries: dict[str, TensorEntry] = {}
    for parameter, parts in layout.items():
        shape = tuple(parameters[parameter].shape)
        for part in parts:
            name, part_dtype = part.name, kept.get(part.name, dtype)
            entry = entries.setdefault(name, TensorEntry(name, part.shape, part_dtype, []))
            read = partial(_read, name, checkpoint, stored_layout[parameter], shape, part_dtype)
            blocks = [
                RowBlock(source, length, partial(read, target))
                for source, target, length in part.lines(shape)
            ]
            entries[name] = entry._replace(blocks=[*entry.blocks, *blocks])
    return list(entries.values())


def _read(
    name: str,
    checkpoint: Checkpoint,
    parts: Sequence[TensorSlice],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    start: int,
    first: int,
    count: int,
) -> Tensor:
    """Reads `count` lines of a parameter from line `start` + `first` on, from the tensors of its
    parts; raises ValueError, which names the target, if a conversion to float16 gives values that
    are NaN or infinite."""
    width = () if len(parts[0].shape) < 2 else shape[-1:]
    out = torch.empty(count, *width, dtype=dtype, device="cpu")
    lines = ShardLines.from_lines(out.view(count, -1), shape, start + first)
    with Reader() as reader, torch.no_grad():
        for part in parts:
            info = checkpoint.tensors[part.name]
            for span in plan_reads(part, info, lines):
                if isinstance(span, ReadSpan):
                    for transfer in merge_reads([span], reader.max_bytes):
                        reader.fill(transfer)
                else:
                    span.out.copy_(span.read(reader))
                if dtype == torch.float16 != info.dtype and not all_finite([span.out], out.device):
                    raise ValueError(
                        f"{name} has values that are infinite in float16, or NaN: choose "
                        "another dtype, such as bfloat16"
                    )
    return out
