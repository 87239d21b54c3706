"""What a model is, from its config.json and the headers of its files: `tigon info`.

Of a hub repository only these are fetched: a few kilobytes of each file of weights. This imports no
torch, which takes seconds; `tigon.info` builds the model, and says whether it would load.
"""

import tempfile
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tigon.families import FAMILIES
from tigon.headers import DTYPES, StoredTensor, find_tensors, read_tensors
from tigon.hub import Repository, config_file
from tigon.utils.json import escape, quote, read_json

FIRST = 1 << 16  # bytes of a file of weights that are asked for at first; most headers fit
Facts = dict[str, str]  # what it is -> its value, as people read it
# Tensors that are no parameters of the text model
OTHERS = ("rotary_emb.inv_freq", "vision_tower.", "multi_modal_projector.")
SCALES = ("_scale_inv", "activation_scale")  # of fp8 weights
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


def info(args: Namespace) -> int:
    print_facts(args.model, summarize(args.model, args.revision))
    return 0


def print_facts(name: str, facts: Facts) -> None:
    print(escape(name))
    for what, value in facts.items():
        print(f"  {what:<14}{escape(value, 4000)}")


def summarize(path: str, revision: str | None = None) -> Facts:
    """Of a directory or a hub repository. Raises OSError or ValueError only where there is no
    config.json that can be read; what is wrong with the weights is the value of "loads"."""
    with open_headers(path, revision) as repository:
        source = read_json(config_file(repository), nan=True)
        stored: Mapping[str, StoredTensor] = {}
        try:
            stored = find_tensors(repository)
            loads = _loading(source, stored)
        except ConnectionError:
            raise
        except (OSError, ValueError) as error:
            loads = f"no: {repository.rename_in(error)}"
        return config_facts(source, stored) | file_facts(repository.tensors()) | {"loads": loads}


class HeadersOnly(Repository):
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

    def tensors(self) -> list[StoredTensor]:
        """Of all files that were asked for, as they are stored."""
        found: list[StoredTensor] = []
        for path in sorted(self.holes.rglob("*.safetensors")):
            with suppress(ValueError):  # which whoever asked for it has been told
                found += read_tensors(path).values()
        return found

    def rename_in(self, error: Exception) -> str:
        """Its text, with the name of the repository."""
        return str(error).replace(str(self.holes), self.name)


@contextmanager
def open_headers(path: str, revision: str | None) -> Iterator[HeadersOnly]:
    with tempfile.TemporaryDirectory(prefix="tigon-headers-") as holes:
        repository = HeadersOnly(path, revision=revision)
        repository.holes = Path(holes)
        yield repository


def config_facts(source: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> Facts:
    """What config.json says, which may be anything, and how many parameters are stored."""
    names, inner = source.get("architectures"), source.get("text_config")
    name = names[0] if isinstance(names, list) and names else "unknown"
    values = {**source, **inner} if isinstance(inner, dict) else dict(source)
    kind = source.get("model_type", "no model_type")
    return {
        "architecture": f"{_plain(name)} ({_plain(kind)})",
        **_parameter_facts(values, stored),
        **_size_facts(values),
        **({"RoPE": rope} if (rope := rope_text(_rope_parameters(values))) else {}),
        **quantization_facts(values),
    }


def _parameter_facts(values: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> Facts:
    ours = _parameters(values, stored)
    if not stored or ours is None:
        count = f"{sum(t.count for t in stored.values()):,} stored" if stored else "unknown"
        return {"parameters": count}
    facts = {"parameters": f"{sum(t.count for t in ours.values()):,}"}
    embedding = next((t for n, t in ours.items() if n.endswith(EMBEDDING)), None)
    if embedding is not None:
        score = next((t for n, t in ours.items() if n == "score.weight"), None)
        untied = any(n.endswith(HEAD) for n in ours)
        tied = "and as many in the head" if untied else "tied to the head"
        if score is not None:
            tied = f"and a head of {score.shape[0] if score.shape else 0} scores"
        facts["embeddings"] = f"{embedding.count:,}, {tied}"
    return facts


def _parameters(
    values: Mapping[str, Any], stored: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor] | None:
    """The tensors that are parameters of the text model; None where a value packs several."""
    plain = values.get("quantization_config") is None
    if not plain and quantization_facts(values) != {"quantised": "fp8"}:
        return None
    tied = values.get("tie_word_embeddings") is True
    left = (*OTHERS, *SCALES, *(HEAD,) * tied)
    return {n: t for n, t in stored.items() if not any(part in n for part in left)}


def _loading(source: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> str:
    """What the model is loaded as, if all of its tensors fit."""
    inner, kind = source.get("text_config"), source.get("model_type")
    values = {**source, **inner} if isinstance(inner, dict) else source
    kinds = [k for k in (values.get("model_type"), kind) if isinstance(k, str) and k in FAMILIES]
    if not kinds:
        return f"no: model_type {quote(kind)} is not supported; README.md lists what is"
    ours = _parameters(values, stored)
    dtype = values.get("dtype") or values.get("torch_dtype")
    if dtype is None and ours:
        dtype = next(iter(ours.values())).dtype
    size = dict(DTYPES.values()).get(dtype) if isinstance(dtype, str) else None
    if ours is None or size is None:
        return "not checked: --check builds the model"
    count = sum(t.count for t in ours.values())
    name = f"tigon.{FAMILIES[kinds[0]]} in {dtype}, {mebibytes(count * size)}"
    return f"as {name}; --check tries it"


def _size_facts(values: Mapping[str, Any]) -> Facts:
    """Those that config.json has; what it leaves out is as in its class of transformers."""

    def of(*keys: str) -> Any:
        return next((values[key] for key in keys if values.get(key) is not None), None)

    heads, kv_heads, width = of("num_attention_heads"), of("num_key_value_heads"), of("head_dim")
    if width is None and type(heads) is int and heads > 0 and type(of("hidden_size")) is int:
        width = of("hidden_size") // heads
    act = of("hidden_act", "hidden_activation")
    facts = {
        "layers": of("num_hidden_layers"),
        "model dim": of("hidden_size"),
        "heads": heads,
        "MLP dim": of("intermediate_size"),
        "vocabulary": of("vocab_size"),
        "context": of("max_position_embeddings"),
    }
    texts = {what: _plain(value) for what, value in facts.items() if value is not None}
    if "heads" in texts and width is not None:
        kv = _plain(heads if kv_heads is None else kv_heads)
        texts["heads"] += f" query, {kv} key/value, {_plain(width)} dims each"
    if "MLP dim" in texts and act is not None:
        texts["MLP dim"] += f", {_plain(act)}"
    if "context" in texts:
        texts["context"] += " tokens"
    return texts


def _rope_parameters(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """By the keys of transformers 5, or of earlier versions."""
    if isinstance(rope := values.get("rope_parameters"), dict):
        return rope
    scaling = values.get("rope_scaling")
    rope = dict(scaling) if isinstance(scaling, dict) else {}
    if (theta := values.get("rope_theta")) is not None:
        rope |= {"rope_theta": theta}
    return rope


def rope_text(rope: Mapping[str, Any]) -> str:
    """RoPE's parameters, or those of each kind of layer, for a person."""
    if rope and all(isinstance(inner, dict) for inner in rope.values()):
        return "; ".join(f"{_plain(name)}: {rope_text(inner)}" for name, inner in rope.items())
    kind = rope.get("rope_type", rope.get("type", "default"))
    keys = sorted(rope.keys() - {"rope_type", "type"}, key=lambda k: (k != "rope_theta", k))
    texts = (_plain(kind), *(f"{_plain(key)} {_plain(rope[key])}" for key in keys))
    return ", ".join(texts) if rope else ""


def quantization_facts(source: Mapping[str, Any]) -> Facts:
    quantised = source.get("quantization_config")
    if not isinstance(quantised, dict):
        return {}
    return {"quantised": _plain(quantised.get("quant_method"))}


def file_facts(tensors: Sequence[StoredTensor]) -> Facts:
    count: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for tensor in tensors:
        count[tensor.dtype] += 1
        size[tensor.dtype] += tensor.nbytes
    kinds = [f"{n} {dtype}, {mebibytes(size[dtype])}" for dtype, n in count.most_common()]
    files = len({tensor.path for tensor in tensors})
    return {
        "files": f"{files} of weights, {sum(size.values()):,} bytes",
        "tensors": "; ".join(kinds) or "none",
    }


def mebibytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


def _plain(value: Any) -> str:
    return escape(value, 80) if isinstance(value, str) else quote(value, 80)
