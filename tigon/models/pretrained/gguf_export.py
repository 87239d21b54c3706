"""Writes models as GGUF files: llama.cpp's names, metadata and order of rows.

The tables are those of `gguf.py`, which reads such files. What an export would be read as is
compared with the model before its matrices are written: whatever the format has no place for is an
error. # D a head's size
"""

import math
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tigon.layers.rope import RotaryEmbedding
from tigon.models.base import LanguageModel
from tigon.models.config import SLIDING, ModelConfig
from tigon.models.pretrained.gguf import (
    ARCHITECTURES,
    FREQS,
    MIXTRAL_ARCHITECTURE,
    SIZES,
    TOP,
    Architecture,
    GGUFModel,
    llama3_divisors,
)
from tigon.models.pretrained.gguf_vocabulary import SavePretrained, add_vocabulary
from tigon.models.pretrained.save import check_no_adapters, prepare_save
from tigon.utils.config import ConfigError
from tigon.utils.json import quote
from tigon.utils.paths import expand_user
from tigon.weights import GGUF, TensorEntry, WriterGroup
from tigon.weights.entries import RowBlock, row_count
from tigon.weights.gguf import import_gguf
from tigon.weights.gguf_write import BF16, BLOCK, F16, F32, Q8_0, GGUFEntry, write_gguf

# Names of types -> ggml's number of the type, and general.file_type
TYPES = {"float32": (F32, 0), "float16": (F16, 1), "bfloat16": (BF16, 32), "q8_0": (Q8_0, 7)}
# model_type -> general.architecture, and its table
FAMILIES: dict[str, tuple[str, Architecture]] = {
    **{family.model_type: (name, family) for name, family in ARCHITECTURES.items()},
    "mistral": ("llama", ARCHITECTURES["llama"]),
    "mixtral": ("llama", MIXTRAL_ARCHITECTURE),
}
# Fields that are not compared: they change no number, or what they mean is compared
SKIPPED = {
    *("source", "dtype", "vocab_size", "max_position_embeddings", "initializer_range"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "rope_parameters"),
    *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
    *("sliding_window", "layer_types", "use_sliding_window", "max_window_layers"),
    "sliding_window_pattern",
}


def check_gguf_target(path: str | os.PathLike[str], replace: bool = False) -> Path:
    """The path of a GGUF file to write; FileExistsError if it is taken."""
    target = expand_user(path)
    if target.is_dir():
        raise FileExistsError(f"{target} is a directory: name a file, such as {target}/model.gguf")
    if target.exists() and not replace:
        raise FileExistsError(f"{target} exists: remove it, choose another path or replace it")
    return target


def parse_gguf_type(dtype: torch.dtype | str) -> str:
    """Returns the name in TYPES of a dtype or its name; raises ValueError for others."""
    name = str(dtype).removeprefix("torch.").lower()
    name = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}.get(name, name)
    if name not in TYPES:
        raise ValueError(f"dtype={dtype!r} is not written to GGUF files: use {', '.join(TYPES)}")
    return name


def save_gguf(
    model: LanguageModel,
    path: str | os.PathLike[str],
    *,
    tokenizer: SavePretrained | None = None,
    dtype: torch.dtype | str | None = None,
    replace: bool = False,
) -> None:
    """Writes a GGUF file, which llama.cpp and Ollama run and `tigon.from_pretrained` loads.

    Args:
        path: of a new file; with `replace` a file there is replaced when the new one is complete.
        tokenizer: is written into the file, with its chat template; without one, llama.cpp reads
            token ids alone.
        dtype: of the matrices: a torch.dtype or its name, or "q8_0", 8 bits with a scale for 32
            values. By default the model's. Vectors and routers are in float32.

    Raises ValueError, before matrices are written, for a family or a setting that the format has
    no place for, and for values that are NaN, or infinite in the type.
    """
    check_no_adapters(model)
    ranks = WriterGroup()
    if ranks.size > 1:
        raise ValueError(
            "a GGUF file is written by one process: save_pretrained on all ranks, then "
            "`tigon export DIRECTORY FILE.gguf`"
        )
    tensors, _ = prepare_save(
        model, tokenizer=tokenizer, ranks=ranks, dtype=torch.float32, stacked_experts=False
    )
    dtype = model.dtype if dtype is None else dtype
    write_gguf_model(model, path, tensors, tokenizer=tokenizer, dtype=dtype, replace=replace)


def write_gguf_model(
    model: LanguageModel,
    path: str | os.PathLike[str],
    tensors: Sequence[TensorEntry],
    *,
    tokenizer: SavePretrained | None,
    dtype: torch.dtype | str,
    replace: bool = False,
) -> None:
    """Writes a GGUF file of a model, which may be on the meta device, with these tensors.

    `tensors` have Hugging Face's names, all rows, and an entry for each expert. Raises ValueError
    for a model that the format cannot describe, before matrices are written.
    """
    target = check_gguf_target(path, replace)
    kind, file_type = TYPES[parse_gguf_type(dtype)]
    config = model.config
    if config.model_type not in FAMILIES or config.labels:
        what = "models that score sequences" if config.labels else quote(config.model_type)
        raise ValueError(
            f"{what} cannot be exported to GGUF, only language models of type "
            f"{', '.join(sorted(FAMILIES))}: convert an export in Hugging Face format with "
            "llama.cpp's convert_hf_to_gguf.py"
        )
    name, family = FAMILIES[config.model_type]
    if family.tied not in (None, config.tie_word_embeddings):
        wanted = "a head that is the embedding" if family.tied else "a head of its own"
        raise ValueError(
            f"llama.cpp's {name} has {wanted}: tie_word_embeddings={config.tie_word_embeddings} "
            "has no place in its files"
        )
    width = config.num_attention_heads * config.head_dim
    if family.square and width != config.hidden_size:
        raise ValueError(
            f"llama.cpp's {name} wants heads of hidden_size={config.hidden_size} dims together, "
            f"and this model's have {width}"
        )
    entries = _map_entries(tensors, family, config, kind)
    writer = import_gguf().GGUFWriter(None, name)
    divisors = _add_metadata(writer, model, name, family)
    writer.add_type("model")
    writer.add_file_type(file_type)
    writer.add_quantization_version(import_gguf().GGML_QUANT_VERSION)
    add_vocabulary(writer, tokenizer, config, model.generation_config)
    if divisors is not None:
        entry = TensorEntry.of(FREQS, divisors)
        entries.append(GGUFEntry(FREQS, tuple(entry.shape), F32, _Rows([entry])))
    write_gguf(writer, target, entries, lambda file: _check_read_back(file, model, family))


# Tensors

IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")


def _map_entries(
    tensors: Sequence[TensorEntry], family: Architecture, config: ModelConfig, kind: int
) -> list[GGUFEntry]:
    """Maps tensors with Hugging Face's names to those of the file, experts stacked."""
    in_block = {stored: name for name, stored in family.blocks.items()}
    top = {stored: name for name, stored in TOP.items()}
    groups: dict[str, list[TensorEntry]] = {}
    for tensor in tensors:
        layer = IN_LAYER.fullmatch(tensor.name)
        inner = EXPERT.sub("{}", layer[2]) if layer else tensor.name.rpartition(".")[0]
        found = in_block.get(inner) if layer else top.get(inner)
        ending = tensor.name.rpartition(".")[2]
        if found is None or (ending == "bias" and found not in family.biased):
            raise ValueError(f"{tensor.name} has no place in llama.cpp: it cannot be exported")
        name = f"blk.{layer[1]}.{found}.{ending}" if layer else f"{found}.{ending}"
        groups.setdefault(name, []).append(tensor)
    return [_make_entry(name, parts, family, config, kind) for name, parts in groups.items()]


def _make_entry(
    name: str, parts: list[TensorEntry], family: Architecture, config: ModelConfig, kind: int
) -> GGUFEntry:
    """Makes the entry of one tensor, or of a stack of experts' matrices."""
    shape = tuple(parts[0].shape)
    if "_exps." in name:
        shape = (len(parts), *shape)
    elif ".ffn_gate_inp_shexp." in name:
        shape, parts = shape[1:], [_flatten(parts[0])]
    head = config.head_dim if family.permuted and re.search(r"\.attn_[qk]\.", name) else 0
    plus = family.norm_offset if name.endswith("norm.weight") else 0.0
    if len(shape) == 1 or ".ffn_gate_inp." in name:
        kind = F32
    elif kind == Q8_0 and shape[-1] % BLOCK:
        kind = F16
    return GGUFEntry(name, shape, kind, _Rows(parts, head, plus), head or 1)


def _flatten(tensor: TensorEntry) -> TensorEntry:
    """Returns the entry of a matrix of one row as that of a vector."""
    (block,) = tensor.blocks

    def read(first: int, count: int) -> Tensor:
        return block.read(0, 1).view(-1).narrow(0, first, count)

    shape = tuple(tensor.shape[1:])
    return tensor._replace(shape=shape, blocks=[RowBlock(0, shape[0], read)])


@dataclass(frozen=True)
class _Rows:
    """Reads rows of a tensor, or of several one after another, in llama.cpp's order of rows."""

    parts: Sequence[TensorEntry]
    head: int = 0  # rows of a head whose halves become neighbors; 0: as they are
    plus: float = 0.0  # is added

    def __call__(self, first: int, count: int) -> Tensor:
        """Rows [first, first + count) in fp32 on the CPU, whole heads if `head` is given."""
        width = self.parts[0].shape[1:][-1:]
        rows = torch.empty(count, *width, device="cpu")
        start = 0
        for part in self.parts:
            for block in part.blocks:
                begin = max(first, start + block.row)
                end = min(first + count, start + block.row + block.rows)
                if begin < end:
                    read = block.read(begin - start - block.row, end - begin)
                    rows[begin - first : end - first] = read.detach()
            start += row_count(part.shape)
        if self.head:
            halves = rows.view(-1, 2, self.head // 2, *width)
            rows = halves.transpose(1, 2).reshape(rows.shape)
        return rows + self.plus if self.plus else rows


# Metadata


def _add_metadata(
    writer: Any, model: LanguageModel, name: str, family: Architecture
) -> Tensor | None:
    """Adds what config.json says; returns divisors [D / 2] of RoPE's frequencies, if any."""
    config = model.config
    if title := os.path.basename(config.source.name.rstrip("/")):
        writer.add_name(title)
    values: dict[str, Any] = {
        key: getattr(config, field)
        for key, field in {**SIZES, **family.keys, **family.optional}.items()
        if getattr(config, field, None) is not None
    }
    values |= {
        "context_length": _context_length(model, family),
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": config.head_dim,
        "vocab_size": config.vocab_size,
    }
    ropes = _ropes(config.rope_parameters)
    if SLIDING in ropes:
        values["rope.freq_base_swa"] = float(ropes[SLIDING]["rope_theta"])
    values |= _rope_metadata(ropes["full_attention"])
    for key, value in values.items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add = writer.add_float32 if isinstance(value, float) else add
        add(f"{name}.{key}", value)
    if ropes["full_attention"]["rope_type"] != "llama3":
        return None
    return llama3_divisors(ropes["full_attention"], config.head_dim)


def _ropes(parameters: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """RoPE's parameters by kind of layer; "full_attention" alone if all layers have the same."""
    return dict(parameters) if SLIDING in parameters else {"full_attention": dict(parameters)}


def _rope_metadata(rope: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of one RoPE; what they cannot say is found when they are read back."""
    values: dict[str, Any] = {"rope.freq_base": float(rope["rope_theta"])}
    if rope["rope_type"] not in ("linear", "yarn"):
        return values
    values |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "yarn":  # llama.cpp has keys of its betas, but reads none of them here
        length = rope["original_max_position_embeddings"]
        values["rope.scaling.original_context_length"] = length
    return values


def _windows(model: LanguageModel) -> list[int | None]:
    """The sliding window of each layer; None: it has none."""
    layers: Any = model.model.layers
    return [block.mixer.window for block in layers]


def _context_length(model: LanguageModel, family: Architecture) -> int:
    """The longest text for which the file computes what the model does."""
    longest = model.config.max_position_embeddings
    windows = [window for window in _windows(model) if window is not None]
    if family.full_every or not windows or min(windows) >= longest:
        return longest
    warnings.warn(
        f"llama.cpp's architecture of {model.config.model_type} has no sliding window, and this "
        f"model's is {min(windows)}: context_length is {min(windows)} in the file, not {longest}",
        stacklevel=6,
    )
    return min(windows)


# What the file would be read as


def _check_read_back(path: Path, model: LanguageModel, family: Architecture) -> None:
    """Raises ConfigError if a reader would compute something else than the model."""
    try:
        read = GGUFModel(GGUF.open(path)).config
    except ValueError as error:
        raise ConfigError(f"the model cannot be described in GGUF: {error}") from None
    _check_windows(model, family, read["max_position_embeddings"])
    config = model.config
    for field in fields(config):
        if field.name in SKIPPED:
            continue
        default = None if field.default is MISSING else field.default
        expected, value = read.get(field.name, default), getattr(config, field.name)
        if value != expected and (value or expected):
            raise ConfigError(
                f"{field.name}={quote(value)} has no place in a GGUF file of "
                f"{config.model_type}, where it is {quote(expected)}"
            )
    _check_rope(config, type(config)._read_rope(read, config.max_position_embeddings))


def _check_windows(model: LanguageModel, family: Architecture, longest: int) -> None:
    """Raises ConfigError if a layer's window is not the one that llama.cpp gives it."""
    every = family.full_every
    for layer, window in enumerate(_windows(model)):
        slides = every and (layer + 1) % every != 0
        expected = getattr(model.config, "sliding_window", None) if slides else None
        if min(window or math.inf, longest) != min(expected or math.inf, longest):
            raise ConfigError(
                f"the sliding window of layer {layer} is {window}, where llama.cpp has {expected}"
            )


def _check_rope(config: ModelConfig, read: Mapping[str, Any]) -> None:
    """Raises ConfigError if RoPE's frequencies or scale are not those of the file."""
    own, stored = _ropes(config.rope_parameters), _ropes(read)
    for kind, parameters in own.items():
        a, b = (
            RotaryEmbedding(config.head_dim, p, config.max_position_embeddings)
            for p in (parameters, stored[kind])
        )
        close = torch.allclose(a.inv_freq, b.inv_freq, rtol=1e-5, atol=0)
        if not close or not math.isclose(a.scaling, b.scaling, rel_tol=1e-5):
            raise ConfigError(
                f"rope_type {parameters['rope_type']!r}, whose parameters are {quote(parameters)}, "
                "has no place in a GGUF file of this family"
            )
