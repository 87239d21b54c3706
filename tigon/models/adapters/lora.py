"""LoraConfig, and the modules of a model that it targets."""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, Self

import torch
from torch import nn

from tigon.layers import Embedding, Experts, FusedLinear, Linear, LMHead, LoRAPart, SparseMoE
from tigon.layers.lora import MATRICES
from tigon.models.arguments import check_keywords
from tigon.models.base import LanguageModel
from tigon.utils.config import suggest
from tigon.utils.json import quote

ALL_LINEAR = "all-linear"
MAX_FLOAT32 = torch.finfo(torch.float32).max
IN_BRACKETS = re.compile(r"\[[^]]*\]")  # a character class of a shell pattern
SAVABLE_MODULES = ("embed_tokens", "lm_head", "score")  # values of modules_to_save


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """A low-rank adapter, which adds `scale * B (A x)` with scale = alpha / rank to projections.

    `targets`: names of projections in the family's checkpoints ("q_proj"), longer suffixes
    ("self_attn.q_proj") or shell patterns of full names ("model.layers.1?.*.q_proj"). "all-linear"
    stands for all projections but embedding, head, routers and experts.
    `rank_pattern` and `alpha_pattern` map names of the same forms to other numbers; the first match
    counts. `rslora`: scale = alpha / sqrt(rank) (arXiv 2312.03732). `dora`: learn the magnitudes of
    the weights' rows too (arXiv 2402.09353). `dropout`: the probability with which each input of A
    is dropped in training. `modules_to_save`: "embed_tokens", "lm_head" or "score", which are
    trained in full. `base`, `revision`: the model that the adapter is for, which its files name.
    Raises ValueError for values out of range.
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

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Raises TypeError for an unknown keyword, with the name here for one of PEFT's."""
        check_keywords("LoraConfig", kwargs, frozenset(cls.__dataclass_fields__))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        targets = (self.targets,) if isinstance(self.targets, str) else tuple(self.targets)
        object.__setattr__(self, "targets", ALL_LINEAR if targets == (ALL_LINEAR,) else targets)
        saved = self.modules_to_save
        object.__setattr__(
            self, "modules_to_save", (saved,) if isinstance(saved, str) else (*saved,)
        )
        for name, rank in _with_patterns("rank", self.rank, self.rank_pattern).items():
            if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank < 2**31:
                raise ValueError(
                    f"the rank of an adapter is 1 to {2**31 - 1}, not {name}={quote(rank)}"
                )
        for name, alpha in _with_patterns("alpha", self.alpha, self.alpha_pattern).items():
            if not isinstance(alpha, int | float) or not 0 < alpha <= MAX_FLOAT32:
                raise ValueError(f"alpha is a positive float32 number, not {name}={quote(alpha)}")
        if not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={quote(self.dropout)} is not in [0, 1)")
        if not self.targets:
            raise ValueError('targets is empty: name projections, such as "q_proj"')
        for name in targets:
            if isinstance(name, str) and "," in IN_BRACKETS.sub("", name):
                names = tuple(part.strip() for part in name.split(",") if part.strip())
                raise ValueError(
                    f"targets={quote(name)} is one name: give a tuple of names, {quote(names)}, "
                    f"or in a shell lora.targets=[{','.join(names)}]"
                )
        for name in self.modules_to_save:
            if name not in SAVABLE_MODULES:
                savable = ", ".join(SAVABLE_MODULES)
                raise ValueError(f"modules_to_save={quote(name)} is not one of {savable}")

    def scale(self, rank: int, alpha: float) -> float:
        """Computes the factor of B A: alpha / rank, or alpha / sqrt(rank) with `rslora`."""
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def _with_patterns(name: str, value: Any, patterns: Mapping[str, Any]) -> dict[str, Any]:
    """Maps names such as "rank" and "rank_pattern[...]" to the values of a setting."""
    return {name: value} | {f"{name}_pattern[{quote(key)}]": v for key, v in patterns.items()}


class AdaptedModule(NamedTuple):
    """A projection that an adapter can have: a linear layer or a part of a packed one, embedding,
    head, or a stacked matrix of all experts of a layer."""

    path: str  # of the layer
    projection: str  # such as q_proj
    first: int  # first of its rows in the layer's weight
    size: int
    linear: bool  # whether "all-linear" includes it
    experts: bool
    stored_path: str  # of the layer in the family's checkpoints

    @property
    def name(self) -> str:
        """The full name in the family's checkpoints."""
        parent = self.stored_path if self.experts else self.stored_path.rpartition(".")[0]
        return f"{parent}.{self.projection}" if parent else self.projection


def find_target_modules(model: LanguageModel) -> list[AdaptedModule]:
    """Lists the modules that adapters support: embedding, language-model head, linear projections
    (parts of a packed one each), and stacked matrices of experts.

    Raises ValueError for a model whose projections are torch's own layers.
    """
    names, targets = model.checkpoint_names, list[AdaptedModule]()
    moes = [module for module in model.modules() if isinstance(module, SparseMoE)]
    routers = {module for moe in moes for module in moe.gate.modules()}
    for path, module in model.named_modules():
        name, stored_path = path.rpartition(".")[2], names.stored_name(path)
        linear = isinstance(module, Linear) and module not in routers
        experts = isinstance(module, Experts)
        if type(module) is nn.Linear:
            raise ValueError(
                f"{path} is torch's own layer: add adapters by PEFT to a model of transformers, or "
                "before as_transformers makes it one"
            )
        parts: list[tuple[str, int]] = []
        if isinstance(module, Embedding) or (
            isinstance(module, LMHead) and name in savable_modules(model)
        ):
            parts = [(name, module.weight.shape[0])]
        elif isinstance(module, Experts) and module.adaptable:
            parts = [(matrix, module.matrix_shape(matrix)[0]) for matrix in MATRICES]
        elif isinstance(module, FusedLinear) and name in names.packed:
            # A layer may have the first parts alone
            parts = [*zip(names.packed[name], module.parts, strict=False)]
        elif isinstance(module, Linear):
            parts = [(stored_path.rpartition(".")[2], module.out_features)]
        first = 0
        for projection, size in parts:
            targets.append(
                AdaptedModule(path, projection, first, size, linear, experts, stored_path)
            )
            first += 0 if experts else size
    return targets


def savable_modules(model: LanguageModel) -> tuple[str, str]:
    """The names of embedding and head in checkpoints, which modules_to_save may contain."""
    return "embed_tokens", model.checkpoint_names.head.removesuffix(".weight")


LoRAParts = dict[str, tuple[LoRAPart, ...]]  # by the layer's path


def resolve_targets(model: LanguageModel, config: LoraConfig) -> LoRAParts:
    """Maps targeted layers to their adapters' parts; ValueError for what matches nothing."""
    modules = find_target_modules(model)
    targets = (config.targets,) if isinstance(config.targets, str) else config.targets
    for target in targets:
        if not any(_is_targeted(target, module) for module in modules):
            raise ValueError(f"targets={quote(target)} {_explain(model, target, modules)}")
    targeted = [m for m in modules if any(_is_targeted(target, m) for target in targets)]
    _check_embedding_and_head(model, config, targeted)
    for setting in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(config, setting):
            if not any(matches_pattern(pattern, module.name) for module in targeted):
                projections = _list_projections(targeted)
                raise ValueError(
                    f"{setting}={quote(pattern)} matches none of targets: {projections}"
                )
    parts: dict[str, list[LoRAPart]] = {}
    for module in targeted:
        rank = int(first_match(config.rank_pattern, module.name, config.rank))
        alpha = first_match(config.alpha_pattern, module.name, config.alpha)
        scale = config.scale(rank, alpha)
        part = LoRAPart(module.projection, module.first, module.size, rank, scale)
        parts.setdefault(module.path, []).append(part)
    return {path: tuple(layer_parts) for path, layer_parts in parts.items()}


def _check_embedding_and_head(
    model: LanguageModel, config: LoraConfig, targeted: Iterable[AdaptedModule]
) -> None:
    """Raises ValueError for an entry of modules_to_save that the model lacks or that is a target
    too, and for DoRA on experts."""
    ends = savable_modules(model)
    for name in config.modules_to_save:
        if name not in ends:
            family = type(model).__name__
            raise ValueError(
                f"modules_to_save={quote(name)}: this {family} has {' and '.join(ends)}"
            )
    for module in targeted:
        name = module.projection
        if name in config.modules_to_save and name in ends:
            raise ValueError(f"{name} is in targets and in modules_to_save: leave one out")
        if config.dora and module.experts:  # as in PEFT
            raise ValueError(f"dora with targets={quote(name)}: experts have none; leave one out")


def check_dropout(model: LanguageModel, config: LoraConfig, parts: LoRAParts) -> None:
    """Raises ValueError for dropout on experts or the head, which do not support it."""
    for path, (part, *_) in parts.items() if config.dropout else ():
        if isinstance(model.get_submodule(path), Experts | LMHead):
            raise ValueError(
                f"dropout={config.dropout} with targets={quote(part.name)}: experts and head "
                "do not support dropout; give 0, or leave them out"
            )


def changes_embedding_or_head(model: LanguageModel, config: LoraConfig) -> bool:
    targets = {part.name for parts in resolve_targets(model, config).values() for part in parts}
    return not targets.isdisjoint(savable_modules(model)) or bool(config.modules_to_save)


def matches_pattern(pattern: str, name: str) -> bool:
    """Whether a name equals or ends with the pattern, or matches it as in a shell."""
    return name == pattern or name.endswith(f".{pattern}") or fnmatchcase(name, pattern)


def _is_targeted(target: str, module: AdaptedModule) -> bool:
    """Whether one of `targets` selects the module."""
    return module.linear if target == ALL_LINEAR else matches_pattern(target, module.name)


def first_match(patterns: Mapping[str, float], name: str, default: float) -> int | float:
    """The value of the first key of `patterns` that matches the name, else the default."""
    return next((value for key, value in patterns.items() if matches_pattern(key, name)), default)


def _list_projections(modules: Iterable[AdaptedModule]) -> str:
    """The names of the modules' projections, each once, for a message."""
    return ", ".join(dict.fromkeys(module.projection for module in modules))


def _explain(model: LanguageModel, target: str, modules: Collection[AdaptedModule]) -> str:
    """Say in a message why a target matches none of the model's modules."""
    name = target.rpartition(".")[2]
    if name == "score":
        return 'has no low-rank adapters: modules_to_save=("score",) trains it whole'
    moe = next((m for m in model.modules() if isinstance(m, SparseMoE)), None)
    if moe is not None and name in ("gate", "router"):
        return "is a router, which has no adapters"
    projections = _list_projections(modules)
    hint = suggest(name, projections.split(", "), 0.6)
    is_packed = moe is not None and name in ("gate_proj", "up_proj", "w1", "w3")
    experts = "; gate and up of experts are one, gate_up_proj" if is_packed else ""
    parts = f"matches no projection of {type(model).__name__}", hint
    return "; ".join(filter(None, (*parts, f"its projections are {projections}{experts}")))
