"""Adds, initializes, activates, merges and removes the adapters of a model."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tigon.layers import (
    Adapters,
    Embedding,
    Experts,
    LayerAdapter,
    Linear,
    LMHead,
    LoRAPart,
    LowRank,
    LowRankEmbedding,
    LowRankExperts,
)
from tigon.layers.lora import LORA_A, LORA_B, MAGNITUDE, dropout_seed
from tigon.models.adapters.lora import (
    LoRAParts,
    changes_embedding_or_head,
    check_dropout,
    resolve_targets,
)
from tigon.models.base import LanguageModel
from tigon.models.init import copy_local
from tigon.models.pretrained.names import EMBEDDING, HEAD
from tigon.settings.lora import LoraConfig
from tigon.utils.json import quote
from tigon.weights import local_rows, local_shard, row_group

# Merging: deltas are added in float32 and rounded once; each rank changes its rows


def add_delta(weight: Tensor, low: LowRank) -> None:
    """Adds scale B A to this rank's rows in place, in float32; then scales them with DoRA."""
    local, start = local_rows("weight", weight)
    a, rank = _full_tensor(low.lora_A).float(), 0
    for part in low.parts:
        b = _full_tensor(low.get_parameter(LORA_B + part.name)).float()
        if low.dora:  # before the test of rows, since all ranks gather
            magnitudes = _full_tensor(low.get_parameter(MAGNITUDE + part.name)).float()
        begin, end = max(part.first, start), min(part.first + part.size, start + len(local))
        if begin < end:
            rows = local[begin - start : end - start]
            part_rows = slice(begin - part.first, end - part.first)
            delta = b[part_rows] @ a[rank : rank + part.rank]
            total = rows.float().add_(delta, alpha=part.scale)
            if low.dora:
                total *= (magnitudes[part_rows] / low.row_norms(total)).unsqueeze(1)
            rows.copy_(total)
        rank += part.rank


def add_embedding_delta(weight: Tensor, low: LowRankEmbedding) -> None:
    """Adds (scale B A)^T to this rank's rows in place, in float32; scales columns with DoRA."""
    local, start = local_rows("weight", weight)
    a, b = (_full_tensor(p).float() for p in (low.lora_embedding_A, low.lora_embedding_B))
    (part,) = low.parts
    delta = a[:, start : start + len(local)].t() @ b.t()
    total = local.float().add_(delta, alpha=part.scale)
    if low.dora:
        total *= _full_tensor(low.lora_magnitude_vector).float() / column_norms(total, weight, low)
    local.copy_(total)


def column_norms(rows: Tensor, weight: Tensor, low: LowRankEmbedding) -> Tensor:
    """Computes the norms [C] of a weight's columns; every rank calls this with its rows [n, C]."""
    squares = rows.square().sum(0)
    if isinstance(weight, DTensor):
        dist.all_reduce(squares, group=row_group(weight))
    return (squares if low.token_ranks is None else low.token_ranks.sum(squares)).sqrt()


def add_experts_deltas(layer: Experts, low: LowRankExperts) -> None:
    """Adds scale B_e A_e to the matrices of this rank's experts, in place; computed in float32."""
    for part in low.parts:
        local, start = local_rows(part.name, layer.get_parameter(part.name))
        names = LORA_A + part.name, LORA_B + part.name
        a, b = (_full_tensor(low.get_parameter(name)).float() for name in names)
        a = a.view(low.experts, part.rank, -1)
        b = b.view(part.size, part.rank, low.experts)
        for e, matrix in enumerate(local.mT if layer.transposed else local, start):
            matrix.copy_(matrix.float().addmm_(b[..., e], a[e], alpha=part.scale))


def _full_tensor(parameter: Tensor) -> Tensor:
    """Returns a parameter without gradient, gathered if it is sharded; every rank calls this."""
    tensor = parameter.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# Adding

NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")


def add_adapter(
    model: LanguageModel,
    config: LoraConfig | None = None,
    name: str = "default",
    *,
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
) -> None:
    """Adds an adapter, which changes no output yet, activates it, and freezes the rest.

    Its parameters are in `dtype`: None is that of the model, and float32 in place of 16 bits. On a
    model without memory (device "meta") `init_adapter` gives it its first values later. Raises
    ValueError, with the model as it was, where DoRA meets a row or a column of zeros.
    """
    config = LoraConfig() if config is None else config
    if not isinstance(config, LoraConfig):
        raise TypeError(f"config must be a tigon.LoraConfig, not {config!r}")
    check_new_adapter(model, name)
    half = model.dtype in (torch.bfloat16, torch.float16)
    dtype = dtype or (torch.float32 if half else model.dtype)
    parts = resolve_targets(model, config)
    check_dropout(model, config, parts)
    _check_ranks(model, parts)
    add_parameters(model, name, config, parts, dtype, model.device)
    if model.device.type != "meta":
        try:
            init_adapter(model, name, generator)
        except ValueError:
            delete_adapter(model, name)
            raise
    activate_adapter(model, name, trained=True)


def check_new_adapter(model: LanguageModel, name: str) -> None:
    """Raises ValueError if no adapter of that name can be added: the name is taken or no name, CUDA
    graphs were captured, or the model is sharded."""
    if not isinstance(name, str) or not NAME.fullmatch(name) or hasattr(Adapters(), name):
        raise ValueError(f"an adapter's name has letters, digits, _ and - only, not {quote(name)}")
    if name in model.adapters:
        raise ValueError(f"there is an adapter {name!r}: delete_adapter({name!r}) removes it")
    _check_not_captured(model)
    if model.tensor_ranks is not None:
        raise ValueError("adapters cannot be added to a model loaded with mesh=: load it without")
    if any(isinstance(p, DTensor) for p in model.parameters()):
        raise ValueError("the model is sharded: add adapters before it is")


def _check_ranks(model: LanguageModel, parts: LoRAParts) -> None:
    """Raises ValueError for a LoRA rank above the smaller side of every matrix that it is used for.

    It may be above that of some of these matrices, as in PEFT.
    """
    max_ranks: dict[int, int] = {}
    for path, layer_parts in parts.items():
        layer = model.get_submodule(path)
        for part in layer_parts:
            side = min(part.size, _columns(layer, part))
            max_ranks[part.rank] = max(side, max_ranks.get(part.rank, 0))
    for rank, side in max_ranks.items():
        if rank > side:
            raise ValueError(f"rank={rank} of an adapter is above {side}, the rank of its matrices")


def _columns(layer: nn.Module, part: LoRAPart) -> int:
    """Counts the columns of the matrix that a part of an adapter is added to."""
    if isinstance(layer, Embedding):
        return layer.embedding_dim
    if isinstance(layer, Experts):
        return layer.matrix_shape(part.name)[1]
    assert isinstance(layer, Linear | LMHead)
    return layer.in_features if isinstance(layer, Linear) else layer.weight.shape[1]


def _check_not_captured(model: LanguageModel) -> None:
    """Raises ValueError if CUDA graphs were captured, which replay the adapters of that time."""
    if model.graphs is not None:
        raise ValueError("adapters cannot change while CUDA graphs are in use")


def add_parameters(
    model: LanguageModel,
    name: str,
    config: LoraConfig,
    parts: LoRAParts,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Registers an adapter: its config, and its uninitialized parameters in the layers; before the
    first adapter, remember which parameters of the base are trained."""
    if not model.adapters:
        model.trainable_before_adapters = {
            n for n, p in model.named_parameters() if p.requires_grad
        }
    model.adapters[name] = config
    for path, layer_parts in parts.items():
        layer: Any = model.get_submodule(path)
        if layer.lora is None:
            layer.lora = Adapters()
        options = {"dtype": dtype, "device": device}
        layer_adapter = _make_layer_adapter(layer, path, layer_parts, config, **options)
        layer.lora.add_module(name, layer_adapter)
    for end in config.modules_to_save:
        owner = _embedding_or_head(model, end)
        if owner.copies is None:
            owner.copies = Adapters()
        empty = torch.empty(owner.weight.shape, dtype=dtype, device=device)
        owner.copies.register_parameter(name, nn.Parameter(empty))


def _make_layer_adapter(
    layer: nn.Module, path: str, parts: Sequence[LoRAPart], config: LoraConfig, **options: Any
) -> LayerAdapter:
    """Makes the adapter of a layer, without values, of the class that fits the layer."""
    if isinstance(layer, Embedding):
        return LowRankEmbedding(layer.embedding_dim, *parts, dora=config.dora, **options)
    if isinstance(layer, Experts):
        columns = [_columns(layer, part) for part in parts]
        return LowRankExperts(len(layer.down_proj), columns, parts, **options)
    options |= {"dora": config.dora, "dropout": config.dropout, "seed": dropout_seed(path)}
    return LowRank(_columns(layer, parts[0]), parts, **options)


def _embedding_or_head(model: LanguageModel, name: str) -> Embedding | LMHead:
    """Returns the embedding for "embed_tokens" of modules_to_save, else the head."""
    return model.model.embed_tokens if name == "embed_tokens" else model.lm_head


def _saved_weights(model: LanguageModel, name: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields pairs of this rank's rows: the base's embedding or head, and the trained copy."""
    for end in model.adapters[name].modules_to_save:
        owner = _embedding_or_head(model, end)
        assert owner.copies is not None
        copy = owner.copies.get_parameter(name)
        yield local_shard(end, owner.weight).memory, local_shard(end, copy).memory


@torch.no_grad()
def init_adapter(
    model: LanguageModel, name: str = "default", generator: torch.Generator | None = None
) -> None:
    """Initializes an adapter as PEFT does: A random, B zero, saved modules copies of the base's.

    Values are drawn unsharded on the CPU, layer by layer, so that the ranks of a sharded model with
    equal generators get shards of the same values. Raises ValueError if a row or column that DoRA
    normalizes is zero, after all collectives.
    """
    zeros: list[str] = []
    for path, low in adapter_layers(model, name).items():
        prefix, shapes = f"{path}.lora.{name}", {}
        for kind, p in low.named_parameters():
            spec = model.shard_specs.get(f"{prefix}.{kind}")
            shapes[kind] = tuple(p.shape) if spec is None else spec.shape
        for kind, values in low.init_values(shapes, generator).items():
            spec = model.shard_specs.get(f"{prefix}.{kind}")
            copy_local(kind, getattr(low, kind), spec, values)
        if low.dora:  # B A is zero, so the magnitudes are the norms of the base's rows
            magnitudes = _base_magnitudes(model.get_submodule(path), low)
            for kind, values in magnitudes.items():
                if not (values.is_meta or values.all()):
                    part = kind.removeprefix(MAGNITUDE)
                    vector = "a column" if part == kind else f"a row of {part}"
                    zeros.append(f"{path}: {vector} is all zeros")
                copy_local(kind, getattr(low, kind), None, values)
    for weight, copy in _saved_weights(model, name):
        copy.copy_(weight)
    if zeros:
        raise ValueError(f"{zeros[0]}, whose length dora divides by: leave it out")


def _base_magnitudes(layer: nn.Module, low: LayerAdapter) -> dict[str, Tensor]:
    """Computes DoRA's first magnitudes in fp32, by the name of their parameter: norms of the base
    weight's rows, or of an embedding's columns. Every rank calls this."""
    weight = layer.values() if isinstance(layer, Linear) else layer.get_parameter("weight")
    rows, first = local_rows("weight", weight)
    if isinstance(low, LowRankEmbedding):
        return {MAGNITUDE.removesuffix("_"): column_norms(rows.float(), weight, low)}
    norms = torch.zeros(weight.shape[0], device=rows.device)
    assert isinstance(low, LowRank)
    norms[first : first + len(rows)] = low.row_norms(rows)
    if isinstance(weight, DTensor):
        dist.all_reduce(norms, group=row_group(weight))
    return {MAGNITUDE + p.name: norms[p.first : p.first + p.size] for p in low.parts}


# Activating


def adapter_layers(model: LanguageModel, name: str) -> dict[str, LayerAdapter]:
    """Maps the path of each layer that an adapter changes to the adapter's module there."""
    return {
        path.removesuffix(f".lora.{name}"): module
        for path, module in model.named_modules()
        if isinstance(module, LayerAdapter) and path.endswith(f".lora.{name}")
    }


def adapter_parameters(model: LanguageModel, name: str) -> dict[str, nn.Parameter]:
    """Finds one adapter's parameters by name, its copies of embedding and head included."""
    marks = f".lora.{name}.", f".copies.{name}"
    return {n: p for n, p in model.named_parameters() if marks[0] in n or n.endswith(marks[1])}


def activate_adapter(model: LanguageModel, name: str | None, *, trained: bool) -> None:
    """Activates an adapter, or the base for None; only a `trained` one is not frozen."""
    set_adapter(model, name)
    ids = set() if name is None else {id(p) for p in adapter_parameters(model, name).values()}
    for p in model.parameters():
        p.requires_grad_(trained and id(p) in ids)


def set_adapter(model: LanguageModel, name: str | None) -> None:
    """Activates an adapter by name, None: the base; freezes nothing. ValueError if unknown."""
    if name is not None:
        resolve_adapter_name(model, name)
    _check_not_captured(model)
    set_active_name(model, name)


def set_active_name(model: LanguageModel, name: str | None) -> None:
    """Makes this adapter, or none, the active one in the model and its layers, unchecked."""
    model.active_adapter = name
    for module in model.modules():
        if isinstance(module, Adapters):
            module.chosen = name


@contextmanager
def adapters_disabled(model: LanguageModel) -> Iterator[None]:
    """Run the body of a `with` on the base alone, without adapters and saved modules.

    Run backward inside too: recomputed blocks use the adapter that is active during backward.
    """
    previous = model.active_adapter
    set_active_name(model, None)
    try:
        yield
    finally:
        set_active_name(model, previous)


def resolve_adapter_name(model: LanguageModel, name: str | None) -> str:
    """Returns the name, None: that of the active adapter; ValueError if there is none."""
    names = ", ".join(model.adapters) or "none"
    if name is not None and not isinstance(name, str):
        raise ValueError(f"{quote(name)} is not a name: give one of {names}")
    if name is None and model.active_adapter is None:
        raise ValueError("no adapter is active: name one")
    name = model.active_adapter if name is None else name
    if name not in model.adapters:
        raise ValueError(f"there is no adapter {quote(name)}; there are {names}")
    return name


def delete_adapter(model: LanguageModel, name: str) -> None:
    """Removes an adapter, after which the base alone is active if it was; after the last one, the
    base's parameters train as before the first."""
    resolve_adapter_name(model, name)
    _check_not_captured(model)
    for module in list(model.modules()):
        for kind, child in list(module.named_children()):
            if isinstance(child, Adapters):
                child._modules.pop(name, None)
                child._parameters.pop(name, None)
                if not child._modules and not child._parameters:
                    setattr(module, kind, None)
    del model.adapters[name]
    if model.active_adapter == name:
        set_active_name(model, None)
    if not model.adapters:
        for n, p in model.named_parameters():
            p.requires_grad_(n in model.trainable_before_adapters)


@torch.no_grad()
def merge_adapter(model: LanguageModel, name: str | None = None) -> None:
    """Adds an adapter, by default the active one, to the base's weights, and removes it.

    Sums are in float32 and rounded once. A quantized weight that is changed gets the model's dtype.
    In a sharded model all ranks call this, and each adds its rows. If embedding and head are tied
    and the adapter changes either, the merged model has two weights and tie_word_embeddings=False,
    unless they stay equal.
    """
    name = resolve_adapter_name(model, name)
    _check_not_captured(model)
    tied = model.ties_head
    if tied and changes_embedding_or_head(model, model.adapters[name]):
        _untie_head(model)
    for path, low in adapter_layers(model, name).items():
        layer = model.get_submodule(path)
        if isinstance(low, LowRank):
            if isinstance(layer, Linear):
                layer.dequantize()
            add_delta(layer.get_parameter("weight"), low)
        elif isinstance(low, LowRankEmbedding):
            add_embedding_delta(layer.get_parameter("weight"), low)
        elif isinstance(low, LowRankExperts):
            assert isinstance(layer, Experts)
            add_experts_deltas(layer, low)
    for weight, copy in _saved_weights(model, name):
        weight.copy_(copy)
    delete_adapter(model, name)
    if tied and not model.ties_head:
        _tie_equal_head(model)


def _untie_head(model: LanguageModel) -> None:
    """Give the head a copy of the weight that it shares with the embedding, and set the config's
    tie_word_embeddings to False; under FSDP, forward then raises RuntimeError."""
    shared = model.lm_head.weight
    model.lm_head.weight = nn.Parameter(shared.detach().clone(), shared.requires_grad)
    if (spec := model.shard_specs.get(EMBEDDING)) is not None:
        model.shard_specs = {**model.shard_specs, HEAD: spec}
    model.config = replace(model.config, tie_word_embeddings=False)
    if any(hasattr(module, "unshard") for module in model.modules()):  # FSDPModule, slow to import
        model.register_forward_pre_hook(_refuse_untied)


def _refuse_untied(*_: object) -> None:
    """Raises RuntimeError, since FSDP would gather the embedding instead of the head's copy."""
    raise RuntimeError(
        "merging has untied embedding and head of a sharded model, which can only be saved"
    )


def _tie_equal_head(model: LanguageModel) -> None:
    """Ties embedding and head again if they are equal and not sharded."""
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    if isinstance(head, DTensor) or model.shard_specs or not torch.equal(embedding, head):
        return
    model.lm_head.weight = cast(nn.Parameter, embedding)
    model.config = replace(model.config, tie_word_embeddings=True)
