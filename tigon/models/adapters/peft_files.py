"""Reads and writes adapters in PEFT's files, adapter_config.json and adapter_model.safetensors.

Files are untrusted: JSON and safetensors headers are checked before anything is allocated, and
unsupported features raise. Source: PEFT's LoraConfig, get_pattern_key and
get_peft_model_state_dict.
"""

import math
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace as replaced
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import torch
from torch import nn

from tigon.hub import HubOptions
from tigon.models.adapters.adapters import (
    activate_adapter,
    adapter_layers,
    adapter_parameters,
    add_parameters,
    check_new_adapter,
    delete_adapter,
    resolve_adapter_name,
    set_active_name,
)
from tigon.models.adapters.lora import (
    AdaptedModule,
    LoraConfig,
    changes_embedding_or_head,
    check_dropout,
    find_target_modules,
    first_match,
    matches_pattern,
    resolve_targets,
    savable_modules,
)
from tigon.models.arguments import check_keywords
from tigon.models.base import LanguageModel
from tigon.models.pretrained.names import (
    HEAD,
    MULTIMODAL,
    PREFIXES,
    TEXT_ALONE,
    experts_stem,
    layout,
)
from tigon.models.pretrained.save import SavePretrained, check_target, write_json, write_model
from tigon.utils.json import escape, quote, read_json
from tigon.utils.paths import expand_user
from tigon.weights import (
    Checkpoint,
    Layout,
    Repository,
    TensorEntry,
    TensorInfo,
    TensorSlice,
    WriterGroup,
    load_into,
    make_entries,
    match_tensors,
)
from tigon.weights.header import read_header
from tigon.weights.write import all_finite

CONFIG, BASE = "adapter_config.json", "base_model_name_or_path"
WEIGHTS, PICKLE = "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."  # of PEFT's tensor names
LOW_RANK = re.compile(r"(.+)\.lora_(?:[AB]\.weight|embedding_[AB])")
SINGLE_EXPERT = re.compile(r".+\.experts\.\d+\.\w+\.lora_[AB]\.weight")
DECODER_PREFIXES = ("layers.", "embed_tokens.")
EXCLUDED = r"(?!model\.language_model\.|lm_head).*"  # whatever is outside of the text model
BASE_WEIGHT = re.compile(r"(.+)\.base_layer\.weight")  # PEFT saves it for embedding and head
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

# Patterns: regular expressions that match a name, or the text after one of its dots. PEFT mostly
# writes plain suffixes, which are looked up; others must be few and simple so that no file is slow.

REPEAT = re.compile(r"[*+?{]")
PLAIN = re.compile(r"(?:[\w.-]|\\[.-])+")
COSTLY = re.compile(r"\(\?(?!:)|\)[*+?{]")  # a group that is repeated, or may hide that it is
MAX_LENGTH, MAX_REPEATS, MAX_BARS = 200, 3, 8  # of one pattern; alternatives multiply
MAX_COST = 200  # of a setting's patterns that are no plain suffixes: 1, or 10 with a repetition


def name_suffixes(name: str) -> Iterator[str]:
    """Yields the name, and the text after each of its dots."""
    while name:
        yield name
        name = name.partition(".")[2]


class Patterns:
    """Looks up PEFT's rank_pattern or alpha_pattern: the first pattern that matches a name counts.

    `names`: all names that will be looked up. Raises ValueError unless the setting is a dictionary
    of numbers of this kind, and for patterns that could take long.
    """

    def __init__(self, values: Mapping[str, Any], key: str, kind: Any, names: Iterable[str]):
        patterns = values.get(key) or {}
        if not isinstance(patterns, dict):
            raise ValueError(f"{key}={quote(patterns)} is not a dictionary")
        suffixes = {suffix for name in names for suffix in name_suffixes(name)}
        self._suffixes: dict[str, tuple[int, Any]] = {}  # suffix -> index, number
        self._regexes: list[tuple[int, re.Pattern[str], Any]] = []
        cost = 0
        for i, (pattern, value) in enumerate(patterns.items()):
            number = check_number(f"{key}[{quote(pattern)}]", value, kind)
            plain = re.sub(r"\\(.)", r"\1", pattern) if PLAIN.fullmatch(pattern) else None
            if plain in suffixes:
                self._suffixes.setdefault(plain, (i, number))
                continue
            cost += 10 if REPEAT.search(pattern) else 1
            if cost > MAX_COST:
                raise ValueError(
                    f"{key} has {len(patterns):,} patterns, and too many of them, such as "
                    f"{quote(pattern)}, name no projection of this model: write whole names"
                )
            self._regexes.append((i, compile_pattern(key, pattern), number))

    def lookup(self, name: str, default: Any) -> Any:
        """Returns the number of the first pattern that matches this name, else the default."""
        matches = [self._suffixes[end] for end in name_suffixes(name) if end in self._suffixes]
        first, value = min(matches, default=(math.inf, default))
        for i, pattern, number in self._regexes:
            if i > first:
                break
            if pattern.fullmatch(name):
                return number
        return value


def check_number(name: str, value: Any, kind: Any) -> Any:
    """Returns the value; raises ValueError if it is no instance of this type of number, or a
    bool."""
    if isinstance(value, bool) or not isinstance(value, kind):
        expected = "integer" if kind is int else "number"
        raise ValueError(f"{name} must be a positive {expected}, got {quote(value)}")
    return value


def compile_pattern(key: str, pattern: str) -> re.Pattern[str]:
    """Compiles a pattern, which may begin after any dot; raises ValueError if it may be slow or is
    no regular expression."""
    long = len(pattern) > MAX_LENGTH or len(REPEAT.findall(pattern)) > MAX_REPEATS
    if long or pattern.count("|") > MAX_BARS or COSTLY.search(pattern):
        raise ValueError(f"{key}[{quote(pattern)}] is too complicated: write whole names")
    try:
        return re.compile(rf"(.*\.)?({pattern})")
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{key}[{quote(pattern)}] is not a regular expression: {error}") from None


# adapter_config.json


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


def _warn_of_misread_modules(modules: Collection[AdaptedModule]) -> None:
    """Warns of adapted MLPs and shared experts that PEFT would not load."""
    names = {m.projection for m in modules if not m.experts}
    if found := sorted(names & {"gate_proj", "up_proj", "down_proj"}):
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
    multimodal one, if AutoModelForCausalLM makes no other."""
    kind = model.config.source.wrapper.get("model_type")
    whole = kind in MULTIMODAL and kind not in TEXT_ALONE
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
    parameters = {f"mlp.experts.{module.projection}" for module in experts}
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


def peft_name(name: str, adapter: str) -> str:
    """Converts a tensor's name in a model's layout to that in PEFT's file, which lacks the
    adapter's name; PREFIX is not added."""
    if name.endswith((f".lora_embedding_A.{adapter}", f".lora_embedding_B.{adapter}")):
        return name.removesuffix(f".{adapter}")
    inner, dot, kind = name.rpartition(".")
    inner = inner.removesuffix(f".{adapter}").removesuffix(".modules_to_save")
    if inner.endswith(".lora_magnitude_vector"):
        return inner
    return f"{inner}{dot}{kind}"


# Reading files


class PeftAdapter(NamedTuple):
    """The files of an adapter; its tensors are not read yet."""

    config: LoraConfig
    checkpoint: Checkpoint
    names: dict[str, str]  # a tensor's name from `peft_name` -> its name in the file
    base_names: dict[str, str]  # path of a module -> the file's name of its base weight
    base_checkpoint: Checkpoint  # the base weights of `base_names`
    tied: bool  # whether training keeps embedding and head equal (PEFT's ensure_weight_tying)


def read_adapter(repository: Repository, model: LanguageModel) -> PeftAdapter:
    """Read and check an adapter's config and the headers of its tensors; raises FileNotFoundError
    for a missing file, and ValueError for what is not supported or not complete."""
    try:
        path = repository.file(CONFIG)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}: it holds no adapter") from error
    values = read_json(path)
    try:
        _check_features(values)
    except ValueError as error:
        raise ValueError(f"{escape(path)}: {error}") from None
    weights = repository.optional_file(WEIGHTS)
    if weights is None:
        hint = ""
        if PICKLE in repository.listing():
            hint = f"; {PICKLE} is not read, as it can run code: save it again with a current PEFT"
        raise FileNotFoundError(f"{repository.name} has no {WEIGHTS}{hint}")
    tensors = dict(read_header(weights))
    file = f"{repository.name}/{WEIGHTS}"
    names = _model_names(tensors, file, model)
    _drop_duplicates(tensors, names, model.checkpoint_names.embedding)
    try:
        if single := next(filter(SINGLE_EXPERT.fullmatch, names), None):
            raise ValueError(
                f"{quote(single)} adapts a single expert, a form of older PEFT versions that is "
                "not read: save the adapter again with a current PEFT"
            )
        config = _lora_config(values, tensors, names, model)
    except ValueError as error:
        raise ValueError(f"{escape(repository.name)}: {error}") from None
    # Only of modules that have a weight to themselves: others are slices of one
    modules = {m.name: m.path for m in find_target_modules(model) if m.stored_path == m.name}
    matches = ((BASE_WEIGHT.fullmatch(name), file_name) for name, file_name in names.items())
    base_names = {
        modules[m[1]]: file_name for m, file_name in matches if m is not None and m[1] in modules
    }
    base_checkpoint = Checkpoint(file, {name: tensors.pop(name) for name in base_names.values()})
    tied = bool(values.get("ensure_weight_tying")) and model.ties_head
    tied = tied and changes_embedding_or_head(model, config)
    return PeftAdapter(config, Checkpoint(file, tensors), names, base_names, base_checkpoint, tied)


def _drop_duplicates(tensors: dict[str, TensorInfo], names: dict[str, str], embedding: str) -> None:
    """Removes, from both dictionaries, the tensors that PEFT writes besides the trained embedding
    and head of a resized base: copies of both, and the base's weights."""
    for name in (embedding, HEAD):
        module = name.removesuffix(".weight")
        for duplicate in ("modules_to_save", "original_module"):
            if name in names and (file_name := names.pop(f"{module}.{duplicate}.weight", None)):
                del tensors[file_name]


def _check_features(values: Mapping[str, Any]) -> None:
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


def _model_names(tensors: Collection[str], file: str, model: LanguageModel) -> dict[str, str]:
    """Maps the names in the family's checkpoints of what the tensors belong to, to the file's
    names; raises ValueError for two with one name."""
    names: dict[str, str] = {}
    for file_name in tensors:
        name = file_name.removeprefix(PREFIX)
        for prefix in PREFIXES[:-1]:
            if name.startswith(prefix):
                name = "model." + name.removeprefix(prefix)
                break
        if name.startswith(DECODER_PREFIXES):  # an adapter of AutoModel, the decoder alone
            name = f"model.{name}"
        name = model.checkpoint_names.stored_name(name)
        if name in names:
            raise ValueError(f"{escape(file)}: {quote(file_name)} repeats {quote(names[name])}")
        names[name] = file_name
    return names


def _rename_in_file(names: Mapping[str, str], model: LanguageModel) -> Callable[[str], str]:
    """Makes a function from the model's names of modules to those that PEFT's config means, where
    a multimodal model may be around the decoder, or the decoder is alone."""
    family = model.checkpoint_names.decoder
    name, file_name = next((pair for pair in names.items() if pair[0].startswith(family)), ("", ""))
    prefix = file_name.removeprefix(PREFIX).removesuffix(name.removeprefix(family))
    return lambda module: rename_decoder(module, family, prefix)


def _lora_config(
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
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise ValueError(
            f"the adapter is for {', '.join(quote(n) for n in unknown[:3])}{more}, which this "
            f"{type(model).__name__} does not have: its {model.config.num_hidden_layers} layers "
            f"have {projections}"
        )
    _check_complete(values, stems, known, in_file)
    adapted = {stem: module for stem, module in known.items() if stem in stems}
    names = [*map(in_file, stems), *(in_file(module.name) for module in known.values())]
    rank_patterns = Patterns(values, "rank_pattern", int, names)
    alpha_patterns = Patterns(values, "alpha_pattern", int | float, names)
    ranks = {m.name: rank_patterns.lookup(in_file(m.name), rank) for m in adapted.values()}
    alphas = {m.name: alpha_patterns.lookup(in_file(m.name), alpha) for m in adapted.values()}
    for stem, module in adapted.items():
        end = "lora_embedding_A" if module.projection == "embed_tokens" else "lora_A.weight"
        info, rows = tensors.get(f"{stem}.{end}"), ranks[module.name]
        if module.experts:
            rows *= len(model.get_submodule(module.path).get_parameter(module.projection))
        if info is not None and info.shape[:1] != (rows,):
            raise ValueError(
                f"{stem}.{end} is {list(info.shape)}, and the rank is said to be "
                f"{ranks[module.name]}"
            )
    base = parse_base(values)
    return LoraConfig(
        rank=rank,
        alpha=alpha,
        targets=tuple(shorten_names(model, [known[stem].name for stem in stems])),
        dropout=values.get("lora_dropout", 0.0),
        rslora=bool(values.get("use_rslora")),
        dora=bool(values.get("use_dora")),
        rank_pattern={name: n for name, n in ranks.items() if n != rank},
        alpha_pattern={name: n for name, n in alphas.items() if n != alpha},
        modules_to_save=_saved_names(values, tensors, model),
        base=base.name,
        revision=base.revision or "",
    )


def _saved_names(
    values: Mapping[str, Any], tensors: Collection[str], model: LanguageModel
) -> tuple[str, ...]:
    """Returns the modules_to_save of PEFT's config by the names that adapters here have for them;
    raises ValueError for what is no list of names."""
    saved = values.get("modules_to_save") or []
    if not isinstance(saved, list) or not all(isinstance(name, str) for name in saved):
        raise ValueError(f"modules_to_save={quote(saved)} is not a list of names")
    savable, family = savable_modules(model), model.checkpoint_names
    # PEFT lists both names that the head of a sequence classifier may have
    saved_names = dict.fromkeys(name.rpartition(".")[2] for name in saved)
    # With ensure_weight_tying PEFT saves both and lists one, and for a resized base it lists none
    paths = zip(savable, (family.embedding, family.head), strict=True)
    saved_names |= {name: None for name, path in paths if path in tensors}
    if "score" in savable:
        saved_names.pop("classifier", None)
    return tuple(saved_names)


def read_vocabulary_size(repository: Repository, model: LanguageModel) -> int | None:
    """Counts the rows of the embedding or head that the adapter saves; None if it saves neither.

    Only a tensor of the model's width counts, since the model will be resized to this number.
    """
    weights = repository.optional_file(WEIGHTS)
    header = {} if weights is None else read_header(weights)
    names = _model_names(header, f"{repository.name}/{WEIGHTS}", model)
    ends = model.checkpoint_names.embedding, HEAD
    shapes = [header[names[name]].shape for name in ends if name in names]
    width = model.config.hidden_size
    return next((shape[0] for shape in shapes if shape[1:] == (width,)), None)


def _module_stems(
    values: Mapping[str, Any], model: LanguageModel, in_file: Callable[[str], str]
) -> dict[str, AdaptedModule]:
    """Maps what precedes `.lora_A` in names of tensors to the module that they adapt, for all that
    adapters support.

    Experts are among them only where target_parameters of `values`, adapter_config.json's content,
    lists them; raises ValueError if it lists anything else.
    """
    parameters = values.get("target_parameters") or []
    if not isinstance(parameters, list) or not all(isinstance(t, str) for t in parameters):
        raise ValueError(f"target_parameters={quote(parameters)} is not a list of names")
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
    """Raises ValueError if a module that PEFT's config targets has no tensors in the file; checks
    nothing if the config restricts layers or excludes modules."""
    targets = values.get("target_modules")
    selections = values.get("layers_to_transform"), values.get("exclude_modules")
    if any(selection not in (None, [], "") for selection in selections):
        return
    pattern = None
    if isinstance(targets, str):
        with suppress(ValueError):  # patterns that may take long are not checked
            compile_pattern("target_modules", targets)
            pattern = re.compile(targets)
    names = {t for t in targets if isinstance(t, str)} if isinstance(targets, list) else set()
    parameters = {*(values.get("target_parameters") or [])}
    for stem, module in known.items():
        name = in_file(module.name)
        targeted = is_listed(name, parameters if module.experts else names)
        if pattern is not None and not module.experts:
            targeted = pattern.fullmatch(name) is not None
        if stem not in stems and targeted:
            raise ValueError(
                f"target_modules={quote(targets)}, and {WEIGHTS} has none for {quote(module.name)}"
            )


# Loading


def load_adapter(
    model: LanguageModel,
    path_or_repo: str | os.PathLike[str],
    name: str = "default",
    *,
    trainable: bool = False,
    dtype: torch.dtype | None = None,
    **source: Unpack[HubOptions],
) -> None:
    """Adds a PEFT adapter from a directory or a hub repository, and activates it.

    All other parameters are frozen, and those of the adapter unless `trainable`. `dtype` None: the
    model's, or float32 for a trainable adapter of a 16-bit model. Raises ValueError, leaving the
    model unchanged, for tensors that do not fit, unsupported features, and NaN. Warns if the
    adapter names another base than this model was read from.
    """
    check_keywords("load_adapter", source, frozenset(HubOptions.__annotations__))
    check_new_adapter(model, name)
    repository = Repository(path_or_repo, **source)
    adapter, size = read_adapter(repository, model), read_vocabulary_size(repository, model)
    try:
        if size not in (None, model.config.vocab_size) and not model.config.labels:
            raise ValueError(
                f"the adapter is of {size} tokens, and the model has {model.config.vocab_size}: "
                f"call model.resize_token_embeddings({size}) first"
            )
        parts = resolve_targets(model, adapter.config)
        if trainable:
            check_dropout(model, adapter.config)
        if trainable and adapter.tied:
            raise ValueError(
                "ensure_weight_tying=True keeps embedding and head equal in training, which is not "
                "supported: load it without trainable=True, or merge it and add another"
            )
    except ValueError as error:
        raise ValueError(f"{escape(os.fspath(path_or_repo))}: {error}") from None
    _check_base(model, adapter)
    half = model.dtype in (torch.bfloat16, torch.float16)
    dtype = dtype or (torch.float32 if half and trainable else model.dtype)
    active = model.active_adapter
    trainable_names = {n for n, p in model.named_parameters() if p.requires_grad}
    try:
        add_parameters(model, name, adapter.config, parts, dtype, torch.device("meta"))
        _load_values(model, name, adapter)
    except BaseException:
        if name in model.adapters:
            delete_adapter(model, name)
            set_active_name(model, active)
            for n, p in model.named_parameters():
                p.requires_grad_(n in trainable_names)
        raise
    activate_adapter(model, name, trained=trainable)
    adapter_base, model_name = adapter.config.base, model.config.source.name
    if adapter_base and model_name and not _is_same_model(adapter_base, model_name):
        warnings.warn(
            f"{escape(os.fspath(path_or_repo))} is an adapter of {quote(adapter_base, 300)}, and "
            f"the model is of {quote(model_name, 300)}: unless it was renamed, its weights differ",
            stacklevel=2,
        )


def _is_same_model(first: str, second: str) -> bool:
    """Whether two paths are one directory, or, if one does not exist, end with the same model's
    name."""
    try:
        return os.path.samefile(first, second)  # first, since every run has a directory hf/
    except (OSError, ValueError):  # one does not exist here
        return _model_name(first) == _model_name(second)


def _model_name(path: str) -> str:
    """Extracts the model's name, in lower case, from a path, a hub repository, or a path in the
    hub's cache."""
    parts = os.path.abspath(path).replace("\\", "/").split("/")
    cached = [part for part in parts if part.startswith("models--")]
    return (cached[-1].rpartition("--")[2] if cached else parts[-1]).casefold()


def _check_base(model: LanguageModel, adapter: PeftAdapter) -> None:
    """Raises ValueError if the file has base weights that differ from the model's, which PEFT would
    load into the base."""
    for path, file_name in adapter.base_names.items():
        weight = model.get_submodule(path).get_parameter("weight")
        name = escape(f"{adapter.checkpoint.name}: {file_name}")
        shape = adapter.base_checkpoint.tensors[file_name].shape
        if shape != weight.shape:
            raise ValueError(
                f"{name} is {list(shape)}, the model's {list(weight.shape)}: it is of another base"
            )
        loaded = {"weight": nn.Parameter(torch.empty_like(weight), requires_grad=False)}
        parts: Layout = {"weight": (TensorSlice.whole(file_name, tuple(weight.shape)),)}
        ignored = adapter.base_checkpoint.tensors.keys() - {file_name}
        load_into(loaded, parts, adapter.base_checkpoint, ignored=ignored, into=name)
        if not torch.equal(loaded["weight"], weight):
            raise ValueError(f"{name} is not the model's own: the adapter is of another base")


def _load_values(model: LanguageModel, name: str, adapter: PeftAdapter) -> None:
    """Allocates the adapter's parameters and loads the file's values.

    Raises ValueError for tensors that do not fit, before anything is allocated, and for values that
    are NaN or infinite.
    """
    parameters, slices = adapter_parameters(model, name), _adapter_layout(model, name)
    names = {part.name for parts in slices.values() for part in parts}
    source_of = {
        n: adapter.names.get(peft_name(n, name), PREFIX + peft_name(n, name)) for n in names
    }
    into = f"an adapter of this {type(model).__name__}"
    options: dict[str, Any] = {"layout": slices, "checkpoint": adapter.checkpoint}
    options |= {"source_of": source_of, "into": into}
    match_tensors(parameters, **options)  # before anything is allocated: sizes are the file's
    for p in parameters.values():
        empty = torch.empty_like(p, device=model.device)
        torch.utils.swap_tensors(p, nn.Parameter(empty, p.requires_grad))
    load_into(parameters, **options)
    for n, p in parameters.items():
        if p.numel() and not all_finite([p.detach()], torch.device("cpu")):
            file_names = ", ".join(source_of[part.name] for part in slices[n])
            file = escape(adapter.checkpoint.name)
            raise ValueError(f"{file} has values that are NaN or infinite in {file_names}")


def _adapter_layout(model: LanguageModel, name: str) -> Layout:
    """Maps one adapter's parameters to tensors of PEFT's file."""
    full = layout(model, model.checkpoint_names, False)
    return {n: full[n] for n in adapter_parameters(model, name)}


# Saving


def save_adapter(
    model: LanguageModel,
    directory: str | os.PathLike[str],
    name: str | None = None,
    *,
    dtype: torch.dtype | None = None,
    tokenizer: SavePretrained | None = None,
    replace: bool = False,
) -> None:
    """Writes an adapter, by default the active one, as PEFT does; PEFT can load it.

    `dtype` None: the adapter's. The directory must be new or empty, and appears complete or not at
    all; with `replace` it may hold an earlier adapter. Under a process group every rank calls this,
    on one file system.
    """
    ranks = WriterGroup()
    with ranks.sync_errors():
        if ranks.first:
            check_target(expand_user(directory), replace, CONFIG)
    tensors, describe = prepare_adapter(model, name, ranks=ranks, dtype=dtype, tokenizer=tokenizer)
    write_adapter(directory, tensors, describe, ranks=ranks, replace=replace)


def prepare_adapter(
    model: LanguageModel,
    name: str | None = None,
    *,
    ranks: WriterGroup,
    dtype: torch.dtype | None = None,
    tokenizer: SavePretrained | None = None,
) -> tuple[list[TensorEntry], Callable[[Path], None]]:
    """Collects the tensors that save_adapter writes, and a function that writes the other files."""
    name = resolve_adapter_name(model, name)
    parameters = adapter_parameters(model, name)
    family, prefix = model.checkpoint_names.decoder, decoder_prefix(model)

    def stored(part: TensorSlice) -> TensorSlice:
        inner = rename_decoder(peft_name(part.name, name), family, prefix)
        return replaced(part, name=PREFIX + inner)

    slices: Layout = {
        n: tuple(map(stored, parts)) for n, parts in _adapter_layout(model, name).items()
    }
    adapted = {
        (path, part.name) for path, low in adapter_layers(model, name).items() for part in low.parts
    }
    modules = [m for m in find_target_modules(model) if (m.path, m.projection) in adapted]
    config = peft_config(model, model.adapters[name], modules)
    if model.config.model_type in MISREAD_TYPES:
        _warn_of_misread_modules(modules)
    dtype = dtype or next(iter(parameters.values())).dtype
    with ranks.sync_errors():
        tensors = make_entries(parameters, slices, dtype, ranks=ranks)

    def describe(root: Path) -> None:
        write_json(root / CONFIG, config)
        if tokenizer is not None:
            tokenizer.save_pretrained(root)

    return tensors, describe


def write_adapter(
    directory: str | os.PathLike[str],
    tensors: Sequence[TensorEntry],
    describe: Callable[[Path], None],
    *,
    ranks: WriterGroup,
    replace: bool = False,
) -> None:
    """Writes an adapter's directory: all tensors in one file, since PEFT reads no shards, and the
    files that `describe` writes."""
    size = max(1, sum(entry.nbytes for entry in tensors))
    options: dict[str, Any] = {"stem": Path(WEIGHTS).stem, "replace": replace}
    write_model(directory, tensors, describe, ranks=ranks, max_shard_size=size, **options)
