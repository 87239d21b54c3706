"""Adapters in PEFT's files: adapter_config.json and adapter_model.safetensors.

They are other people's: JSON and safetensors headers are checked before anything is allocated, and
what an adapter would do that is not done here is refused by name. Source: PEFT's LoraConfig and
get_peft_model_state_dict.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from tigon.models._layout import EMBEDDING, HEAD, PREFIXES, stem_of_experts
from tigon.models._lora import LoraConfig, Place, changes_ends, places, saved_ends
from tigon.models._model import LanguageModel
from tigon.models._peft_config import BASE, CONFIG, base_of, meant_by, short
from tigon.models._peft_experts import APART, Tensors, stack, with_stacked
from tigon.models._peft_patterns import Patterns, checked, ends_of, quick
from tigon.utils.json import escape, quote, read_json
from tigon.weights import Checkpoint, Decoded, Repository, TensorInfo, read_header

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
