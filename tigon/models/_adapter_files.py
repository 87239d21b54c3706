"""Adapters from PEFT's files, and to them."""

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace as replaced
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn

from tigon.hub import Source
from tigon.models._adapters import (
    adapter_parameters,
    check_name,
    check_new,
    choose,
    delete_adapter,
    install,
    low_ranks,
    switch,
)
from tigon.models._arguments import check_keywords
from tigon.models._layout import layout
from tigon.models._lora import check_dropout, places, plan
from tigon.models._model import LanguageModel
from tigon.models._peft import PREFIX, WEIGHTS, Stored, read_adapter, read_vocabulary_size
from tigon.models._peft_config import CONFIG, peft_config, peft_name
from tigon.models._save import SavesItself, check_target, write_json, write_model
from tigon.utils.json import escape, quote
from tigon.utils.paths import expand_user
from tigon.weights import (
    Entry,
    Layout,
    Part,
    Repository,
    Writers,
    all_finite,
    entries,
    load_into,
    match,
)


def load_adapter(
    model: LanguageModel,
    path_or_repo: str | os.PathLike[str],
    name: str = "default",
    *,
    trainable: bool = False,
    dtype: torch.dtype | None = None,
    **source: Unpack[Source],
) -> None:
    """Add an adapter of PEFT's from a directory or a hub repository, and choose it.

    All else is frozen, and the adapter too unless `trainable`. `dtype` None: the model's, as that
    is what products are computed in; float32 for one that trains on in a model of 16 bits. Raises
    ValueError, naming what is wrong, for tensors that do not fit the model, features that are not
    supported, and tensors with NaN; the model is then as it was. Warns if the adapter fits, but
    names another base than this model was read from.
    """
    check_keywords("load_adapter", source, frozenset(Source.__annotations__))
    check_new(model, name)
    repository = Repository(path_or_repo, **source)
    stored, size = read_adapter(repository, model), read_vocabulary_size(repository, model)
    try:
        if size not in (None, model.config.vocab_size) and not model.config.labels:
            raise ValueError(
                f"the adapter is of {size} tokens, and the model has {model.config.vocab_size}: "
                f"call model.resize_token_embeddings({size}) first"
            )
        parts = plan(model, stored.config)
        if trainable:
            check_dropout(model, stored.config)
        if trainable and stored.tied:
            raise ValueError(
                "ensure_weight_tying=True keeps embedding and head equal in training, which is not "
                "supported: load the adapter without trainable=True, or merge it and begin another"
            )
    except ValueError as error:
        raise ValueError(f"{escape(os.fspath(path_or_repo))}: {error}") from None
    _check_base(model, stored)
    half = model.dtype in (torch.bfloat16, torch.float16)
    dtype = dtype or (torch.float32 if half and trainable else model.dtype)
    active = model.active_adapter
    learned = {n for n, p in model.named_parameters() if p.requires_grad}
    try:
        install(model, name, stored.config, parts, dtype, torch.device("meta"))
        _fill(model, name, stored)
    except BaseException:
        if name in model.adapters:
            delete_adapter(model, name)
            switch(model, active)
            for n, p in model.named_parameters():
                p.requires_grad_(n in learned)
        raise
    choose(model, name, trained=trainable)
    said, own = stored.config.base, model.config.source.name
    if said and own and not _same(said, own):
        warnings.warn(
            f"{escape(os.fspath(path_or_repo))} is an adapter of {quote(said, 300)}, and the "
            f"model is of {quote(own, 300)}: it fits, but what it adds was learned over other "
            "weights, unless the one is the other under a new name",
            stacklevel=2,
        )


def _same(one: str, other: str) -> bool:
    """Whether two places, directories or hub repositories, are one or have the same name."""
    try:
        return os.path.samefile(one, other)  # all runs have a directory hf
    except (OSError, ValueError):  # one is no directory here
        return _last_name(one) == _last_name(other)


def _last_name(place: str) -> str:
    """Of a path or a repository; the repository's, if it is in the hub's cache."""
    parts = os.path.abspath(place).replace("\\", "/").split("/")
    cached = [part for part in parts if part.startswith("models--")]
    return (cached[-1].rpartition("--")[2] if cached else parts[-1]).casefold()


def _check_base(model: LanguageModel, stored: Stored) -> None:
    """Raises ValueError if the file has weights of a base that are not this model's: PEFT would put
    them into the base."""
    for module, own in stored.base.items():
        weight = model.get_submodule(module).get_parameter("weight")
        name = escape(f"{stored.checkpoint.name}: {own}")
        if stored.of_base.tensors[own].shape != weight.shape:
            shape = list(stored.of_base.tensors[own].shape)
            raise ValueError(
                f"{name} is {shape}, the model's {list(weight.shape)}: it is of another base"
            )
        found = {"weight": nn.Parameter(torch.empty_like(weight), requires_grad=False)}
        parts: Layout = {"weight": (Part.whole(own, tuple(weight.shape)),)}
        others = stored.of_base.tensors.keys() - {own}
        load_into(found, parts, stored.of_base, ignored=others, into=name)
        if not torch.equal(found["weight"], weight):
            raise ValueError(f"{name} is not the model's own: the adapter is of another base")


def _fill(model: LanguageModel, name: str, stored: Stored) -> None:
    """Memory for its parameters, and the file's values, if they fit."""
    own, parts_of = adapter_parameters(model, name), _layout(model, name)
    inside = {part.name for parts in parts_of.values() for part in parts}
    source_of = {
        n: stored.names.get(peft_name(n, name), PREFIX + peft_name(n, name)) for n in inside
    }
    how: dict[str, Any] = {"layout": parts_of, "checkpoint": stored.checkpoint}
    how |= {"source_of": source_of, "into": f"an adapter of this {type(model).__name__}"}
    match(own, **how)  # before anything is allocated: sizes are the file's
    for p in own.values():
        empty = torch.empty_like(p, device=model.device)
        torch.utils.swap_tensors(p, nn.Parameter(empty, p.requires_grad))
    load_into(own, **how)
    for n, p in own.items():
        if p.numel() and not all_finite([p.detach()], torch.device("cpu")):
            names = ", ".join(source_of[part.name] for part in parts_of[n])
            raise ValueError(
                f"{escape(stored.checkpoint.name)} has values that are NaN or infinite in {names}"
            )


def _layout(model: LanguageModel, name: str) -> Layout:
    """Of one adapter's parameters."""
    whole = layout(model, model.checkpoint_names, False)
    return {n: whole[n] for n in adapter_parameters(model, name)}


def save_adapter(
    model: LanguageModel,
    directory: str | os.PathLike[str],
    name: str | None = None,
    *,
    dtype: torch.dtype | None = None,
    tokenizer: SavesItself | None = None,
    replace: bool = False,
) -> None:
    """Write an adapter, by default the active one, as PEFT does; PEFT loads it at once.

    In its own dtype or another. The directory must be new or empty, and appears whole or not at
    all; with `replace`, an earlier adapter may be there. Under a process group every rank calls
    this, and all need one file system.
    """
    ranks = Writers()
    with ranks.together():
        if ranks.first:
            check_target(expand_user(directory), replace, CONFIG)
    tensors, describe = prepare_adapter(model, name, ranks=ranks, dtype=dtype, tokenizer=tokenizer)
    write_adapter(directory, tensors, describe, ranks=ranks, replace=replace)


def prepare_adapter(
    model: LanguageModel,
    name: str | None = None,
    *,
    ranks: Writers,
    dtype: torch.dtype | None = None,
    tokenizer: SavesItself | None = None,
) -> tuple[list[Entry], Callable[[Path], None]]:
    """What save_adapter writes: tensors, and what adds the other files to a directory."""
    name = check_name(model, name)
    own = adapter_parameters(model, name)
    parts_of: Layout = {
        n: tuple(replaced(part, name=PREFIX + peft_name(part.name, name)) for part in parts)
        for n, parts in _layout(model, name).items()
    }
    inside = {(path, p.name) for path, low in low_ranks(model, name).items() for p in low.parts}
    chosen = [place for place in places(model) if (place.path, place.own) in inside]
    config = peft_config(model, model.adapters[name], chosen)
    dtype = dtype or next(iter(own.values())).dtype
    with ranks.together():
        tensors = entries(own, parts_of, dtype, ranks=ranks)

    def describe(root: Path) -> None:
        write_json(root / CONFIG, config)
        if tokenizer is not None:
            tokenizer.save_pretrained(root)

    return tensors, describe


def write_adapter(
    directory: str | os.PathLike[str],
    tensors: Sequence[Entry],
    describe: Callable[[Path], None],
    *,
    ranks: Writers,
    replace: bool = False,
) -> None:
    """One file of all tensors, as PEFT reads no other."""
    size = max(1, sum(entry.nbytes for entry in tensors))
    how: dict[str, Any] = {"max_shard_size": size, "stem": Path(WEIGHTS).stem}
    write_model(directory, tensors, describe, ranks=ranks, replace=replace, **how)
