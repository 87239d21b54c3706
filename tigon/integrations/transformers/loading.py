"""Makes transformers' models of checkpoints and of native models, and lets Auto classes do so."""

import os
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tigon import models
from tigon.integrations.transformers import model as classes
from tigon.integrations.transformers.model import CLASS_NAMES, TigonPreTrainedModel
from tigon.models.arguments import check_keywords
from tigon.models.causal_lm import CausalLM
from tigon.models.pretrained.load import LoadOptions

# Keywords of transformers' from_pretrained that change nothing here
IGNORED = frozenset(("low_cpu_mem_usage", "trust_remote_code", "use_safetensors", "use_cache"))
QUANTIZED = ("load_in_4bit", "load_in_8bit", "quantization_config", "quantize")
OPTIONS = frozenset(LoadOptions.__annotations__) - {"dtype", "device", "labels", "quantize"}


def as_transformers(
    model: CausalLM, *, projections: str = "split", tigon_options: Mapping[str, Any] | None = None
) -> TigonPreTrainedModel:
    """Makes a transformers model that has the modules and weights of a native one: no copies.

    The projections that checkpoints have separately become modules of their own in both, under
    transformers' names; projections="fused" leaves them as they are. `tigon_options` are defaults
    of forward's keywords in calls with labels, such as metrics. Raises TypeError for a model that
    is not Tigon's, and ValueError for one with adapters, quantized weights or shards.
    """
    if not isinstance(model, CausalLM):
        raise TypeError(
            f"{type(model).__name__} is no model of Tigon: load one with tigon.from_pretrained"
        )
    check_whole(model)
    config = CONFIG_MAPPING[model.config.model_type].from_dict(model.config.to_dict())
    config.name_or_path = model.config.source.name
    config.dtype = model.dtype
    cls = find_class(model)
    return cls(config, model, projections=projections, tigon_options=tigon_options)


def find_class(model: CausalLM) -> type[TigonPreTrainedModel]:
    """The class under transformers' name of a native model; ValueError if there is none."""
    name = model.config.transformers_class
    if name not in CLASS_NAMES:
        raise ValueError(
            f"transformers has no class for text alone of model_type {model.config.model_type!r}: "
            "train it with tigon train"
        )
    return getattr(classes, name)


def check_whole(model: CausalLM) -> None:
    """Raises ValueError for a model whose parameters are not simply those of its checkpoint."""
    if model.adapters:
        raise ValueError(
            f"the model has adapters ({', '.join(model.adapters)}): merge or delete them, and let "
            "PEFT add its own"
        )
    if model._quantized_weight is not None:
        raise ValueError(
            f"the model's weights are quantized ({model._quantized_weight.kind}), which "
            "transformers' Trainer and PEFT do not know: load it without quantize"
        )
    if model.shard_specs:
        raise ValueError("the model is sharded: make it a transformers model before that")


def from_pretrained(
    path_or_repo: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str = "auto",
    device_map: Any = "cpu",
    num_labels: int = 0,
    projections: str = "split",
    tigon_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> TigonPreTrainedModel:
    """Loads a checkpoint as a transformers model, in evaluation mode; see `as_transformers`.

    `device_map` names one device, or is "auto" where there is one. With `num_labels` it is a
    sequence classifier, whose head is random unless the checkpoint has one. Other keywords are
    those of `tigon.from_pretrained`, but for quantize. Raises TypeError for an unknown one, and
    ValueError for quantization and for several devices.
    """
    for name in QUANTIZED:
        if options.pop(name, None):
            raise ValueError(
                f"{name}: transformers' models of Tigon are not quantized; for LoRA over 4 bits "
                'use tigon.from_pretrained(path, quantize="nf4") and its add_adapter'
            )
    options = {name: value for name, value in options.items() if name not in IGNORED}
    if "torch_dtype" in options:
        dtype = options.pop("torch_dtype")
    check_keywords("from_pretrained", options, OPTIONS)
    device = find_device(device_map)
    model = models.from_pretrained(
        path_or_repo, dtype=dtype, device=device, labels=num_labels, **options
    )
    return as_transformers(model, projections=projections, tigon_options=tigon_options)


def find_device(device_map: Any) -> torch.device:
    """The device that a `device_map` names; ValueError if it names several, or is "auto" with
    several accelerators."""
    if isinstance(device_map, Mapping):
        names = {torch.device(device) for device in device_map.values()}
        device_map = names.pop() if len(names) == 1 else device_map
    if device_map in ("auto", "balanced", "balanced_low_0", "sequential"):
        if torch.accelerator.device_count() < 2:
            return torch.accelerator.current_accelerator() or torch.device("cpu")
    elif device_map is None:
        return torch.device("cpu")
    elif isinstance(device_map, str | int | torch.device):
        return torch.device(device_map)
    raise ValueError(
        f"device_map={device_map!r} spreads the layers over several devices, which Tigon does "
        'not: name one ("cuda:0"), and use several with torchrun or accelerate'
    )


# transformers' Auto classes

AUTO_CLASSES: dict[type[TigonPreTrainedModel], Any] = {
    classes.TigonForCausalLM: AutoModelForCausalLM,
    classes.TigonForSequenceClassification: AutoModelForSequenceClassification,
}
_replaced: list[tuple[dict[Any, Any], Any, Any]] = []  # what `unregister` puts back


def register() -> None:
    """Lets AutoModelForCausalLM and AutoModelForSequenceClassification load Tigon's models, of all
    families that transformers has, until `unregister`."""
    unregister()
    for name, (_, base) in CLASS_NAMES.items():
        cls = getattr(classes, name)
        mapping = AUTO_CLASSES[base]._model_mapping._extra_content
        _replaced.append((mapping, cls.config_class, mapping.get(cls.config_class)))
        mapping[cls.config_class] = cls


def unregister() -> None:
    """Gives transformers' Auto classes their own models back; does nothing if they have them."""
    while _replaced:
        mapping, key, before = _replaced.pop()
        if before is None:
            mapping.pop(key, None)
        else:
            mapping[key] = before
