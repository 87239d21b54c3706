"""Models to Hugging Face checkpoints."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tigon.models._config import Config
from tigon.models._layout import layout
from tigon.models._model import LanguageModel
from tigon.weights import entries, new_directory, write_checkpoint


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
    tensors: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a Hugging Face checkpoint that transformers loads at once.

    In the model's dtype, or in another without touching the model. The directory must be new or
    empty, and appears whole or not at all. Under a process group every rank calls this; rank 0
    writes, and what stops it stops all of them. `stacked_experts`: one tensor for all experts of a
    layer, or each expert apart; None is what the checkpoint had that the model is from, else apart.
    `tensors`: in place of the model's parameters, by their names, such as an average of them.
    """
    dtype = dtype or model.dtype
    writes = not dist.is_initialized() or dist.get_rank() == 0
    if stacked_experts is None:
        stacked_experts = model.config.source.stacked_experts
    parts_of = layout(model, model.checkpoint_names, stacked_experts)
    found = entries(tensors or dict(model.named_parameters()), parts_of, dtype)
    opened = ExitStack()
    with _rank_0_decides():  # before the others wait in collectives
        root = opened.enter_context(new_directory(directory)) if writes else None
    with _rank_0_decides(), opened:
        write_checkpoint(root, found, max_shard_size=max_shard_size)
        if root is not None:
            config = replace(model.config, dtype=str(dtype).removeprefix("torch."))
            write_description(root, config, model.generation_config, tokenizer)


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


@contextmanager
def _rank_0_decides() -> Iterator[None]:
    """Leave together; an error of rank 0 inside is raised on every rank."""
    failed: list[str | None] = [None]
    try:
        yield
    except BaseException as error:
        failed = [f"{type(error).__name__}: {error}"]
        raise
    finally:
        if dist.is_initialized():
            dist.broadcast_object_list(failed, src=0)
    if failed[0] is not None:
        raise RuntimeError(f"rank 0 stopped with {failed[0]}")


def _tokens(config: Config) -> dict[str, Any]:
    ids = {k: getattr(config, k) for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {"_from_model_config": True, **{k: v for k, v in ids.items() if v is not None}}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
