"""An adapter of PEFT's and the base that it names, as one model."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tigon.hub import Repository
from tigon.models import CausalLM, from_pretrained, read_base, read_vocabulary_size, split_gguf
from tigon.tokenizer import Tokenizer
from tigon.utils.json import escape, quote
from tigon.weights import all_finite

LONGEST = 1000  # characters of a path or a name


def is_adapter(place: str, revision: str | None = None) -> bool:
    """Whether a directory or hub repository has PEFT's adapter_config.json and no model of its own.

    Raises OSError or ValueError as `Repository` does.
    """
    if split_gguf(place)[1] is not None:
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
    """The base that the adapter names, at the revision that it names, with the adapter chosen.

    Which base that is, stderr is told; `base` names another one. `revision` is the adapter's;
    `dtype` "auto" is the base's, `adapter_dtype` None the model's. The tokenizer is the adapter's,
    or the base's if it has none. Raises ValueError or OSError (ConnectionError where the hub cannot
    be reached), naming the file and what to do, for a base that cannot be had.
    """
    repository = Repository(adapter, revision=revision)
    known = read_base(repository)
    if known is None:
        raise ValueError(f"{adapter} is neither a run with an adapter nor has adapter_config.json")
    where = escape(f"{repository.name}/adapter_config.json")
    what_to_do = (
        "write the base's folder or its name on the hub into base_model_name_or_path there, or "
        "name it with --base"
    )
    name, at = (known.name, known.revision) if base is None else (base, None)
    if not name:
        raise ValueError(f"{where}: base_model_name_or_path names no base: {what_to_do}")
    if not name.isprintable() or len(name) > LONGEST:
        raise ValueError(
            f"{where}: base_model_name_or_path={quote(name)} is no base's: {what_to_do}"
        )
    tokenizer = None
    if repository.optional_file("tokenizer.json") is not None:
        tokenizer = Tokenizer.from_pretrained(adapter, revision=revision)
    at = None if os.path.isdir(os.path.expanduser(name)) else at
    try:
        tokenizer = tokenizer or Tokenizer.from_pretrained(name, revision=at)
        model = from_pretrained(name, revision=at, dtype=dtype, device=device)
    except (OSError, ValueError) as error:
        kind = next(k for k in (ConnectionError, OSError, ValueError) if isinstance(error, k))
        raise kind(
            f"{where}: the base cannot be loaded: {error}; if it is elsewhere, {what_to_do}"
        ) from error
    if known.scores and not model.config.labels:
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
    """The adapter added to its base, as save_pretrained writes it, with its options.

    Returns the dtype; "auto" is the base's. Raises as `load_with_adapter` does.
    """
    # In float32, so that the adapter is not rounded before it is added
    model, tokenizer = load_with_adapter(
        adapter, revision, dtype, adapter_dtype=torch.float32, base=base
    )
    merge_adapter(model, adapter)
    model.save_pretrained(directory, tokenizer=tokenizer, **options)
    return model.dtype


def merge_adapter(model: CausalLM, adapter: str) -> None:
    """Merge the adapter of that name; ValueError if the dtype does not hold what it gives."""
    model.merge_adapter()
    bad = [name for name, p in model.named_parameters() if not all_finite([p], p.device)]
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        base = quote(model.config.source.name)
        raise ValueError(
            f"{escape(adapter)} added to {base} gives NaN or infinite values in {model.dtype}, in "
            f"{bad[0]}{more}: --dtype says another dtype, and a base or an adapter with such "
            "values cannot be used"
        )


@contextmanager
def as_merged_directory(
    adapter: str, revision: str | None = None, base: str | None = None
) -> Iterator[str]:
    """What `export_merged` writes, for the time being."""
    with tempfile.TemporaryDirectory() as parent:
        export_merged(adapter, Path(parent, "hf"), revision, base=base)
        yield str(Path(parent, "hf"))
