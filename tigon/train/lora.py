"""The adapter of a run: from its settings into the model, and out of its checkpoints."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tigon.models import CausalLM, begin_adapter, quantise, quantised_bytes, saved_ends
from tigon.train import checkpoint
from tigon.train.config import Config
from tigon.utils.config import build_settings, read_settings


def add_lora(model: CausalLM, config: Config) -> None:
    """The settings' adapter, in param_dtype, with a reward model's head; on a model without memory
    without values. Before it the base is quantised where the settings say so and it is not yet."""
    assert config.lora is not None
    if config.lora.quantize and not quantised_bytes(model):
        quantise(model, config.lora.quantize)
    own = config.lora.adapter(config.model, config.revision or "")
    if config.labels and "score" not in own.modules_to_save:  # new, and so trained whole
        own = replace(own, modules_to_save=(*own.modules_to_save, "score"))
    if config.new_tokens:  # PEFT resizes its base alike, and finds the rows in the adapter
        ends = (*own.modules_to_save, *saved_ends(model))
        own = replace(own, modules_to_save=tuple(dict.fromkeys(ends)))
    model.add_adapter(own, dtype=getattr(torch, config.param_dtype))


def begin_lora(model: CausalLM, config: Config) -> None:
    """Its first values: the same on any number of ranks."""
    begin_adapter(model, generator=torch.Generator().manual_seed(config.seed))


def settings_of(source: Path) -> Config | None:
    """The settings of the run that made a checkpoint of an adapter; None: it is one of a model."""
    values: dict[str, Any] = checkpoint.read_metadata(source).get("config", {})
    if not values.get("lora"):
        return None
    try:
        return build_settings(Config, read_settings(Config, values))
    except ValueError as error:
        raise ValueError(f"{source / 'run.json'}: {error}") from None
