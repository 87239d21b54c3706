"""What describes a checkpoint's model: config.json, or a GGUF file's metadata."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from tigon.hub import config_file
from tigon.models._config import Config, ConfigError
from tigon.models._gguf import GGUFModel
from tigon.models._layout import MULTIMODAL
from tigon.models._model import LanguageModel
from tigon.models._quantised import KEY as QUANTISATION
from tigon.models._quantised import read_quantisation
from tigon.utils.config import check_type
from tigon.utils.json import escape, quote, read_json
from tigon.weights import GGUF, Checkpoint, Repository

M = TypeVar("M", bound=LanguageModel)


def read_config(
    repository: Repository, models: Mapping[str, type[M]], gguf_file: str | None = None
) -> tuple[type[M], Config]:
    """The class of the repository's model and its config.json; no weights are looked at."""
    return describe(repository, models, gguf_file)[1:3]


def describe(
    repository: Repository, models: Mapping[str, type[M]], gguf_file: str | None
) -> tuple[str, type[M], Config, Callable[[], Checkpoint]]:
    """What describes the model, for messages; what it is; and what opens its checkpoint."""
    if gguf_file is not None:
        file = escape(f"{repository.name}/{gguf_file}")
        gguf = GGUF.open(repository.file(gguf_file))
        with named(file):
            model = GGUFModel(gguf)
            cls = _class_of(model.config, models)
            config = cls.config_class.from_dict(model.config)
            return file, cls, config, lambda: model.checkpoint(file)
    file = f"{repository.name}/config.json"
    # Models of other families have infinities; what is read here is checked key by key
    whole = read_json(config_file(repository), nan=True)
    with named(file):
        source = _text_config(whole)
        cls = _class_of(source, models)
        scales = read_quantisation(whole)
        source = {key: value for key, value in source.items() if key != QUANTISATION}
        config = cls.config_class.from_dict(source)
        return file, cls, config, lambda: Checkpoint.open(repository, scales)


def _class_of(source: Mapping[str, Any], models: Mapping[str, type[M]]) -> type[M]:
    kind = source.get("model_type")
    if not isinstance(kind, str) or kind not in models:
        raise ConfigError(f"model_type {quote(kind)} is not {' or '.join(map(repr, models))}")
    return models[kind]


def _text_config(source: dict[str, Any]) -> dict[str, Any]:
    """The text model's part of a multimodal config; any other config as it is."""
    kind = source.get("model_type")
    if not isinstance(kind, str) or kind not in MULTIMODAL:
        return source
    text = dict(check_type("text_config", source.get("text_config") or {}, dict))
    text.setdefault("model_type", MULTIMODAL[kind])
    text.setdefault("tie_word_embeddings", source.get("tie_word_embeddings", True))
    dtype = source.get("dtype") or source.get("torch_dtype")
    if dtype is not None and not (text.get("dtype") or text.get("torch_dtype")):
        text["dtype"] = dtype
    return text


@contextmanager
def named(file: str) -> Iterator[None]:
    """Let a ConfigError say whose config it is."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
