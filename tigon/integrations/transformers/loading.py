"""Makes transformers' models of checkpoints and of native models, and lets Auto classes do so."""

import os
from collections.abc import Mapping
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tigon.integrations.transformers import model as classes
from tigon.integrations.transformers.model import CLASS_NAMES, TigonPreTrainedModel, find_class
from tigon.models.causal_lm import CausalLM
from tigon.models.pretrained.names import MULTIMODAL, TEXT_ALONE


def as_transformers(
    model: CausalLM, *, tigon_options: Mapping[str, Any] | None = None
) -> TigonPreTrainedModel:
    """Makes a transformers model that has the modules and weights of a native one: no copies.

    The projections that checkpoints have separately become modules of their own in both, under
    transformers' names. `tigon_options` are defaults of forward's keywords in calls with labels,
    such as metrics. Raises TypeError for a model that is not Tigon's, and ValueError for one with
    adapters, quantized weights or shards.
    """
    if not isinstance(model, CausalLM):
        raise TypeError(
            f"{type(model).__name__} is no model of Tigon: load one with tigon.from_pretrained"
        )
    return find_class(model).from_native(model, tigon_options=tigon_options)


def from_pretrained(path_or_repo: str | os.PathLike[str], **options: Any) -> TigonPreTrainedModel:
    """Loads a checkpoint as a transformers model, in evaluation mode; see `as_transformers`.

    `device_map` names one device, by default the CPU, or is "auto" where there is one accelerator.
    With `num_labels` it is a sequence classifier, whose head is random unless the checkpoint has
    one. Other keywords are `tigon_options`, those of `tigon.from_pretrained`, but for quantize, and
    of the config's fields those that change no layer, such as use_cache; so may `config`,
    transformers' one. `attn_implementation` names kernels of transformers, and has no effect but a
    warning: `attention` names Tigon's. Raises TypeError for an unknown keyword, and ValueError for
    quantization, for several devices and for a config of another model.
    """
    return TigonPreTrainedModel.from_pretrained(path_or_repo, **options)


# transformers' Auto classes

AUTO_CLASSES: dict[type[TigonPreTrainedModel], Any] = {
    classes.TigonForCausalLM: AutoModelForCausalLM,
    classes.TigonForSequenceClassification: AutoModelForSequenceClassification,
}
_originals: list[tuple[dict[Any, Any], Any, Any]] = []  # what `unregister` puts back


def register() -> None:
    """Lets AutoModelForCausalLM and AutoModelForSequenceClassification load Tigon's models, of all
    families that transformers has, until `unregister`."""
    unregister()
    for name, (_, base) in CLASS_NAMES.items():
        cls = getattr(classes, name)
        mapping = AUTO_CLASSES[base]._model_mapping._extra_content
        own = cls.config_class
        kinds = TEXT_ALONE if base is classes.TigonForCausalLM else ()
        # Of a multimodal checkpoint, too, of which transformers makes the text model
        wrappers = [CONFIG_MAPPING[k] for k in kinds if MULTIMODAL[k] == own.model_type]
        for config_class in (own, *wrappers):
            _originals.append((mapping, config_class, mapping.get(config_class)))
            mapping[config_class] = cls


def unregister() -> None:
    """Gives transformers' Auto classes their own models back; does nothing if they have them."""
    while _originals:
        mapping, key, before = _originals.pop()
        if before is None:
            mapping.pop(key, None)
        else:
            mapping[key] = before
