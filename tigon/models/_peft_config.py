"""What PEFT's adapter_config.json says of an adapter, and PEFT's names of its tensors."""

from collections.abc import Collection, Mapping, Set
from typing import Any, NamedTuple

from tigon.models._lora import LoraConfig, Place, first_match, matches, places
from tigon.models._model import LanguageModel
from tigon.models._peft_patterns import ends_of
from tigon.utils.json import read_json
from tigon.weights import Repository

CONFIG, BASE = "adapter_config.json", "base_model_name_or_path"


class AdapterBase(NamedTuple):
    """The model that an adapter says it is of."""

    name: str  # a directory or a hub repository; "" if there is none
    revision: str | None  # of a hub repository
    scores: bool  # whether it scores sequences


def base_of(values: Mapping[str, Any]) -> AdapterBase:
    """Of the values of an adapter_config.json; what is no text counts as absent."""
    name, revision = (
        value if isinstance(value := values.get(key), str) and value else None
        for key in (BASE, "revision")
    )
    return AdapterBase(name or "", revision, values.get("task_type") == "SEQ_CLS")


def read_base(repository: Repository) -> AdapterBase | None:
    """Likewise of a repository; None if it has no adapter_config.json."""
    path = repository.optional_file(CONFIG)
    return None if path is None else base_of(read_json(path))


def meant_by(place: Place, names: Set[str]) -> bool:
    """Whether a list of names in PEFT's files means this one."""
    return any(end in names for end in ends_of(place.name))


def short(model: LanguageModel, names: Collection[str]) -> list[str]:
    """Ends of names that mean just these projections, for every version of transformers."""
    every = [place.name for place in places(model)]
    ends = list(dict.fromkeys(n.rpartition(".")[2] for n in every if n in names))
    meant = {name for name in every if any(matches(end, name) for end in ends)}
    # Experts have projections of such names in older versions
    plain = not any(name.endswith(".experts.down_proj") for name, _ in model.named_parameters())
    return ends if plain and meant == set(names) else sorted(names)


def peft_config(model: LanguageModel, config: LoraConfig, own: Collection[Place]) -> dict[str, Any]:
    """adapter_config.json of an adapter of these projections."""
    names = [place.name for place in own]

    def of_each(patterns: Mapping[str, float], default: float) -> dict[str, float]:
        every = {name: first_match(patterns, name, default) for name in sorted(names)}
        return {name: value for name, value in every.items() if value != default}

    source = model.config.source
    of = config if config.base else LoraConfig(base=source.name, revision=source.revision)
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if model.config.labels else "CAUSAL_LM",
        BASE: of.base or None,
        "revision": of.revision or None,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": short(model, [place.name for place in own if not place.experts]),
        "target_parameters": _parameters(model, own),
        "rank_pattern": of_each(config.rank_pattern, config.rank),
        "alpha_pattern": of_each(config.alpha_pattern, config.alpha),
        "use_rslora": config.rslora,
        "use_dora": config.dora,
        "modules_to_save": list(config.modules_to_save) or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _parameters(model: LanguageModel, own: Collection[Place]) -> list[str] | None:
    """Of experts, which are no modules."""
    mine = [place for place in own if place.experts]
    short = {f"mlp.experts.{place.own}" for place in mine}
    meant = [p for p in places(model) if p.experts and meant_by(p, short)]
    return (sorted(short) if len(meant) == len(mine) else sorted(p.name for p in mine)) or None


def peft_name(name: str, adapter: str) -> str:
    """Of a tensor in a file, from its name in a model's layout."""
    if name.endswith((f".lora_embedding_A.{adapter}", f".lora_embedding_B.{adapter}")):
        return name.removesuffix(f".{adapter}")
    inner, dot, kind = name.rpartition(".")
    inner = inner.removesuffix(f".{adapter}").removesuffix(".modules_to_save")
    if inner.endswith(".lora_magnitude_vector"):
        return inner
    return f"{inner}{dot}{kind}"
