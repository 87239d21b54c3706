"""Models to Hugging Face checkpoints."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace as replaced
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tigon.models._config import Config
from tigon.models._layout import layout
from tigon.models._model import LanguageModel
from tigon.weights import Entry, Ranks, entries, new_directory, write_checkpoint


class SavesItself(Protocol):
    """A tokenizer, as far as an export needs one."""

    def save_pretrained(self, directory: str | os.PathLike[str]) -> object: ...


def save_pretrained(
    model: LanguageModel,
    directory: str | os.PathLike[str],
    *,
    tokenizer: SavesItself | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    stacked_experts: bool | None = None,
    replace: bool = False,
    values: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a Hugging Face checkpoint that transformers loads at once.

    In the model's dtype, or in another without touching the model. The directory must be new or
    empty, and appears whole or not at all; with `replace`, what was there stays until the new one
    is whole. Under a process group every rank calls this and writes its own rows, so that all need
    one file system; what stops one rank stops all of them. `stacked_experts`: one tensor for all
    experts of a layer, or each expert apart; None is what the checkpoint had that the model is
    from, else apart. `values`: in place of parameters, by their names, such as an average of them;
    of a sharded parameter this rank's part.
    """
    ranks = Ranks()
    tensors, describe = prepare_save(
        model,
        tokenizer=tokenizer,
        dtype=dtype,
        stacked_experts=stacked_experts,
        values=values,
        ranks=ranks,
    )
    options: dict[str, Any] = {"max_shard_size": max_shard_size, "replace": replace}
    write_model(directory, tensors, describe, ranks=ranks, **options)


def prepare_save(
    model: LanguageModel,
    *,
    tokenizer: SavesItself | None,
    ranks: Ranks,
    dtype: torch.dtype | None = None,
    stacked_experts: bool | None = None,
    values: Mapping[str, Tensor] | None = None,
) -> tuple[list[Entry], Callable[[Path], None]]:
    """What save_pretrained writes: tensors, and what adds the other files to a directory."""
    dtype = dtype or model.dtype
    if stacked_experts is None:
        stacked_experts = model.config.source.stacked_experts
    parts_of = layout(model, model.checkpoint_names, stacked_experts)
    with ranks.together():
        tensors = entries(
            dict(model.named_parameters()), parts_of, dtype, values=values, ranks=ranks
        )
    config = replaced(model.config, dtype=str(dtype).removeprefix("torch."))
    generation = model.generation_config
    return tensors, lambda root: write_description(root, config, generation, tokenizer)


def write_model(
    directory: str | os.PathLike[str],
    tensors: Sequence[Entry],
    describe: Callable[[Path], None],
    *,
    ranks: Ranks,
    max_shard_size: int | str = "5GB",
    replace: bool = False,
) -> None:
    """A directory with the tensors and what the first rank's `describe` writes into it."""
    needed = sum(entry.nbytes for entry in tensors)
    with ExitStack() as opened:
        root = None
        with ranks.together():
            if ranks.first:
                root = opened.enter_context(
                    new_directory(directory, replace=replace, needed=needed)
                )
        write_checkpoint(root, tensors, max_shard_size=max_shard_size, ranks=ranks)
        with ranks.together():
            if root is not None:
                describe(root)
            opened.close()  # gives the directory its name


def write_description(
    root: Path, config: Config, generation: Any, tokenizer: SavesItself | None
) -> None:
    """All files of a checkpoint but its weights."""
    _write_json(root / "config.json", config.to_dict())
    generation = generation or _tokens(config)
    if hasattr(generation, "to_diff_dict"):  # transformers' object
        generation = generation.to_diff_dict()
    _write_json(root / "generation_config.json", generation)
    if tokenizer is not None:
        tokenizer.save_pretrained(root)


def _tokens(config: Config) -> dict[str, Any]:
    ids = {k: getattr(config, k) for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {"_from_model_config": True, **{k: v for k, v in ids.items() if v is not None}}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
