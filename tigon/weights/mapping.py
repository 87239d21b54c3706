"""Parameters that are parts of files, mapped into memory in place of copies."""

import mmap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tigon.weights.checkpoint import Checkpoint
from tigon.weights.decoded import Decoded
from tigon.weights.header import TensorInfo
from tigon.weights.layout import Layout, Part
from tigon.weights.matching import match


def map_parameters(
    parameters: Mapping[str, Tensor], layout: Layout, checkpoint: Checkpoint, **names: Any
) -> dict[str, Tensor]:
    """Of the parameters, those whose bytes a file holds as they are: that part of it, mapped.

    Raises where `load_into` does, whose keywords `names` are. Nothing is read before it is used,
    and what is written to the tensors stays in this process: the file never changes. A parameter of
    several tensors is among them if these follow each other in one file. The file must be neither
    shortened nor written to for as long as one of the tensors lives.
    """
    matched = match(parameters, layout, checkpoint, **names)
    files: dict[Path, mmap.mmap] = {}
    found: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        place = _place(parameter, matched[name])
        if place is None:
            continue
        path, offset = place
        if path not in files:
            with open(path, "rb") as file:
                files[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        end = offset + parameter.numel() * parameter.itemsize
        if end > len(files[path]):
            raise ValueError(f"{path} ended at byte {len(files[path])}: it was shortened")
        flat = torch.frombuffer(
            files[path], dtype=parameter.dtype, count=parameter.numel(), offset=offset
        )
        found[name] = flat.view(parameter.shape)
    return found


def _place(
    parameter: Tensor, parts: Sequence[tuple[Part, TensorInfo | Decoded]]
) -> tuple[Path, int] | None:
    """Where a file has the parameter's bytes as they are, all in a row."""
    if not parameter.numel():
        return None
    spans: list[tuple[int, Path, int, int]] = []
    for part, info in parts:
        if not isinstance(info, TensorInfo) or info.dtype != parameter.dtype:
            return None
        row = info.nbytes // max(1, info.shape[0] if info.shape else 1)
        for source, target, length in part.slices:
            begin = info.offset + source * row
            spans.append((target, info.path, begin, begin + length * row))
    spans.sort()
    _, path, offset, _ = spans[0]
    follow = all(a[1] == b[1] and a[3] == b[2] for a, b in pairwise(spans))
    return (path, offset) if follow and offset % parameter.itemsize == 0 else None
