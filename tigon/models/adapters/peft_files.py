"""PEFT's patterns: regular expressions of names, of which files of others may have many.

A pattern means a name if it fits the name or what follows one of its dots. Most are such ends
themselves, as PEFT writes one for each projection: these are looked up. The others are tried one by
one, and are few and simple, so that no file can take long. Source: PEFT's get_pattern_key.
"""

import math
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace as replaced
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import torch
from torch import nn

from tigon.hub import HubOptions
from tigon.models.adapters.adapters import (
    adapter_parameters,
    check_name,
    check_new,
    choose,
    delete_adapter,
    install,
    low_ranks,
    switch,
)
from tigon.models.adapters.lora import (
    LoraConfig,
    Place,
    changes_ends,
    check_dropout,
    first_match,
    matches,
    places,
    plan,
    saved_ends,
)
from tigon.models.adapters.peft_experts import APART, Tensors, stack, with_stacked
from tigon.models.arguments import check_keywords
from tigon.models.base import LanguageModel
from tigon.models.pretrained.names import EMBEDDING, HEAD, PREFIXES, layout, stem_of_experts
from tigon.models.pretrained.save import SavesItself, check_target, write_json, write_model
from tigon.utils.json import escape, quote, read_json
from tigon.utils.paths import expand_user
from tigon.weights import (
    Checkpoint,
    Decoded,
    Entry,
    Layout,
    Part,
    Repository,
    TensorInfo,
    Writers,
    all_finite,
    entries,
    load_into,
    match,
    read_header,
)

REPEAT = re.compile(r"[*+?{]")
PLAIN = re.compile(r"(?:[\w.-]|\\[.-])+")
LONGEST_PATTERN, MOST_REPEATS = 200, 3
MOST_REPEATING = 20  # patterns of one setting that have any
MOST_TRIED = 200  # patterns of one setting that are no ends of names


def ends_of(name: str) -> Iterator[str]:
    """A name, and what follows each of its dots."""
    while name:
        yield name
        name = name.partition(".")[2]


class Patterns:
    """The numbers that a setting has for some names; the first pattern that means one counts.

    `names`: all that will be asked for. ValueError for what is no dictionary from patterns to
    numbers of this kind, and for patterns that could take long.
    """

    def __init__(self, values: Mapping[str, Any], key: str, kind: Any, names: Iterable[str]):
        patterns = values.get(key) or {}
        if not isinstance(patterns, dict):
            raise ValueError(f"{key}={quote(patterns)} is no dictionary")
        known = {end for name in names for end in ends_of(name)}
        self._ends: dict[str, tuple[int, Any]] = {}  # of each its place among all, and its number
        self._tried: list[tuple[int, re.Pattern[str], Any]] = []
        if sum(bool(REPEAT.search(pattern)) for pattern in patterns) > MOST_REPEATING:
            raise ValueError(
                f"{key} has more than {MOST_REPEATING} patterns that repeat something: write whole "
                "names"
            )
        for i, (pattern, value) in enumerate(patterns.items()):
            number = checked(f"{key}[{quote(pattern)}]", value, kind)
            plain = re.sub(r"\\(.)", r"\1", pattern) if PLAIN.fullmatch(pattern) else None
            if plain in known:
                self._ends.setdefault(plain, (i, number))
                continue
            if len(self._tried) == MOST_TRIED:
                raise ValueError(
                    f"{key} has {len(patterns):,} patterns, and more than {MOST_TRIED} of them, "
                    f"such as {quote(pattern)}, are no names of this model's projections: leave "
                    "those out"
                )
            self._tried.append((i, compiled(key, pattern), number))

    def of(self, name: str, default: Any) -> Any:
        """The number of the first pattern that means this name."""
        found = [self._ends[end] for end in ends_of(name) if end in self._ends]
        first, value = min(found, default=(math.inf, default))
        for i, pattern, number in self._tried:
            if i > first:
                break
            if pattern.fullmatch(name):
                return number
        return value


def checked(name: str, value: Any, kind: Any) -> Any:
    """The number; ValueError for one of another kind."""
    if isinstance(value, bool) or not isinstance(value, kind):
        raise ValueError(f"{name}={quote(value)} is no number that it can be")
    return value


def quick(key: str, pattern: str) -> re.Pattern[str] | None:
    """A regular expression of whole names; None for one that may take long."""
    try:
        compiled(key, pattern)
    except ValueError:
        return None
    return re.compile(pattern)


def compiled(key: str, pattern: str) -> re.Pattern[str]:
    """A pattern, if no name can take it long."""
    if len(pattern) > LONGEST_PATTERN or len(REPEAT.findall(pattern)) > MOST_REPEATS:
        raise ValueError(f"{key}[{quote(pattern)}] is too complicated: write whole names")
    if re.search(r"\(\?(?!:)", pattern):  # with (?x:...) repeats of groups look otherwise
        raise ValueError(
            f"{key}[{quote(pattern)}] has a group of a special kind: write whole names"
        )
    if re.search(r"\)[*+?{]", pattern):
        raise ValueError(f"{key}[{quote(pattern)}] repeats a group: write whole names")
    try:
        return re.compile(rf"(.*\.)?({pattern})")
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{key}[{quote(pattern)}] is no regular expression: {error}") from None


# What PEFT's adapter_config.json says of an adapter, and PEFT's names of its tensors.

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


# Adapters in PEFT's files: adapter_config.json and adapter_model.safetensors.
#
# They are other people's: JSON and safetensors headers are checked before anything is allocated,
# and what an adapter would do that is not done here is refused by name. Source: PEFT's LoraConfig
# and get_peft_model_state_dict.

WEIGHTS, PICKLE = "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."  # of PEFT's names
LOW_RANK = re.compile(r"(.+)\.lora_(?:[AB]\.weight|embedding_[AB])")
OF_DECODER = ("layers.", "embed_tokens.")  # beginnings of names in the decoder
OF_BASE = re.compile(r"(.+)\.base_layer\.weight")  # PEFT saves it beside an embedding's or a head's
# Keys that are read, say what tensors show better, or were for the beginning of training alone
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
# Ways to begin that leave the base as it is; others take from it what the adapter begins with
BEGINNINGS = (True, False, None, "gaussian", "orthogonal", "eva")


class Stored(NamedTuple):
    """An adapter's files."""

    config: LoraConfig
    checkpoint: Checkpoint
    names: dict[str, str]  # the file's of each tensor, by that which `peft_names` gives it
    base: dict[str, str]  # likewise weights of the base, by the paths of their modules
    of_base: Checkpoint  # has them
    tied: bool  # whether training keeps embedding and head equal (PEFT's ensure_weight_tying)


def read_adapter(repository: Repository, model: LanguageModel) -> Stored:
    """What the files say, as far as it can be told without reading tensors."""
    try:
        path = repository.file(CONFIG)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}: it holds no adapter") from error
    values, where = read_json(path), escape(path)
    try:
        _check_features(values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    weights = repository.optional_file(WEIGHTS)
    if weights is None:
        also = ""
        if PICKLE in repository.listing():
            also = f"; {PICKLE} is not read, as it can run code: save it again with a current PEFT"
        raise FileNotFoundError(f"{repository.name} has no {WEIGHTS}{also}")
    tensors: Tensors = {**read_header(weights)}
    names = _names(tensors, f"{repository.name}/{WEIGHTS}")
    _drop_duplicates(tensors, names)
    try:
        stems = [match[1] for name in names if (match := LOW_RANK.fullmatch(name))]
        if any(APART.fullmatch(name) for name in names):
            values = _stack(values, stems, names, tensors, model)
        config = _config(values, stems, {n: tensors[own] for n, own in names.items()}, model)
    except ValueError as error:
        raise ValueError(f"{escape(repository.name)}: {error}") from None
    whole = {p.name for p in places(model) if p.path == p.name}  # others have parts of a weight
    base = {}
    for inner, own in names.items():
        if (match := OF_BASE.fullmatch(inner)) and match[1] in whole:
            base[match[1]] = own
    at = f"{repository.name}/{WEIGHTS}"
    rest = {own: info for own, info in tensors.items() if own not in base.values()}
    of_base = {own: tensors[own] for own in base.values()}
    tied = _tied(values, model) and changes_ends(model, config)
    return Stored(config, Checkpoint(at, rest), names, base, Checkpoint(at, of_base), tied)


def _drop_duplicates(tensors: Tensors, names: dict[str, str]) -> None:
    """Remove what PEFT writes beside the trained embedding and head of a resized base: both once
    more, and the base's, which nothing reads."""
    for name in (EMBEDDING, HEAD):
        module = name.removesuffix(".weight")
        for duplicate in ("modules_to_save", "original_module"):
            if name in names and (own := names.pop(f"{module}.{duplicate}.weight", None)):
                del tensors[own]


def _stack(
    values: Mapping[str, Any],
    stems: Sequence[str],
    names: dict[str, str],
    tensors: Tensors,
    model: LanguageModel,
) -> dict[str, Any]:
    """Experts that are apart in one matrix each, in place; their settings are returned."""
    of = [(values.get(key, 8), kind) for key, kind in (("r", int), ("lora_alpha", int | float))]
    rank, alpha = (checked("r or lora_alpha", value, kind) for value, kind in of)
    keys = ("rank_pattern", int), ("alpha_pattern", int | float)
    ranks, alphas = (Patterns(values, key, kind, stems) for key, kind in keys)
    plain = {n: info for n, own in names.items() if isinstance(info := tensors[own], TensorInfo)}
    found = stack(
        model,
        plain,
        lambda name: (ranks.of(name, rank), alphas.of(name, alpha)),
        rslora=bool(values.get("use_rslora")),
    )
    for name in found.apart:
        del tensors[names.pop(name)]
    for name, info in found.tensors.items():
        names[name] = PREFIX + name
        tensors[names[name]] = info
    return with_stacked(values, found)


def _check_features(values: Mapping[str, Any]) -> None:
    """Raises ValueError for what would be computed in another way."""
    kind = values.get("peft_type")
    if kind != "LORA":
        raise ValueError(f"peft_type {quote(kind)} is not LORA")
    beginning = values.get("init_lora_weights", True)
    if not any(beginning is known or beginning == known for known in BEGINNINGS):
        raise ValueError(
            f"init_lora_weights={quote(beginning)} takes from the base what the adapter begins "
            "with, so that it does not fit the base as it is: convert it with PEFT "
            "(save_pretrained with path_initial_model_for_weight_conversion)"
        )
    if values.get("bias", "none") != "none":
        raise ValueError(f"bias={quote(values['bias'])}: adapters have no biases here")
    for key in ("use_rslora", "use_dora"):
        if (value := values.get(key)) not in (None, False, True):
            raise ValueError(f"{key}={quote(value)} is neither true nor false")
    for key, value in values.items():
        if key not in KNOWN and value not in (None, False, [], {}, ""):
            raise ValueError(f"{escape(key, 100)}={quote(value)} is not supported")


def _names(tensors: Collection[str], where: str) -> dict[str, str]:
    """Tensor names as this package's models have them, to the file's."""
    found: dict[str, str] = {}
    for name in tensors:
        inner = name.removeprefix(PREFIX)
        for prefix in PREFIXES[:-1]:
            if inner.startswith(prefix):
                inner = "model." + inner.removeprefix(prefix)
                break
        if inner.startswith(OF_DECODER):  # saved over AutoModel, which is the decoder alone
            inner = f"model.{inner}"
        if inner in found:
            raise ValueError(f"{escape(where)}: {quote(name)} and {quote(found[inner])} are one")
        found[inner] = name
    return found


def _config(
    values: Mapping[str, Any],
    stems: Sequence[str],
    tensors: Mapping[str, TensorInfo | Decoded],
    model: LanguageModel,
) -> LoraConfig:
    """With whole names in place of PEFT's patterns. Ranks are those of the tensors.

    `stems`: what the names of the file's tensors begin with, those of experts apart too.
    """
    rank, alpha = values.get("r", 8), values.get("lora_alpha", 8)
    checked("r", rank, int)
    checked("lora_alpha", alpha, int | float)
    own = {match[1] for name in tensors if (match := LOW_RANK.fullmatch(name))}
    known = _stems(values, model)
    if not own:
        raise ValueError("no tensor of it is named lora_A or lora_B")
    if unknown := sorted(own - known.keys()):
        kinds = ", ".join(dict.fromkeys(place.own for place in known.values()))
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise ValueError(
            f"the adapter is for {', '.join(quote(n) for n in unknown[:3])}{more}, which this "
            f"{type(model).__name__} does not have: its {model.config.num_hidden_layers} layers "
            f"have {kinds}"
        )
    _check_whole(values, own, known)
    ranks, alphas = {}, {}
    named = [*stems, *(place.name for place in known.values())]
    rank_patterns, alpha_patterns = (
        Patterns(values, key, kind, named)
        for key, kind in (("rank_pattern", int), ("alpha_pattern", int | float))
    )
    for stem in filter(own.__contains__, known):
        place, name = known[stem], known[stem].name
        said = rank_patterns.of(name, rank)
        end = "lora_embedding_A" if place.own == "embed_tokens" else "lora_A.weight"
        info = tensors.get(f"{stem}.{end}")
        rows = said * (_experts_of(model, place) if place.experts else 1)
        if info is not None and info.shape[:1] != (rows,):
            raise ValueError(
                f"{stem}.{end} is {list(info.shape)}, and the rank is said to be {said}"
            )
        if said != rank:
            ranks[name] = said
        if (other := alpha_patterns.of(name, alpha)) != alpha:
            alphas[name] = other
    saved = values.get("modules_to_save") or []
    if not isinstance(saved, list) or not all(isinstance(name, str) for name in saved):
        raise ValueError(f"modules_to_save={quote(saved)} is no list of names")
    both = saved_ends(model)
    # PEFT names both heads that models of scores may have
    last = dict.fromkeys(name.rpartition(".")[2] for name in saved)
    # PEFT saves both and names one with ensure_weight_tying, and none of a resized model
    paths = zip(both, (EMBEDDING, model.checkpoint_names.head), strict=True)
    last |= {end: None for end, path in paths if path in tensors}
    if "score" in both:
        last.pop("classifier", None)
    return LoraConfig(
        rank=rank,
        alpha=alpha,
        targets=tuple(short(model, [known[stem].name for stem in own])),
        dropout=values.get("lora_dropout", 0.0),
        rslora=bool(values.get("use_rslora")),
        dora=bool(values.get("use_dora")),
        rank_pattern=ranks,
        alpha_pattern=alphas,
        modules_to_save=tuple(last),
        base=base_of(values).name,
        revision=base_of(values).revision or "",
    )


def read_vocabulary_size(repository: Repository, model: LanguageModel) -> int | None:
    """The rows of the embedding or the head that the adapter has whole; None if it has neither, of
    the model's width: the file may be anybody's, and a model is resized to what is returned."""
    weights = repository.optional_file(WEIGHTS)
    header = {} if weights is None else read_header(weights)
    names = _names(header, f"{repository.name}/{WEIGHTS}")
    shapes = [header[names[name]].shape for name in (EMBEDDING, HEAD) if name in names]
    width = model.config.hidden_size
    return next((shape[0] for shape in shapes if shape[1:] == (width,)), None)


def _tied(values: Mapping[str, Any], model: LanguageModel) -> bool:
    """Whether PEFT keeps what the adapter has for the embedding and for the head equal."""
    return bool(values.get("ensure_weight_tying")) and model.ties_head


def _stems(values: Mapping[str, Any], model: LanguageModel) -> dict[str, Place]:
    """What the tensors' names of every projection begin with."""
    parameters = values.get("target_parameters") or []
    if not isinstance(parameters, list) or not all(isinstance(t, str) for t in parameters):
        raise ValueError(f"target_parameters={quote(parameters)} is no list of names")
    every = places(model)
    stacked = {end for place in every if place.experts for end in ends_of(place.name)}
    for target in parameters:
        if target not in stacked:
            raise ValueError(
                f"target_parameters={quote(target)} matches no experts of this "
                f"{type(model).__name__}"
            )
    found, chosen = {}, [p for p in every if p.experts and meant_by(p, {*parameters})]
    for place in every:
        if place.experts:
            meant = [p.own for p in chosen if p.path == place.path]
            if place.own in meant:
                found[stem_of_experts(place.path, place.own, meant)] = place
        else:
            found[place.name] = place
    return found


def _experts_of(model: LanguageModel, place: Place) -> int:
    return len(model.get_submodule(place.path).get_parameter(place.own))


def _check_whole(values: Mapping[str, Any], own: set[str], known: Mapping[str, Place]) -> None:
    """ValueError if projections that the targets name have no tensors: the adapter is of a model of
    fewer layers, or its file lacks some."""
    targets = values.get("target_modules")
    chosen = values.get("layers_to_transform"), values.get("exclude_modules")
    if any(some not in (None, [], "") for some in chosen):
        return
    pattern = quick("target_modules", targets) if isinstance(targets, str) else None
    names = {t for t in targets if isinstance(t, str)} if isinstance(targets, list) else set()
    parameters = {*(values.get("target_parameters") or [])}
    for name, place in known.items():
        meant = meant_by(place, parameters if place.experts else names)
        if pattern is not None and not place.experts:
            meant = pattern.fullmatch(place.name) is not None
        if name not in own and meant:
            raise ValueError(
                f"target_modules={quote(targets)}, and {WEIGHTS} has none for {quote(place.name)}: "
                "it is of another model, or lacks tensors"
            )


# Adapters from PEFT's files, and to them.


def load_adapter(
    model: LanguageModel,
    path_or_repo: str | os.PathLike[str],
    name: str = "default",
    *,
    trainable: bool = False,
    dtype: torch.dtype | None = None,
    **source: Unpack[HubOptions],
) -> None:
    """Add an adapter of PEFT's from a directory or a hub repository, and choose it.

    All else is frozen, and the adapter too unless `trainable`. `dtype` None: the model's, as that
    is what products are computed in; float32 for one that trains on in a model of 16 bits. Raises
    ValueError, naming what is wrong, for tensors that do not fit the model, features that are not
    supported, and tensors with NaN; the model is then as it was. Warns if the adapter fits, but
    names another base than this model was read from.
    """
    check_keywords("load_adapter", source, frozenset(HubOptions.__annotations__))
    check_new(model, name)
    repository = Repository(path_or_repo, **source)
    stored, size = read_adapter(repository, model), read_vocabulary_size(repository, model)
    try:
        if size not in (None, model.config.vocab_size) and not model.config.labels:
            raise ValueError(
                f"the adapter is of {size} tokens, and the model has {model.config.vocab_size}: "
                f"call model.resize_token_embeddings({size}) first"
            )
        parts = plan(model, stored.config)
        if trainable:
            check_dropout(model, stored.config)
        if trainable and stored.tied:
            raise ValueError(
                "ensure_weight_tying=True keeps embedding and head equal in training, which is not "
                "supported: load the adapter without trainable=True, or merge it and begin another"
            )
    except ValueError as error:
        raise ValueError(f"{escape(os.fspath(path_or_repo))}: {error}") from None
    _check_base(model, stored)
    half = model.dtype in (torch.bfloat16, torch.float16)
    dtype = dtype or (torch.float32 if half and trainable else model.dtype)
    active = model.active_adapter
    learned = {n for n, p in model.named_parameters() if p.requires_grad}
    try:
        install(model, name, stored.config, parts, dtype, torch.device("meta"))
        _fill(model, name, stored)
    except BaseException:
        if name in model.adapters:
            delete_adapter(model, name)
            switch(model, active)
            for n, p in model.named_parameters():
                p.requires_grad_(n in learned)
        raise
    choose(model, name, trained=trainable)
    said, own = stored.config.base, model.config.source.name
    if said and own and not _same(said, own):
        warnings.warn(
            f"{escape(os.fspath(path_or_repo))} is an adapter of {quote(said, 300)}, and the "
            f"model is of {quote(own, 300)}: it fits, but what it adds was learned over other "
            "weights, unless the one is the other under a new name",
            stacklevel=2,
        )


def _same(one: str, other: str) -> bool:
    """Whether two places, directories or hub repositories, are one or have the same name."""
    try:
        return os.path.samefile(one, other)  # all runs have a directory hf
    except (OSError, ValueError):  # one is no directory here
        return _last_name(one) == _last_name(other)


def _last_name(place: str) -> str:
    """Of a path or a repository; the repository's, if it is in the hub's cache."""
    parts = os.path.abspath(place).replace("\\", "/").split("/")
    cached = [part for part in parts if part.startswith("models--")]
    return (cached[-1].rpartition("--")[2] if cached else parts[-1]).casefold()


def _check_base(model: LanguageModel, stored: Stored) -> None:
    """Raises ValueError if the file has weights of a base that are not this model's: PEFT would put
    them into the base."""
    for module, own in stored.base.items():
        weight = model.get_submodule(module).get_parameter("weight")
        name = escape(f"{stored.checkpoint.name}: {own}")
        if stored.of_base.tensors[own].shape != weight.shape:
            shape = list(stored.of_base.tensors[own].shape)
            raise ValueError(
                f"{name} is {shape}, the model's {list(weight.shape)}: it is of another base"
            )
        found = {"weight": nn.Parameter(torch.empty_like(weight), requires_grad=False)}
        parts: Layout = {"weight": (Part.whole(own, tuple(weight.shape)),)}
        others = stored.of_base.tensors.keys() - {own}
        load_into(found, parts, stored.of_base, ignored=others, into=name)
        if not torch.equal(found["weight"], weight):
            raise ValueError(f"{name} is not the model's own: the adapter is of another base")


def _fill(model: LanguageModel, name: str, stored: Stored) -> None:
    """Memory for its parameters, and the file's values, if they fit."""
    own, parts_of = adapter_parameters(model, name), _layout(model, name)
    inside = {part.name for parts in parts_of.values() for part in parts}
    source_of = {
        n: stored.names.get(peft_name(n, name), PREFIX + peft_name(n, name)) for n in inside
    }
    how: dict[str, Any] = {"layout": parts_of, "checkpoint": stored.checkpoint}
    how |= {"source_of": source_of, "into": f"an adapter of this {type(model).__name__}"}
    match(own, **how)  # before anything is allocated: sizes are the file's
    for p in own.values():
        empty = torch.empty_like(p, device=model.device)
        torch.utils.swap_tensors(p, nn.Parameter(empty, p.requires_grad))
    load_into(own, **how)
    for n, p in own.items():
        if p.numel() and not all_finite([p.detach()], torch.device("cpu")):
            names = ", ".join(source_of[part.name] for part in parts_of[n])
            raise ValueError(
                f"{escape(stored.checkpoint.name)} has values that are NaN or infinite in {names}"
            )


def _layout(model: LanguageModel, name: str) -> Layout:
    """Of one adapter's parameters."""
    whole = layout(model, model.checkpoint_names, False)
    return {n: whole[n] for n in adapter_parameters(model, name)}


def save_adapter(
    model: LanguageModel,
    directory: str | os.PathLike[str],
    name: str | None = None,
    *,
    dtype: torch.dtype | None = None,
    tokenizer: SavesItself | None = None,
    replace: bool = False,
) -> None:
    """Write an adapter, by default the active one, as PEFT does; PEFT loads it at once.

    In its own dtype or another. The directory must be new or empty, and appears whole or not at
    all; with `replace`, an earlier adapter may be there. Under a process group every rank calls
    this, and all need one file system.
    """
    ranks = Writers()
    with ranks.together():
        if ranks.first:
            check_target(expand_user(directory), replace, CONFIG)
    tensors, describe = prepare_adapter(model, name, ranks=ranks, dtype=dtype, tokenizer=tokenizer)
    write_adapter(directory, tensors, describe, ranks=ranks, replace=replace)


def prepare_adapter(
    model: LanguageModel,
    name: str | None = None,
    *,
    ranks: Writers,
    dtype: torch.dtype | None = None,
    tokenizer: SavesItself | None = None,
) -> tuple[list[Entry], Callable[[Path], None]]:
    """What save_adapter writes: tensors, and what adds the other files to a directory."""
    name = check_name(model, name)
    own = adapter_parameters(model, name)
    parts_of: Layout = {
        n: tuple(replaced(part, name=PREFIX + peft_name(part.name, name)) for part in parts)
        for n, parts in _layout(model, name).items()
    }
    inside = {(path, p.name) for path, low in low_ranks(model, name).items() for p in low.parts}
    chosen = [place for place in places(model) if (place.path, place.own) in inside]
    config = peft_config(model, model.adapters[name], chosen)
    dtype = dtype or next(iter(own.values())).dtype
    with ranks.together():
        tensors = entries(own, parts_of, dtype, ranks=ranks)

    def describe(root: Path) -> None:
        write_json(root / CONFIG, config)
        if tokenizer is not None:
            tokenizer.save_pretrained(root)

    return tensors, describe


def write_adapter(
    directory: str | os.PathLike[str],
    tensors: Sequence[Entry],
    describe: Callable[[Path], None],
    *,
    ranks: Writers,
    replace: bool = False,
) -> None:
    """One file of all tensors, as PEFT reads no other."""
    size = max(1, sum(entry.nbytes for entry in tensors))
    how: dict[str, Any] = {"max_shard_size": size, "stem": Path(WEIGHTS).stem}
    write_model(directory, tensors, describe, ranks=ranks, replace=replace, **how)
