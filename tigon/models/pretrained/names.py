"""Maps parameters to the names of checkpoint tensors."""

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor, nn

from tigon.layers import (
    Adapters,
    FusedLinear,
    LayerAdapter,
    Linear,
    LowRankEmbedding,
    LowRankExperts,
    QuantizedWeight,
    RowOrder,
)
from tigon.layers.lora import LORA_B, MAGNITUDE
from tigon.utils.tensor_names import is_ignored
from tigon.weights import Layout, RowSpan, ShardSpec, TensorSlice, shard_slices

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
SCORE = "score.weight"  # the head of a model that scores sequences
# Prefixes of the decoder's names in files; a checkpoint of the decoder alone has none
PREFIXES = ("language_model.model.", "model.language_model.", "model.", "")
# model_type of a multimodal config -> default model_type of its text_config
MULTIMODAL = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "llama4": "llama4_text",
    "mistral3": "mistral",
    "muse_glimmer": "muse_glimmer_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
# Those whose text_config has the tie_word_embeddings that counts; of others it is their own
TIED_BY_TEXT = ("llama4",)
# Those in which tie_word_embeddings is false by default
UNTIED = ("muse_glimmer", "qwen3_5", "qwen3_5_moe")
# Those that transformers' AutoModelForCausalLM loads as the text model alone
TEXT_ALONE = ("llama4", "qwen3_5", "qwen3_5_moe")

QKV = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
PACKED = QKV | {"gate_up_proj": ("gate_proj", "up_proj")}
EXPERTS = {
    "mlp.experts.gate_up_proj": (
        "mlp.experts.{}.gate_proj.weight",
        "mlp.experts.{}.up_proj.weight",
    ),
    "mlp.experts.down_proj": ("mlp.experts.{}.down_proj.weight",),
}


class CheckpointNames(NamedTuple):
    """A family's names of tensors that are packed or stacked in one parameter here."""

    # Name of a FusedLinear -> names of its parts, in row order; without an entry it is stored whole
    packed: Mapping[str, tuple[str, ...]] = PACKED
    # Suffix of a parameter -> tensors of checkpoints with one for each expert, in row order
    experts: Mapping[str, tuple[str, ...]] = EXPERTS
    # Modules or parameters here -> their names in every checkpoint, such as "mlp" -> "feed_forward"
    renamed: Mapping[str, str] = MappingProxyType({})
    head: str = HEAD
    # Whether checkpoints have layers of multi-token prediction past the last one, which are skipped
    extra_layers: bool = False
    extra: tuple[str, ...] = ()  # prefixes of other tensors of multi-token prediction
    decoder: str = "model."  # prefix of the decoder's tensors

    @property
    def embedding(self) -> str:
        return self.stored_name(EMBEDDING)

    def stored_name(self, name: str) -> str:
        """The name in checkpoints of a tensor or module of the model with this name."""
        name = f".{name}."
        for own, stored in self.renamed.items():
            name = name.replace(f".{own}.", f".{stored}.")
        name = name[1:-1]
        if not name.startswith("model."):
            return name
        return self.decoder + name.removeprefix("model.")

    def stacked_in(self, present: Collection[str]) -> bool:
        """Whether a checkpoint with these tensors has all experts of a layer in one tensor."""
        return any(name.endswith(tuple(self.experts)) for name in present)


def layout(model: nn.Module, names: CheckpointNames, stacked_experts: bool) -> Layout:
    """Maps parameters, stored buffers and quantized weights to tensors with this rank's rows."""
    slices: Layout = {}
    specs: Mapping[str, ShardSpec] = getattr(model, "shard_specs", {})
    for path, module, kind, p in _walk_tensors(model):
        name = f"{path}.{kind}"
        shape = specs[name].shape if name in specs else tuple(p.shape)
        parent, _, leaf = path.rpartition(".")
        if isinstance(module, Adapters | LayerAdapter):
            slices[name] = _adapter_slices(model, path, module, kind, shape, names)
        elif name == HEAD:
            slices[name] = (TensorSlice.whole(names.head, shape),)
        elif isinstance(module, FusedLinear) and leaf in names.packed:
            parts = [f"{parent}.{part}.{kind}" for part in names.packed[leaf]]
            tiles = _tile(parts, module.parts, shape[1:])
            pairs = zip(tiles, module.orders, strict=True)
            slices[name] = tuple(_ordered(tile, order) for tile, order in pairs)
        elif not stacked_experts and (
            suffix := next((end for end in names.experts if name.endswith(f".{end}")), None)
        ):
            layer, experts = name.removesuffix(suffix), shape[0] if len(shape) == 3 else 1
            templates = names.experts[suffix]
            parts = [layer + part.format(e) for e in range(experts) for part in templates]
            rows = math.prod(shape[:-1]) // len(parts)
            slices[name] = _tile(parts, [rows] * len(parts), shape[-1:])
        else:
            slices[name] = (TensorSlice.whole(name, shape),)
    slices = {
        name: tuple(replace(part, name=names.stored_name(part.name)) for part in parts)
        for name, parts in slices.items()
    }
    return {n: shard_slices(p, specs[n]) if n in specs else p for n, p in slices.items()}


def _walk_tensors(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yields parameters and stored buffers once each, with the path of their module, the module and
    their name there; a quantized weight as a meta tensor."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        tensors: dict[str, Tensor] = {}
        if isinstance(module, Linear) and module.quantized is not None:
            tensors["weight"] = module.weight_meta
        tensors |= dict(module.named_parameters(recurse=False)) | module_buffers(module)
        for name, tensor in tensors.items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield path, module, name, tensor


def module_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Finds the module's own buffers that checkpoints have: the persistent ones."""
    if isinstance(module, QuantizedWeight):  # its buffers are a weight, which has another form
        return {}
    skipped = module._non_persistent_buffers_set
    return {n: b for n, b in module.named_buffers(recurse=False) if n not in skipped}


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Finds all parameters and stored buffers, by name in the order of modules; of quantized
    weights there are none."""
    walk = _walk_tensors(model)
    return {f"{path}.{n}": t for path, module, n, t in walk if getattr(module, n) is t}


def stored_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Finds all buffers that checkpoints have, by name; each is whole on every rank."""
    tensors = stored_tensors(model).items()
    return {name: t for name, t in tensors if not isinstance(t, nn.Parameter)}


def _adapter_slices(
    model: nn.Module,
    path: str,
    module: Adapters | LayerAdapter,
    kind: str,
    shape: tuple[int, ...],
    names: CheckpointNames,
) -> tuple[TensorSlice, ...]:
    """Slices an adapter's parameter into tensors named as in PEFT's files, without their prefix."""
    if isinstance(module, Adapters):
        owner = path.rpartition(".")[0]
        owner = names.head.removesuffix(".weight") if owner == "lm_head" else owner
        return (TensorSlice.whole(f"{owner}.modules_to_save.{kind}.weight", shape),)
    layer, _, adapter = path.rpartition(".lora.")
    if isinstance(module, LowRankEmbedding):
        adapter += ".weight" if kind == MAGNITUDE.removesuffix("_") else ""
        return (TensorSlice.whole(f"{layer}.{kind}.{adapter}", shape),)
    if isinstance(module, LowRankExperts):
        factor, part = kind[: len("lora_A")], kind[len("lora_A_") :]
        stem = experts_stem(layer, part, [p.name for p in module.parts])
        return (TensorSlice.whole(f"{stem}.{factor}.{adapter}.weight", shape),)
    parent = layer.removesuffix(layer.rpartition(".")[2])  # with its dot
    if kind == "lora_A":
        leaf = [f"{parent}{part.name}.lora_A.{adapter}.weight" for part in module.parts]
        return _tile(leaf, [part.rank for part in module.parts], shape[1:])
    for start in (LORA_B, MAGNITUDE):
        if kind.startswith(start):
            part = kind.removeprefix(start)
            name = f"{parent}{part}.{start.removesuffix('_')}.{adapter}.weight"
            return (_ordered(TensorSlice.whole(name, shape), _order(model, layer, part, names)),)
    raise AssertionError(kind)


def _order(model: nn.Module, layer: str, part: str, names: CheckpointNames) -> RowOrder | None:
    """Finds how checkpoints order the rows of a layer's part, such as q_proj of qkv_proj."""
    module, parts = model.get_submodule(layer), names.packed.get(layer.rpartition(".")[2], ())
    if not isinstance(module, FusedLinear) or part not in parts:
        return None
    return module.orders[parts.index(part)]


def _ordered(part: TensorSlice, order: RowOrder | None) -> TensorSlice:
    """Returns the slice of a whole tensor with its rows in the checkpoint's order."""
    if order is None:
        return part
    ((_, first, _),) = part.rows
    rows = (RowSpan(source, first + target, n) for source, target, n in order.runs())
    return replace(part, rows=tuple(rows))


def experts_stem(layer: str, part: str, parts: Collection[str]) -> str:
    """Makes what precedes `.lora_A` in PEFT's names of an experts' matrix `part`: if both matrices
    are among the adapted `parts`, PEFT nests the wrapper of gate_up_proj in that of down_proj."""
    return f"{layer}.base_layer" if part == "gate_up_proj" and len(parts) > 1 else layer


def base_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Finds all parameters and stored buffers but those of adapters, by name."""
    tensors = stored_tensors(model)
    return {n: t for n, t in tensors.items() if ".lora." not in n and ".copies." not in n}


def _tile(
    names: Sequence[str], rows: Sequence[int], rest: tuple[int, ...]
) -> tuple[TensorSlice, ...]:
    """Cuts a parameter into slices of these numbers of rows, of shape `rest`."""
    starts = itertools.accumulate(rows, initial=0)
    return tuple(
        TensorSlice.whole(n, (r, *rest), s) for n, r, s in zip(names, rows, starts, strict=False)
    )


def embedding_and_head(present: Collection[str]) -> tuple[str, str]:
    """Finds the names of embedding and head in a checkpoint with these tensors."""
    inside = f"language_model.{HEAD}"
    embedding = _prefix(present) + EMBEDDING.removeprefix("model.")
    return embedding, inside if inside in present else HEAD


def _prefix(present: Collection[str]) -> str:
    """Finds the first of PREFIXES that a tensor of the checkpoint begins with."""
    return next((p for p in PREFIXES if any(name.startswith(p) for name in present)), "")


def find_sources(
    names: Collection[str], present: Collection[str], family: CheckpointNames
) -> tuple[dict[str, str], set[str]]:
    """Maps a model's `names` to those of a checkpoint with tensors `present`, where they differ.

    Also returns the checkpoint's tensors that the model does not need.
    """
    prefix, own = _prefix(present), family.decoder
    source_of = {n: prefix + n.removeprefix(own) for n in names if n.startswith(own)}
    ignored = {n for n in present if is_ignored(n)}
    embedding, head = embedding_and_head(present)
    if HEAD in names:
        source_of[HEAD] = head
    elif head in present:  # tied
        if embedding in present:
            ignored.add(head)
        else:
            source_of[family.embedding] = head
    return source_of, ignored
