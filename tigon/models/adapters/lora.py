"""Which projections of a model an adapter has, and with which numbers."""

import difflib
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch

from tigon.layers import Embedding, Experts, FusedLinear, Linear, LMHead, LoRAPart, SparseMoE
from tigon.layers.lora import MATRICES
from tigon.models.base import LanguageModel
from tigon.utils.json import quote

ALL_LINEAR = "all-linear"
MAX_FLOAT32 = torch.finfo(torch.float32).max
IN_BRACKETS = re.compile(r"\[[^]]*\]")  # of a shell pattern: one of these characters
SAVABLE_MODULES = ("embed_tokens", "lm_head", "score")  # what modules_to_save may name


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """A low-rank adapter, whose projections get `scale * B (A x)` with scale = alpha / rank.

    `targets`: names of projections as the family's checkpoints have them ("q_proj"), their ends
    ("self_attn.q_proj", a whole name) or shell patterns of whole names
    ("model.layers.1?.*.q_proj"); "all-linear", alone or beside others: all but embedding, head,
    routers and experts.
    `rank_pattern` and `alpha_pattern` give some of these, named alike, numbers of their own; the
    first that fits counts. `rslora`: scale = alpha / sqrt(rank) (arXiv 2312.03732). `dora`: the
    lengths of the weights' rows are learned, too (arXiv 2402.09353). `dropout`: the share of its
    input that A does not read, drawn anew for each token in training. `modules_to_save`: of
    "embed_tokens" and "lm_head", or "score" of a model that scores sequences, those that the
    adapter has whole weights of. `base`, `revision`: the name of the model that it is for, and of
    its state on the hub, which files say. Raises ValueError for numbers that no adapter has.
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
    revision: str = ""

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
            if not isinstance(alpha, int | float) or not 0 < alpha <= MAX_FLOAT32:
                raise ValueError(
                    f"alpha is a number above 0 that float32 holds: {_of(name, alpha, 'alpha')}"
                )
        if not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={quote(self.dropout)} is not in [0, 1)")
        for name in ("rslora", "dora"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={quote(getattr(self, name))} is neither True nor False")
        if not self.targets:
            raise ValueError('targets is empty: name projections, such as "q_proj"')
        for name in targets:
            if isinstance(name, str) and "," in IN_BRACKETS.sub("", name):
                apart = tuple(part.strip() for part in name.split(",") if part.strip())
                raise ValueError(
                    f"targets={quote(name)} is one name: give a tuple of names, {quote(apart)}, "
                    f"or in a shell lora.targets=[{','.join(apart)}]"
                )
        for name in self.modules_to_save:
            if name not in SAVABLE_MODULES:
                raise ValueError(
                    f"modules_to_save={quote(name)}: only {', '.join(SAVABLE_MODULES)} can be saved whole"
                )

    def scale(self, rank: int, alpha: float) -> float:
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def _of(name: str, value: object, setting: str) -> str:
    where = setting if name == setting else f"{setting}_pattern[{quote(name)}]"
    return f"{where}={quote(value)}"


class AdaptedModule(NamedTuple):
    """A projection: the layer that computes it, and its columns there; or embedding or head, or a
    matrix of all experts of a layer."""

    path: str  # of the layer
    own: str  # such as q_proj
    first: int
    size: int
    linear: bool = True  # one of those that "all-linear" means
    experts: bool = False

    @property
    def name(self) -> str:
        """As the family's checkpoints have it."""
        parent = self.path if self.experts else self.path.rpartition(".")[0]
        return f"{parent}.{self.own}" if parent else self.own


def find_target_modules(model: LanguageModel) -> list[AdaptedModule]:
    """Embedding, head, and all projections of the model but its routers', in order; of experts the
    stacked matrices."""
    modules = dict(model.named_modules())
    routers = {id(moe.gate) for moe in modules.values() if isinstance(moe, SparseMoE)}
    packed, found = model.checkpoint_names.packed, []
    for path, module in modules.items():
        own = path.rpartition(".")[2]
        if isinstance(module, Embedding) or (
            isinstance(module, LMHead) and own in savable_modules(model)
        ):
            found.append(AdaptedModule(path, own, 0, module.weight.shape[0], linear=False))
        if isinstance(module, Experts):
            sizes = (module.get_parameter(name).shape[1] for name in MATRICES)
            every = zip(MATRICES, sizes, strict=True)
            found += [
                AdaptedModule(path, name, 0, size, linear=False, experts=True)
                for name, size in every
            ]
        if not isinstance(module, Linear) or id(module) in routers:
            continue
        if isinstance(module, FusedLinear) and own in packed:
            first = 0
            for part, size in zip(packed[own], module.parts, strict=True):
                found.append(AdaptedModule(path, part, first, size))
                first += size
        else:
            found.append(AdaptedModule(path, own, 0, module.out_features))
    return found


def savable_modules(model: LanguageModel) -> tuple[str, str]:
    """Embedding and head, as checkpoints call them: what modules_to_save may name."""
    return "embed_tokens", model.checkpoint_names.head.removesuffix(".weight")


LoRAParts = dict[str, tuple[LoRAPart, ...]]  # by the layer's path


def resolve_targets(model: LanguageModel, config: LoraConfig) -> LoRAParts:
    """What each layer gets; ValueError for a target or a pattern that matches nothing."""
    every = find_target_modules(model)
    targets = (config.targets,) if isinstance(config.targets, str) else config.targets
    for target in targets:
        if not any(_means(target, place) for place in every):
            raise ValueError(f"targets={quote(target)} {_why_not(model, target, every)}")
    chosen = [place for place in every if any(_means(target, place) for target in targets)]
    _check_ends(model, config, chosen)
    for setting in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(config, setting):
            if not any(matches_pattern(pattern, place.name) for place in chosen):
                raise ValueError(
                    f"{setting}={quote(pattern)} matches none of the projections that the adapter "
                    f"has: {_kinds(chosen)}"
                )
    found: dict[str, list[LoRAPart]] = {}
    for place in chosen:
        rank = int(first_match(config.rank_pattern, place.name, config.rank))
        alpha = first_match(config.alpha_pattern, place.name, config.alpha)
        part = LoRAPart(place.own, place.first, place.size, rank, config.scale(rank, alpha))
        found.setdefault(place.path, []).append(part)
    return {path: tuple(parts) for path, parts in found.items()}


def _check_ends(model: LanguageModel, config: LoraConfig, chosen: Iterable[AdaptedModule]) -> None:
    """Raises ValueError for what embedding and head cannot have."""
    ends = savable_modules(model)
    for name in config.modules_to_save:
        if name not in ends:
            raise ValueError(
                f"modules_to_save={quote(name)}: this {type(model).__name__} has "
                f"{' and '.join(ends)}"
            )
    for place in chosen:
        if place.own in config.modules_to_save and place.own in ends:
            raise ValueError(
                f"{place.own} is in targets and in modules_to_save: its weight is trained whole or "
                "by an adapter; leave one out"
            )
        if config.dora and place.experts:  # as in PEFT
            raise ValueError(
                f"dora with targets={quote(place.own)}: no lengths are learned of experts; leave "
                "one out"
            )


def check_dropout(model: LanguageModel, config: LoraConfig) -> None:
    """Raises ValueError where an adapter cannot be trained with its dropout."""
    for path, parts in resolve_targets(model, config).items() if config.dropout else ():
        if isinstance(model.get_submodule(path), Experts | LMHead):
            raise ValueError(
                f"dropout={config.dropout} with targets={quote(parts[0].name)}: experts and head "
                "are adapted without dropout; give 0, or leave them out"
            )


def changes_embedding_or_head(model: LanguageModel, config: LoraConfig) -> bool:
    """Whether the adapter changes the embedding or the head."""
    targets = {part.name for parts in resolve_targets(model, config).values() for part in parts}
    return not targets.isdisjoint(savable_modules(model)) or bool(config.modules_to_save)


def matches_pattern(pattern: str, name: str) -> bool:
    """Whether a name is, or ends with, the pattern's, or is one of the shell pattern's."""
    return name == pattern or name.endswith(f".{pattern}") or fnmatchcase(name, pattern)


def _means(target: str, place: AdaptedModule) -> bool:
    return place.linear if target == ALL_LINEAR else matches_pattern(target, place.name)


def first_match(patterns: Mapping[str, float], name: str, default: float) -> int | float:
    return next((value for key, value in patterns.items() if matches_pattern(key, name)), default)


def _kinds(some: Iterable[AdaptedModule]) -> str:
    return ", ".join(dict.fromkeys(place.own for place in some))


def _why_not(model: LanguageModel, target: str, every: Collection[AdaptedModule]) -> str:
    """Why no projection is meant."""
    own = target.rpartition(".")[2]
    if own == "score":
        return 'has no low-rank adapters: modules_to_save=("score",) trains it whole'
    moe = next((m for m in model.modules() if isinstance(m, SparseMoE)), None)
    if moe is not None and own in ("gate", "router"):
        return "is a router, which has no adapters"
    kinds = _kinds(every)
    near = difflib.get_close_matches(own, kinds.split(", "), n=1)
    meant = f"did you mean {near[0]!r}? " if near else ""
    joined = moe is not None and own in ("gate_proj", "up_proj", "w1", "w3")
    experts = "; gate and up of experts are one, gate_up_proj" if joined else ""
    family = type(model).__name__
    return f"matches no projection of {family}; {meant}its projections are {kinds}{experts}"
