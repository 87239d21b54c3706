"""Writes models as Hugging Face checkpoints, uploads them, and converts checkpoints."""

import json
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace as replaced
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from tigon.models.base import LanguageModel
from tigon.models.config import ModelConfig, parse_dtype
from tigon.models.pretrained.gguf_vocabulary import SavePretrained
from tigon.models.pretrained.names import base_tensors, layout, stored_buffers
from tigon.models.pretrained.quantization import count_parameters, dequantized_entries
from tigon.models.pretrained.upload import UploadTarget, write_card
from tigon.utils.json import list_first
from tigon.utils.paths import expand_user
from tigon.weights import (
    Layout,
    TensorEntry,
    WriterGroup,
    local_shard,
    make_entries,
    write_checkpoint,
)
from tigon.weights.files import check_free, new_directory
from tigon.weights.write import all_finite


class FileOptions(TypedDict, total=False):
    """Keywords of every function that writes a model's files."""

    tokenizer: SavePretrained | None
    max_shard_size: int | str
    stacked_experts: bool | None  # one tensor for all experts of a layer; None: as it was loaded


def save_pretrained(
    model: LanguageModel,
    directory: str | os.PathLike[str],
    *,
    tokenizer: SavePretrained | None = None,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
    stacked_experts: bool | None = None,
    replace: bool = False,
    values: Mapping[str, Tensor] | None = None,
) -> None:
    """Writes a Hugging Face checkpoint that transformers loads at once.

    `dtype` (a torch.dtype or its name) is the model's by default. The directory must be new or
    empty, and appears complete or not at all. With `replace` it may hold an earlier export, which
    stays until the new one is complete; other files, such as notes, are kept. Under a process group
    every rank calls this and writes its rows, on one file system; an error on one rank stops all.
    `stacked_experts`: one tensor for all experts of a layer, or one for each; None: as in the
    model's checkpoint, else one for each. `values`: tensors to write instead of parameters, by
    name, such as averages; of a sharded one this rank's shard. Quantized weights are dequantized.
    """
    ranks = WriterGroup()
    with ranks.sync_errors():
        if ranks.first:
            check_target(expand_user(directory), replace)
    files = ranks.gather(model.files_digest)
    if unequal := [rank for rank, digest in enumerate(files) if digest != files[0]]:
        raise ValueError(
            f"rank {unequal[0]} has read other files of the model than rank 0: give all hosts the "
            "same files"
        )
    dtype = model.dtype if dtype is None else parse_dtype(dtype)
    check_no_adapters(model)
    tensors, describe = prepare_save(
        model,
        tokenizer=tokenizer,
        ranks=ranks,
        dtype=dtype,
        stacked_experts=stacked_experts,
        values=values,
    )
    _warn_unless_finite(model, dtype, values or {})
    write_model(
        directory, tensors, describe, ranks=ranks, max_shard_size=max_shard_size, replace=replace
    )


def check_no_adapters(model: LanguageModel) -> None:
    """Raises ValueError for a model with adapters, which are no part of its files."""
    if model.adapters:
        raise ValueError(
            f"the model has adapters ({', '.join(model.adapters)}), which are no part of its "
            "files: save_adapter writes them alone, merge_adapter adds one to the weights"
        )


def prepare_save(
    model: LanguageModel,
    *,
    tokenizer: SavePretrained | None,
    ranks: WriterGroup,
    dtype: torch.dtype,
    stacked_experts: bool | None = None,
    values: Mapping[str, Tensor] | None = None,
) -> tuple[list[TensorEntry], Callable[[Path], None]]:
    """Collects the tensors that save_pretrained writes, and a writer of the other files."""
    if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
        raise TypeError(f"tokenizer must be a tokenizer, or None, not {tokenizer!r}")
    parts_of = file_layout(model, stacked_experts)
    with ranks.sync_errors():
        tensors = make_entries(base_tensors(model), parts_of, dtype, values=values, ranks=ranks)
        kept = buffer_dtypes(model, parts_of)
        tensors = [t._replace(dtype=kept.get(t.name, t.dtype)) for t in tensors]
        tensors += dequantized_entries(model, parts_of, dtype, ranks)
    return tensors, description_writer(model, dtype, tokenizer)


def buffer_dtypes(model: LanguageModel, parts_of: Layout) -> dict[str, torch.dtype]:
    """Maps the names of the buffers' tensors to their dtypes, which exports keep."""
    return {p.name: b.dtype for n, b in stored_buffers(model).items() for p in parts_of[n]}


def file_layout(model: LanguageModel, stacked_experts: bool | None) -> Layout:
    """Maps parameters to the tensors to write; None: experts as in the model's checkpoint."""
    if stacked_experts is None:
        stacked_experts = model.config.source.stacked_experts
    return layout(model, model.checkpoint_names, stacked_experts)


def description_writer(
    model: LanguageModel, dtype: torch.dtype, tokenizer: SavePretrained | None
) -> Callable[[Path], None]:
    """Makes a function that writes all files of a checkpoint but its weights into a directory."""
    dtype_name: Any = str(dtype).removeprefix("torch.")
    config, generation = replaced(model.config, dtype=dtype_name), model.generation_config
    return lambda root: write_description(root, config, generation, tokenizer)


def _warn_unless_finite(
    model: LanguageModel, dtype: torch.dtype, values: Mapping[str, Tensor]
) -> None:
    """Warns of this rank's weights that are NaN or infinite in the export's dtype."""
    shards = {n: local_shard(n, values.get(n, p)).memory for n, p in model.named_parameters()}
    shards = {name: memory for name, memory in shards.items() if memory.numel()}
    is_finite = partial(all_finite, device=torch.device("cpu"), most=torch.finfo(dtype).max)
    if is_finite(shards.values()):
        return
    bad = [name for name, memory in shards.items() if not is_finite([memory])]
    text = f"weights that are NaN or infinite in {dtype} are saved: {list_first(bad)}"
    warnings.warn(text, stacklevel=3)


def check_target(directory: Path, replace: bool, mark: str = "config.json") -> None:
    """Raises FileExistsError, before any work, unless the directory is new or empty, or, with
    `replace`, has the file `mark`, which identifies an earlier export."""
    if replace:
        check_free(directory, replace=True)
        if directory.is_dir() and any(directory.iterdir()) and not (directory / mark).is_file():
            raise FileExistsError(
                f"{directory} holds files and no {mark}: replace=True takes earlier exports alone; "
                "choose another path"
            )
        return
    try:
        check_free(directory)
    except FileExistsError as error:
        hint = "; replace=True replaces an earlier export" if directory.is_dir() else ""
        raise FileExistsError(f"{error}{hint}") from None


# Files that are part of a tokenizer with tokenizer.json
TOKENIZER = re.compile(
    r"chat_template\.jinja|additional_chat_templates/.*|(special_tokens_map|added_tokens)\.json"
)


def write_model(
    directory: str | os.PathLike[str],
    tensors: Sequence[TensorEntry],
    describe: Callable[[Path], None],
    *,
    ranks: WriterGroup,
    max_shard_size: int | str = "5GB",
    stem: str = "model",
    replace: bool = False,
) -> None:
    """Writes a directory with the tensors, and the files that `describe` writes on the first rank.

    With `replace`, files with other names are kept, except an earlier export's weights.
    """
    needed = sum(entry.nbytes for entry in tensors)
    weights = re.compile(rf"{re.escape(stem)}(-\d+-of-\d+)?\.safetensors(\.index\.json)?")

    def stale(name: str) -> bool:
        has_tokenizer = root is not None and (root / "tokenizer.json").exists()
        return bool(weights.fullmatch(name) or (has_tokenizer and TOKENIZER.fullmatch(name)))

    with ExitStack() as opened:
        root = None
        with ranks.sync_errors():
            if ranks.first:
                root = opened.enter_context(
                    new_directory(directory, replace=replace, needed=needed, stale=stale)
                )
        write_checkpoint(root, tensors, max_shard_size=max_shard_size, stem=stem, ranks=ranks)
        with ranks.sync_errors():
            if root is not None:
                describe(root)
            opened.close()  # gives the directory its name


def write_description(
    root: Path, config: ModelConfig, generation: Any, tokenizer: SavePretrained | None
) -> None:
    """Writes all files of a checkpoint but its weights: config.json, generation_config.json (only
    special tokens' ids if `generation` is empty) and the tokenizer's."""
    write_json(root / "config.json", config.to_file())
    if not generation:
        ids = {key: getattr(config, f"{key}_token_id") for key in ("bos", "eos", "pad")}
        generation = {"_from_model_config": True}
        generation |= {f"{key}_token_id": id for key, id in ids.items() if id is not None}
    if hasattr(generation, "to_diff_dict"):  # transformers' object
        generation = generation.to_diff_dict()
    write_json(root / "generation_config.json", generation)
    if tokenizer is not None:
        tokenizer.save_pretrained(root)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes indented JSON."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# Uploading


def push_to_hub(
    model: LanguageModel,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str | None = None,
    token: str | bool | None = None,
    create_pr: bool = False,
    card: str | None = None,
    overwrite_card: bool = False,
    dtype: torch.dtype | str | None = None,
    **options: Unpack[FileOptions],
) -> str:
    """Uploads what `save_pretrained` writes; returns the address of the repository, or of the pull
    request with `create_pr`.

    The repository is made if there is none: `private`, or as the account's default is (None). A
    `revision` is a branch. All files come in one commit, and what the hub has already is not sent
    again. `card` is the text of README.md; None is a short one. A card there that somebody has
    changed stays, with a warning, unless `overwrite_card`. Under a process group every rank calls
    this, and all must see rank 0's temporary directory. Raises OSError, saying what to do, if the
    hub cannot be reached or refuses: before anything is written, where that can be known.
    """
    ranks = WriterGroup()
    with ExitStack() as stack:
        temporary = ""
        with ranks.sync_errors():
            if ranks.first:
                destination = UploadTarget(
                    repo_id, private=private, revision=revision, token=token, create_pr=create_pr
                )
                temporary = stack.enter_context(tempfile.TemporaryDirectory())
        folder = Path(ranks.gather(temporary)[0], "model")
        save_pretrained(model, folder, dtype=dtype, **options)
        address = ""
        with ranks.sync_errors():
            if ranks.first:
                if card is None:
                    kind, count = model.config.transformers_class, count_parameters(model)
                    about = f"`{kind}` with {count:,} parameters, saved by Tigon."
                    card = write_card(destination.name, about, tags=[model.config.model_type])
                address = destination.upload(
                    folder, card=card, message=commit_message, overwrite_card=overwrite_card
                )
        return ranks.gather(address)[0]
