"""A run's weights in Hugging Face format: as it trains, at its end, of any checkpoint later."""

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tigon.hub import Repository
from tigon.models import (
    CausalLM,
    adapter_parameters,
    from_pretrained,
    materialize,
    parse_gguf_path,
    read_base,
    read_vocabulary_size,
    torch_dtype,
    write_converted,
)
from tigon.parallel import shard_layers
from tigon.tokenizer import Tokenizer
from tigon.train import checkpoint, resume
from tigon.train.build import TrainingRun
from tigon.train.config import Config
from tigon.train.model import (
    add_lora,
    base_digest,
    build_adapted_model,
    export_dtype,
    model_from_checkpoint_config,
    read_adapter_run_config,
)
from tigon.utils.json import escape, quote
from tigon.weights.write import all_finite

SMALL = (".json", ".txt", ".jinja", ".model")  # what a checkpoint has besides tensors


def find_checkpoint(path: str) -> Path | None:
    """`path` itself, or the newest one of the run directory that it is; None if neither."""
    if Path(path, "run.json").is_file():
        return Path(path)
    return checkpoint.latest(Path(path, "checkpoints"))


def load_checkpoint(
    source: Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    mesh: DeviceMesh | None = None,
    expert_parallel: bool = False,
    base: str | None = None,
) -> tuple[CausalLM, Tokenizer]:
    """Model and tokenizer, in this process alone, however many ranks wrote it; with `mesh`, of all
    ranks and one dimension, shared by them: every rank calls this. `expert_parallel`: with whole
    experts, as in `tigon.from_pretrained`. `base`: of an adapter's run, in place of the one that
    run.json names.

    `dtype` None is that of config.json, which the run's export has too. Raises ValueError, naming
    the file, if the checkpoint is damaged, if its base has other weights or cannot be trusted, and
    with `mesh` as `check_shareable` does.
    """
    if base is not None and read_adapter_run_config(source) is None:
        raise ValueError(f"--base {base}: {source} is no checkpoint of an adapter")
    if mesh is not None:
        check_shareable(source)
    with checkpoint.read_lock(source):
        checkpoint.verify(source, wanted=_is_export_file)
        if (config := read_adapter_run_config(source)) is not None:
            config = _with_base(source, config, base)
            # Its tokenizer has the new tokens, and the adapter their rows
            model = build_adapted_model(replace(config, tokenizer=str(source)), dtype, device)
            checkpoint.load(source, model)
            return model.eval(), load_checkpoint_tokenizer(source)
        model = model_from_checkpoint_config(source, torch.float32)
        model.to(dtype or torch_dtype(model.config.dtype or "float32"))
        if mesh is not None:
            shard_layers(model, mesh, expert_parallel=expert_parallel)
        materialize(model, torch.device(device))
        checkpoint.load(source, model)
        return model.eval(), load_checkpoint_tokenizer(source)


def load_checkpoint_tokenizer(source: Path) -> Tokenizer:
    """The checkpoint's, which chats with the variables that the run gave the chat template."""
    tokenizer = Tokenizer.from_pretrained(source)
    given = checkpoint.read_metadata(source).get("config", {}).get("chat_template_kwargs")
    tokenizer.use_chat_template_kwargs(given or {})
    return tokenizer


def _with_base(source: Path, config: Config, base: str | None) -> Config:
    """The settings with the base that is used, which stderr is told: `base`, or that of run.json.

    run.json may be anybody's, who would have weights of this machine exported: those that it names
    are used only if it knows their digest.
    """
    where = "--base"
    if base is None:
        base, where = config.init or config.model, escape(source / "run.json")
        local = os.path.exists(os.path.expanduser(base))
        if local and "base" not in checkpoint.read_metadata(source):
            raise ValueError(
                f"{where} names the base {quote(base)}, which is on this machine, without a digest "
                "of its weights: if it is the right one, name it with --base"
            )
    elif config.init:
        config = replace(config, init=base)
    else:
        config = replace(config, model=base, revision=None)
    try:
        resume.check_base(source, config, base_digest(config))
    except (OSError, ValueError) as error:
        error_type = next(k for k in (ConnectionError, OSError, ValueError) if isinstance(error, k))
        raise error_type(f"{error}; if the base is elsewhere, name it with --base") from error
    print(f"base: {escape(base)}, named by {where}", file=sys.stderr)
    return config


def check_shareable(source: Path) -> None:
    """ValueError for a checkpoint that must be exported before ranks can share its model."""
    if read_adapter_run_config(source) is not None:
        raise ValueError(
            f"{source} is a checkpoint of an adapter, which ranks cannot share: "
            "`tigon export --merge` it first"
        )


def convert_checkpoint(
    source: Path,
    directory: str,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    stacked_experts: bool | None = None,
    merge: bool = False,
    base: str | None = None,
) -> torch.dtype:
    """A run's checkpoint in Hugging Face format, in a few buffers of memory; returns its dtype.

    Of a run with lora the adapter, in PEFT's format, or with `merge` the model with it, made in
    memory. `base` is that of `load_checkpoint`, and the other options are those of save_pretrained;
    raises as `load_checkpoint` does.
    """
    options: dict[str, Any] = {"max_shard_size": max_shard_size, "stacked_experts": stacked_experts}
    lora = read_adapter_run_config(source)
    if merge and lora is None:
        raise ValueError(f"--merge: {source} is no checkpoint of an adapter")
    if base is not None and not merge:
        raise ValueError(f"--base {base}: only --merge needs the base")
    if lora is not None and not merge:
        return _convert_adapter(source, directory, lora, dtype)
    if merge:
        model, tokenizer = load_checkpoint(source, dtype=dtype, base=base)
        merge_adapter(model, str(source))
        model.save_pretrained(directory, tokenizer=tokenizer, **options)
        return model.dtype
    with checkpoint.read_lock(source):
        checkpoint.verify(source, wanted=_is_export_file)
        model = model_from_checkpoint_config(source, torch.float32)
        model.to(dtype or torch_dtype(model.config.dtype or "float32"))
        tokenizer = Tokenizer.from_pretrained(source)
        stored, layout = checkpoint.stored_weights(source, model)
        write_converted(model, directory, stored, layout, tokenizer=tokenizer, **options)
    return model.dtype


def _convert_adapter(
    source: Path, directory: str, config: Config, dtype: torch.dtype | None
) -> torch.dtype:
    """The base is not needed: its config.json is in the checkpoint."""
    with checkpoint.read_lock(source):
        checkpoint.verify(source, wanted=_is_export_file)
        model = model_from_checkpoint_config(source, torch.float32)
        add_lora(model, config)
        for p in adapter_parameters(model, "default").values():
            empty = torch.empty_like(p, device="cpu")
            torch.utils.swap_tensors(p, torch.nn.Parameter(empty, p.requires_grad))
        checkpoint.load(source, model)
        own = next(iter(adapter_parameters(model, "default").values())).dtype
        tokenizer = Tokenizer.from_pretrained(source)
        model.save_adapter(directory, dtype=dtype, tokenizer=tokenizer)
    return dtype or own


def meta_model_from_checkpoint(source: Path) -> CausalLM:
    """The model on the meta device, in its config's dtype: nothing of its weights is read."""
    model = model_from_checkpoint_config(source, torch.float32)
    return model.to(torch_dtype(model.config.dtype or "float32"))


@contextmanager
def exported_directory(source: Path, base: str | None = None) -> Iterator[str]:
    """A checkpoint's model in Hugging Face format, for the time being."""
    with tempfile.TemporaryDirectory() as parent:
        model, tokenizer = load_checkpoint(source, base=base)
        if model.active_adapter is not None:
            model.merge_adapter()
        model.save_pretrained(Path(parent, "hf"), tokenizer=tokenizer)
        del model
        yield str(Path(parent, "hf"))


def export_name(config: Config) -> str:
    """Returns the name of a run's export directory: hf, or adapter for a run with lora."""
    return "hf" if config.lora is None else "adapter"


def step_export_path(config: Config, step: int) -> Path:
    """Returns the directory of the export after `step`, a multiple of hf_every."""
    return Path(config.run_dir, f"{export_name(config)}-step-{step:08d}")


def export(run: TrainingRun, target: Path, values: Mapping[str, Tensor] | None = None) -> None:
    """As `Exporter.export`, and wait until it is on the disk."""
    _start_export(run, target, values)
    run.exporter.wait()


def export_step(run: TrainingRun, step: int) -> None:
    """While training goes on."""
    _start_export(run, step_export_path(run.config, step), None)


def export_best(run: TrainingRun, step: int) -> None:
    """run_dir/hf-best, if hf_best is set and the evaluation after `step` is the best so far."""
    if run.config.hf_best and run.state.best_step == step > 0:
        export(run, Path(run.config.run_dir, f"{export_name(run.config)}-best"))


def _start_export(run: TrainingRun, target: Path, values: Mapping[str, Tensor] | None) -> None:
    """In the dtype of the checkpoint that the run began with unless told; an adapter in its own."""
    dtype = export_dtype(run.config, run.model)
    held = dtype if run.model.active_adapter is None else None
    try:
        checkpoint.check_finite(run.model, ema=None if values is None else run.ema, dtype=held)
    except FloatingPointError as error:
        raise FloatingPointError(f"{target} was not written: {error}") from None
    run.exporter.export(run.model, target, run.tokenizer, dtype=dtype, values=values)


def _is_export_file(name: str) -> bool:
    return name.startswith("weights-") or name.endswith(SMALL)


MAX_NAME_LENGTH = 1000  # characters of a path or a name


def is_adapter(place: str, revision: str | None = None) -> bool:
    """Whether a directory or hub repository has PEFT's adapter_config.json and no model of its own.

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
    if not name.isprintable() or len(name) > MAX_NAME_LENGTH:
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
        error_type = next(k for k in (ConnectionError, OSError, ValueError) if isinstance(error, k))
        raise error_type(
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
def merged_directory(
    adapter: str, revision: str | None = None, base: str | None = None
) -> Iterator[str]:
    """What `export_merged` writes, for the time being."""
    with tempfile.TemporaryDirectory() as parent:
        export_merged(adapter, Path(parent, "hf"), revision, base=base)
        yield str(Path(parent, "hf"))
