"""Adapters of each expert apart, as PEFT wrote them for older versions of transformers, read as
those of stacked matrices.

# E experts, P parts of a matrix (gate and up, or down alone), O rows and K columns of a part,
# r rank

Of one expert the A of all parts follow each other, and B has a block for each: the rank is P r, and
alpha is such that the scale stays. Source: PEFT's transformers_weight_conversion, whose scale with
rslora is sqrt(P) times too large.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.models.adapters.lora import AdaptedModule, find_target_modules
from tigon.models.base import LanguageModel
from tigon.models.pretrained.names import experts_stem
from tigon.utils.json import quote
from tigon.weights import DecodedTensor, Reader, TensorInfo

APART = re.compile(r".+\.experts\.\d+\.\w+\.lora_[AB]\.weight")
Tensors = dict[str, TensorInfo | DecodedTensor]


@dataclass(frozen=True)
class StackedA(DecodedTensor):
    """[E P r, K] of the A of each expert's parts [r, K], those of one expert together."""

    pieces: tuple[TensorInfo, ...]

    def rows(self, reader: Reader, first: int, count: int) -> Tensor:
        rank = self.pieces[0].shape[0]
        begin, end = first // rank, -(-(first + count) // rank)
        found = torch.cat([_read(reader, info) for info in self.pieces[begin:end]])
        return found[first - begin * rank :][:count]


@dataclass(frozen=True)
class StackedB(DecodedTensor):
    """[P O, P r E] of the B of each part's experts [O, r]: a block of rows and ranks for each part,
    and in it the columns of all experts for one rank after another."""

    pieces: tuple[tuple[TensorInfo, ...], ...]  # of each part those of its experts

    @property
    def unit(self) -> int:
        return self.shape[0]

    def rows(self, reader: Reader, first: int, count: int) -> Tensor:
        size, rank = self.pieces[0][0].shape
        whole = torch.zeros(self.shape[0], len(self.pieces), rank, len(self.pieces[0]))
        for p, experts in enumerate(self.pieces):
            for e, info in enumerate(experts):
                whole[p * size : (p + 1) * size, p, :, e] = _read(reader, info)
        return whole.flatten(1)[first : first + count]


def _read(reader: Reader, info: TensorInfo) -> Tensor:
    out = torch.empty(info.shape, dtype=info.dtype)
    reader.read(info.path, info.offset, info.dtype, out)
    return out.float()


class Stacked(NamedTuple):
    """What takes the place of tensors and settings of experts apart."""

    tensors: Tensors  # by names in a model's layout, but for the adapter's
    apart: set[str]  # the names whose place they take
    find_target_modules: dict[str, tuple[int, float]]  # rank and alpha of each matrix


def stack(
    model: LanguageModel,
    tensors: Mapping[str, TensorInfo],
    numbers: Callable[[str], tuple[int, float]],
    *,
    rslora: bool,
) -> Stacked:
    """`numbers`: rank and alpha that the file says of a projection. ValueError for experts that are
    not all there, or that differ in rank or scale."""
    found = Stacked({}, set(), {})
    every = [
        (place, _names_of(model, place)) for place in find_target_modules(model) if place.experts
    ]
    here = {p.name for p, of in every if any(n in tensors for part in of for n in _both(part))}
    for place, of in every:
        if place.name not in here:
            continue
        names = [name for part in of for name in _both(part)]
        if missing := [name for name in names if name not in tensors]:
            raise ValueError(
                "of experts all have an adapter or none, and gate and up both: "
                f"{quote(missing[0])} is missing"
            )
        a, b = ([[tensors[f"{n}.lora_{x}.weight"] for n in part] for part in of] for x in "AB")
        shapes = {
            (*x.shape, 0, *y.shape)
            for x, y in zip(chain.from_iterable(a), chain.from_iterable(b), strict=True)
        }
        said = {numbers(stem) for part in of for stem in part}
        (rank, alpha), shape, parts = next(iter(said)), next(iter(shapes)), len(of)
        columns, size = shape[1], shape[-2]
        if len(said) > 1 or shapes != {(rank, columns, 0, size, rank)}:
            raise ValueError(
                f"the adapters of the experts of {place.name} are not alike, or not of the ranks "
                f"that they are said to be: {sorted(said)} are ranks and alphas"
            )
        meant = [p.own for p, _ in every if p.path == place.path and p.name in here]
        stem = experts_stem(place.path, place.own, meant)
        first, experts = a[0][0], len(a[0])
        where = first.path, first.offset
        pieces = tuple(part[e] for e in range(experts) for part in a)
        name = f"{stem}.lora_A.weight"
        found.tensors[name] = StackedA(
            name, (experts * parts * rank, columns), *where, pieces=pieces
        )
        name = f"{stem}.lora_B.weight"
        shape = (parts * size, parts * rank * experts)
        found.tensors[name] = StackedB(name, shape, *where, pieces=tuple(map(tuple, b)))
        found.apart.update(names)
        found.places[place.name] = parts * rank, alpha * (math.sqrt(parts) if rslora else parts)
    return found


def _names_of(model: LanguageModel, place: AdaptedModule) -> list[list[str]]:
    """Of each part of the matrix, what its experts' projections are called apart."""
    ending = f"mlp.experts.{place.own}"
    layer = place.name.removesuffix(ending)
    experts = len(model.get_submodule(place.path).get_parameter(place.own))
    return [
        [layer + part.format(e).removesuffix(".weight") for e in range(experts)]
        for part in model.checkpoint_names.experts[ending]
    ]


def _both(stems: Sequence[str]) -> list[str]:
    return [f"{stem}.lora_{kind}.weight" for stem in stems for kind in "AB"]


def with_stacked(values: Mapping[str, Any], stacked: Stacked) -> dict[str, Any]:
    """adapter_config.json of the stacked matrices."""
    ranks, alphas = (
        {re.escape(name): of[i] for name, of in stacked.places.items()} for i in range(2)
    )
    return {
        **values,
        "target_parameters": [*(values.get("target_parameters") or []), *stacked.places],
        "rank_pattern": ranks | (values.get("rank_pattern") or {}),
        "alpha_pattern": alphas | (values.get("alpha_pattern") or {}),
    }
