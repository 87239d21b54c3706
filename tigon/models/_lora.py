"""Which projections of a model an adapter has, and with which numbers."""

import difflib
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch

from tigon.json_file import shown
from tigon.layers import FusedLinear, Linear, LoRAPart, SparseMoE
from tigon.models._model import LanguageModel

ALL_LINEAR = "all-linear"
LARGEST = torch.finfo(torch.float32).max
ENDS = ("embed_tokens", "lm_head")  # what modules_to_save may name


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """A low-rank adapter, whose projections get `scale * B (A x)` with scale = alpha / rank.

    `targets`: names of projections as the family's checkpoints have them ("q_proj"), their ends
    ("self_attn.q_proj", a whole name) or shell patterns of whole names
    ("model.layers.1?.*.q_proj"); "all-linear": all but head and routers. `rank_pattern` and
    `alpha_pattern` give some of these, named alike, numbers of their own; the first that fits
    counts. `rslora`: scale = alpha / sqrt(rank) (arXiv 2312.03732). `dora`: the lengths of the
    weights' rows are learned, too (arXiv 2402.09353). `dropout`: the share of its input that A does
    not read, drawn anew for each token in training. `modules_to_save`: of "embed_tokens" and
    "lm_head", those that the adapter has whole weights of. `base`: the name of the model that it is
    for, which files say. Raises ValueError for numbers that no adapter has.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] | str = ALL_LINEAR
    dropout: float = 0.0
    rslora: bool = False
    dora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    modules_to_save: tuple[str, ...] = ()
    base: str = ""

    def __post_init__(self) -> None:
        targets = (self.targets,) if isinstance(self.targets, str) else tuple(self.targets)
        object.__setattr__(self, "targets", ALL_LINEAR if targets == (ALL_LINEAR,) else targets)
        saved = self.modules_to_save
        object.__setattr__(
            self, "modules_to_save", (saved,) if isinstance(saved, str) else (*saved,)
        )
        for name, rank in {"rank": self.rank, **self.rank_pattern}.items():
            if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank < 2**31:
                raise ValueError(
                    f"the rank of an adapter is 1 to {2**31 - 1}: {_of(name, rank, 'rank')}"
                )
        for name, alpha in {"alpha": self.alpha, **self.alpha_pattern}.items():
            if not isinstance(alpha, int | float) or not 0 < alpha <= LARGEST:
                raise ValueError(
                    f"alpha is a number above 0 that float32 holds: {_of(name, alpha, 'alpha')}"
                )
        if not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={shown(self.dropout)} is not in [0, 1)")
        if not self.targets:
            raise ValueError('targets is empty: name projections, such as "q_proj"')
        for name in self.modules_to_save:
            if name not in ENDS:
                raise ValueError(
                    f"modules_to_save={shown(name)}: only {' and '.join(ENDS)} can be saved whole"
                )

    def scale(self, rank: int, alpha: float) -> float:
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def _of(name: str, value: object, setting: str) -> str:
    where = setting if name == setting else f"{setting}_pattern[{shown(name)}]"
    return f"{where}={shown(value)}"


class Place(NamedTuple):
    """A projection: the layer that computes it, and its columns there."""

    path: str  # of the layer
    own: str  # such as q_proj
    first: int
    size: int

    @property
    def name(self) -> str:
        """As the family's checkpoints have it."""
        return f"{self.path.rpartition('.')[0]}.{self.own}"


def places(model: LanguageModel) -> list[Place]:
    """All projections of the model but its routers', in order."""
    modules = dict(model.named_modules())
    routers = {id(moe.gate) for moe in modules.values() if isinstance(moe, SparseMoE)}
    packed, found = model.checkpoint_names.packed, []
    for path, module in modules.items():
        if not isinstance(module, Linear) or id(module) in routers:
            continue
        own = path.rpartition(".")[2]
        if isinstance(module, FusedLinear) and own in packed:
            first = 0
            for part, size in zip(packed[own], module.parts, strict=True):
                found.append(Place(path, part, first, size))
                first += size
        else:
            found.append(Place(path, own, 0, module.out_features))
    return found


Plan = dict[str, tuple[LoRAPart, ...]]  # by the layer's path


def plan(model: LanguageModel, config: LoraConfig) -> Plan:
    """What each layer gets; ValueError for a target or a pattern that matches nothing."""
    every = places(model)
    chosen = every
    if config.targets != ALL_LINEAR:
        for target in config.targets:
            if not any(matches(target, place.name) for place in every):
                raise ValueError(f"targets={shown(target)} {_why_not(model, target, every)}")
        chosen = [p for p in every if any(matches(t, p.name) for t in config.targets)]
    for setting in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(config, setting):
            if not any(matches(pattern, place.name) for place in chosen):
                raise ValueError(
                    f"{setting}={shown(pattern)} matches none of the projections that the adapter "
                    f"has: {_kinds(chosen)}"
                )
    found: dict[str, list[LoRAPart]] = {}
    for path, own, first, size in chosen:
        name = Place(path, own, first, size).name
        rank = int(first_match(config.rank_pattern, name, config.rank))
        alpha = first_match(config.alpha_pattern, name, config.alpha)
        part = LoRAPart(own, first, size, rank, config.scale(rank, alpha))
        found.setdefault(path, []).append(part)
    return {path: tuple(parts) for path, parts in found.items()}


def matches(pattern: str, name: str) -> bool:
    """Whether a name is, or ends with, the pattern's, or is one of the shell pattern's."""
    return name == pattern or name.endswith(f".{pattern}") or fnmatchcase(name, pattern)


def first_match(patterns: Mapping[str, float], name: str, default: float) -> int | float:
    return next((value for key, value in patterns.items() if matches(key, name)), default)


def _kinds(some: Iterable[Place]) -> str:
    return ", ".join(dict.fromkeys(place.own for place in some))


def _why_not(model: LanguageModel, target: str, every: Collection[Place]) -> str:
    """Why no projection is meant."""
    own = target.rpartition(".")[2]
    if own == "lm_head":
        if model.config.tie_word_embeddings:
            return "is tied to the embedding, which would change with it: leave it out"
        return 'has no low-rank adapters: give modules_to_save=("lm_head",), or leave it out'
    if own == "embed_tokens":
        return 'has no low-rank adapters: give modules_to_save=("embed_tokens",), or leave it out'
    moe = next((m for m in model.modules() if isinstance(m, SparseMoE)), None)
    if moe is not None and own in ("gate", "router"):
        return "is a router, which has no adapters"
    kinds = _kinds(every)
    near = difflib.get_close_matches(own, kinds.split(", "), n=1)
    meant = f"did you mean {near[0]!r}? " if near else ""
    experts = "; experts of a mixture have no adapters" if moe is not None else ""
    family = type(model).__name__
    return f"matches no projection of {family}; {meant}its projections are {kinds}{experts}"
