"""Reads and writes adapters in PEFT's files, adapter_config.json and adapter_model.safetensors.

Files are untrusted: safetensors headers are checked before anything is allocated. Source: PEFT's
get_peft_model_state_dict.
"""

import os
import re
import sys
import warnings
from collections.abc import Callable, Collection
from dataclasses import replace as replaced
from functools import partial
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
)
from tigon.models.adapters.lora import (
    changes_embedding_or_head,
    check_dropout,
    find_target_modules,
    resolve_targets,
)
from tigon.models.adapters.peft_config import (
    CONFIG,
    PREFIX,
    WEIGHTS,
    check_features,
    decoder_prefix,
    parse_lora_config,
    peft_config,
    rename_decoder,
    warn_of_misread_modules,
)
from tigon.models.base import LanguageModel
from tigon.models.pretrained.names import HEAD, PREFIXES, layout
from tigon.models.pretrained.save import SavePretrained, check_target, write_json, write_model
from tigon.settings.lora import LoraConfig
from tigon.utils.config import check_keywords, prefix_errors
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

PICKLE = "adapter_model.bin"
SINGLE_EXPERT = re.compile(r".+\.experts\.\d+\.\w+\.lora_[AB]\.weight")
DECODER_PREFIXES = ("layers.", "embed_tokens.")


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
    tied: bool  # whether training keeps embedding and head equal (PEFT's ensure_weight_tying)


def read_adapter(repository: Repository, model: LanguageModel) -> PeftAdapter:
    """Read and check an adapter's config and the headers of its tensors; raises FileNotFoundError
    for a missing file, and ValueError for what is not supported or not complete."""
    try:
        path = repository.file(CONFIG)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}: it holds no adapter") from error
    values = read_json(path)
    with prefix_errors(escape(path), ValueError):
        check_features(values)
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
    with prefix_errors(escape(repository.name), ValueError):
        if single := next(filter(SINGLE_EXPERT.fullmatch, names), None):
            raise ValueError(
                f"{quote(single)} adapts a single expert, a form of older PEFT versions that is "
                "not read: save the adapter again with a current PEFT"
            )
        config = parse_lora_config(values, tensors, names, model)
    # PEFT saves it for embedding and head; modules without a weight to themselves have none
    modules = [m for m in find_target_modules(model) if m.stored_path == m.name]
    base_weights = {m.path: f"{m.name}.base_layer.weight" for m in modules}
    base_names = {path: names[name] for path, name in base_weights.items() if name in names}
    tied = bool(values.get("ensure_weight_tying")) and model.ties_head
    tied = tied and changes_embedding_or_head(model, config)
    return PeftAdapter(config, Checkpoint(file, tensors), names, base_names, tied)


def _drop_duplicates(tensors: dict[str, TensorInfo], names: dict[str, str], embedding: str) -> None:
    """Removes, from both dictionaries, the tensors that PEFT writes besides the trained embedding
    and head of a resized base: copies of both, and the base's weights."""
    for name in (embedding, HEAD):
        module = name.removesuffix(".weight")
        for duplicate in ("modules_to_save", "original_module"):
            if name in names and (file_name := names.pop(f"{module}.{duplicate}.weight", None)):
                del tensors[file_name]


def _model_names(tensors: Collection[str], file: str, model: LanguageModel) -> dict[str, str]:
    """Maps the names in the family's checkpoints of what the tensors belong to, to the file's
    names; raises ValueError for two with one name."""
    names: dict[str, str] = {}
    for file_name in tensors:
        name = file_name.removeprefix(PREFIX)
        prefix = next(prefix for prefix in PREFIXES if name.startswith(prefix))
        # Without a prefix: an adapter of AutoModel, the decoder alone
        if prefix or name.startswith(DECODER_PREFIXES):
            name = "model." + name.removeprefix(prefix)
        name = model.checkpoint_names.stored_name(name)
        if name in names:
            raise ValueError(f"{escape(file)}: {quote(file_name)} repeats {quote(names[name])}")
        names[name] = file_name
    return names


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
    with prefix_errors(escape(os.fspath(path_or_repo)), ValueError):
        if size not in (None, model.config.vocab_size) and not model.config.labels:
            raise ValueError(
                f"the adapter is of {size} tokens, and the model has {model.config.vocab_size}: "
                f"call model.resize_token_embeddings({size}) first"
            )
        parts = resolve_targets(model, adapter.config)
        if trainable:
            check_dropout(model, adapter.config, parts)
        if trainable and adapter.tied:
            raise ValueError(
                "ensure_weight_tying=True keeps embedding and head equal in training, which is not "
                "supported: load it without trainable=True, or merge it and add another"
            )
    _check_base(model, adapter)
    half = model.dtype in (torch.bfloat16, torch.float16)
    dtype = dtype or (torch.float32 if half and trainable else model.dtype)
    try:
        add_parameters(model, name, adapter.config, parts, dtype, torch.device("meta"))
        _load_values(model, name, adapter)
    except BaseException:
        if name in model.adapters:
            delete_adapter(model, name)
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
    """Whether two paths are one directory, or end with the same model's name."""
    try:
        return os.path.samefile(first, second)  # first, since every run has a directory hf/
    except (OSError, ValueError):  # one does not exist here
        return _model_name(first) == _model_name(second)


def _model_name(path: str) -> str:
    """Extracts the model's name, in lower case, from a path or hub repository."""
    parts = os.path.abspath(path).replace("\\", "/").split("/")
    cached = [part for part in parts if part.startswith("models--")]
    return (cached[-1].rpartition("--")[2] if cached else parts[-1]).casefold()


def _check_base(model: LanguageModel, adapter: PeftAdapter) -> None:
    """Raises ValueError for base weights in the file that differ from the model's."""
    for path, file_name in adapter.base_names.items():
        weight = model.get_submodule(path).get_parameter("weight")
        name = escape(f"{adapter.checkpoint.name}: {file_name}")
        shape = adapter.checkpoint.tensors[file_name].shape
        if shape != weight.shape:
            raise ValueError(
                f"{name} is {list(shape)}, the model's {list(weight.shape)}: it is of another base"
            )
        stored = torch.empty_like(weight, device="cpu")
        adapter.checkpoint.read_into(file_name, stored)
        if not torch.equal(stored, weight.cpu()):
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
    options |= {"source_of": source_of, "into": into, "ignored": adapter.base_names.values()}
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
    warn_of_misread_modules(model, modules)
    dtype = dtype or next(iter(parameters.values())).dtype
    with ranks.sync_errors():
        tensors = make_entries(parameters, slices, dtype, ranks=ranks)

    def describe(root: Path) -> None:
        write_json(root / CONFIG, config)
        if tokenizer is not None:
            tokenizer.save_pretrained(root)

    return tensors, describe


# All tensors in one file, since PEFT reads no shards
write_adapter = partial(write_model, stem=Path(WEIGHTS).stem, max_shard_size=sys.maxsize)
