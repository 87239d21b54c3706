"""Checkpoints to checkpoints of another dtype or form, without a model in memory."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from tigon.models._fit import sources
from tigon.models._layout import layout
from tigon.models._load import build
from tigon.models._model import LanguageModel
from tigon.models._save import SavesItself, write_description, write_model
from tigon.weights import Layout, Repository, Stored, Writers, converted, height

M = TypeVar("M", bound=LanguageModel)


def convert(
    source: Repository,
    directory: str | os.PathLike[str],
    models: Mapping[str, type[M]],
    *,
    gguf_file: str | None = None,
    tokenizer: SavesItself | None = None,
    dtype: torch.dtype | Literal["auto"] = "auto",
    max_shard_size: int | str = "5GB",
    stacked_experts: bool | None = None,
) -> LanguageModel:
    """What `from_pretrained` and then `save_pretrained` write, in a few buffers of memory.

    Returns the model that was written, on the meta device.
    """
    model, checkpoint = build(source, models, dtype=dtype, gguf_file=gguf_file)
    found = sources(model, checkpoint)
    stored_layout, source_of = found["layout"], found["source_of"]
    shapes = {part.name: part.shape for parts in stored_layout.values() for part in parts}
    stored = {
        name: [Stored(0, 0, height(shape), 0, source_of.get(name, name), checkpoint)]
        for name, shape in shapes.items()
    }
    write_converted(
        model,
        directory,
        stored,
        stored_layout,
        tokenizer=tokenizer,
        max_shard_size=max_shard_size,
        stacked_experts=stacked_experts,
    )
    return model


def write_converted(
    model: LanguageModel,
    directory: str | os.PathLike[str],
    stored: Mapping[str, Sequence[Stored]],
    stored_layout: Layout,
    *,
    tokenizer: SavesItself | None,
    max_shard_size: int | str,
    stacked_experts: bool | None,
) -> None:
    """What save_pretrained writes of a model on the meta device, whose weights are `stored`."""
    if stacked_experts is None:
        stacked_experts = model.config.source.stacked_experts
    wanted = layout(model, model.checkpoint_names, stacked_experts)
    changes: dict[str, Any] = {"dtype": str(model.dtype).removeprefix("torch.")}
    config = replace(model.config, **changes)

    def describe(root: Path) -> None:
        write_description(root, config, model.generation_config, tokenizer)

    write_model(
        directory,
        converted(wanted, model.dtype, stored, stored_layout),
        describe,
        ranks=Writers(),
        max_shard_size=max_shard_size,
    )
