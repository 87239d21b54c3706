"""Quantised frozen weights: choosing layers, loading, and writing.

All projections but head, routers and experts are quantised, as by bitsandbytes. Matrices that a
checkpoint stores separately are quantised separately, so that packed projections have the same
numbers as PEFT's separate ones.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from tigon.layers import FP8Weight, Linear, NF4Weight, QuantizedWeight
from tigon.models.adapters.lora import find_target_modules
from tigon.models.base import LanguageModel
from tigon.models.pretrained.match import match_arguments
from tigon.models.pretrained.names import layout
from tigon.utils.json import escape
from tigon.weights import BlockScales, Checkpoint, TensorEntry, TensorSlice, WriterGroup, load_into
from tigon.weights.checkpoint import Fp8Tensor
from tigon.weights.write import RowBlock, all_finite, row_chunks

Quantize = Literal["nf4", "keep"]
BATCH_BYTES = 512 << 20  # bytes of weights in 16 or 32 bits that are read before they are quantised
E4M3 = torch.float8_e4m3fn


def check_quantize(quantize: Any) -> None:
    """Raises ValueError for an unknown kind of quantization."""
    if quantize is not None and quantize not in get_args(Quantize):
        raise ValueError(
            f'quantize={quantize!r} is not known: "nf4" makes 4 bits of the weights, "keep" keeps '
            "those of an fp8 checkpoint in fp8, and None has all of them in the model's dtype"
        )


def quantized_layers(model: LanguageModel) -> Iterator[tuple[str, Linear, QuantizedWeight]]:
    """Yields each quantised layer, with its weight and the name of the weight as a parameter."""
    for path, module in model.named_modules():
        if isinstance(module, Linear) and module.quantized is not None:
            yield f"{path}.weight", module, module.quantized


def count_parameters(model: LanguageModel, *, frozen: bool = False) -> int:
    """The number of parameters, quantised ones and those of other ranks included; `frozen`: only
    the frozen ones."""
    quantized = sum(math.prod(weight.shape) for _, _, weight in quantized_layers(model))
    shapes = (
        model.shard_specs[n].shape if n in model.shard_specs else p.shape
        for n, p in model.named_parameters()
        if not (frozen and p.requires_grad)
    )
    return quantized + sum(map(math.prod, shapes))


def quantized_bytes(model: LanguageModel) -> int:
    """The bytes of quantised weights."""
    return sum(weight.nbytes for _, _, weight in quantized_layers(model))


def quantize_model(
    model: LanguageModel, quantize: Quantize, checkpoint: Checkpoint | None = None
) -> None:
    """Quantise the projections' weights, and freeze the model.

    On the meta device `load_weights` fills them; otherwise the present values are rounded. Without
    the `checkpoint`, "keep" assumes blocks of the usual size, for estimates.
    """
    check_quantize(quantize)
    modules = dict.fromkeys(module.path for module in find_target_modules(model))
    paths = [path for path in modules if isinstance(model.get_submodule(path), Linear)]
    if quantize == "keep" and checkpoint is not None:
        _keep(model, paths, checkpoint)
    else:
        parts_of = layout(model, model.checkpoint_names, False)
        for path in paths:
            layer = _layer(model, path)
            sizes = _rows(parts_of[f"{path}.weight"]), layer.in_features, model.dtype
            if quantize == "keep":
                blocks = [BlockScales().block or (1, 1)] * len(sizes[0])
                layer.quantize(FP8Weight(*sizes, blocks=blocks, stored=E4M3))
                continue
            nf4_weight, weight = NF4Weight(*sizes), layer.weight.detach()
            layer.quantize(nf4_weight)
            if not weight.is_meta:
                nf4_weight.allocate(weight.device)
                store_nf4(nf4_weight, f"{path}.weight", weight)
    model.requires_grad_(False)


def _layer(model: LanguageModel, path: str) -> Linear:
    layer = model.get_submodule(path)
    assert isinstance(layer, Linear)
    return layer


def _rows(parts: Sequence[TensorSlice]) -> list[int]:
    return [part.shape[0] for part in parts]


def store_nf4(nf4_weight: NF4Weight, name: str, weight: Tensor) -> None:
    """Quantise `weight` [K, C] into `nf4_weight`; raises ValueError with its name for NaN."""
    if not all_finite([weight], weight.device):
        raise ValueError(f"{name} has values that are NaN or infinite, which 4 bits cannot hold")
    nf4_weight.store(weight)


def _keep(model: LanguageModel, paths: Sequence[str], checkpoint: Checkpoint) -> None:
    load_options, any_kept = match_arguments(model, checkpoint), False
    for path in paths:
        parts, layer = load_options["layout"][f"{path}.weight"], _layer(model, path)
        stored = [_fp8(load_options, part) for part in parts]
        if (first := stored[0]) is None:
            continue
        stored_kind = first.stored.dtype, first.block[1]
        blocks = [info.block for info in stored if info is not None]
        if any(i is None or (i.stored.dtype, i.block[1]) != stored_kind for i in stored):
            continue
        sizes = _rows(parts), layer.in_features, model.dtype
        layer.quantize(FP8Weight(*sizes, blocks=blocks, stored=stored_kind[0]))
        any_kept = True
    if not any_kept:
        raise ValueError(
            f'quantize="keep": {escape(checkpoint.name)} has no projections in fp8 to keep; '
            'quantize="nf4" makes 4 bits of them'
        )


def _fp8(load_options: dict[str, Any], part: TensorSlice) -> Fp8Tensor | None:
    """The checkpoint's tensor for a slice, if it is a matrix in fp8."""
    info = load_options["checkpoint"].tensors.get(
        load_options["source_of"].get(part.name, part.name)
    )
    return info if isinstance(info, Fp8Tensor) and len(info.shape) == 2 else None


def load_quantized(model: LanguageModel, checkpoint: Checkpoint, staging_bytes: int) -> None:
    """Fill the quantised weights, with at most BATCH_BYTES of unquantised ones in memory."""
    every = list(quantized_layers(model))
    if not every:
        return
    load_options: dict[str, Any] = match_arguments(model, checkpoint) | {
        "into": type(model).__name__
    }
    kept = {name: weight for name, _, weight in every if isinstance(weight, FP8Weight)}
    if kept:
        fp8_tensors = {
            name: [_fp8(load_options, part) for part in load_options["layout"][name]]
            for name in kept
        }
        tensors = dict(checkpoint.tensors)
        tensors |= {
            i.name: i.stored for infos in fp8_tensors.values() for i in infos if i is not None
        }
        as_stored = load_options | {"checkpoint": Checkpoint(checkpoint.name, tensors)}
        memory = {name: weight.memory for name, weight in kept.items()}
        load_into(memory, **as_stored, staging_bytes=staging_bytes)
        for name, weight in kept.items():
            weight.store_scales([info.scales() for info in fp8_tensors[name] if info is not None])
    batch: dict[str, NF4Weight] = {}
    for name, _, quantized in every:
        if isinstance(quantized, NF4Weight):
            if batch and _size([*batch.values(), quantized]) > BATCH_BYTES:
                _load_batch(model, batch, load_options, staging_bytes)
                batch = {}
            batch[name] = quantized
    _load_batch(model, batch, load_options, staging_bytes)


def _size(weights: Sequence[QuantizedWeight]) -> int:
    """The bytes of the weights when dequantised."""
    return sum(math.prod(w.shape) * w.dtype.itemsize for w in weights)


def _load_batch(
    model: LanguageModel,
    batch: dict[str, NF4Weight],
    load_options: dict[str, Any],
    staging_bytes: int,
) -> None:
    on: dict[str, Any] = {"device": model.device}
    full = {
        name: torch.empty(quantized.shape, dtype=quantized.dtype, **on)
        for name, quantized in batch.items()
    }
    load_into(full, **load_options, staging_bytes=staging_bytes)
    for name, quantized in batch.items():
        try:
            store_nf4(quantized, name, full.pop(name))
        except ValueError as error:
            raise ValueError(f"{escape(load_options['checkpoint'].name)}: {error}") from None


def dequantized_entries(
    model: LanguageModel,
    parts_of: dict[str, tuple[TensorSlice, ...]],
    dtype: torch.dtype,
    ranks: WriterGroup,
) -> list[TensorEntry]:
    """Entries that write the quantised weights in `dtype`, a few rows at a time. All ranks have the
    same weights, and each writes a share."""
    fp8_tensors: list[TensorEntry] = []
    for name, _, weight in quantized_layers(model):
        for i, part in enumerate(parts_of[name]):
            pieces = [
                RowBlock(first, count, partial(_read, weight, i, first))
                for first, count in row_chunks(part.shape[0], part.shape[1] * dtype.itemsize)
            ]
            quantized = pieces[(ranks.rank - len(fp8_tensors)) % ranks.size :: ranks.size]
            fp8_tensors.append(TensorEntry(part.name, part.shape, dtype, quantized))
    return fp8_tensors


def _read(weight: QuantizedWeight, part: int, begin: int, first: int, count: int) -> Tensor:
    return weight.rows(part, begin + first, count)
