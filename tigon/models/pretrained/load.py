"""Loads checkpoints, described by config.json or a GGUF file's metadata, into models."""

import os
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from tigon.generation import check_generation_config
from tigon.hub import HubOptions, config_file
from tigon.kernels.attention.backends import Backend
from tigon.layers import QuantizedWeight
from tigon.models.base import LanguageModel
from tigon.models.config import ConfigError, ModelConfig, parse_dtype, torch_dtype, vocabulary_keys
from tigon.models.pretrained.gguf import GGUFModel
from tigon.models.pretrained.match import (
    check_counts,
    check_fit,
    check_sizes,
    match_arguments,
    warn_of_extra_tensors,
)
from tigon.models.pretrained.names import (
    MULTIMODAL,
    SCORE,
    TIED_BY_TEXT,
    UNTIED,
    base_tensors,
    embedding_and_head,
    module_buffers,
)
from tigon.models.pretrained.quantization import check_quantize, load_quantized, quantize_model
from tigon.models.quantization_config import KEY as QUANTIZATION
from tigon.models.quantization_config import read_quantization
from tigon.settings.lora import Quantize
from tigon.utils import config
from tigon.utils.config import check_keywords, prefix_errors
from tigon.utils.json import escape, quote, read_json
from tigon.utils.memory import check_memory
from tigon.weights import (
    GGUF,
    STAGING_BYTES,
    Checkpoint,
    DecodedTensor,
    Repository,
    load_into,
    map_parameters,
    prepin_staging,
)
from tigon.weights.decoded import RandomTensor, ResizedTensor
from tigon.weights.entries import row_chunks

M = TypeVar("M", bound=LanguageModel)


def read_config(
    repository: Repository, models: Mapping[str, type[M]], gguf_file: str | None = None
) -> ModelConfig:
    """Reads the config of the repository's model, but no weights."""
    return open_model(repository, models, gguf_file)[1]


def open_model(
    repository: Repository, models: Mapping[str, type[M]], gguf_file: str | None
) -> tuple[str, ModelConfig, Callable[[], Checkpoint]]:
    """Returns a model's file name and config, and a function that opens its checkpoint."""
    if gguf_file is not None:
        file = escape(f"{repository.name}/{gguf_file}")
        gguf = GGUF.open(repository.file(gguf_file))
        with prefix_errors(file):
            model = GGUFModel(gguf)
            return file, parse_any_config(model.config, models), lambda: model.checkpoint(file)
    file = f"{repository.name}/config.json"
    # Configs of other families have infinities; ours are checked key by key
    content = read_json(config_file(repository), nan=True)
    with prefix_errors(file):
        config, scales = parse_any_config(content, models), read_quantization(content)
        return file, config, lambda: Checkpoint.open(repository, scales)


def parse_any_config(content: Mapping[str, Any], models: Mapping[str, type[M]]) -> ModelConfig:
    """Reads the config that config.json's content has for one of these models, the text model of a
    multimodal one, but not how weights are quantized; raises ConfigError."""
    kind = _text_config(content).get("model_type")
    if not isinstance(kind, str) or kind not in models:
        raise ConfigError(f"model_type {quote(kind)} is not {' or '.join(map(repr, models))}")
    return parse_config(models[kind], content, ignored=(QUANTIZATION,))


def parse_config(
    cls: type[M], content: Mapping[str, Any], ignored: Collection[str] = ()
) -> ModelConfig:
    """Reads this class's config from config.json's content, even a multimodal one."""
    source = {k: v for k, v in _text_config(content).items() if k not in ignored}
    config = cls.config_class.from_dict(source)
    if content.get("model_type") not in MULTIMODAL:
        return config
    return replace(config, source=replace(config.source, wrapper=content))


def _text_config(source: Mapping[str, Any]) -> Mapping[str, Any]:
    """Extracts the language model's config from a multimodal one; others are returned unchanged."""
    kind = source.get("model_type")
    if not isinstance(kind, str) or kind not in MULTIMODAL:
        return source
    text = dict(config.check_type("text_config", source.get("text_config") or {}, dict))
    if text.get("model_type") in (None, kind):  # which transformers does not look at, either
        text["model_type"] = MULTIMODAL[kind]
    if kind not in TIED_BY_TEXT:
        text["tie_word_embeddings"] = source.get("tie_word_embeddings", kind not in UNTIED)
    dtype = source.get("dtype") or source.get("torch_dtype")
    if dtype is not None and not (text.get("dtype") or text.get("torch_dtype")):
        text["dtype"] = dtype
    return text


# Models from checkpoints

C = TypeVar("C", bound=ModelConfig)


class LoadOptions(HubOptions, total=False):
    """Keywords of every `from_pretrained`."""

    dtype: torch.dtype | str  # such as "bfloat16"; "auto": the checkpoint's
    device: torch.device | str
    attention: Backend  # docs/attention.md
    gguf_file: str | None  # of the directory or repository, in place of its config and weights
    labels: int  # scores of a sequence classifier, whose head is random if there is none
    quantize: Quantize | None  # of frozen weights; docs/adapters.md, docs/weights.md
    mmap: bool  # leave weights in the file until they are used; docs/weights.md
    staging_bytes: int  # of the host's memory for buffers while weights are read


def from_pretrained(
    path_or_repo: str | os.PathLike[str],
    models: Mapping[str, type[M]],
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    attention: Backend = "auto",
    gguf_file: str | None = None,
    labels: int = 0,
    quantize: Quantize | None = None,
    mmap: bool = False,
    staging_bytes: int = STAGING_BYTES,
    shard: Callable[[M, Checkpoint], None] | None = None,
    **source: Any,
) -> M:
    """Loads the model of `models` that config.json's model_type names, in evaluation mode.

    With `mmap`, on the CPU, a weight that needs no conversion stays in the file until it is used.
    With `quantize` the projections' weights are quantized, and only adapters can be trained.
    `shard` is called with the model without memory, to keep a part of it, and its checkpoint.
    """
    check_keywords("from_pretrained", source, frozenset(LoadOptions.__annotations__))
    if gguf_file is None:
        path_or_repo, gguf_file = parse_gguf_path(path_or_repo)
    if mmap and torch.device(device).type != "cpu":
        raise ValueError(f"mmap=True maps files into the CPU's memory: it cannot be on {device}")
    _check_device(device)
    repository = Repository(path_or_repo, **source)
    with prepin_staging(torch.device(device), staging_bytes):
        model, checkpoint = build(
            repository, models, dtype=dtype, gguf_file=gguf_file, labels=labels, quantize=quantize
        )
    model.use_attention(attention)
    if shard is not None:
        shard(model, checkpoint)
    mapped = map_weights(model, checkpoint) if mmap else set()
    materialize(model, torch.device(device))
    load_weights(model, checkpoint, mapped=mapped, staging_bytes=staging_bytes)
    return model.eval()


def parse_gguf_path(
    path_or_repo: str | os.PathLike[str],
) -> tuple[str | os.PathLike[str], str | None]:
    """Split the path of a GGUF file into directory and name; other arguments stay unchanged."""
    path = Path(os.path.expanduser(path_or_repo))
    if path.suffix == ".gguf" and path.parent.is_dir() and not path.is_dir():
        return path.parent, path.name
    return path_or_repo, None


def build(
    repository: Repository,
    models: Mapping[str, type[M]],
    *,
    dtype: torch.dtype | str = "auto",
    gguf_file: str | None = None,
    fit: bool = True,
    labels: int = 0,
    seed: int = 0,
    quantize: Quantize | None = None,
    vocab_size: int | None = None,
    mean_rows: Collection[int] = (),
) -> tuple[M, Checkpoint]:
    """Build the repository's model on the meta device, and open the checkpoint that fills it.

    To shard a model: `build`, fully_shard, `materialize`, `load_weights`. Raises unless the
    checkpoint fits exactly, before anything is allocated; with `fit` False, call `find_misfits`.
    `labels`: make a sequence classifier with this number of scores; its head is random, by the
    seed, if the checkpoint has none. `vocab_size`: resize the vocabulary; rows that the checkpoint
    lacks, and those in `mean_rows`, are the mean of its rows.
    """
    model_dtype = None if dtype == "auto" else parse_dtype(dtype)
    check_quantize(quantize)
    file, config, open_checkpoint = open_model(repository, models, gguf_file)
    cls = models[config.model_type]
    with prefix_errors(file):
        checkpoint = open_checkpoint()  # last, since it may download
        check_sizes(config, checkpoint)
        config = _resolve_tied_weights(config, checkpoint)
        model_dtype = model_dtype or _default_dtype(config, checkpoint)
        stacked = cls.checkpoint_names.stacked_in(checkpoint.tensors)
        origin = replace(config.source, stacked_experts=stacked, name=repository.name)
        if repository.directory is None and repository.revision != "main":
            origin = replace(origin, revision=repository.revision)
        config = replace(config, source=origin)
        if labels:
            config, checkpoint = add_score_head(config, checkpoint, labels, seed)
        if vocab_size is not None:
            config, checkpoint = resize_vocabulary(config, checkpoint, vocab_size, mean_rows)
        model = build_on_meta(cls, config, model_dtype)
        check_counts(model, checkpoint)
    if fit:
        check_fit(model, checkpoint)
        warn_of_extra_tensors(model, checkpoint)
    if quantize is not None:
        quantize_model(model, quantize, checkpoint)
    generation = repository.optional_file("generation_config.json")
    if generation is not None:
        model.generation_config = read_json(generation)
        with prefix_errors(escape(generation)):
            check_generation_config(model.generation_config)
    return model, checkpoint


def add_score_head(
    config: C, checkpoint: Checkpoint, labels: int, seed: int
) -> tuple[C, Checkpoint]:
    """Returns the config of a sequence classifier with this number of scores, and the checkpoint
    with a random head, by the seed, if it has none.

    Raises ConfigError as `as_sequence_classifier` does.
    """
    config = as_sequence_classifier(config, labels)
    if SCORE in checkpoint.tensors:
        return config, checkpoint
    shape = (labels, config.hidden_size)
    head = RandomTensor(SCORE, shape, Path(), 0, std=config.initializer_range, seed=seed)
    return config, Checkpoint(checkpoint.name, {**checkpoint.tensors, SCORE: head})


def resize_vocabulary(
    config: C, checkpoint: Checkpoint, size: int, mean_rows: Collection[int]
) -> tuple[C, Checkpoint]:
    """Returns config and checkpoint with `size` rows of embedding and head, and of a second
    embedding of all tokens. Rows that the checkpoint lacks, and those in `mean_rows`, become the
    mean of its rows, when they are read."""
    tensors, keys = dict(checkpoint.tensors), vocabulary_keys(config)
    embedding, head = embedding_and_head(tensors)
    second = embedding.replace("embed_tokens", "embed_tokens_per_layer")
    for name in (embedding, head, *[second] * (len(keys) - 1)):
        if (info := tensors.get(name)) is None:
            continue
        shape = (size, *info.shape[1:])
        if size > info.shape[0] or mean_rows:
            rows = frozenset(mean_rows)
            tensors[name] = ResizedTensor(name, shape, info.path, info.offset, info, rows)
        else:
            tensors[name] = replace(info, shape=shape)
    sizes: dict[str, Any] = dict.fromkeys(keys, size)
    return replace(config, **sizes), Checkpoint(checkpoint.name, tensors)


def as_sequence_classifier(config: C, labels: int) -> C:
    """Makes the config of a sequence classifier with this number of scores. Raises ConfigError if
    transformers has no such class, or the config has another number."""
    if config.labels not in (0, labels):
        raise ConfigError(f"the model has {config.labels} scores of a sequence, not {labels}")
    if config.classifier() is None:
        raise ConfigError(f"transformers has no class for scores of {config.model_type!r}")
    return replace(config, labels=labels)


def build_on_meta(cls: type[M], config: ModelConfig, dtype: torch.dtype) -> M:
    """Builds a model without memory, in `dtype`; raises ConfigError for sizes that a layer refuses,
    and warns if its activations exceed float16 in that dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"), _NoInit():
            model = cls(config)
    except ConfigError:
        raise
    except ValueError as error:  # from a layer
        raise ConfigError(str(error)) from None
    except (RuntimeError, OverflowError) as error:  # meta tensors take no memory
        raise ConfigError(f"no model can have these sizes: {str(error).splitlines()[0]}") from None
    finally:
        torch.set_default_dtype(before)
    model.warn_of_overflow()
    return model


class _NoInit(TorchFunctionMode):
    """Disables torch.nn.init, which on the meta device would import torch's compiler."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return None
        return func(*args, **(kwargs or {}))


def materialize(model: nn.Module, device: torch.device) -> None:
    """Allocates every meta parameter and stored buffer, without values, sharded or not.

    Raises ConfigError, before anything is allocated, if the weights exceed the device's memory.
    """
    shards = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    needed = sum(shard.nbytes for shard in shards if shard.is_meta)
    check_memory(needed, device, "the weights take", ConfigError)
    for p in model.parameters():
        if p.is_meta:
            if type(p) is nn.Parameter:  # six times as fast as empty_like of a meta tensor
                empty = torch.empty(p.shape, dtype=p.dtype, device=device)
            else:
                empty = torch.empty_like(p, device=device)
            # In place, so that ties hold, and FSDP2 and optimizers keep their parameters
            torch.utils.swap_tensors(p, nn.Parameter(empty, p.requires_grad))
    for module in model.modules():
        if isinstance(module, QuantizedWeight) and any(b.is_meta for b in module.buffers()):
            module.allocate(device)
        for name, buffer in module_buffers(module).items():
            if buffer.is_meta:
                setattr(module, name, torch.empty_like(buffer, device=device))
    model.to(device)  # buffers; and FSDP2 takes note of its new shards


def map_weights(model: LanguageModel, checkpoint: Checkpoint) -> set[str]:
    """Memory-maps the meta parameters that files hold unchanged, and returns their names."""
    parameters = dict(model.named_parameters())
    mapped = map_parameters(parameters, **match_arguments(model, checkpoint))
    for name, tensor in mapped.items():
        p = parameters[name]
        torch.utils.swap_tensors(p, nn.Parameter(tensor, p.requires_grad))
    return set(mapped)


def load_weights(
    model: LanguageModel,
    checkpoint: Checkpoint,
    *,
    mapped: Collection[str] = (),
    staging_bytes: int = STAGING_BYTES,
) -> None:
    """Fills the base's parameters and stored buffers, except those `mapped`; raises unless the
    checkpoint fits exactly.

    Buffers take at most `staging_bytes` of host memory.
    """
    tensors = {n: t for n, t in base_tensors(model).items() if n not in mapped}
    load_into(
        tensors,
        **match_arguments(model, checkpoint),
        into=type(model).__name__,
        staging_bytes=staging_bytes,
    )
    load_quantized(model, checkpoint, staging_bytes)


def _resolve_tied_weights(config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
    """Returns the config, untied with a warning if the checkpoint's embedding and head differ."""
    ends = embedding_and_head(checkpoint.tensors)
    has_both = checkpoint.tensors.keys() >= {*ends}
    if not config.tie_word_embeddings or not has_both or _are_equal(checkpoint, *ends):
        return config
    warnings.warn(
        f"{checkpoint.name}: tie_word_embeddings is true, but lm_head and embed_tokens differ; "
        "they stay apart",
        stacklevel=4,
    )
    return replace(config, tie_word_embeddings=False)


def _are_equal(checkpoint: Checkpoint, first: str, second: str) -> bool:
    """Returns whether two tensors have the same shape and values; reads a few rows at a time."""
    info = checkpoint.tensors[first]
    if info.shape != checkpoint.tensors[second].shape:
        return False
    for row, count in row_chunks(info.shape[0], info.nbytes // max(1, info.shape[0])):
        a, b = torch.empty((2, count, *info.shape[1:]), dtype=info.dtype, device="cpu")
        checkpoint.read_into(first, a, row=row)
        checkpoint.read_into(second, b, row=row)
        if not torch.equal(a, b):
            return False
    return True


def _check_device(device: torch.device | str) -> None:
    """Raises ValueError for a device that is unknown or not available."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {str(device)!r} cannot be used here: {reason}") from None


def _default_dtype(config: ModelConfig, checkpoint: Checkpoint) -> torch.dtype:
    """Chooses the config's dtype, else the checkpoint's first floating one, else float32."""
    if config.dtype is not None:
        try:
            return torch_dtype(config.dtype)
        except ConfigError as error:
            raise ConfigError(f"{error}; pass dtype=") from None
    plain = (i for i in checkpoint.tensors.values() if not isinstance(i, DecodedTensor))
    floating = (i.dtype for i in plain if i.dtype.is_floating_point)
    return next(floating, torch.float32)
