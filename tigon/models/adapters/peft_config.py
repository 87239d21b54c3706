"""Reads and writes PEFT's adapter_config.json.

The file is untrusted, and unsupported features raise. Source: PEFT's LoraConfig and
get_pattern_key.
"""

import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any, NamedTuple

from tigon.models.adapters.lora import (
    AdaptedModule,
    find_target_modules,
    first_match,
    matches_pattern,
    savable_modules,
)
from tigon.models.base import LanguageModel
from tigon.models.pretrained.names import MULTIMODAL, TEXT_ALONE, experts_stem
from tigon.settings.lora import LoraConfig
from tigon.utils.json import escape, list_first, quote, read_json
from tigon.weights import Repository, TensorInfo

CONFIG, BASE = "adapter_config.json", "base_model_name_or_path"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of PEFT's tensor names
LOW_RANK = re.compile(r"(.+)\.lora_(?:[AB]\.weight|embedding_[AB])")
EXCLUDED = r"(?!model\.language_model\.|lm_head).*"  # whatever is outside of the text model
# Keys that are read, that repeat what the tensors show, or that only the start of training uses
KNOWN = frozenset(
    (
        *("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "rank_pattern"),
        *("alpha_pattern", "target_parameters", "modules_to_save", "peft_type", "bias"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("init_lora_weights", "ensure_weight_tying", "task_type", "inference_mode", BASE),
        *("revision", "auto_mapping", "peft_version", "loftq_config", "eva_config"),
        *("corda_config", "lora_ga_config", "qalora_group_size", "megatron_core"),
        "runtime_config",
    )
)
# Values of init_lora_weights that leave the base as it is
INITIALIZERS = (True, False, None, "gaussian", "orthogonal", "eva")

# Patterns are regular expressions that match a name, or the text after one of its dots. PEFT mostly
# writes plain suffixes, which are looked up: adapters of experts have thousands
PLAIN = re.compile(r"(?:[\w.-]|\\[.-])+")


def name_suffixes(name: str) -> Iterator[str]:
    """Yields the name, and the text after each of its dots."""
    while name:
        yield name
        name = name.partition(".")[2]


def match_patterns(
    values: Mapping[str, Any], key: str, kind: Any, names: Sequence[str]
) -> dict[str, Any]:
    """Maps names to the number of the first pattern that matches them, of PEFT's rank_pattern or
    alpha_pattern. Raises ValueError unless the setting is a dictionary of numbers of this kind.
    """
    patterns = values.get(key) or {}
    if not isinstance(patterns, dict):
        raise ValueError(f"{key}={quote(patterns)} is not a dictionary")
    by_suffix: dict[str, list[str]] = {}
    for name in names:
        for suffix in name_suffixes(name):
            by_suffix.setdefault(suffix, []).append(name)
    numbers: dict[str, Any] = {}
    for pattern, value in patterns.items():
        number = check_number(f"{key}[{quote(pattern)}]", value, kind)
        plain = re.sub(r"\\(.)", r"\1", pattern) if PLAIN.fullmatch(pattern) else ""
        matched: Iterable[str] = by_suffix.get(plain, ())
        if not matched:
            try:
                matched = filter(re.compile(rf"(.*\.)?({pattern})").fullmatch, names)
            except (re.error, RecursionError, OverflowError) as error:
                text = f"{key}[{quote(pattern)}] is not a regular expression: {error}"
                raise ValueError(text) from None
        for name in matched:
            numbers.setdefault(name, number)
    return numbers


def check_number(name: str, value: Any, kind: Any) -> Any:
    """Returns the value; ValueError if it is not of this type of number, or a bool."""
    if isinstance(value, bool) or not isinstance(value, kind):
        expected = "integer" if kind is int else "number"
        raise ValueError(f"{name} must be a positive {expected}, got {quote(value)}")
    return value


class AdapterBase(NamedTuple):
    """The base model that an adapter's config names."""

    name: str  # a directory or a hub repository; "" if the config names none
    revision: str | None  # of a hub repository
    scores: bool  # whether it is a sequence classifier


def parse_base(values: Mapping[str, Any]) -> AdapterBase:
    """Reads the base model from adapter_config.json's content; ignores values that are not text."""
    texts = {key: value for key, value in values.items() if isinstance(value, str) and value}
    return AdapterBase(
        texts.get(BASE, ""), texts.get("revision"), texts.get("task_type") == "SEQ_CLS"
    )


def read_base(repository: Repository) -> AdapterBase | None:
    """Reads the base model of a repository's adapter; None if it has no adapter_config.json."""
    path = repository.optional_file(CONFIG)
    return None if path is None else parse_base(read_json(path))


def is_listed(name: str, names: Set[str]) -> bool:
    """Whether a list of names in PEFT's files includes this module's, in full or by a suffix."""
    return any(end in names for end in name_suffixes(name))


# Types of which PEFT 0.21 takes every gate_proj, up_proj and down_proj for one of routed experts
MISREAD_TYPES = frozenset({"deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen3_next"})


def warn_of_misread_modules(model: LanguageModel, modules: Collection[AdaptedModule]) -> None:
    """Warns of adapted MLPs and shared experts that PEFT would not load."""
    names = {m.projection for m in modules if not m.experts} & {"gate_proj", "up_proj", "down_proj"}
    if model.config.model_type in MISREAD_TYPES and (found := sorted(names)):
        warnings.warn(
            f"PEFT takes {', '.join(found)} of this model type for those of routed experts, and "
            "drops what MLPs and shared experts learned: merge the adapter to use it elsewhere",
            stacklevel=4,
        )


def shorten_names(model: LanguageModel, names: Collection[str]) -> list[str]:
    """Returns the names' last components if these select the same modules in any version of
    transformers, else the names, sorted."""
    all_names = [module.name for module in find_target_modules(model)]
    suffixes = list(dict.fromkeys(n.rpartition(".")[2] for n in all_names if n in names))
    selected = {name for name in all_names if any(matches_pattern(s, name) for s in suffixes)}
    # In older versions experts have projections with the same suffixes
    plain = not any(name.endswith(".experts.down_proj") for name, _ in model.named_parameters())
    # A number would select layers, too
    plain = plain and not any(suffix.isdigit() for suffix in suffixes)
    return suffixes if plain and selected == set(names) else sorted(names)


def decoder_prefix(model: LanguageModel) -> str:
    """Finds how names in the decoder begin in the model that transformers makes of the base: the
    multimodal one, if AutoModelForCausalLM makes no other; for scores always."""
    kind = model.config.source.wrapper.get("model_type")
    whole = kind in MULTIMODAL and (kind not in TEXT_ALONE or model.config.labels > 0)
    return "model.language_model." if whole else model.checkpoint_names.decoder


def rename_decoder(name: str, old: str, new: str) -> str:
    """Returns the name with another beginning, if it is one in the decoder."""
    return new + name.removeprefix(old) if name.startswith(old) else name


def peft_config(
    model: LanguageModel, config: LoraConfig, modules: Collection[AdaptedModule]
) -> dict[str, Any]:
    """Makes the content of adapter_config.json for an adapter of these modules."""
    names = sorted(module.name for module in modules)
    family, prefix = model.checkpoint_names.decoder, decoder_prefix(model)

    def outer(names: Iterable[str]) -> list[str]:
        return [rename_decoder(name, family, prefix) for name in names]

    def overrides(patterns: Mapping[str, float], default: float) -> dict[str, float]:
        values = [first_match(patterns, name, default) for name in names]
        pairs = zip(outer(names), values, strict=True)
        return {name: value for name, value in pairs if value != default}

    origin = model.config.source
    base = config if config.base else LoraConfig(base=origin.name, revision=origin.revision)
    linear = [module.name for module in modules if not module.experts]
    experts = [module for module in modules if module.experts]
    parameters = {re.split(r"\.\d+\.", module.name)[-1] for module in experts}  # within a layer
    selected = [
        m for m in find_target_modules(model) if m.experts and is_listed(m.name, parameters)
    ]
    if len(selected) != len(experts):  # suffixes select experts of other layers too
        parameters = {module.name for module in experts}
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if model.config.labels else "CAUSAL_LM",
        BASE: base.base or None,
        "revision": base.revision or None,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": outer(shorten_names(model, linear)),
        "target_parameters": sorted(outer(parameters)) or None,
        # Towers of images and sounds have projections of the same names
        "exclude_modules": EXCLUDED if prefix != "model." else None,
        "rank_pattern": overrides(config.rank_pattern, config.rank),
        "alpha_pattern": overrides(config.alpha_pattern, config.alpha),
        "use_rslora": config.rslora,
        "use_dora": config.dora,
        "modules_to_save": list(config.modules_to_save) or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def check_features(values: Mapping[str, Any]) -> None:
    """Raises ValueError for features that are not supported."""
    kind = values.get("peft_type")
    if kind != "LORA":
        raise ValueError(f"peft_type {quote(kind)} is not LORA")
    initializer = values.get("init_lora_weights", True)
    if not any(initializer is known or initializer == known for known in INITIALIZERS):
        raise ValueError(
            f"init_lora_weights={quote(initializer)} changes the base's weights: convert it with "
            "PEFT's save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    if values.get("bias", "none") != "none":
        raise ValueError(f"bias={quote(values['bias'])}: adapters have no biases here")
    for key in ("use_rslora", "use_dora"):
        if (value := values.get(key)) not in (None, False, True):
            raise ValueError(f"{key}={quote(value)} is neither true nor false")
    for key, value in values.items():
        if key not in KNOWN and value not in (None, False, [], {}, ""):
            raise ValueError(f"{escape(key, 100)}={quote(value)} is not supported")


def _rename_in_file(names: Mapping[str, str], model: LanguageModel) -> Callable[[str], str]:
    """Makes a function from the model's names of modules to those that PEFT's config means, where
    a multimodal model may be around the decoder, or the decoder is alone."""
    family = model.checkpoint_names.decoder
    name, file_name = next((pair for pair in names.items() if pair[0].startswith(family)), ("", ""))
    prefix = file_name.removeprefix(PREFIX).removesuffix(name.removeprefix(family))
    return lambda module: rename_decoder(module, family, prefix)


def parse_lora_config(
    values: Mapping[str, Any],
    file_tensors: Mapping[str, TensorInfo],
    file_names: Mapping[str, str],
    model: LanguageModel,
) -> LoraConfig:
    """Converts PEFT's config to a LoraConfig with names instead of regular expressions; raises
    ValueError for one that contradicts the tensors.

    The tensors decide which modules are adapted; `file_names` has theirs by the model's names.
    """
    tensors = {name: file_tensors[file_name] for name, file_name in file_names.items()}
    in_file = _rename_in_file(file_names, model)
    rank = check_number("r", values.get("r", 8), int)
    alpha = check_number("lora_alpha", values.get("lora_alpha", 8), int | float)
    stems = {match[1] for name in tensors if (match := LOW_RANK.fullmatch(name))}
    known = _module_stems(values, model, in_file)
    if not stems:
        raise ValueError("no tensor of it is named lora_A or lora_B")
    if unknown := sorted(stems - known.keys()):
        projections = ", ".join(dict.fromkeys(module.projection for module in known.values()))
        raise ValueError(
            f"the adapter is for {list_first([quote(n) for n in unknown])}, which this "
            f"{type(model).__name__} does not have: its {model.config.num_hidden_layers} layers "
            f"have {projections}"
        )
    _check_complete(values, stems, known, in_file)
    names = {module.name: in_file(module.name) for module in known.values()}

    def overrides(key: str, kind: Any, default: float) -> dict[str, Any]:
        numbers = match_patterns(values, key, kind, [*names.values()])
        adapted = (module.name for stem, module in known.items() if stem in stems)
        chosen = {name: numbers.get(names[name], default) for name in adapted}
        return {name: number for name, number in chosen.items() if number != default}

    base = parse_base(values)
    return LoraConfig(
        rank=rank,
        alpha=alpha,
        targets=tuple(shorten_names(model, [known[stem].name for stem in stems])),
        dropout=values.get("lora_dropout", 0.0),
        rslora=bool(values.get("use_rslora")),
        dora=bool(values.get("use_dora")),
        rank_pattern=overrides("rank_pattern", int, rank),
        alpha_pattern=overrides("alpha_pattern", int | float, alpha),
        modules_to_save=_saved_names(values, tensors, model),
        base=base.name,
        revision=base.revision or "",
    )


def _read_names(values: Mapping[str, Any], key: str) -> list[str]:
    """Returns the names that a key of PEFT's config lists; ValueError for what is no list."""
    names = values.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{key}={quote(names)} is not a list of names")
    return names


def _saved_names(
    values: Mapping[str, Any], tensors: Collection[str], model: LanguageModel
) -> tuple[str, ...]:
    """Returns the modules_to_save of PEFT's config by the names that adapters here have for them;
    raises ValueError for what is no list of names."""
    saved = _read_names(values, "modules_to_save")
    savable, family = savable_modules(model), model.checkpoint_names
    # PEFT lists both names that the head of a sequence classifier may have
    saved_names = dict.fromkeys(name.rpartition(".")[2] for name in saved)
    # With ensure_weight_tying PEFT saves both and lists one, and for a resized base it lists none
    paths = zip(savable, (family.embedding, family.head), strict=True)
    saved_names |= {name: None for name, path in paths if path in tensors}
    if "score" in savable:
        saved_names.pop("classifier", None)
    return tuple(saved_names)


def _module_stems(
    values: Mapping[str, Any], model: LanguageModel, in_file: Callable[[str], str]
) -> dict[str, AdaptedModule]:
    """Maps what precedes `.lora_A` in names of tensors to the module that they adapt, for all that
    adapters support.

    Experts are among them only where target_parameters of `values`, adapter_config.json's content,
    lists them; raises ValueError if it lists anything else.
    """
    parameters = _read_names(values, "target_parameters")
    modules = find_target_modules(model)
    suffixes = {end for m in modules if m.experts for end in name_suffixes(in_file(m.name))}
    for target in parameters:
        if target not in suffixes:
            family = type(model).__name__
            hint = "; PEFT's all-linear includes routers, which adapters here do not train: list "
            hint += "the projections, such as q_proj, instead"
            raise ValueError(
                f"target_parameters={quote(target)} matches no experts of this {family}"
                + (hint if "gate.weight" in target or "router" in target else "")
            )
    targeted = [m for m in modules if m.experts and is_listed(in_file(m.name), {*parameters})]
    stems: dict[str, AdaptedModule] = {}
    for module in modules:
        if module.experts:
            projections = [m.projection for m in targeted if m.path == module.path]
            if module.projection in projections:
                stem = experts_stem(module.stored_path, module.projection, projections)
                stems[stem] = module
        else:
            stems[module.name] = module
    return stems


def _check_complete(
    values: Mapping[str, Any],
    stems: Set[str],
    known: Mapping[str, AdaptedModule],
    in_file: Callable[[str], str],
) -> None:
    """Raises ValueError if a module that target_modules of PEFT's config names or matches, or
    experts that it targets, have no tensors in the file; checks nothing if the config restricts
    layers or excludes modules."""
    targets = values.get("target_modules")
    selections = values.get("layers_to_transform"), values.get("exclude_modules")
    if any(selection not in (None, [], "") for selection in selections):
        return
    names = {t for t in targets if isinstance(t, str)} if isinstance(targets, list) else set()
    pattern = None
    if isinstance(targets, str):
        with suppress(re.error, RecursionError, OverflowError):
            pattern = re.compile(targets)
    for stem, module in known.items():
        name = in_file(module.name)
        targeted = module.experts or is_listed(name, names) or (pattern and pattern.fullmatch(name))
        if stem not in stems and targeted:
            raise ValueError(
                f"target_modules={quote(targets)}, and {WEIGHTS} has none for {quote(module.name)}"
            )
