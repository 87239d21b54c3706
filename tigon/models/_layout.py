"""Which checkpoint tensors every parameter is made of."""

import itertools
import math
from collections.abc import Sequence

from torch import nn

from tigon.layers import FusedLinear
from tigon.models._model import LanguageModel
from tigon.weights import Layout, Part


def layout(model: LanguageModel) -> Layout:
    """Every parameter, and the checkpoint tensors that its rows are made of."""
    found: Layout = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        for kind, p in module.named_parameters(recurse=False):
            if id(p) in seen:
                continue
            seen.add(id(p))
            found[f"{path}.{kind}"] = _parts(model, path, kind, module, tuple(p.shape))
    return found


def _parts(
    model: LanguageModel, path: str, kind: str, module: nn.Module, shape: tuple[int, ...]
) -> tuple[Part, ...]:
    """The tensors of a parameter: itself, or those fused in it, or each expert's."""
    name, ending = f"{path}.{kind}", ".".join(path.split(".")[-2:])
    if isinstance(module, FusedLinear) and ending in model.FUSED:
        parent = path.rpartition(".")[0]
        names = [f"{parent}.{part}.{kind}" for part in model.FUSED[ending]]
        return _tile(names, module.parts, shape[1:])
    for stacked, apart in () if model.stacked else model.PER_EXPERT.items():
        if name.endswith(f".{stacked}"):
            layer, experts = name.removesuffix(stacked), shape[0] if len(shape) == 3 else 1
            names = [layer + part.format(e) for e in range(experts) for part in apart]
            rows = math.prod(shape[:-1]) // len(names)
            return _tile(names, [rows] * len(names), shape[-1:])
    return (Part(name, shape),)


def _tile(names: Sequence[str], rows: Sequence[int], rest: tuple[int, ...]) -> tuple[Part, ...]:
    """Parts one after the other, that many rows each."""
    starts = itertools.accumulate(rows, initial=0)
    return tuple(Part(n, (r, *rest), s) for n, r, s in zip(names, rows, starts, strict=False))
