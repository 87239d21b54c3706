"""Describes a model by its config.json and the headers of its files: `tigon info`.

From a hub repository only these are fetched, a few kilobytes of each file of weights. This imports
no torch, which takes seconds; `tigon.cli.info` builds the model and says whether it would load.
"""

import re
import tempfile
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from tigon.hub import Repository, config_file
from tigon.utils.json import escape, quote, read_json
from tigon.utils.safetensors_header import DTYPES, StoredTensor, find_tensors, read_tensors
from tigon.utils.tensor_names import is_ignored

FIRST_BYTES = 1 << 16  # of a file of weights, requested first; most headers fit
Facts = dict[str, str]  # label -> value, as printed
MTP = "mtp."  # begins the names of heads that predict further tokens
MXFP4 = "_blocks", "_scales"  # endings of names
SCALES = ("_scale_inv", "activation_scale")  # of fp8 weights
ACTIVATIONS = ("hidden_act", "hidden_activation")
BASE = "base_model_name_or_path"  # in PEFT's adapter_config.json
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
SUPPORTED = Path(__file__).parents[1] / "models/families.py"  # importing it takes seconds


def info(args: Namespace) -> int:
    """Runs `tigon info`, from headers alone and without torch."""
    print_facts(args.model, summarize(args.model, args.revision))
    return 0


def print_facts(name: str, facts: Facts) -> None:
    """Prints a name and its facts, a line for each, with control characters escaped."""
    print(escape(name))
    for label, value in facts.items():
        print(f"  {label:<14}{escape(value, 4000)}")


def summarize(path: str, revision: str | None = None) -> Facts:
    """Returns facts about a directory or a hub repository; "loads" says if its weights are wrong.

    Raises OSError or ValueError only if there is no config.json that can be read.
    """
    with HeadersOnly(path, revision=revision) as repository:
        return describe_repository(repository)


class HeadersOnly(Repository):
    """Reads only the headers of a repository's weights, into files with a hole in place of data."""

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="tigon-headers-")
        self._paths: dict[str, Path] = {}
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def optional_file(self, name: str) -> Path | None:
        """Returns a file's path, or None if there is none; for .safetensors, which are never
        fetched whole, that of a temporary file with the header and a hole."""
        if name in self._paths or not name.endswith(".safetensors"):
            return self._paths.get(name) or super().optional_file(name)
        try:
            start, size = self.read_prefix(name, FIRST_BYTES)
        except FileNotFoundError:
            return None
        header_size = 8 + int.from_bytes(start[:8], "little")
        if len(start) < min(header_size, size):
            # What announces more than there may be is refused by what reads the header
            start, size = self.read_prefix(name, min(header_size, size, 1 << 27))
        path = Path(self._folder.name, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(start[:header_size])  # a hole that begins in a tensor would be a false one
            file.truncate(size)
        self._paths[name] = path
        return path

    def tensors(self) -> list[StoredTensor]:
        """Returns the tensors of all .safetensors files that were requested."""
        tensors: list[StoredTensor] = []
        for path in sorted(self._paths.values()):
            with suppress(ValueError):  # was raised when the file was requested
                tensors += read_tensors(path).values()
        return tensors

    @contextmanager
    def note_faults(self, facts: Facts) -> Iterator[None]:
        """Says in `facts`, under "loads", what the `with` block finds wrong with the files, by the
        repository's name, not that of the temporary directory."""
        try:
            yield
        except ConnectionError:
            raise
        except (OSError, ValueError) as error:
            facts["loads"] = f"no: {str(error).replace(self._folder.name, self.name)}"


def describe_repository(repository: HeadersOnly) -> Facts:
    """Returns the facts of `summarize` about an opened repository."""
    if repository.optional_file("config.json") is None and (
        file := repository.optional_file("adapter_config.json")
    ):
        return _describe_adapter(read_json(file, nan=True), repository)
    source = read_json(config_file(repository), nan=True)
    stored: Mapping[str, StoredTensor] = {}
    loads: Facts = {}
    with repository.note_faults(loads):
        stored = find_tensors(repository)
        loads["loads"] = _format_loads(source, stored)
    return describe_config(source, stored) | _file_facts(repository.tensors()) | loads


def _describe_adapter(source: Mapping[str, Any], repository: HeadersOnly) -> Facts:
    """Returns the facts in adapter_config.json, whose values may be anything, and its tensors."""
    loads = {"loads": "with its base, as in tigon generate and tigon export --merge"}
    with repository.note_faults(loads):
        read_tensors(repository.file("adapter_model.safetensors"))
    tensors = repository.tensors()
    return {
        "adapter": f"{_plain(source.get('peft_type'))} of {quote(source.get(BASE), 300)}",
        "rank": f"{_plain(source.get('r'))}, alpha {_plain(source.get('lora_alpha'))}",
        "parameters": f"{sum(t.count for t in tensors):,}",
        **_file_facts(tensors),
        **loads,
    }


def _file_facts(tensors: Sequence[StoredTensor]) -> Facts:
    """Returns the number and sizes of files, and of tensors by dtype."""
    counts = Counter(tensor.dtype for tensor in tensors)
    sizes = {dtype: sum(t.nbytes for t in tensors if t.dtype == dtype) for dtype in counts}
    kinds = [f"{n} {dtype}, {format_mib(sizes[dtype])}" for dtype, n in counts.most_common()]
    files = f"{len({t.path for t in tensors})} of weights, {sum(sizes.values()):,} bytes"
    return {"files": files, "tensors": "; ".join(kinds) or "none"}


def describe_config(source: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> Facts:
    """Returns the facts in config.json, whose values may be anything, and counts parameters."""
    names = source.get("architectures")
    name = names[0] if isinstance(names, list) and names else "unknown"
    values = _text_config(source)
    rope = format_rope(_rope_parameters(values))
    return {
        "architecture": f"{_plain(name)} ({_plain(source.get('model_type', 'no model_type'))})",
        **_parameter_facts(values, stored),
        **_size_facts(values),
        **_layer_facts(values),
        **({"RoPE": rope} if rope else {}),
        **_quantization(values),
    }


def _text_config(source: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a config with the values of its text_config, if it has one, in place of its own."""
    inner = source.get("text_config")
    return {**source, **inner} if isinstance(inner, dict) else source


def _parameter_facts(values: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> Facts:
    """Counts parameters and those in the embedding, and says whether the head is tied."""
    parameters = _parameters(values, stored)
    if not stored or parameters is None:
        count = f"{sum(t.count for t in stored.values()):,} stored" if stored else "unknown"
        return {"parameters": count}
    facts = {"parameters": f"{sum(t.count for t in parameters.values()):,}"}
    embedding = next((t for n, t in parameters.items() if n.endswith(EMBEDDING)), None)
    if embedding is not None:
        untied = any(n.endswith(HEAD) for n in parameters)
        tied = "and as many in the head" if untied else "tied to the head"
        if score := parameters.get("score.weight"):
            tied = f"and a head of {score.shape[0] if score.shape else 0} scores"
        facts["embeddings"] = f"{embedding.count:,}, {tied}"
    return facts


def _parameters(
    values: Mapping[str, Any], stored: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor] | None:
    """Returns the parameters of the text model; None if their values are packed."""
    quantized = _quantization(values).get("quantized")
    if quantized == "mxfp4":
        stored = _unpack_mxfp4(stored)
    elif quantized not in (None, "fp8"):
        return None
    tied = values.get("tie_word_embeddings") is True
    layers, left = values.get("num_hidden_layers"), (*SCALES, *(HEAD,) * tied)

    def is_read(name: str) -> bool:
        layer = re.search(r"layers\.(\d{1,9})\.", name)
        beyond = layer is not None and type(layers) is int and int(layer[1]) >= layers
        return not (beyond or is_ignored(name) or name.startswith(MTP))

    return {n: t for n, t in stored.items() if is_read(n) and not any(part in n for part in left)}


def _unpack_mxfp4(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Returns the tensors with those in MXFP4 as they load: two values for each byte of blocks."""
    blocks, scales = MXFP4
    names = {n for n in stored if n.endswith(scales)}
    unpacked = {n: t for n, t in stored.items() if n not in names}
    for name in [n for n in unpacked if n.endswith(blocks)]:
        tensor = unpacked.pop(name)
        shape = (*tensor.shape, 2)
        unpacked[name.removesuffix(blocks)] = replace(tensor, tag="BF16", shape=shape)
    return unpacked


def _quantization(values: Mapping[str, Any]) -> Facts:
    """Returns {"quantized": METHOD} of a quantized model, else {}."""
    config = values.get("quantization_config")
    if config is None:
        return {}
    return {"quantized": _plain(config.get("quant_method") if isinstance(config, dict) else config)}


def supported_class(model_type: Any) -> str | None:
    """Returns the class in tigon.models for a model_type of config.json; None without one."""
    names = re.findall(r" as (\w+)", SUPPORTED.read_text())
    classes = {name.lower().replace("_", ""): name for name in names} | {"mistral3": "Mistral"}
    return classes.get(str(model_type).replace("_", "").removesuffix("text"))


def _format_loads(source: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> str:
    """Returns a text with the class, dtype and size in memory that the model would have; it begins
    with "no: " if model_type or quant_method is not supported, and "not checked: " if headers do
    not say."""
    values, model_type = _text_config(source), source.get("model_type")
    name = supported_class(values.get("model_type")) or supported_class(model_type)
    if name is None:
        return f"no: model_type {quote(model_type)} is not supported; README.md lists what is"
    parameters = _parameters(values, stored)
    if parameters is None:
        method = quote(_quantization(values)["quantized"])
        return f"no: quant_method {method} is not supported; docs/formats.md lists what is"
    dtype = values.get("dtype") or values.get("torch_dtype")
    if dtype is None and parameters:
        dtype = next(iter(parameters.values())).dtype
    size = dict(DTYPES.values()).get(dtype) if isinstance(dtype, str) else None
    if size is None:
        return "not checked: --check builds the model"
    count = sum(t.count for t in parameters.values())
    return f"as tigon.{name} in {dtype}, {format_mib(count * size)}; --check tries it"


def _size_facts(values: Mapping[str, Any]) -> Facts:
    """Returns the sizes in config.json; one that it leaves out has no line."""

    def get(*keys: str) -> Any:
        return next((values[key] for key in keys if values.get(key) is not None), None)

    heads, width, size = get("num_attention_heads"), get("head_dim"), get("hidden_size")
    plain, rotated = values.get("qk_nope_head_dim"), values.get("qk_rope_head_dim")
    if type(plain) is type(rotated) is int:  # a head has both
        width = plain + rotated
    if width is None and type(heads) is int and heads > 0 and type(size) is int:
        width = size // heads
    kv_heads, act = get("num_key_value_heads", "num_attention_heads"), get(*ACTIVATIONS)
    of_heads = f" query, {_plain(kv_heads)} key/value, {_plain(width)} dims each"
    unit = f", {_plain(act)}" if act is not None else ""
    if values.get("block_auto_adjust_ff_dim"):
        unit = ", from which the MLPs' own follows"
    facts = {
        "layers": (get("num_hidden_layers"), ""),
        "model dim": (size, ""),
        "heads": (heads, of_heads if width is not None else ""),
        "MLP dim": (get("intermediate_size"), unit),
        "vocabulary": (get("vocab_size"), ""),
        "context": (get("max_position_embeddings"), " tokens"),
    }
    return {k: f"{_plain(value)}{unit}" for k, (value, unit) in facts.items() if value is not None}


# Key that a model has only with such layers -> a line's label, and its text with values of keys
LAYER_FACTS: dict[str, tuple[str, str]] = {
    "sliding_window": ("window", "{sliding_window} tokens"),
    "attention_chunk_size": ("chunks", "{attention_chunk_size} tokens"),
    "num_kv_shared_layers": ("shared keys", "in the last {num_kv_shared_layers} layers"),
    "kv_lora_rank": ("latents", "{kv_lora_rank} dims of keys and values"),
    "linear_num_value_heads": (
        "DeltaNet",
        "{linear_num_key_heads} query/key, {linear_num_value_heads} value heads, "
        "{linear_key_head_dim} and {linear_value_head_dim} dims each",
    ),
    "conv_L_cache": ("convolution", "{conv_L_cache} tokens"),
}
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "top_k_experts")


def _layer_facts(values: Mapping[str, Any]) -> Facts:
    """Returns what config.json says of kinds of layers, experts, windows and recurrences."""
    facts = {}
    if isinstance(kinds := values.get("layer_types"), list):
        counts = Counter(kind for kind in kinds if isinstance(kind, str)).most_common(4)
        if len(counts) > 1:
            facts["layer types"] = ", ".join(f"{n} {_plain(kind)}" for kind, n in counts)
    experts = next((n for key in EXPERT_COUNTS if (n := values.get(key))), None)
    if experts is not None and values.get("enable_moe_block", True):
        chosen = next((n for key in EXPERTS_PER_TOKEN if (n := values.get(key))), "unknown")
        size = values.get("moe_intermediate_size") or values.get("intermediate_size")
        numbers = map(_plain, (experts, chosen, size))
        facts["experts"] = "{}, {} per token, {} dims each".format(*numbers)
    for key, (label, text) in LAYER_FACTS.items():
        used = key != "sliding_window" or values.get("use_sliding_window", True)
        if used and values.get(key):
            names = re.findall(r"{(\w+)}", text)
            facts[label] = text.format_map({name: _plain(values.get(name)) for name in names})
    return facts


def _rope_parameters(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns RoPE's parameters, from the keys of transformers 5 or of earlier versions."""
    if isinstance(rope := values.get("rope_parameters"), dict):
        return rope
    scaling = values.get("rope_scaling")
    rope = dict(scaling) if isinstance(scaling, dict) else {}
    if (theta := values.get("rope_theta")) is not None:
        rope |= {"rope_theta": theta}
    return rope


def format_rope(rope: Mapping[str, Any]) -> str:
    """Returns RoPE's parameters, or those of each kind of layer, as a line; "" without any."""
    if rope and all(isinstance(inner, dict) for inner in rope.values()):
        return "; ".join(f"{_plain(name)}: {format_rope(inner)}" for name, inner in rope.items())
    kind = rope.get("rope_type", rope.get("type", "default"))
    keys = sorted(rope.keys() - {"rope_type", "type"}, key=lambda k: (k != "rope_theta", k))
    texts = (_plain(kind), *(f"{_plain(key)} {_plain(rope[key])}" for key in keys))
    return ", ".join(texts) if rope else ""


def format_mib(count: int) -> str:
    """Formats bytes in MiB, with one decimal."""
    return f"{count / 2**20:,.1f} MiB"


def _plain(value: Any) -> str:
    """Returns a value as printable text of about 80 characters at most; a string without quotes."""
    return escape(value, 80) if isinstance(value, str) else quote(value, 80)
