"""Learning-rate schedules, and parameter groups: which parameters are trained, by which
settings."""

import difflib
import math
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from tigon.layers import FusedLinear, Linear, SparseMoE
from tigon.layers.moe import Experts
from tigon.models import CausalLM
from tigon.models.adapters.adapters import adapter_parameters
from tigon.settings.config import Config, ParameterGroup
from tigon.utils.json import list_first

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Decay of the rate from 1 to 0, by the fraction of the schedule that is done
SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
    "sqrt": lambda done: 1.0 - math.sqrt(done),
}


def learning_rate(config: Config, step: int, steps: int) -> float:
    """Returns the rate at `step`, counted from 0: up to lr in the warm-up, then the schedule."""
    warmup = num_steps(config.warmup_steps, steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    shape: str = config.schedule
    length = max(1, steps - warmup)  # steps of the decay
    if config.schedule == "wsd":
        length, shape = min(length, max(1, num_steps(config.decay_steps, steps))), config.decay_type
    done = max(0, step - (steps - length)) / length
    share = SHAPES[shape](done)
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * share)


def num_steps(value: float, steps: int) -> int:
    """Returns a number of steps from a setting; below 1, it is a fraction of all steps."""
    return round(value * steps) if value < 1 else int(value)


def freeze(model: CausalLM, config: Config) -> None:
    """Sets requires_grad of all parameters: false in groups with `freeze`, and outside the adapter
    if there is one. Raises ValueError for groups without effect, or if none is left to train."""
    groups = assign(model, config.parameter_groups)
    adapter = getattr(model, "active_adapter", None)  # any module may be given
    trains = None if adapter is None else adapter_parameters(model, adapter)
    for i, group in enumerate(config.parameter_groups):
        if trains is not None and not group.freeze and not any(groups[n] is group for n in trains):
            known = model.layout()[next(iter(trains))][0].name
            raise ValueError(
                f"parameter_groups[{i}]: {list(group.match)} matches the base alone, which is "
                f"frozen under lora; the adapter has names such as {known}"
            )
        named = {name: p for name, p in model.named_parameters() if groups[name] is group}
        if group.weight_decay and not any(_decays(name, p) for name, p in named.items()):
            raise ValueError(
                f"parameter_groups[{i}].weight_decay={group.weight_decay} is for no matrix: norms "
                f"and biases do not decay, and it has only {list_first([*named])}"
            )
    for name, p in model.named_parameters():
        match, learns = groups[name], trains is None or name in trains
        p.requires_grad_(learns and (match is None or not match.freeze))
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("parameter_groups freeze all parameters: nothing is left to train")


def parameter_groups(
    model: CausalLM, config: Config, hidden: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Returns an optimizer's groups: trained parameters with the same settings.

    weight_decay applies to matrices, and is 0 for norms and biases. `lr_scale` multiplies the
    schedule's learning rate. Parameters named in `hidden` have separate groups, with `hidden` true;
    if there are any, the other groups have adamw_lr.
    """
    groups = assign(model, config.parameter_groups)
    others_lr = config.lr if not hidden or config.adamw_lr is None else config.adamw_lr
    members: dict[tuple[Any, ...], list[Any]] = {}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        group = groups[name] or ParameterGroup(())
        lr = config.lr if name in hidden else others_lr
        lr = lr if group.lr is None else group.lr
        decay = config.weight_decay if group.weight_decay is None else group.weight_decay
        decay = decay if _decays(name, p) else 0.0
        key = name in hidden, lr / config.lr if lr else 0.0, decay
        members.setdefault(key, []).append(p)
    return [
        {"params": parameters, "hidden": is_hidden, "lr_scale": scale, "weight_decay": decay}
        for (is_hidden, scale, decay), parameters in members.items()
    ]


def _decays(name: str, p: Tensor) -> bool:
    """Returns whether weight_decay applies to a parameter; the experts' biases are stacked."""
    return p.dim() > 1 and not name.endswith("bias")


def hidden_matrices(model: CausalLM) -> dict[str, tuple[int, ...]]:
    """Returns the numbers of rows of each parameter's matrices, for all in blocks except routers.

    q, k and v, gate and up, and all experts are separate matrices, but transposed ones of gate and
    up, whose columns may alternate, are one for each expert. Rows are those of the whole
    parameter's flattening [-1, last dim], also if ranks divide it.
    """
    modules = list(model.model.layers.named_modules(prefix="model.layers"))
    moes = [module for _, module in modules if isinstance(module, SparseMoE)]
    routers = {id(module) for moe in moes for module in moe.gate.modules()}
    routers |= {id(moe.shared_expert_gate) for moe in moes}
    found = {}
    for path, module in modules:
        if isinstance(module, Linear) and id(module) not in routers:
            parts = module.parts if isinstance(module, FusedLinear) else (module.out_features,)
            found[f"{path}.weight"] = parts
        elif isinstance(module, Experts):
            for name, count in (("gate_up_proj", 2), ("down_proj", 1)):
                whole = model.shard_specs.get(f"{path}.{name}", module.get_parameter(name)).shape
                count = 1 if module.transposed else count  # then gates and ups share rows
                found[f"{path}.{name}"] = (whole[1] // count,) * (count * whole[0])
    return found


def assign(model: CausalLM, groups: Sequence[ParameterGroup]) -> dict[str, ParameterGroup | None]:
    """Returns the first group that matches each parameter, by its name; None if none does.

    Patterns match the names of checkpoint tensors, with the experts of a layer stacked or separate.
    Raises ValueError for a pattern that matches nothing or only parts of a parameter, and for a
    group whose parameters all match earlier groups.
    """
    if not groups:
        return dict.fromkeys(name for name, _ in model.named_parameters())
    layouts = model.layout(), model.layout(stacked_experts=True)
    names = {p: [[part.name for part in parts[p]] for parts in layouts] for p in layouts[0]}
    found: dict[str, ParameterGroup | None] = dict.fromkeys(names)
    for i, group in enumerate(groups):
        where, matched = f"parameter_groups[{i}]", set()
        for parameter, spellings in names.items():
            hits = [[name for name in s if _matches(name, group.match)] for s in spellings]
            matched |= {name for hit in hits for name in hit}
            if found[parameter] is None and any(hits):
                if not any(map(operator.eq, hits, spellings)):
                    raise ValueError(f"{where}: {_missed(spellings[0], hits[0], group.match)}")
                found[parameter] = group
        for pattern in group.match:
            if not any(_matches(name, [pattern]) for name in matched):
                raise ValueError(f"{where}: {pattern!r} matches no tensor; {_near(pattern, names)}")
        if not any(other is group for other in found.values()):
            raise ValueError(f"{where}: groups before it match all that {list(group.match)} match")
    return found


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _missed(names: Sequence[str], hit: Sequence[str], patterns: Sequence[str]) -> str:
    """Returns a text with the parts of a parameter that no pattern matches."""
    missing = [name for name in names if name not in hit]
    return (
        f"{', '.join(map(repr, patterns))} matches {hit[0]}, but not {list_first(missing)}, "
        "which is one parameter with it: match all of it"
    )


def _near(pattern: str, names: Mapping[str, Sequence[Sequence[str]]]) -> str:
    """Returns a hint with the names nearest to a pattern."""
    if HEAD not in names and _matches(HEAD, [pattern]):
        return f"the model's {HEAD} is tied to its embedding: name {EMBEDDING}"
    known = {name for spellings in names.values() for name in spellings[0]}
    kinds = {re.sub(r"\.\d+\.", ".*.", name) for name in known}
    close = difflib.get_close_matches(pattern, sorted(kinds), n=3, cutoff=0.0)
    return f"the nearest are {', '.join(close)}"
