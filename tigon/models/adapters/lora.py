"""The modules of a model that a LoraConfig targets."""

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from tigon.layers import Embedding, Experts, FusedLinear, Linear, LMHead, LoRAPart, SparseMoE
from tigon.layers.lora import MATRICES
from tigon.models.base import LanguageModel
from tigon.settings.lora import ALL_LINEAR, LoraConfig
from tigon.utils.config import suggest
from tigon.utils.json import quote


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
