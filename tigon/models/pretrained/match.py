"""Compares a checkpoint's headers with a model, before anything is allocated."""

import math
import re
import warnings
from collections.abc import Collection
from typing import Any

from tigon.models.base import LanguageModel
from tigon.models.config import ConfigError, ModelConfig
from tigon.models.pretrained.names import embedding_and_head, find_sources, layout, stored_tensors
from tigon.utils.json import quote
from tigon.utils.tensor_names import is_other_modality
from tigon.weights import Checkpoint, Misfits, compare_tensors, match_tensors

EXTRA_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")  # keys of how many there are


def check_sizes(config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Raises ConfigError for sizes in the config that no tensor of the checkpoint can have."""
    shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
    widest = max((size for shape in shapes.values() for size in shape), default=0)
    # Each expert is a tensor, or the rows of one tensor
    maxima = {"num_hidden_layers": len(shapes)}
    counts = "num_experts", "num_local_experts", "n_routed_experts"
    maxima |= dict.fromkeys(counts, max(len(shapes), widest))
    for key, maximum in maxima.items():
        if (value := getattr(config, key, 0) or 0) > maximum:
            raise ConfigError(
                f"{key}={value} does not fit the checkpoint, which has {len(shapes)} tensors and "
                f"no size beyond {widest}"
            )
    embedding, _ = embedding_and_head(shapes)
    expected = (config.vocab_size, config.hidden_size)
    if shapes.get(embedding, expected) != expected:
        raise ConfigError(
            f"vocab_size={expected[0]} and hidden_size={expected[1]} do not fit the checkpoint, "
            f"whose {quote(embedding)} is {quote(list(shapes[embedding]))}"
        )


def check_counts(model: LanguageModel, checkpoint: Checkpoint) -> None:
    """Raises ConfigError if a meta model has over twice the checkpoint's values or experts, so that
    `check_fit` need not name each of them."""
    needed = sum(p.numel() for p in model.parameters())
    stored = sum(math.prod(info.shape) for info in checkpoint.tensors.values())
    if needed > 2 * stored:
        raise ConfigError(f"a model of {needed} values does not fit a checkpoint of {stored}")
    names, tensors = model.checkpoint_names, checkpoint.tensors
    if names.stacked_in(tensors):
        return
    experts = sum(
        p.shape[0]
        for name, p in model.named_parameters()
        if name.endswith(tuple(names.experts)) and p.dim() == 3
    )
    if experts > 2 * len(tensors):
        raise ConfigError(
            f"a model of {experts} matrices of experts does not fit {len(tensors)} tensors"
        )


def check_fit(model: LanguageModel, checkpoint: Checkpoint) -> None:
    """Raises ValueError unless the checkpoint has exactly the tensors that the model needs."""
    arguments = match_arguments(model, checkpoint) | {"into": type(model).__name__}
    match_tensors(stored_tensors(model), **arguments)


def find_misfits(model: LanguageModel, checkpoint: Checkpoint) -> Misfits:
    """Collects the tensors for which `check_fit` would raise, by the kind of misfit."""
    return compare_tensors(stored_tensors(model), **match_arguments(model, checkpoint))[1]


def extra_tensors(model: LanguageModel, present: Collection[str]) -> set[str]:
    """Finds the tensors of multi-token prediction, if the family's checkpoints may have them: in as
    many layers past the last one as config.json says, one by default, or under prefixes of their
    own."""
    names = model.checkpoint_names
    extra = {name for name in present if names.extra and name.startswith(names.extra)}
    if not names.extra_layers:
        return extra
    layers = {name: re.match(r"(?:model\.)?layers\.(\d{1,9})\.", name) for name in present}
    first, source = model.config.num_hidden_layers, model.config.source.config
    given = [n for key in EXTRA_LAYERS if type(n := source.get(key)) is int]
    more = range(first, first + (given[0] if given else 1))
    return extra | {name for name, layer in layers.items() if layer and int(layer[1]) in more}


def unread_tensors(model: LanguageModel, present: Collection[str]) -> set[str]:
    """Finds keys and values of layers that read those of another layer, which need none."""
    blocks = enumerate(model.model.layers)
    at = [f"layers.{i}.{b.mixer_name}." for i, b in blocks if b.kv_source is not None]
    ends = [f"{layer}{name}." for layer in at for name in ("k_proj", "v_proj", "k_norm", "v_norm")]
    return {name for name in present if any(end in name for end in ends)} if ends else set()


def warn_of_extra_tensors(model: LanguageModel, checkpoint: Checkpoint) -> None:
    """Warns of tensors of multi-token prediction, which are not read and an export lacks."""
    if names := extra_tensors(model, checkpoint.tensors):
        warnings.warn(
            f"{checkpoint.name}: {len(names)} tensors are skipped, {quote(min(names))} among them; "
            "they predict further tokens (multi-token prediction), and an export will lack them",
            stacklevel=4,
        )


def warn_of_other_modalities(checkpoint: Checkpoint) -> None:
    """Warns of tensors for images and sound, which an export lacks."""
    if names := [name for name in checkpoint.tensors if is_other_modality(name)]:
        warnings.warn(
            f"{checkpoint.name}: {len(names)} tensors for images or sound are skipped, "
            f"{quote(min(names))} among them; an export is the text model alone: docs/export.md "
            "says how to put it back into the original",
            stacklevel=3,
        )


def match_arguments(model: LanguageModel, checkpoint: Checkpoint) -> dict[str, Any]:
    """Makes the keywords of `load_into` and `match_tensors` for a model and a checkpoint."""
    present = checkpoint.tensors.keys()
    family = model.checkpoint_names
    parts_of = layout(model, family, family.stacked_in(present))
    names = {part.name for parts in parts_of.values() for part in parts}
    source_of, ignored = find_sources(names, present, family)
    ignored |= extra_tensors(model, present) | unread_tensors(model, present)
    arguments = {"layout": parts_of, "source_of": source_of, "ignored": ignored}
    return arguments | {"checkpoint": checkpoint}
