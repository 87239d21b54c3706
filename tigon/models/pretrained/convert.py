"""Converts checkpoints to what saving the loaded model would write, without a model in memory."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeVar, Unpack

import torch

from tigon.models.base import LanguageModel
from tigon.models.pretrained.gguf_export import save_gguf, write_gguf_model
from tigon.models.pretrained.load import build
from tigon.models.pretrained.match import match_arguments, warn_of_other_modalities
from tigon.models.pretrained.names import stored_tensors
from tigon.models.pretrained.save import (
    FileOptions,
    buffer_dtypes,
    description_writer,
    file_layout,
    save_pretrained,
    write_model,
)
from tigon.weights import Checkpoint, Layout, Repository, WriterGroup, convert_entries

M = TypeVar("M", bound=LanguageModel)


def convert_pretrained(
    source: Repository,
    target: str | os.PathLike[str],
    models: Mapping[str, type[M]],
    *,
    gguf_file: str | None = None,
    dtype: torch.dtype | Literal["auto"] = "auto",
    gguf: str | None = None,
    **options: Unpack[FileOptions],
) -> LanguageModel:
    """Convert a checkpoint to what loading and saving it would write, with a few buffers of memory.

    Returns the written model, on the meta device. `gguf` makes a GGUF file of this type, or of the
    model's if it is "auto".
    """
    model, checkpoint = build(source, models, dtype=dtype, gguf_file=gguf_file)
    warn_of_other_modalities(checkpoint)
    arguments = match_arguments(model, checkpoint)
    source_of = arguments["source_of"]
    stored_layout = {
        name: tuple(replace(part, name=source_of.get(part.name, part.name)) for part in parts)
        for name, parts in arguments["layout"].items()
    }
    write_converted(model, target, checkpoint, stored_layout, gguf=gguf, **options)
    return model


def save_model(
    model: LanguageModel,
    target: str | os.PathLike[str],
    *,
    gguf: str | None = None,
    **options: Unpack[FileOptions],
) -> None:
    """Saves a model as save_pretrained does, or as GGUF of the type `gguf`; "auto": its dtype."""
    if gguf is None:
        save_pretrained(model, target, **options)
    else:
        dtype = None if gguf == "auto" else gguf
        save_gguf(model, target, tokenizer=options.get("tokenizer"), dtype=dtype)


def write_converted(
    model: LanguageModel,
    target: str | os.PathLike[str],
    checkpoint: Checkpoint,
    stored_layout: Layout,
    *,
    gguf: str | None = None,
    **options: Unpack[FileOptions],
) -> None:
    """Writes what `save_model` would, for a model on the meta device: each tensor's rows are read
    from the checkpoint, whose tensors hold the parameters' rows as `stored_layout` says."""
    stacked = False if gguf else options.get("stacked_experts")
    target_layout = file_layout(model, stacked)
    kept = buffer_dtypes(model, target_layout)
    dtype, tokenizer = torch.float32 if gguf else model.dtype, options.get("tokenizer")
    parameters = stored_tensors(model)
    tensors = convert_entries(parameters, target_layout, dtype, checkpoint, stored_layout, kept)
    if gguf:
        kind = model.dtype if gguf == "auto" else gguf
        write_gguf_model(model, target, tensors, tokenizer=tokenizer, dtype=kind)
        return
    write_others = description_writer(model, model.dtype, tokenizer)

    def describe(root: Path) -> None:
        checkpoint.check_unchanged()  # all rows are read, and nothing has the target's name yet
        write_others(root)

    size = options.get("max_shard_size", "5GB")
    write_model(target, tensors, describe, ranks=WriterGroup(), max_shard_size=size)
