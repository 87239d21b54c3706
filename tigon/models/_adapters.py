"""Low-rank adapters of a model: added, switched, merged and removed."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tigon.json_file import shown
from tigon.layers import Adapters, Copies, Embedding, Linear, LMHead, LowRank
from tigon.layers.lora import MAGNITUDE, B, place_of
from tigon.models._lora import LoraConfig, Plan, plan
from tigon.models._model import LanguageModel
from tigon.weights import local_part, own_rows

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
    model without memory (device "meta") `begin_adapter` gives it its first values later.
    """
    config = LoraConfig() if config is None else config
    if not isinstance(config, LoraConfig):
        raise TypeError(f"an adapter is described by a tigon.LoraConfig, not {config!r}")
    check_new(model, name)
    half = model.dtype in (torch.bfloat16, torch.float16)
    dtype = dtype or (torch.float32 if half else model.dtype)
    install(model, name, config, plan(model, config), dtype, model.device)
    if model.device.type != "meta":
        begin_adapter(model, name, generator)
    choose(model, name, trained=True)


def check_new(model: LanguageModel, name: str) -> None:
    """Raises ValueError where no adapter of that name can be added."""
    if not isinstance(name, str) or not NAME.fullmatch(name) or hasattr(Adapters(), name):
        raise ValueError(f"an adapter's name has letters, digits, _ and - only, not {shown(name)}")
    if name in model.adapters:
        raise ValueError(f"there is an adapter {name!r}: delete_adapter({name!r}) removes it")
    _check_free(model)
    if any(isinstance(p, DTensor) for p in model.parameters()):
        raise ValueError("the model is sharded: add adapters before it is")


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
        layer = _layer(model, path)
        if layer.lora is None:
            layer.lora = Adapters()
        how: dict[str, Any] = {"dora": config.dora, "dropout": config.dropout}
        how |= {"place": place_of(path), "dtype": dtype, "device": device}
        low = LowRank(layer.in_features, own, **how)
        layer.lora.add_module(name, low)
    for end in config.modules_to_save:
        owner = _end(model, end)
        if owner.copies is None:
            owner.copies = Copies()
        empty = torch.empty(owner.weight.shape, dtype=dtype, device=device)
        owner.copies.register_parameter(name, nn.Parameter(empty))


def _layer(model: LanguageModel, path: str) -> Linear:
    layer = model.get_submodule(path)
    assert isinstance(layer, Linear)
    return layer


def _end(model: LanguageModel, name: str) -> Embedding | LMHead:
    return model.lm_head if name == "lm_head" else model.model.embed_tokens


@torch.no_grad()
def begin_adapter(
    model: LanguageModel, name: str = "default", generator: torch.Generator | None = None
) -> None:
    """First values as PEFT has them: A random, B zero, copies of the base's weights.

    They are drawn whole on the CPU, in the order of layers, so that every rank of a sharded model
    that begins with the same `generator` gets its rows of the same values.
    """
    for path, low in low_ranks(model, name).items():
        first_values = low.drawn(generator)
        if low.dora:  # what is added is 0: the rows have their own lengths
            lengths = _lengths(_layer(model, path).values())
            for part in low.parts:
                rows = lengths[part.first : part.first + part.size]
                first_values[MAGNITUDE + part.name] = rows
        for kind, values in first_values.items():
            own, first = own_rows(kind, getattr(low, kind))
            own.copy_(values[first : first + len(own)])
    for end in model.adapters[name].modules_to_save:
        owner = _end(model, end)
        assert owner.copies is not None
        copy = owner.copies.get_parameter(name)
        local_part(end, copy).memory.copy_(local_part(end, owner.weight).memory)


def _lengths(weight: Tensor) -> Tensor:
    """fp32, of all rows; every rank of a sharded weight calls this."""
    own, first = own_rows("weight", weight)
    found = torch.zeros(weight.shape[0], device=own.device)
    found[first : first + len(own)] = torch.linalg.vector_norm(own, dim=1, dtype=torch.float32)
    if isinstance(weight, DTensor):
        dist.all_reduce(found, group=weight.device_mesh.get_group())
    return found


def low_ranks(model: LanguageModel, name: str) -> dict[str, LowRank]:
    """By the path of its layer."""
    return {
        path.removesuffix(f".lora.{name}"): module
        for path, module in model.named_modules()
        if isinstance(module, LowRank) and path.endswith(f".lora.{name}")
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
        if isinstance(module, Adapters | Copies):
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
    if name is None and model.active_adapter is None:
        raise ValueError("no adapter is active: name one")
    name = model.active_adapter if name is None else name
    if name not in model.adapters:
        raise ValueError(
            f"there is no adapter {shown(name)}; there are {', '.join(model.adapters) or 'none'}"
        )
    return name


def delete_adapter(model: LanguageModel, name: str) -> None:
    """Remove an adapter. With the last one the base trains again as it did before the first."""
    check_name(model, name)
    _check_free(model)
    for module in model.modules():
        if isinstance(module, Adapters):
            module._modules.pop(name, None)
        elif isinstance(module, Copies):
            module._parameters.pop(name, None)
    for module in model.modules():
        if isinstance(module, Linear) and module.lora is not None and not module.lora._modules:
            module.lora = None
        elif isinstance(module, Embedding | LMHead) and module.copies is not None:
            module.copies = module.copies if module.copies._parameters else None
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
    this, and each adds its own rows.
    """
    name = check_name(model, name)
    _check_free(model)
    ends = model.adapters[name].modules_to_save
    if ends and model.config.tie_word_embeddings:
        raise ValueError(
            f"the adapter {name!r} has weights of its own for {' and '.join(ends)}, and the "
            "model's embedding and head are one: it cannot be merged"
        )
    for path, low in low_ranks(model, name).items():
        layer = _layer(model, path)
        layer.dequantise()
        add_delta(layer.weight, low)
    for end in ends:
        owner = _end(model, end)
        assert owner.copies is not None
        copy = owner.copies.get_parameter(name)
        local_part(end, owner.weight).memory.copy_(local_part(end, copy).memory)
    delete_adapter(model, name)


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
                total *= (lengths[here] / torch.linalg.vector_norm(total, dim=1)).unsqueeze(1)
            rows.copy_(total)
        rank += part.rank


def _whole(parameter: Tensor) -> Tensor:
    """All rows; every rank of a sharded one calls this."""
    whole = parameter.detach()
    return whole.full_tensor() if isinstance(whole, DTensor) else whole
