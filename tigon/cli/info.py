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
    describe_config,
    describe_files,
    describe_quantization,
    format_mib,
    format_rope,
    open_headers,
    print_facts,
)
from tigon.hub import Repository, config_file
from tigon.kernels.attention.api import survey
from tigon.models import MODELS, CausalLM, build, find_misfits, parse_gguf_path
from tigon.train.export import find_checkpoint, meta_model_from_checkpoint
from tigon.utils.json import quote, read_json
from tigon.version import __version__
from tigon.weights import Checkpoint, format_misfits
from tigon.weights.header import read_header

MAX_MISFITS = 5  # tensors, at most, of those that do not fit


def info(args: Namespace) -> int:
    if args.model is None:
        print_machine()
    else:
        print_facts(args.model, describe(args.model, args.revision))
    return 0


def print_machine() -> None:
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
    """Facts about a directory, a run (its newest checkpoint), a checkpoint, a .gguf file or a hub
    repository.

    "loads" says why a model would not load. Raises OSError or ValueError only if there is no
    config.json that can be read.
    """
    if checkpoint := find_checkpoint(path):
        return _describe_run(checkpoint)
    directory, gguf_file = parse_gguf_path(path)
    if gguf_file is not None:
        return _describe_gguf(Repository(directory, revision=revision), gguf_file)
    with open_headers(path, revision) as repository:
        source = read_json(config_file(repository), nan=True)
        kind = source.get("model_type")
        problems: list[str] = []
        model: CausalLM | None = None
        stored: Checkpoint | None = None
        try:
            model, stored = build(repository, MODELS, fit=False)
        except ConnectionError:
            raise
        except (OSError, ValueError) as error:
            problems = [repository.rename_in(error)]
            is_supported = isinstance(kind, str) and (kind in MODELS or "text_config" in source)
            if not is_supported:
                problems = [f"model_type {quote(kind)} is not supported; README.md lists what is"]
            try:
                Checkpoint.open(repository)  # for what is in its files all the same
            except (OSError, ValueError) as error:
                problems += [] if is_supported else [repository.rename_in(error)]
        tensors = repository.tensors()
        if model is None:
            facts = describe_config(source, {})
            if tensors:
                facts["parameters"] = f"{sum(tensor.count for tensor in tensors):,} stored"
        else:
            facts = _describe_model(model) | describe_quantization(source)
        if model is not None and stored is not None:
            problems += _list_misfits(model, stored)
        return facts | describe_files(tensors) | {"loads": _format_loads(model, stored, problems)}


def _describe_model(model: CausalLM) -> Facts:
    c = model.config
    embeddings = model.model.embed_tokens.weight.numel()
    tied = "tied to the head" if c.tie_word_embeddings else "and as many in the head"
    if c.labels:
        tied = f"and a head of {c.labels} scores"
    return {
        "architecture": f"{c.transformers_class} ({c.model_type})",
        "parameters": f"{_count_parameters(model):,}",
        "embeddings": f"{embeddings:,}, {tied}",
        "layers": f"{c.num_hidden_layers}",
        "model dim": f"{c.hidden_size}",
        "heads": f"{c.num_attention_heads} query, {c.num_key_value_heads} key/value, "
        f"{c.head_dim} dims each",
        "MLP dim": f"{c.intermediate_size}, {c.hidden_act}",
        "vocabulary": f"{c.vocab_size}",
        "context": f"{c.max_position_embeddings} tokens",
        "RoPE": format_rope(c.rope_parameters),
    }


def _describe_gguf(repository: Repository, name: str) -> Facts:
    """Raises ValueError for a file that would not load."""
    model, stored = build(repository, MODELS, gguf_file=name, fit=False)
    problems = _list_misfits(model, stored)
    size = f"1 of weights, {repository.file(name).stat().st_size:,} bytes"
    return _describe_model(model) | {"files": size, "loads": _format_loads(model, stored, problems)}


def _describe_run(checkpoint: Path) -> Facts:
    model = meta_model_from_checkpoint(checkpoint)
    facts = _describe_model(model)
    sizes: Counter[str] = Counter()
    for path in sorted(checkpoint.glob("*.safetensors")):
        for info in read_header(path).values():
            sizes[f"{path.name.split('-')[0]} in {dtype_name(info.dtype)}"] += info.nbytes
    files = sum(path.is_file() for path in checkpoint.iterdir())
    return facts | {
        "files": f"checkpoint {checkpoint.name}, {files} files, {sum(sizes.values()):,} bytes",
        "tensors": ", ".join(f"{label} {format_mib(n)}" for label, n in sizes.items()),
        "loads": _format_loads(model, None, []),
    }


def _list_misfits(model: CausalLM, stored: Checkpoint) -> list[str]:
    return [
        format_misfits(fault, names, MAX_MISFITS)
        for fault, names in find_misfits(model, stored).items()
    ]


def _format_loads(model: CausalLM | None, stored: Checkpoint | None, problems: list[str]) -> str:
    if problems or model is None:
        return f"no: {'; '.join(problems)}"
    size = _count_parameters(model) * model.dtype.itemsize
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


def _count_parameters(model: CausalLM) -> int:
    return sum(p.numel() for p in model.parameters())


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
