"""Names of checkpoint tensors, and which slices of parameters they fill."""

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from tigon.layers import (
    FusedLinear,
    LayerAdapter,
    Linear,
    LowRankEmbedding,
    LowRankExperts,
    SavedModules,
)
from tigon.layers.lora import MAGNITUDE, B
from tigon.weights import Cut, Layout, Part, cut_parts

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
SCORE = "score.weight"  # the head of a model that scores sequences
# Prefixes of the decoder's names in files; a checkpoint of the decoder alone has none
PREFIXES = ("language_model.model.", "model.language_model.", "model.", "")
# Checkpoints with more than text in them, and the model type of their text where they name none
MULTIMODAL = {"gemma3": "gemma3_text", "mistral3": "mistral"}
OTHER_MODALITIES = ("vision_tower.", "multi_modal_projector.")
# Saved by old transformers versions; computed here
IGNORED_ENDINGS = ("rotary_emb.inv_freq",)

QKV = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
PACKED = QKV | {"gate_up_proj": ("gate_proj", "up_proj")}
EXPERTS = {
    "mlp.experts.gate_up_proj": (
        "mlp.experts.{}.gate_proj.weight",
        "mlp.experts.{}.up_proj.weight",
    ),
    "mlp.experts.down_proj": ("mlp.experts.{}.down_proj.weight",),
}


class Names(NamedTuple):
    """What a family's checkpoints call the parts of what is one tensor here."""

    # Name of a FusedLinear -> names of its parts, in row order; without an entry it is stored whole
    packed: Mapping[str, tuple[str, ...]] = PACKED
    # Ending of a parameter -> what it is in checkpoints that have experts apart, in row order
    experts: Mapping[str, tuple[str, ...]] = EXPERTS
    head: str = HEAD

    def stacked_in(self, present: Collection[str]) -> bool:
        """Whether a checkpoint of these tensors has all experts of a layer in one."""
        return any(name.endswith(tuple(self.experts)) for name in present)


def layout(model: nn.Module, names: Names, stacked_experts: bool) -> Layout:
    """Every parameter, quantised weights too, and the checkpoint tensors that its rows are of.

    Those that tensor or expert parallelism has cut are described by the model's `cuts`.
    """
    found: Layout = {}
    cuts: Mapping[str, Cut] = getattr(model, "cuts", {})
    seen: set[int] = set()
    for path, module in model.named_modules():
        for kind, p in _own(module):
            if id(p) in seen:
                continue
            seen.add(id(p))
            name = f"{path}.{kind}"
            shape = cuts[name].shape if name in cuts else tuple(p.shape)
            if isinstance(module, LayerAdapter | SavedModules):
                found[name] = _of_adapter(path, module, kind, shape, names)
                continue
            parent, _, own = path.rpartition(".")
            if name == HEAD:
                found[name] = (Part.whole(names.head, shape),)
            elif isinstance(module, FusedLinear) and own in names.packed:
                parts = [f"{parent}.{part}.{kind}" for part in names.packed[own]]
                found[name] = _tile(parts, module.parts, shape[1:])
            elif not stacked_experts and (ending := _ending(name, names.experts)):
                layer, experts = name.removesuffix(ending), shape[0] if len(shape) == 3 else 1
                apart = names.experts[ending]
                parts = [layer + part.format(e) for e in range(experts) for part in apart]
                rows = math.prod(shape[:-1]) // len(parts)
                found[name] = _tile(parts, [rows] * len(parts), shape[-1:])
            else:
                found[name] = (Part.whole(name, shape),)
    return {n: cut_parts(p, cuts[n]) if n in cuts else p for n, p in found.items()}


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Its parameters, and what stands for one that is quantised."""
    if isinstance(module, Linear) and module.quantized is not None:
        yield "weight", module.weight_meta
    yield from module.named_parameters(recurse=False)


def _of_adapter(
    path: str, module: LayerAdapter | SavedModules, kind: str, shape: tuple[int, ...], names: Names
) -> tuple[Part, ...]:
    """The names that PEFT's modules have for it, but for what they begin with."""
    if isinstance(module, SavedModules):
        owner = path.rpartition(".")[0]
        owner = names.head.removesuffix(".weight") if owner == "lm_head" else owner
        return (Part.whole(f"{owner}.modules_to_save.{kind}.weight", shape),)
    layer, _, adapter = path.rpartition(".lora.")
    if isinstance(module, LowRankEmbedding):
        adapter += ".weight" if kind == MAGNITUDE.removesuffix("_") else ""
        return (Part.whole(f"{layer}.{kind}.{adapter}", shape),)
    if isinstance(module, LowRankExperts):
        factor, part = kind[: len("lora_A")], kind[len("lora_A_") :]
        stem = stem_of_experts(layer, part, [p.name for p in module.parts])
        return (Part.whole(f"{stem}.{factor}.{adapter}.weight", shape),)
    parent = layer.removesuffix(layer.rpartition(".")[2])  # with its dot
    if kind == "lora_A":
        own = [f"{parent}{part.name}.lora_A.{adapter}.weight" for part in module.parts]
        return _tile(own, [part.rank for part in module.parts], shape[1:])
    for start in (B, MAGNITUDE):
        if kind.startswith(start):
            name = f"{kind.removeprefix(start)}.{start.removesuffix('_')}"
            return (Part.whole(f"{parent}{name}.{adapter}.weight", shape),)
    raise AssertionError(kind)


def stem_of_experts(layer: str, part: str, parts: Collection[str]) -> str:
    """What PEFT's names of a part's matrices begin with: its wrapper of one parameter is in that of
    the other, where `parts`, those adapted, are both."""
    return f"{layer}.base_layer" if part == "gate_up_proj" and len(parts) > 1 else layer


def is_adapters(name: str) -> bool:
    """Whether a parameter belongs to an adapter and not to the base."""
    return ".lora." in name or ".copies." in name


def base_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """All but those of adapters."""
    return {name: p for name, p in model.named_parameters() if not is_adapters(name)}


def _ending(name: str, endings: Collection[str]) -> str | None:
    return next((ending for ending in endings if name.endswith(f".{ending}")), None)


def _tile(names: Sequence[str], rows: Sequence[int], rest: tuple[int, ...]) -> tuple[Part, ...]:
    """Parts one after the other, that many rows each."""
    starts = itertools.accumulate(rows, initial=0)
    return tuple(Part.whole(n, (r, *rest), s) for n, r, s in zip(names, rows, starts, strict=False))


def embedding_and_head(present: Collection[str]) -> tuple[str, str]:
    """What a checkpoint of these tensors calls the two, if it has them."""
    inside = f"language_model.{HEAD}"
    embedding = _prefix(present) + EMBEDDING.removeprefix("model.")
    return embedding, inside if inside in present else HEAD


def _prefix(present: Collection[str]) -> str:
    return next((p for p in PREFIXES if any(name.startswith(p) for name in present)), "")


def locate(names: Collection[str], present: Collection[str]) -> tuple[dict[str, str], set[str]]:
    """From a model's `names` to those that a checkpoint of tensors `present` has instead.

    Also returns the checkpoint's tensors that the model does not need.
    """
    prefix = _prefix(present)
    source_of = {n: prefix + n.removeprefix("model.") for n in names if n.startswith("model.")}
    ignored = {n for n in present if n.endswith(IGNORED_ENDINGS)}
    ignored |= {n for n in present if n.removeprefix("model.").startswith(OTHER_MODALITIES)}
    embedding, head = embedding_and_head(present)
    if HEAD in names:
        source_of[HEAD] = head
    elif head in present:  # tied
        if embedding in present:
            ignored.add(head)
        else:
            source_of[EMBEDDING] = head
    return source_of, ignored
