"""What a model is and what loading it would do, from its config and the headers of its files.

Of a hub repository only these are fetched: a few kilobytes of each file of weights.
"""

import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from tigon.hub import Repository
from tigon.json_file import escaped, read_json, shown
from tigon.models import MODELS, CausalLM, build, config_file, misfits, split_gguf
from tigon.train.export import described_checkpoint, find_checkpoint
from tigon.weights import Checkpoint, TensorInfo, listing, read_header

FIRST = 1 << 16  # bytes of a file of weights that are asked for at first; most headers fit
NAMED = 5  # tensors, at most, of those that do not fit
Facts = dict[str, str]  # what it is -> its value, as people read it
SIZES = {
    "layers": "num_hidden_layers",
    "model dim": "hidden_size",
    "heads": "num_attention_heads",
    "MLP dim": "intermediate_size",
    "vocabulary": "vocab_size",
    "context": "max_position_embeddings",
}


def describe(path: str, revision: str | None = None) -> Facts:
    """Of a directory, a run (its newest checkpoint), a checkpoint, a .gguf file, a hub repository.

    A model that would not load is described all the same, and why is the value of "loads".
    Raises OSError or ValueError only where there is no config.json that can be read.
    """
    if checkpoint := find_checkpoint(path):
        return _of_run(checkpoint)
    directory, gguf_file = split_gguf(path)
    if gguf_file is not None:
        return _of_gguf(Repository(directory, revision=revision), gguf_file)
    with _headers(path, revision) as repository:
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
            problems = [repository.renamed(error)]
            known = isinstance(kind, str) and (kind in MODELS or "text_config" in source)
            if not known:
                problems = [f"model_type {shown(kind)} is not supported; README.md lists what is"]
            try:
                Checkpoint.open(repository)  # for what is in its files all the same
            except (OSError, ValueError) as error:
                problems += [] if known else [repository.renamed(error)]
        facts = _of_source(source) if model is None else _of_model(model)
        tensors = repository.tensors()
        if model is None and tensors:
            facts["parameters"] = f"{sum(math.prod(t.shape) for t in tensors):,} stored"
        if model is not None and stored is not None:
            problems += _unfit(model, stored)
        if isinstance(quantised := source.get("quantization_config"), dict):
            facts["quantised"] = _plain(quantised.get("quant_method"))
        return facts | _of_files(tensors) | {"loads": _loading(model, stored, problems)}


class _HeadersOnly(Repository):
    """A repository whose files of weights are, in `holes`, a header before a hole."""

    holes: Path

    def file(self, name: str) -> Path:
        if not name.endswith(".safetensors"):
            return super().file(name)
        start, size = self.beginning(name, FIRST)
        needed = 8 + int.from_bytes(start[:8], "little")
        if len(start) < min(needed, size):
            # What announces more than there may be is refused by what reads the header
            start, size = self.beginning(name, min(needed, size, 1 << 27))
        path = self.holes / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(start[:needed])  # a hole that begins in a tensor would be a false one
            file.truncate(size)
        return path

    def tensors(self) -> list[TensorInfo]:
        """Of all files that were asked for, as they are stored."""
        found: list[TensorInfo] = []
        for path in sorted(self.holes.rglob("*.safetensors")):
            with suppress(ValueError):  # which whoever asked for it has been told
                found += read_header(path).values()
        return found

    def renamed(self, error: Exception) -> str:
        """Its text, with the name of the repository."""
        return str(error).replace(str(self.holes), self.name)


@contextmanager
def _headers(path: str, revision: str | None) -> Iterator[_HeadersOnly]:
    with tempfile.TemporaryDirectory(prefix="tigon-headers-") as holes:
        repository = _HeadersOnly(path, revision=revision)
        repository.holes = Path(holes)
        yield repository


def _of_model(model: CausalLM) -> Facts:
    c = model.config
    embeddings = model.model.embed_tokens.weight.numel()
    tied = "tied to the head" if c.tie_word_embeddings else "and as many in the head"
    if c.labels:
        tied = f"and a head of {c.labels} scores"
    rope = ", ".join(f"{k} {v}" for k, v in c.rope_parameters.items() if k != "rope_type")
    return {
        "architecture": f"{c.transformers_class} ({c.model_type})",
        "parameters": f"{_count(model):,}",
        "embeddings": f"{embeddings:,}, {tied}",
        "layers": f"{c.num_hidden_layers}",
        "model dim": f"{c.hidden_size}",
        "heads": f"{c.num_attention_heads} query, {c.num_key_value_heads} key/value, "
        f"{c.head_dim} dims each",
        "MLP dim": f"{c.intermediate_size}, {c.hidden_act}",
        "vocabulary": f"{c.vocab_size}",
        "context": f"{c.max_position_embeddings} tokens",
        "RoPE": f"{c.rope_parameters['rope_type']}, {rope}",
    }


def _of_source(source: Mapping[str, Any]) -> Facts:
    """Of a model type that there is no class for; its config may say anything."""
    names = source.get("architectures")
    name = names[0] if isinstance(names, list) and names else "unknown"
    kind = source.get("model_type", "no model_type")
    facts = {"architecture": f"{_plain(name)} ({_plain(kind)})", "parameters": "unknown"}
    inner = source.get("text_config")
    values = {**inner, **source} if isinstance(inner, dict) else source
    facts |= {what: _plain(values[key]) for what, key in SIZES.items() if key in values}
    return facts


def _of_files(tensors: Sequence[TensorInfo]) -> Facts:
    count: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for info in tensors:
        count[dtype_name(info.dtype)] += 1
        size[dtype_name(info.dtype)] += info.nbytes
    kinds = [f"{n} {dtype}, {mebibytes(size[dtype])}" for dtype, n in count.most_common()]
    files = len({info.path for info in tensors})
    return {
        "files": f"{files} of weights, {sum(size.values()):,} bytes",
        "tensors": "; ".join(kinds) or "none",
    }


def _of_gguf(repository: Repository, name: str) -> Facts:
    """Raises ValueError for one that would not load."""
    model, stored = build(repository, MODELS, gguf_file=name, fit=False)
    problems = _unfit(model, stored)
    size = f"1 of weights, {repository.file(name).stat().st_size:,} bytes"
    return _of_model(model) | {"files": size, "loads": _loading(model, stored, problems)}


def _of_run(checkpoint: Path) -> Facts:
    model = described_checkpoint(checkpoint)
    facts = _of_model(model)
    sizes: Counter[str] = Counter()
    for path in sorted(checkpoint.glob("*.safetensors")):
        for info in read_header(path).values():
            sizes[f"{path.name.split('-')[0]} in {dtype_name(info.dtype)}"] += info.nbytes
    files = sum(path.is_file() for path in checkpoint.iterdir())
    return facts | {
        "files": f"checkpoint {checkpoint.name}, {files} files, {sum(sizes.values()):,} bytes",
        "tensors": ", ".join(f"{what} {mebibytes(n)}" for what, n in sizes.items()),
        "loads": _loading(model, None, []),
    }


def _unfit(model: CausalLM, stored: Checkpoint) -> list[str]:
    return [listing(fault, names, NAMED) for fault, names in misfits(model, stored).items()]


def _loading(model: CausalLM | None, stored: Checkpoint | None, problems: list[str]) -> str:
    if problems or model is None:
        return f"no: {'; '.join(problems)}"
    size = _count(model) * model.dtype.itemsize
    parts = [f"as tigon.{type(model).__name__} in {dtype_name(model.dtype)}, {mebibytes(size)}"]
    if stored is not None:
        names = model.checkpoint_names
        if any(name.endswith(tuple(names.experts)) for name, _ in model.named_parameters()):
            apart = "stacked" if names.stacked_in(stored.tensors) else "apart, stacked as they load"
            parts.append(f"experts are stored {apart}")
        heads = [name for name in stored.tensors if name.endswith("lm_head.weight")]
        if model.config.tie_word_embeddings and heads:
            parts.append("the head is stored too: it stays tied if it equals the embedding")
    return "; ".join(parts)


def _count(model: CausalLM) -> int:
    return sum(p.numel() for p in model.parameters())


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def mebibytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


def _plain(value: Any) -> str:
    return escaped(value, 80) if isinstance(value, str) else shown(value, 80)
