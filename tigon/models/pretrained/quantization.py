"""Frozen weights in few bits: which layers have them, how they are loaded and written.

All projections do but the head, routers and experts, as under bitsandbytes. Each matrix that a
checkpoint has for itself is quantised for itself, so that packed projections have the numbers that
PEFT's separate ones have.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from tigon.layers import FP8Weight, Linear, NF4Weight, QuantizedWeight
from tigon.models.adapters.lora import places
from tigon.models.base import LanguageModel
from tigon.models.pretrained.match import sources
from tigon.models.pretrained.names import layout
from tigon.utils.json import escape
from tigon.weights import (
    BlockScales,
    Checkpoint,
    Entry,
    Fp8Tensor,
    Part,
    Piece,
    Writers,
    all_finite,
    cut,
    load_into,
)

Quantize = Literal["nf4", "keep"]
WHOLE = 512 << 20  # bytes of weights in 16 or 32 bits that are read before they are quantised
E4M3 = torch.float8_e4m3fn


def check_quantize(quantize: Any) -> None:
    """Raises ValueError for a name that is none."""
    if quantize is not None and quantize not in get_args(Quantize):
        raise ValueError(
            f'quantize={quantize!r} is not known: "nf4" makes 4 bits of the weights, "keep" keeps '
            "those of an fp8 checkpoint in fp8, and None has all of them in the model's dtype"
        )


def quantised_layers(model: LanguageModel) -> Iterator[tuple[str, Linear, QuantizedWeight]]:
    """Those that have a quantised weight, by the name that it would have as a parameter."""
    for path, module in model.named_modules():
        if isinstance(module, Linear) and module.quantized is not None:
            yield f"{path}.weight", module, module.quantized


def count_parameters(model: LanguageModel, *, frozen: bool = False) -> int:
    """All numbers of the model, those in few bits and of other ranks too; or those frozen alone."""
    few = sum(math.prod(weight.shape) for _, _, weight in quantised_layers(model))
    shapes = (
        model.cuts[n].shape if n in model.cuts else p.shape
        for n, p in model.named_parameters()
        if not (frozen and p.requires_grad)
    )
    return few + sum(map(math.prod, shapes))


def quantised_bytes(model: LanguageModel) -> int:
    """What weights in few bits take."""
    return sum(weight.nbytes for _, _, weight in quantised_layers(model))


def quantise(
    model: LanguageModel, quantize: Quantize, checkpoint: Checkpoint | None = None
) -> None:
    """Have the projections' weights in few bits, and freeze all of the model.

    On the meta device `load_weights` gives them values; a model with values keeps them, as far as
    4 bits can. Without the `checkpoint`, "keep" takes its blocks for the usual ones, which serves
    to plan.
    """
    check_quantize(quantize)
    every = dict.fromkeys(place.path for place in places(model))
    paths = [path for path in every if isinstance(model.get_submodule(path), Linear)]
    if quantize == "keep" and checkpoint is not None:
        _keep(model, paths, checkpoint)
    else:
        parts_of = layout(model, model.checkpoint_names, False)
        for path in paths:
            layer = _layer(model, path)
            given = _rows(parts_of[f"{path}.weight"]), layer.in_features, model.dtype
            if quantize == "keep":
                blocks = [BlockScales().block or (1, 1)] * len(given[0])
                layer.quantize(FP8Weight(*given, blocks=blocks, stored=E4M3))
                continue
            made, weight = NF4Weight(*given), layer.weight.detach()
            layer.quantize(made)
            if not weight.is_meta:
                made.allocate(weight.device)
                store(made, f"{path}.weight", weight)
    model.requires_grad_(False)


def _layer(model: LanguageModel, path: str) -> Linear:
    layer = model.get_submodule(path)
    assert isinstance(layer, Linear)
    return layer


def _rows(parts: Sequence[Part]) -> list[int]:
    return [part.shape[0] for part in parts]


def store(made: NF4Weight, name: str, weight: Tensor) -> None:
    """Give it the numbers of `weight` [K, C], which is called `name`; ValueError for NaN."""
    if not all_finite([weight], weight.device):
        raise ValueError(f"{name} has values that are NaN or infinite, which 4 bits cannot hold")
    made.store(weight)


def _keep(model: LanguageModel, paths: Sequence[str], checkpoint: Checkpoint) -> None:
    how, any_kept = sources(model, checkpoint), False
    for path in paths:
        parts, layer = how["layout"][f"{path}.weight"], _layer(model, path)
        stored = [_fp8(how, part) for part in parts]
        if (first := stored[0]) is None:
            continue
        alike = first.stored.dtype, first.block[1]
        blocks = [info.block for info in stored if info is not None]
        if any(i is None or (i.stored.dtype, i.block[1]) != alike for i in stored):
            continue
        given = _rows(parts), layer.in_features, model.dtype
        layer.quantize(FP8Weight(*given, blocks=blocks, stored=alike[0]))
        any_kept = True
    if not any_kept:
        raise ValueError(
            f'quantize="keep": {escape(checkpoint.name)} has no projections in fp8 to keep; '
            'quantize="nf4" makes 4 bits of them'
        )


def _fp8(how: dict[str, Any], part: Part) -> Fp8Tensor | None:
    """What the checkpoint has for a part, if that is a matrix in fp8."""
    info = how["checkpoint"].tensors.get(how["source_of"].get(part.name, part.name))
    return info if isinstance(info, Fp8Tensor) and len(info.shape) == 2 else None


def load_quantised(model: LanguageModel, checkpoint: Checkpoint, staging_bytes: int) -> None:
    """Fill the weights in few bits; at most WHOLE bytes of others, or one weight, are there
    meanwhile."""
    every = list(quantised_layers(model))
    if not every:
        return
    how: dict[str, Any] = sources(model, checkpoint) | {"into": type(model).__name__}
    kept = {name: weight for name, _, weight in every if isinstance(weight, FP8Weight)}
    if kept:
        found = {name: [_fp8(how, part) for part in how["layout"][name]] for name in kept}
        tensors = dict(checkpoint.tensors)
        tensors |= {i.name: i.stored for infos in found.values() for i in infos if i is not None}
        as_stored = how | {"checkpoint": Checkpoint(checkpoint.name, tensors)}
        memory = {name: weight.memory for name, weight in kept.items()}
        load_into(memory, **as_stored, staging_bytes=staging_bytes)
        for name, weight in kept.items():
            weight.store_scales([info.scales() for info in found[name] if info is not None])
    batch: dict[str, NF4Weight] = {}
    for name, _, own in every:
        if isinstance(own, NF4Weight):
            if batch and _size([*batch.values(), own]) > WHOLE:
                _load_batch(model, batch, how, staging_bytes)
                batch = {}
            batch[name] = own
    _load_batch(model, batch, how, staging_bytes)


def _size(weights: Sequence[QuantizedWeight]) -> int:
    """Bytes of them, dequantised."""
    return sum(math.prod(w.shape) * w.dtype.itemsize for w in weights)


def _load_batch(
    model: LanguageModel, batch: dict[str, NF4Weight], how: dict[str, Any], staging_bytes: int
) -> None:
    on: dict[str, Any] = {"device": model.device}
    whole = {name: torch.empty(own.shape, dtype=own.dtype, **on) for name, own in batch.items()}
    load_into(whole, **how, staging_bytes=staging_bytes)
    for name, own in batch.items():
        try:
            store(own, name, whole.pop(name))
        except ValueError as error:
            raise ValueError(f"{escape(how['checkpoint'].name)}: {error}") from None


def dequantised_entries(
    model: LanguageModel, parts_of: dict[str, tuple[Part, ...]], dtype: torch.dtype, ranks: Writers
) -> list[Entry]:
    """The weights in few bits as tensors of a checkpoint in `dtype`, a few rows at a time. All
    ranks have all of them, and each writes its share."""
    found: list[Entry] = []
    for name, _, weight in quantised_layers(model):
        for i, part in enumerate(parts_of[name]):
            pieces = [
                Piece(first, count, partial(_read, weight, i, first))
                for first, count in cut(part.shape[0], part.shape[1] * dtype.itemsize)
            ]
            own = pieces[(ranks.rank - len(found)) % ranks.size :: ranks.size]
            found.append(Entry(part.name, part.shape, dtype, own))
    return found


def _read(weight: QuantizedWeight, part: int, begin: int, first: int, count: int) -> Tensor:
    return weight.rows(part, begin + first, count)
