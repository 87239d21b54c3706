"""What adapters add to weights, in float32 and rounded once; every rank of a sharded model adds its
own rows."""

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
    SavedModules,
)
from tigon.layers.lora import MAGNITUDE, A, B, dropout_seed
from tigon.models.adapters.lora import LoraConfig, Plan, changes_ends, check_dropout, plan
from tigon.models.base import LanguageModel
from tigon.models.pretrained.names import EMBEDDING, HEAD
from tigon.utils.json import quote
from tigon.weights import local_part, own_rows, row_group


def add_delta(weight: Tensor, low: LowRank) -> None:
    """scale B A, and DoRA's lengths, to this rank's rows of the weight."""
    own, start = own_rows("weight", weight)
    a, rank = _whole(low.lora_A).float(), 0
    for part in low.parts:
        b = _whole(low.get_parameter(B + part.name)).float()
        # By all ranks, of which some may have no row of the part
        lengths = _whole(low.get_parameter(MAGNITUDE + part.name)).float() if low.dora else None
        begin, end = max(part.first, start), min(part.first + part.size, start + len(own))
        if begin < end:
            rows = own[begin - start : end - start]
            here = slice(begin - part.first, end - part.first)
            delta = b[here] @ a[rank : rank + part.rank]
            total = rows.float().add_(delta, alpha=part.scale)
            if lengths is not None:
                total *= (lengths[here] / low.row_norms(total)).unsqueeze(1)
            rows.copy_(total)
        rank += part.rank


def add_embedding_delta(weight: Tensor, low: LowRankEmbedding) -> None:
    """(scale B A)^T and DoRA's lengths, to this rank's rows of the weight, one for each token."""
    own, start = own_rows("weight", weight)
    a, b = (_whole(p).float() for p in (low.lora_embedding_A, low.lora_embedding_B))
    (part,) = low.parts
    delta = a[:, start : start + len(own)].t() @ b.t()
    total = own.float().add_(delta, alpha=part.scale)
    if low.dora:
        total *= _whole(low.lora_magnitude_vector).float() / column_norms(total, weight, low)
    own.copy_(total)


def column_norms(rows: Tensor, weight: Tensor, low: LowRankEmbedding) -> Tensor:
    """[C], of this rank's rows [n, C] of the weight; every rank calls this."""
    return low.column_norms(rows, row_group(weight) if isinstance(weight, DTensor) else None)


def add_experts_deltas(layer: nn.Module, low: LowRankExperts) -> None:
    """scale B_e A_e to the matrices of this rank's experts."""
    for part in low.parts:
        own, start = own_rows(part.name, layer.get_parameter(part.name))
        a, b = (_whole(low.get_parameter(kind + part.name)).float() for kind in (A, B))
        a = a.view(low.experts, part.rank, -1)
        b = b.view(part.size, part.rank, low.experts)
        for e, matrix in enumerate(own, start):
            matrix.copy_(matrix.float().addmm_(b[..., e], a[e], alpha=part.scale))


def _whole(parameter: Tensor) -> Tensor:
    """All rows; every rank of a sharded one calls this."""
    whole = parameter.detach()
    return whole.full_tensor() if isinstance(whole, DTensor) else whole


# Low-rank adapters of a model: added, switched, merged and removed.

NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")


def add_adapter(
    model: LanguageModel,
    config: LoraConfig | None = None,
    name: str = "default",
    *,
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
) -> None:
    """Add a new adapter, which changes nothing yet, choose it, and freeze all else.

    Its parameters are in `dtype`: None is that of the model, and float32 in place of 16 bits. On a
    model without memory (device "meta") `begin_adapter` gives it its first values later. Raises
    ValueError, with the model as it was, where DoRA meets a row or a column of zeros.
    """
    config = LoraConfig() if config is None else config
    if not isinstance(config, LoraConfig):
        raise TypeError(f"an adapter is described by a tigon.LoraConfig, not {config!r}")
    check_new(model, name)
    check_dropout(model, config)
    half = model.dtype in (torch.bfloat16, torch.float16)
    dtype = dtype or (torch.float32 if half else model.dtype)
    parts = plan(model, config)
    _check_ranks(model, parts)
    install(model, name, config, parts, dtype, model.device)
    if model.device.type != "meta":
        try:
            begin_adapter(model, name, generator)
        except ValueError:
            delete_adapter(model, name)
            raise
    choose(model, name, trained=True)


def check_new(model: LanguageModel, name: str) -> None:
    """Raises ValueError where no adapter of that name can be added."""
    if not isinstance(name, str) or not NAME.fullmatch(name) or hasattr(Adapters(), name):
        raise ValueError(f"an adapter's name has letters, digits, _ and - only, not {quote(name)}")
    if name in model.adapters:
        raise ValueError(f"there is an adapter {name!r}: delete_adapter({name!r}) removes it")
    _check_free(model)
    if model.tensor_ranks is not None:
        raise ValueError("there are no adapters on a model whose layers ranks share (mesh=)")
    if any(isinstance(p, DTensor) for p in model.parameters()):
        raise ValueError("the model is sharded: add adapters before it is")


def _check_ranks(model: LanguageModel, parts: Plan) -> None:
    """Raises ValueError for a rank that is above the smaller side of every matrix that it is for.

    Above that of some it is of use for the others, and PEFT has such adapters.
    """
    most: dict[int, int] = {}
    for path, own in parts.items():
        layer = model.get_submodule(path)
        for part in own:
            side = min(part.size, _columns(layer, part))
            most[part.rank] = max(side, most.get(part.rank, 0))
    for rank, side in most.items():
        if rank > side:
            raise ValueError(
                f"rank={rank} of an adapter is above {side}, the rank of the largest matrix that "
                f"it is for: give {side} or less"
            )


def _columns(layer: nn.Module, part: LoRAPart) -> int:
    """Of the matrix that a part is added to."""
    if isinstance(layer, Embedding):
        return layer.embedding_dim
    if isinstance(layer, Experts):
        return layer.get_parameter(part.name).shape[2]
    assert isinstance(layer, Linear | LMHead)
    return layer.in_features if isinstance(layer, Linear) else layer.weight.shape[1]


def _check_free(model: LanguageModel) -> None:
    if model.graphs is not None:
        raise ValueError("the model's blocks run from CUDA graphs, which know its adapters of then")


def install(
    model: LanguageModel,
    name: str,
    config: LoraConfig,
    parts: Plan,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Its parameters, without values."""
    if not model.adapters:
        model.trained_without = {n for n, p in model.named_parameters() if p.requires_grad}
    model.adapters[name] = config
    for path, own in parts.items():
        layer: Any = model.get_submodule(path)
        if layer.lora is None:
            layer.lora = Adapters()
        how = {"dtype": dtype, "device": device}
        layer.lora.add_module(name, _of_layer(layer, path, own, config, **how))
    for end in config.modules_to_save:
        owner = _end(model, end)
        if owner.copies is None:
            owner.copies = SavedModules()
        empty = torch.empty(owner.weight.shape, dtype=dtype, device=device)
        owner.copies.register_parameter(name, nn.Parameter(empty))


def _of_layer(
    layer: nn.Module, path: str, parts: Sequence[LoRAPart], config: LoraConfig, **how: Any
) -> LayerAdapter:
    if isinstance(layer, Embedding):
        return LowRankEmbedding(layer.embedding_dim, *parts, dora=config.dora, **how)
    if isinstance(layer, Experts):
        columns = [_columns(layer, part) for part in parts]
        return LowRankExperts(len(layer.down_proj), columns, parts, **how)
    how |= {"dora": config.dora, "dropout": config.dropout, "seed": dropout_seed(path)}
    return LowRank(_columns(layer, parts[0]), parts, **how)


def _end(model: LanguageModel, name: str) -> Embedding | LMHead:
    return model.model.embed_tokens if name == "embed_tokens" else model.lm_head


@torch.no_grad()
def begin_adapter(
    model: LanguageModel, name: str = "default", generator: torch.Generator | None = None
) -> None:
    """First values as PEFT has them: A random, B zero, copies of the base's weights.

    They are drawn whole on the CPU, in the order of layers, so that every rank of a model that is
    divided begins with its part of the same values, of the same `generator`. ValueError where DoRA
    meets a row or a column of zeros, which has no direction; after what all ranks do together.
    """
    wrong: list[str] = []
    for path, low in low_ranks(model, name).items():
        at, whole = f"{path}.lora.{name}", {}
        for kind, p in low.named_parameters():
            cut = model.cuts.get(f"{at}.{kind}")
            whole[kind] = tuple(p.shape) if cut is None else cut.shape
        first_values = low.init_values(whole, generator)
        for kind, values in first_values.items():
            if (cut := model.cuts.get(f"{at}.{kind}")) is not None:
                first_values[kind] = cut.take(values)
        if low.dora:  # what is added is 0: the rows have their own lengths
            lengths = _lengths(model.get_submodule(path), low)
            wrong += _zeros(model, at, lengths)
            first_values |= lengths
        for kind, values in first_values.items():
            own, first = own_rows(kind, getattr(low, kind))
            own.copy_(values[first : first + len(own)])
    for end in model.adapters[name].modules_to_save:
        owner = _end(model, end)
        assert owner.copies is not None
        copy = owner.copies.get_parameter(name)
        local_part(end, copy).memory.copy_(local_part(end, owner.weight).memory)
    if wrong:
        raise ValueError(
            f"{wrong[0]} is all zeros, and dora divides by its length: leave dora out, or this "
            "layer out of its targets"
        )


def _zeros(model: LanguageModel, at: str, lengths: dict[str, Tensor]) -> Iterator[str]:
    """Rows or columns whose length is 0, one of each part, as the whole weight counts them."""
    for name, values in lengths.items():
        if values.is_meta or values.all():
            continue
        own = torch.arange(len(values))
        if (cut := model.cuts.get(f"{at}.{name}")) is not None:
            own = cut.take(torch.arange(cut.shape[0]))
        first = own[int((values == 0).nonzero()[0])]
        part = name.removeprefix(MAGNITUDE)
        what = f"row {first} of {part}" if part != name else f"column {first}"
        yield f"{at.rpartition('.lora.')[0]}: {what}"


def _lengths(layer: nn.Module, low: LayerAdapter) -> dict[str, Tensor]:
    """DoRA's in fp32, of all rows that FSDP divides, or of an embedding's columns; every rank calls
    this."""
    weight = layer.values() if isinstance(layer, Linear) else layer.get_parameter("weight")
    own, first = own_rows("weight", weight)
    if isinstance(low, LowRankEmbedding):
        return {MAGNITUDE.removesuffix("_"): column_norms(own.float(), weight, low)}
    found = torch.zeros(weight.shape[0], device=own.device)
    assert isinstance(low, LowRank)
    found[first : first + len(own)] = low.row_norms(own)
    if isinstance(weight, DTensor):
        dist.all_reduce(found, group=row_group(weight))
    return {MAGNITUDE + p.name: found[p.first : p.first + p.size] for p in low.parts}


def low_ranks(model: LanguageModel, name: str) -> dict[str, LayerAdapter]:
    """By the path of its layer."""
    return {
        path.removesuffix(f".lora.{name}"): module
        for path, module in model.named_modules()
        if isinstance(module, LayerAdapter) and path.endswith(f".lora.{name}")
    }


def adapter_parameters(model: LanguageModel, name: str) -> dict[str, nn.Parameter]:
    """Those of one adapter."""
    marks = f".lora.{name}.", f".copies.{name}"
    return {n: p for n, p in model.named_parameters() if marks[0] in n or n.endswith(marks[1])}


def choose(model: LanguageModel, name: str | None, *, trained: bool = False) -> None:
    """The adapter that is added, and what trains."""
    set_adapter(model, name)
    own = set() if name is None else {id(p) for p in adapter_parameters(model, name).values()}
    for p in model.parameters():
        p.requires_grad_(trained and id(p) in own)


def set_adapter(model: LanguageModel, name: str | None) -> None:
    """Choose the adapter that is added, by its name; None: the base alone. What trains stays so."""
    if name is not None:
        check_name(model, name)
    _check_free(model)
    switch(model, name)


def switch(model: LanguageModel, name: str | None) -> None:
    model.active_adapter = name
    for module in model.modules():
        if isinstance(module, Adapters | SavedModules):
            module.chosen = name


@contextmanager
def adapters_disabled(model: LanguageModel) -> Iterator[None]:
    """Inside, the model is the base alone: no adapter is added, saved modules are the base's.

    For passes without gradients, or whose backward is inside too: a block that is computed again
    there has the adapter that is chosen then.
    """
    before = model.active_adapter
    switch(model, None)
    try:
        yield
    finally:
        switch(model, before)


def check_name(model: LanguageModel, name: str | None) -> str:
    """The name of an adapter that is there; None: the active one's."""
    if name is not None and not isinstance(name, str):
        raise ValueError(
            f"{quote(name)} is no name of an adapter: one is added at a time; there are "
            f"{', '.join(model.adapters) or 'none'}"
        )
    if name is None and model.active_adapter is None:
        raise ValueError("no adapter is active: name one")
    name = model.active_adapter if name is None else name
    if name not in model.adapters:
        raise ValueError(
            f"there is no adapter {quote(name)}; there are {', '.join(model.adapters) or 'none'}"
        )
    return name


def delete_adapter(model: LanguageModel, name: str) -> None:
    """Remove an adapter. With the last one the base trains again as it did before the first."""
    check_name(model, name)
    _check_free(model)
    for module in model.modules():
        if isinstance(module, Adapters):
            module._modules.pop(name, None)
        elif isinstance(module, SavedModules):
            module._parameters.pop(name, None)
    for module in model.modules():
        for kind, held in list(module._modules.items()):
            if isinstance(held, Adapters | SavedModules) and not {
                **held._modules,
                **held._parameters,
            }:
                setattr(module, kind, None)
    del model.adapters[name]
    if model.active_adapter == name:
        switch(model, None)
    if not model.adapters:
        for n, p in model.named_parameters():
            p.requires_grad_(n in model.trained_without)


@torch.no_grad()
def merge_adapter(model: LanguageModel, name: str | None = None) -> None:
    """Add an adapter, by default the active one, to the base's weights, and remove it.

    Sums are in float32 and rounded once to the weights' dtype. A quantised weight that something is
    added to is then one of the model's dtype, of whole size. In a sharded model all ranks call
    this, and each adds its own rows. Where the embedding and the head are tied and the adapter
    changes either, the merged model has two weights and tie_word_embeddings=False, unless the two
    are equal.
    """
    name = check_name(model, name)
    _check_free(model)
    tied = model.ties_head
    if tied and changes_ends(model, model.adapters[name]):
        _untie_head(model)
    for path, low in low_ranks(model, name).items():
        layer = model.get_submodule(path)
        if isinstance(low, LowRank):
            if isinstance(layer, Linear):
                layer.dequantize()
            add_delta(layer.get_parameter("weight"), low)
        elif isinstance(low, LowRankEmbedding):
            add_embedding_delta(layer.get_parameter("weight"), low)
        elif isinstance(low, LowRankExperts):
            add_experts_deltas(layer, low)
    for end in model.adapters[name].modules_to_save:
        owner = _end(model, end)
        assert owner.copies is not None
        copy = owner.copies.get_parameter(name)
        local_part(end, owner.weight).memory.copy_(local_part(end, copy).memory)
    delete_adapter(model, name)
    if tied and not model.ties_head:
        _tie_equal_head(model)


def _untie_head(model: LanguageModel) -> None:
    """Give the head a copy of the weight that it shares with the embedding."""
    shared = model.lm_head.weight
    model.lm_head.weight = nn.Parameter(shared.detach().clone(), shared.requires_grad)
    if (cut := model.cuts.get(EMBEDDING)) is not None:
        model.cuts = {**model.cuts, HEAD: cut}
    model.config = replace(model.config, tie_word_embeddings=False)
    if any(hasattr(module, "unshard") for module in model.modules()):  # FSDPModule, slow to import
        model.register_forward_pre_hook(_refuse_untied)


def _refuse_untied(*_: object) -> None:
    """FSDP would gather the embedding in place of the head's copy."""
    raise RuntimeError(
        "merging the adapter has untied the embedding and the head of a sharded model, which can "
        "only be saved: load what save_pretrained writes"
    )


def _tie_equal_head(model: LanguageModel) -> None:
    """Tie embedding and head again if they are equal, as PEFT's ensure_weight_tying keeps them."""
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    if isinstance(head, DTensor) or model.cuts or not torch.equal(embedding, head):
        return
    model.lm_head.weight = cast(nn.Parameter, embedding)
    model.config = replace(model.config, tie_word_embeddings=True)
