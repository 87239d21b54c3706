"""Describes a model by building it without its weights: `tigon info --check`.

`tigon.cli.summary` describes it by config.json and the headers of its files, without torch.
"""

import platform
from argparse import Namespace
from collections import Counter
from pathlib import Path

import torch

from tigon.cli.summary import (
    Facts,
    HeadersOnly,
    describe_config,
    describe_repository,
    format_mib,
    print_facts,
)
from tigon.hub import Repository
from tigon.kernels.attention.backends import survey
from tigon.models import MODELS, CausalLM, build
from tigon.models.pretrained.load import parse_gguf_path
from tigon.models.pretrained.match import find_misfits
from tigon.models.pretrained.names import stored_tensors
from tigon.train.checkpoint import read_metadata
from tigon.train.export import find_checkpoint, meta_model_from_checkpoint
from tigon.utils.safetensors_header import StoredTensor
from tigon.version import __version__
from tigon.weights import Checkpoint, format_misfits
from tigon.weights.header import read_header

MAX_MISFITS = 5  # tensors, at most, of those that do not fit


def info(args: Namespace) -> int:
    """Runs `tigon info --check`: prints what a model is, or without one what the machine has."""
    if args.model is None:
        print_machine()
    else:
        print_facts(args.model, describe(args.model, args.revision))
    return 0


def print_machine() -> None:
    """Prints versions, CPU, GPUs, and the attention backend of each kind of call and why."""
    print(f"tigon {__version__}, python {platform.python_version()}, torch {torch.__version__}")
    print(f"cpu: {platform.machine()}, {torch.get_num_threads()} threads")
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        print(f"cuda:{i}: {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    print(f"attention on {device}, bfloat16, heads of 128 dims:")
    for kind, choice in survey(device).items():
        print(f"  {kind:<20}{choice.name} ({choice.why})")


def describe(path: str, revision: str | None = None) -> Facts:
    """Returns facts about a directory, a hub repository, a .gguf file, a checkpoint or a run.

    "loads" says why a model would not load. Raises OSError or ValueError only if there is no
    config.json that can be read.
    """
    if checkpoint := find_checkpoint(path):
        return _describe_run(checkpoint)
    directory, gguf_file = parse_gguf_path(path)
    if gguf_file is not None:
        repository = Repository(directory, revision=revision)
        model, stored = build(repository, MODELS, gguf_file=gguf_file, fit=False)
        size = f"1 of weights, {repository.file(gguf_file).stat().st_size:,} bytes"
        return describe_model(model) | {"files": size, "loads": _format_loads(model, stored)}
    with HeadersOnly(path, revision=revision) as repository:
        facts = describe_repository(repository)
        if "adapter" in facts or facts["loads"].startswith("no: "):
            return facts
        with repository.note_faults(facts):
            facts["loads"] = _format_loads(*build(repository, MODELS, fit=False))
        return facts


def _describe_run(checkpoint: Path) -> Facts:
    """Returns the facts of a run's checkpoint, its files and the size of their tensors by kind."""
    model = meta_model_from_checkpoint(checkpoint)
    sizes: Counter[str] = Counter()
    for path in sorted(checkpoint.glob("*.safetensors")):
        for info in read_header(path).values():
            sizes[f"{path.name.split('-')[0]} in {dtype_name(info.dtype)}"] += info.nbytes
    lora = read_metadata(checkpoint)["config"].get("lora")
    adapter = {"adapter": f"rank {lora['rank']}, alpha {lora['alpha']:g}"} if lora else {}
    files = sum(path.is_file() for path in checkpoint.iterdir())
    return describe_model(model) | {
        **adapter,
        "files": f"checkpoint {checkpoint.name}, {files} files, {sum(sizes.values()):,} bytes",
        "tensors": ", ".join(f"{label} {format_mib(n)}" for label, n in sizes.items()),
        "loads": _format_loads(model),
    }


def describe_model(model: CausalLM) -> Facts:
    """Returns the facts in a model's config, and the numbers of its parameters."""
    parameters = {
        name: StoredTensor("F32", tuple(t.shape), Path(), 0)
        for name, t in stored_tensors(model).items()
    }
    return describe_config(model.config.to_file(), parameters)


def _format_loads(model: CausalLM, stored: Checkpoint | None = None) -> str:
    """Returns a text with the class, dtype and size of the model, and how `stored` has experts and
    a tied head; or with "no: " and which tensors of `stored` do not fit."""
    misfits = {} if stored is None else find_misfits(model, stored)
    if misfits:
        texts = (format_misfits(fault, names, MAX_MISFITS) for fault, names in misfits.items())
        return f"no: {'; '.join(texts)}"
    size = sum(p.numel() for p in model.parameters()) * model.dtype.itemsize
    parts = [f"as tigon.{type(model).__name__} in {dtype_name(model.dtype)}, {format_mib(size)}"]
    if stored is not None:
        names = model.checkpoint_names
        if any(name.endswith(tuple(names.experts)) for name, _ in model.named_parameters()):
            form = "stacked" if names.stacked_in(stored.tensors) else "apart, stacked as they load"
            parts.append(f"experts are stored {form}")
        heads = [name for name in stored.tensors if name.endswith("lm_head.weight")]
        if model.config.tie_word_embeddings and heads:
            parts.append("the head is stored too: it stays tied if it equals the embedding")
    return "; ".join(parts)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
