"""Quantizes frozen weights, loads them and writes them dequantized.

All projections but head, routers and experts are quantized, as by bitsandbytes. Matrices that a
checkpoint stores separately are quantized separately, so that packed projections have the same
values as PEFT's separate ones; where rows are in another order here, other rows share a scale's
scale.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, cast, get_args

import torch
from torch import Tensor

from tigon.layers import FP8Weight, Linear, NF4Weight, QuantizedWeight
from tigon.models.adapters.lora import find_target_modules
from tigon.models.base import LanguageModel
from tigon.models.pretrained.match import match_arguments
from tigon.models.pretrained.names import layout
from tigon.settings.lora import Quantize
from tigon.utils.config import prefix_errors
from tigon.utils.json import escape
from tigon.utils.memory import split_by_size
from tigon.weights import Checkpoint, Layout, TensorEntry, WriterGroup, load_into
from tigon.weights.checkpoint import BLOCK, Fp8Tensor
from tigon.weights.entries import RowBlock, row_chunks
from tigon.weights.write import all_finite

BATCH_BYTES = 512 << 20  # bytes of unquantized weights that are read before they are quantized


def check_quantize(quantize: Any) -> None:
    """Raises ValueError for an unknown kind of quantization."""
    if quantize is not None and quantize not in get_args(Quantize):
        raise ValueError(
            f'quantize={quantize!r} is not known: "nf4" makes 4 bits of the weights, "keep" keeps '
            "those of an fp8 checkpoint, None dequantizes them"
        )


def quantized_layers(model: LanguageModel) -> Iterator[tuple[str, Linear, QuantizedWeight]]:
    """Yields the name of each quantized weight, its layer, and the weight."""
    for path, module in model.named_modules():
        if isinstance(module, Linear) and module.quantized is not None:
            yield f"{path}.weight", module, module.quantized


def count_parameters(model: LanguageModel, *, frozen: bool = False) -> int:
    """Counts all ranks' parameters, quantized ones included; `frozen`: only the frozen ones."""
    quantized = sum(math.prod(weight.shape) for _, _, weight in quantized_layers(model))
    shapes = (
        model.shard_specs[n].shape if n in model.shard_specs else p.shape
        for n, p in model.named_parameters()
        if not (frozen and p.requires_grad)
    )
    return quantized + sum(map(math.prod, shapes))


def quantized_bytes(model: LanguageModel) -> int:
    """Counts the bytes that quantized weights take."""
    return sum(weight.nbytes for _, _, weight in quantized_layers(model))


def quantize_model(
    model: LanguageModel, quantize: Quantize, checkpoint: Checkpoint | None = None
) -> None:
    """Make the projections' weights quantized ones, in place, and freeze the model.

    On the meta device `load_weights` fills them; otherwise "nf4" rounds the model's values. "keep"
    takes only layers that the checkpoint stores in fp8, and raises ValueError if it has none;
    without a `checkpoint` it assumes blocks of the usual size in all, for estimates.
    """
    check_quantize(quantize)
    modules = {m.path: model.get_submodule(m.path) for m in find_target_modules(model) if m.linear}
    layers = {f"{path}.weight": m for path, m in modules.items() if isinstance(m, Linear)}
    if quantize == "keep":  # blocks of rows that are in another order here have no scale
        layers = {n: m for n, m in layers.items() if not any(getattr(m, "orders", ()))}
    if quantize == "keep" and checkpoint is not None:
        _keep_fp8(model, layers, checkpoint)
    else:
        parts_of = layout(model, model.checkpoint_names, False)
        for name, layer in layers.items():
            rows = [part.shape[0] for part in parts_of[name]]
            sizes = rows, layer.in_features, model.dtype
            if quantize == "keep":
                blocks = [BLOCK] * len(rows)
                layer.quantize(FP8Weight(*sizes, blocks=blocks, stored=torch.float8_e4m3fn))
                continue
            nf4_weight, weight = NF4Weight(*sizes), layer.weight.detach()
            layer.quantize(nf4_weight)
            if not weight.is_meta:
                nf4_weight.allocate(weight.device)
                store_nf4(nf4_weight, name, weight)
    model.requires_grad_(False)


def store_nf4(nf4_weight: NF4Weight, name: str, weight: Tensor) -> None:
    """Quantizes `weight` [K, C] into `nf4_weight`; ValueError for NaN and infinity."""
    if not all_finite([weight], weight.device):
        raise ValueError(f"{name} has values that are NaN or infinite, which 4 bits cannot hold")
    nf4_weight.store(weight)


def _keep_fp8(model: LanguageModel, layers: dict[str, Linear], checkpoint: Checkpoint) -> None:
    """Makes layers fp8 whose matrices are all so in the checkpoint; ValueError if none is."""
    load_options, has_fp8 = match_arguments(model, checkpoint), False
    for name, layer in layers.items():
        parts, infos = load_options["layout"][name], _find_fp8(load_options, name)
        formats = {(info.stored.dtype, info.block[1]) for info in infos}
        if len(infos) < len(parts) or len(formats) > 1:
            continue
        rows, blocks = [part.shape[0] for part in parts], [info.block for info in infos]
        sizes = rows, layer.in_features, model.dtype
        layer.quantize(FP8Weight(*sizes, blocks=blocks, stored=infos[0].stored.dtype))
        has_fp8 = True
    if not has_fp8:
        raise ValueError(
            f'quantize="keep": {escape(checkpoint.name)} has no projections in fp8; use "nf4"'
        )


def _find_fp8(load_options: dict[str, Any], name: str) -> list[Fp8Tensor]:
    """Finds the fp8 matrices of the checkpoint that a parameter is made of."""
    parts, source_of = load_options["layout"][name], load_options["source_of"]
    tensors = load_options["checkpoint"].tensors
    infos = (tensors.get(source_of.get(part.name, part.name)) for part in parts)
    return [info for info in infos if isinstance(info, Fp8Tensor) and len(info.shape) == 2]


def load_quantized(model: LanguageModel, checkpoint: Checkpoint, staging_bytes: int) -> None:
    """Fills quantized weights, with at most BATCH_BYTES of others in memory."""
    weights = {name: weight for name, _, weight in quantized_layers(model)}
    if not weights:
        return
    load_options = match_arguments(model, checkpoint)
    load_options |= {"into": type(model).__name__, "staging_bytes": staging_bytes}
    fp8_weights = {name: w for name, w in weights.items() if isinstance(w, FP8Weight)}
    if fp8_weights:
        fp8_tensors = {name: _find_fp8(load_options, name) for name in fp8_weights}
        stored = {info.name: info.stored for infos in fp8_tensors.values() for info in infos}
        codes = Checkpoint(checkpoint.name, {**checkpoint.tensors, **stored})
        code_views = {name: weight.memory for name, weight in fp8_weights.items()}
        load_into(code_views, **load_options | {"checkpoint": codes})
        for name, weight in fp8_weights.items():
            weight.store_scales([info.scales() for info in fp8_tensors[name]])
    nf4_weights = [name for name, w in weights.items() if isinstance(w, NF4Weight)]
    metas = {name: weights[name].weight_meta for name in nf4_weights}
    # A batch is read in full, then quantized one by one
    for batch in split_by_size(nf4_weights, lambda name: metas[name].nbytes, BATCH_BYTES):
        dense = {name: torch.empty_like(metas[name], device=model.device) for name in batch}
        load_into(dense, **load_options)
        with prefix_errors(escape(checkpoint.name), ValueError):
            for name in batch:
                store_nf4(cast(NF4Weight, weights[name]), name, dense.pop(name))


def dequantized_entries(
    model: LanguageModel, parts_of: Layout, dtype: torch.dtype, ranks: WriterGroup
) -> list[TensorEntry]:
    """Makes entries that write the quantized weights in `dtype`, a few rows at a time. All ranks
    have the same weights, and each writes a share."""

    def read(weight: QuantizedWeight, part: int, begin: int, first: int, count: int) -> Tensor:
        return weight.rows(part, begin + first, count)

    entries: list[TensorEntry] = []
    for name, _, weight in quantized_layers(model):
        for i, part in enumerate(parts_of[name]):
            begin, row_bytes = part.rows[0].target, part.shape[1] * dtype.itemsize
            blocks = [
                RowBlock(source + first, count, partial(read, weight, i, target - begin + first))
                for source, target, rows in part.rows
                for first, count in row_chunks(rows, row_bytes)
            ]
            local = blocks[(ranks.rank - len(entries)) % ranks.size :: ranks.size]
            entries.append(TensorEntry(part.name, part.shape, dtype, local))
    return entries
