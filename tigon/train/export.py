"""Exports weights in Hugging Face format: of a checkpoint, and of an adapter on its base."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from tigon.hub import Repository
from tigon.models import CausalLM, from_pretrained, materialize
from tigon.models.adapters.adapters import adapter_parameters
from tigon.models.adapters.peft_config import read_base
from tigon.models.adapters.peft_files import read_vocabulary_size
from tigon.models.config import torch_dtype
from tigon.models.pretrained.convert import save_model, write_converted
from tigon.models.pretrained.load import parse_gguf_path
from tigon.parallel import shard_layers
from tigon.settings.config import Config
from tigon.tokenizer import Tokenizer
from tigon.train import checkpoint, resume
from tigon.train.model import (
    add_lora,
    base_digest,
    build_adapted_model,
    model_from_checkpoint_config,
    read_adapter_run_config,
)
from tigon.utils.json import escape, list_first, quote
from tigon.weights.files import read_lock
from tigon.weights.write import all_finite

SMALL_FILES = (".json", ".txt", ".jinja", ".model")  # files of a checkpoint that hold no tensors
MAX_NAME_LENGTH = 1000  # characters of a path or a name


# Checkpoints of runs


def find_checkpoint(path: str) -> Path | None:
    """Returns `path` if it is a checkpoint, the newest one if it is a run, else None. Raises
    FileNotFoundError for a run without one."""
    run = Path(path)
    if (run / "run.json").is_file():
        return run
    newest = checkpoint.latest(run / "checkpoints")
    if newest is None and (run / "checkpoints").is_dir() and (run / "config.yaml").is_file():
        export = run / "hf"
        hint = f"its export is {export}" if export.is_dir() else "save_every says when it has one"
        raise FileNotFoundError(f"{path} is a run without a checkpoint: {hint}")
    return newest


def load_checkpoint(
    source: Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    mesh: DeviceMesh | None = None,
    expert_parallel: bool = False,
    base: str | None = None,
) -> tuple[CausalLM, Tokenizer]:
    """Loads model and tokenizer of a checkpoint, however many ranks wrote it.

    Args:
        dtype: of the model; None is that of config.json, which the run's export has too.
        mesh: of one dimension with all ranks, which share the model: every rank calls this.
        expert_parallel: whether ranks of the mesh have whole experts.
        base: of an adapter's run, in place of the one that run.json names.

    Raises ValueError, naming the file, if the checkpoint is damaged, if its base has other weights
    or cannot be trusted, and with `mesh` as `check_shareable` does.
    """
    if base is not None and read_adapter_run_config(source) is None:
        raise ValueError(f"--base {base}: {source} is no checkpoint of an adapter")
    if mesh is not None:
        check_shareable(source)
    with read_lock(source):
        checkpoint.verify(source, wanted=_is_export_file)
        if (config := read_adapter_run_config(source)) is not None:
            config = _with_base(source, config, base)
            # Its tokenizer has the new tokens, and the adapter their rows
            model = build_adapted_model(replace(config, tokenizer=str(source)), dtype, device)
        else:
            model = meta_model_from_checkpoint(source, dtype)
            if mesh is not None:
                shard_layers(model, mesh, expert_parallel=expert_parallel)
            materialize(model, torch.device(device))
        checkpoint.load(source, model)
        tokenizer = Tokenizer.from_pretrained(source)
    saved = checkpoint.read_metadata(source).get("config", {})
    tokenizer.use_chat_template_kwargs(saved.get("chat_template_kwargs") or {})
    return model.eval(), tokenizer


def _with_base(source: Path, config: Config, base: str | None) -> Config:
    """Returns the settings with the base to use, `base` or that of run.json, and prints which.

    run.json may come from anybody, who would have weights of this machine exported: those that it
    names are used only if it knows their digest.
    """
    where = "--base"
    if base is None:
        base, where = config.init or config.model, escape(source / "run.json")
        is_local = os.path.exists(os.path.expanduser(base))
        if is_local and "base" not in checkpoint.read_metadata(source):
            raise ValueError(
                f"{where} names the base {quote(base)}, which is on this machine, without a digest "
                "of its weights: if it is the right one, name it with --base"
            )
    elif config.init:
        config = replace(config, init=base)
    else:
        config = replace(config, model=base, revision=None)
    with _explain_base_errors("", "if the base is elsewhere, name it with --base"):
        resume.check_base(source, config, base_digest(config))
    print(f"base: {escape(base)}, named by {where}", file=sys.stderr)
    return config


@contextmanager
def _explain_base_errors(prefix: str, hint: str) -> Iterator[None]:
    """Adds `prefix` and `hint` to the text of an OSError or ValueError about an adapter's base."""
    try:
        yield
    except (OSError, ValueError) as error:
        error_type = next(k for k in (ConnectionError, OSError, ValueError) if isinstance(error, k))
        raise error_type(f"{prefix}{error}; {hint}") from error


def check_shareable(source: Path) -> None:
    """Raises ValueError for a checkpoint that must be exported before ranks can share its model."""
    if read_adapter_run_config(source) is not None:
        raise ValueError(
            f"{source} is a checkpoint of an adapter, which ranks cannot share: "
            "`tigon export --merge` it first"
        )


def meta_model_from_checkpoint(source: Path, dtype: torch.dtype | None = None) -> CausalLM:
    """Returns the model on the meta device; the default dtype is that of config.json."""
    model = model_from_checkpoint_config(source, torch.float32)
    return model.to(dtype or torch_dtype(model.config.dtype or "float32"))


def convert_checkpoint(
    source: Path,
    directory: str,
    *,
    dtype: torch.dtype | None = None,
    merge: bool = False,
    base: str | None = None,
    **options: Any,
) -> torch.dtype:
    """Exports a checkpoint in Hugging Face format, in a few buffers of memory; returns its dtype.

    An adapter's checkpoint is written in PEFT's format, or with `merge` as the model with the
    adapter added, in memory. `base` and errors are those of `load_checkpoint`, and `options` those
    of `save_model`.
    """
    lora = read_adapter_run_config(source)
    if merge and lora is None:
        raise ValueError(f"--merge: {source} is no checkpoint of an adapter")
    if base is not None and not merge:
        raise ValueError(f"--base {base}: only --merge needs the base")
    if options.get("gguf") and lora is not None and not merge:
        raise ValueError(f"{source} is of an adapter, which {directory} cannot hold: add --merge")
    if merge:
        model, tokenizer = load_checkpoint(source, dtype=dtype, base=base)
        merge_adapter(model, str(source))
        save_model(model, directory, tokenizer=tokenizer, **options)
        return model.dtype
    with read_lock(source):
        checkpoint.verify(source, wanted=_is_export_file)
        tokenizer = Tokenizer.from_pretrained(source)
        if lora is None:
            model = meta_model_from_checkpoint(source, dtype)
            stored, layout = checkpoint.stored_weights(source, model)
            write_converted(model, directory, stored, layout, tokenizer=tokenizer, **options)
            return model.dtype
        # The base is not needed: its config.json is in the checkpoint
        model = model_from_checkpoint_config(source, torch.float32)
        add_lora(model, lora)
        for p in adapter_parameters(model, "default").values():
            empty = torch.empty_like(p, device="cpu")
            torch.utils.swap_tensors(p, torch.nn.Parameter(empty, p.requires_grad))
        checkpoint.load(source, model)
        model.save_adapter(directory, dtype=dtype, tokenizer=tokenizer)
    return dtype or next(iter(adapter_parameters(model, "default").values())).dtype


def _is_export_file(name: str) -> bool:
    """Returns whether exporting a checkpoint needs this file of it: weights and small files."""
    return name.startswith("weights-") or name.endswith(SMALL_FILES)


# Adapters in PEFT's format


def is_adapter(place: str, revision: str | None) -> bool:
    """Returns whether a directory or hub repository has adapter_config.json and no config.json.

    Raises OSError or ValueError as `Repository` does.
    """
    if parse_gguf_path(place)[1] is not None:
        return False
    repository = Repository(place, revision=revision)
    if repository.optional_file("config.json") is not None:
        return False
    return repository.optional_file("adapter_config.json") is not None


def load_with_adapter(
    adapter: str,
    revision: str | None = None,
    dtype: torch.dtype | str = "auto",
    device: str | torch.device = "cpu",
    adapter_dtype: torch.dtype | None = None,
    base: str | None = None,
) -> tuple[CausalLM, Tokenizer]:
    """Loads an adapter on the base, at the revision, that it names; prints which to stderr.

    `base` names another one. `revision` is the adapter's; `dtype` "auto" is the base's,
    `adapter_dtype` None the model's. The tokenizer is the adapter's, or the base's if it has none.
    Raises ValueError or OSError (ConnectionError if the hub cannot be reached), naming the file and
    what to do, for a base that cannot be loaded.
    """
    repository = Repository(adapter, revision=revision)
    peft_config = read_base(repository)
    if peft_config is None:
        raise ValueError(f"{adapter} is neither a run with an adapter nor has adapter_config.json")
    where = escape(f"{repository.name}/adapter_config.json")
    remedy = (
        "write the base's folder or its name on the hub into base_model_name_or_path there, or "
        "name it with --base"
    )
    name, base_revision = (peft_config.name, peft_config.revision) if base is None else (base, None)
    if not name:
        raise ValueError(f"{where}: base_model_name_or_path names no base: {remedy}")
    if not name.isprintable() or len(name) > MAX_NAME_LENGTH:
        raise ValueError(f"{where}: base_model_name_or_path={quote(name)} is no base's: {remedy}")
    tokenizer = None
    if repository.optional_file("tokenizer.json") is not None:
        tokenizer = Tokenizer.from_pretrained(adapter, revision=revision)
    if os.path.isdir(os.path.expanduser(name)):
        base_revision = None
    prefix, hint = f"{where}: the base cannot be loaded: ", f"if it is elsewhere, {remedy}"
    with _explain_base_errors(prefix, hint):
        tokenizer = tokenizer or Tokenizer.from_pretrained(name, revision=base_revision)
        model = from_pretrained(name, revision=base_revision, dtype=dtype, device=device)
    if peft_config.scores and not model.config.labels:
        raise ValueError(
            f"{where} is of a model that scores sequences, and its base {quote(name)} "
            "predicts tokens: `tigon export RUN DIRECTORY --merge` of the run, or PEFT, merges them"
        )
    size = read_vocabulary_size(repository, model)  # of a base that was resized for new tokens
    if size is not None and size > model.config.vocab_size:
        model.resize_token_embeddings(size)
    model.load_adapter(adapter, revision=revision, dtype=adapter_dtype)
    print(f"base: {name}, named by {where if base is None else '--base'}", file=sys.stderr)
    return model, tokenizer


def export_merged(
    adapter: str,
    directory: str | os.PathLike[str],
    revision: str | None = None,
    dtype: torch.dtype | str = "auto",
    base: str | None = None,
    **options: Any,
) -> torch.dtype:
    """Adds an adapter to its base and saves the model; returns its dtype, by default the base's.

    `options` are those of `save_model`. Raises as `load_with_adapter` does.
    """
    # In float32, so that the adapter is not rounded before it is added
    model, tokenizer = load_with_adapter(
        adapter, revision, dtype, adapter_dtype=torch.float32, base=base
    )
    merge_adapter(model, adapter)
    save_model(model, directory, tokenizer=tokenizer, **options)
    return model.dtype


def merge_adapter(model: CausalLM, adapter: str) -> None:
    """Merges the active adapter; ValueError naming `adapter` if the sums overflow the dtype."""
    model.merge_adapter()
    bad = [name for name, p in model.named_parameters() if not all_finite([p], p.device)]
    if bad:
        base = quote(model.config.source.name)
        raise ValueError(
            f"{escape(adapter)} added to {base} gives NaN or infinite values in {model.dtype}, in "
            f"{list_first(bad)}: --dtype says another dtype, and a base or an adapter with "
            "such values cannot be used"
        )


@contextmanager
def exported_directory(model: str, revision: str | None, base: str | None) -> Iterator[str]:
    """Yields a temporary export of a run, a checkpoint or an adapter, merged with its base."""
    with tempfile.TemporaryDirectory() as parent:
        directory = str(Path(parent, "hf"))
        if (source := find_checkpoint(model)) is None:
            export_merged(model, directory, revision, base=base)
        elif base is None and read_adapter_run_config(source) is None:
            convert_checkpoint(source, directory)
        else:
            convert_checkpoint(source, directory, merge=True, base=base)
        yield directory
