"""Adds an adapter that is a weighted combination of others, as PEFT's add_weighted_adapter does.

# r rank of an adapter, R ranks of several, K columns and O rows of a matrix, E experts
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor

from tigon.layers import LayerAdapter, LoRAPart, LowRank, LowRankEmbedding, LowRankExperts
from tigon.layers.lora import LORA_B
from tigon.models.adapters.adapters import (
    adapter_layers,
    adapter_parameters,
    add_parameters,
    check_new_adapter,
    resolve_adapter_name,
)
from tigon.models.adapters.lora import resolve_targets
from tigon.models.base import LanguageModel
from tigon.settings.lora import LoraConfig
from tigon.utils.json import quote

Combination = Literal["svd", "linear", "cat"]
Term = tuple[float, Tensor, Tensor]  # weight with the adapter's scale, A [..., r, K], B [..., O, r]


@torch.no_grad()
def add_weighted_adapter(
    model: LanguageModel,
    adapters: Sequence[str],
    weights: Sequence[float],
    adapter_name: str,
    combination_type: Combination = "svd",
    svd_rank: int | None = None,
) -> None:
    """Adds an adapter that combines others, which stay; `set_adapter` activates it.

    Args:
        adapters: the names of adapters of the model.
        weights: one for each of them, of any sign.
        adapter_name: the new adapter's.
        combination_type: "cat" is exact: the sum of the weighted updates, with the sum of the
            ranks. "svd" is the nearest matrix to that sum of rank `svd_rank`. "linear" adds the
            factors A and B apart, which is quick, keeps the rank that all must share, and is a
            rough approximation: products of one adapter's B and another's A come with it.
        svd_rank: by default the largest rank of the adapters.

    The new adapter changes whatever one of them changes, with scale 1. It is frozen. Raises
    ValueError for unknown or duplicate names, DoRA, `modules_to_save`, and ranks that differ with
    "linear".
    """
    terms = _check_arguments(model, adapters, weights, combination_type, svd_rank)
    check_new_adapter(model, adapter_name)
    configs = [model.adapters[name] for name in terms]
    layers = {name: adapter_layers(model, name) for name in terms}
    ranks = [max(p.rank for low in found.values() for p in low.parts) for found in layers.values()]
    whole = len(terms) == 1 and svd_rank is None  # as PEFT: one is exact by itself
    kind = "linear" if whole else combination_type
    if kind == "linear":
        _check_equal_ranks(layers)
    rank = {"linear": max(ranks), "cat": sum(ranks), "svd": svd_rank or max(ranks)}[kind]
    config = _combine_configs(configs, rank)
    dtype = next(iter(adapter_parameters(model, next(iter(terms))).values())).dtype
    parts = resolve_targets(model, config)
    add_parameters(model, adapter_name, config, parts, dtype, model.device)
    for p in adapter_parameters(model, adapter_name).values():
        p.requires_grad_(False).zero_()
    for path, layer in adapter_layers(model, adapter_name).items():
        for part in layer.parts:
            found = [
                (weight * own.scale, *_factors(layers[name][path], own))
                for name, weight in terms.items()
                for own in (layers[name][path].parts if path in layers[name] else ())
                if own.name == part.name
            ]
            a, b = COMBINE[kind](found, part.rank)
            target_a, target_b = _factors(layer, part)
            target_a[..., : a.shape[-2], :] = a
            target_b[..., : b.shape[-1]] = b


def _check_arguments(
    model: LanguageModel,
    adapters: Sequence[str],
    weights: Sequence[float],
    combination_type: str,
    svd_rank: int | None,
) -> dict[str, float]:
    """Returns each adapter's weight by name; ValueError for arguments that do not fit."""
    if isinstance(adapters, str) or not adapters:
        message = f"adapters={quote(adapters)} must be a list of names of the model's adapters"
        raise ValueError(message)
    if len(adapters) != len(weights):
        raise ValueError(
            f"adapters={quote(adapters)} and weights={quote(weights)}: give each adapter a weight"
        )
    if len(set(adapters)) < len(adapters):
        raise ValueError(f"adapters={quote(adapters)} names one twice: add its weights")
    if combination_type not in get_args(Combination):
        kinds = ", ".join(get_args(Combination))
        raise ValueError(f"combination_type={quote(combination_type)} is not one of {kinds}")
    if svd_rank is not None and combination_type != "svd":
        raise ValueError(
            f"svd_rank={quote(svd_rank)} has no effect with combination_type={combination_type!r}: "
            "leave it out"
        )
    if svd_rank is not None and svd_rank < 1:
        raise ValueError(f"svd_rank={quote(svd_rank)} must be at least 1")
    for name, weight in zip(adapters, weights, strict=True):
        resolve_adapter_name(model, name)
        if not isinstance(weight, int | float) or not math.isfinite(weight):
            raise ValueError(f"the weight {quote(weight)} of adapter {name!r} is no finite number")
        config = model.adapters[name]
        if config.dora or config.modules_to_save:
            what = "DoRA" if config.dora else f"modules_to_save={quote(config.modules_to_save)}"
            raise ValueError(f"adapter {name!r} has {what}, which cannot be added: merge it alone")
    return dict(zip(adapters, weights, strict=True))


def _check_equal_ranks(layers: Mapping[str, Mapping[str, LayerAdapter]]) -> None:
    """Raises ValueError if adapters of one projection have different ranks."""
    ranks: dict[tuple[str, str], int] = {}
    for name, found in layers.items():
        for path, layer in found.items():
            for part in layer.parts:
                rank = ranks.setdefault((path, part.name), part.rank)
                if rank != part.rank:
                    raise ValueError(
                        f"{part.name} has rank {part.rank} in adapter {name!r} and {rank} in "
                        'another: "linear" adds equal ranks alone; use "cat" or "svd"'
                    )


def _combine_configs(configs: Sequence[LoraConfig], rank: int) -> LoraConfig:
    """The config of an adapter with the targets of all, in which the scale is 1."""
    targets = [(c.targets,) if isinstance(c.targets, str) else c.targets for c in configs]
    names = tuple(dict.fromkeys(name for group in targets for name in group))
    plain = LoraConfig(rank=rank, alpha=rank, targets=names)
    return replace(plain, base=configs[0].base, revision=configs[0].revision)


def _factors(layer: LayerAdapter, part: LoRAPart) -> tuple[Tensor, Tensor]:
    """Views A [r, K] and B [O, r] of a part, of experts A [E, r, K] and B [E, O, r]."""
    if isinstance(layer, LowRankEmbedding):
        return layer.lora_embedding_A, layer.lora_embedding_B
    if isinstance(layer, LowRankExperts):
        return layer.factors(part)
    assert isinstance(layer, LowRank)
    first = sum(p.rank for p in layer.parts[: layer.parts.index(part)])
    a = layer.lora_A[first : first + part.rank]
    return a, layer.get_parameter(LORA_B + part.name)


# Combinations, in fp32: A [..., R, K] and B [..., O, R] whose product is the sum, or near it


def _cat(terms: Sequence[Term], rank: int) -> tuple[Tensor, Tensor]:
    """Stacks the factors; the weights go into A."""
    a = torch.cat([a.float() * weight for weight, a, _ in terms], -2)
    return a, torch.cat([b.float() for _, _, b in terms], -1)


def _linear(terms: Sequence[Term], rank: int) -> tuple[Tensor, Tensor]:
    """Adds the factors with the roots of the weights, whose signs go into A."""
    a = sum(a.float() * math.copysign(abs(weight) ** 0.5, weight) for weight, a, _ in terms)
    b = sum(b.float() * abs(weight) ** 0.5 for weight, _, b in terms)
    assert isinstance(a, Tensor) and isinstance(b, Tensor)
    return a, b


def _svd(terms: Sequence[Term], rank: int) -> tuple[Tensor, Tensor]:
    """Keeps the largest singular values of the sum, which is never formed: those of the product of
    two small triangles are the same."""
    a, b = _cat(terms, rank)
    q_a, r_a = torch.linalg.qr(a.mT)
    q_b, r_b = torch.linalg.qr(b)
    u, s, v = torch.linalg.svd(r_b @ r_a.mT, full_matrices=False)
    u, s, v = u[..., :rank], s[..., :rank], v[..., :rank, :]
    return v @ q_a.mT, q_b @ (u * s.unsqueeze(-2))


COMBINE = {"cat": _cat, "linear": _linear, "svd": _svd}
